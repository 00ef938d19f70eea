"""Pictures in files: turned by EXIF data, and with more than 8 bits."""

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image, ImageOps

from micronorm.data.coco import open_coco
from micronorm.data.files import check_picture, decode, decode_labels
from micronorm.data.loading import FileSamples
from micronorm.data.masks import MaskDecoder, MaskedImage, open_label_maps
from micronorm.data.nuclei import open_nuclei
from tests.data.miniature import COCO_SIZE, write_coco, write_label_maps, write_masked, write_nuclei


def _turn(path, orientation=6):
    """Give a picture an EXIF orientation, and leave its pixels as they are."""
    with Image.open(path) as image:
        exif = image.getexif()
        exif[ExifTags.Base.Orientation] = orientation
        image.save(path, exif=exif)


@pytest.mark.parametrize("orientation", range(10))  # 0 and 9 have no meaning
@pytest.mark.parametrize("suffix", [".jpg", ".png"])
def test_a_picture_is_turned_as_its_orientation_says(tmp_path, orientation, suffix):
    path = tmp_path / f"a{suffix}"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (6, 9, 3), dtype=np.uint8)).save(path)
    _turn(path, orientation)
    with Image.open(path) as image:
        upright = ImageOps.exif_transpose(image)
    assert np.array_equal(decode(path), upright)
    assert check_picture(path) == upright.size == ((6, 9) if 5 <= orientation <= 8 else (9, 6))


@pytest.mark.parametrize("values", [np.uint8, np.uint16])
def test_a_label_map_is_turned_as_its_orientation_says(tmp_path, values):
    labels = np.arange(54, dtype=values).reshape(6, 9)
    Image.fromarray(labels).save(tmp_path / "a.png")
    _turn(tmp_path / "a.png", 3)
    assert np.array_equal(decode_labels(tmp_path / "a.png", modes=("L", "I;16")), labels[::-1, ::-1])


def test_a_picture_with_broken_exif_data_is_read_as_it_is(tmp_path):
    Image.new("RGB", (9, 6)).save(tmp_path / "a.jpg", exif=b"Exif\x00\x00no header of EXIF data")
    assert decode(tmp_path / "a.jpg").size == check_picture(tmp_path / "a.jpg") == (9, 6)


def test_a_mask_belongs_to_the_turned_image(tmp_path):
    pair = MaskedImage(tmp_path / "a.jpg", tmp_path / "a.png")
    write_masked(*pair, (6, 9))
    _turn(pair.image)
    with pytest.raises(ValueError, match=r"a\.jpg has 6×9 pixels, .*a\.png has 9×6; images are turned as their EXIF"):
        MaskDecoder([pair], void=255)
    write_masked(tmp_path / "b.jpg", pair.mask, (9, 6))
    samples = FileSamples(MaskDecoder([pair], void=255))
    (image,), (mask,) = next(samples.load([(0, torch.tensor([0]))], seed=0))
    assert image.shape[1:] == mask.shape == (9, 6)


def test_the_size_in_annotations_is_that_of_the_turned_image(tmp_path):
    write_coco(tmp_path, official=False)
    path = tmp_path / "train/000000000010.jpg"
    _turn(path)
    with pytest.raises(ValueError, match=r"10\.jpg has 24×32 pixels, but 32×24 .* before it was turned as its EXIF"):
        open_coco(tmp_path, masks=False)
    Image.new("RGB", COCO_SIZE).save(path)
    _turn(path)
    images, _, _ = next(open_coco(tmp_path, masks=False, test="train").test.load([(0, torch.tensor([0]))], seed=0))
    assert images[0].shape == (3, *COCO_SIZE)


@pytest.mark.parametrize("values, mode", [(np.uint16, "I;16"), (np.int32, "I"), (np.float32, "F")])
def test_a_picture_of_more_than_8_bits_is_refused(tmp_path, values, mode):
    path = tmp_path / "a.png"
    Image.fromarray(np.full((6, 9), 1000, dtype=values)).save(path, format="TIFF")
    for read in (decode, check_picture):
        with pytest.raises(ValueError, match=rf"8 bits per channel, .*a\.png has PIL's mode {mode}; convert it"):
            read(path)


def test_images_of_more_than_8_bits_are_named_before_training_and_label_maps_are_not(tmp_path):
    deep = Image.fromarray(np.full((18, 24), 1000, dtype=np.uint16))
    write_label_maps(tmp_path / "maps")
    deep.save(tmp_path / "maps/train/images/1.jpg", format="PNG")
    with pytest.raises(ValueError, match=r"1\.jpg has PIL's mode I;16"):
        open_label_maps(tmp_path / "maps")
    write_nuclei(tmp_path / "nuclei")  # label maps of 16 bits
    assert len(open_nuclei(tmp_path / "nuclei", masks=False).train) == 3
