"""Images with one label per pixel, from files."""

import numpy as np
import pytest
import torch
from PIL import Image

from micronorm.data.files import check_picture
from micronorm.data.loading import FileSamples
from micronorm.data.masks import MaskDecoder, MaskedImage, open_camvid, open_label_maps, open_voc, scale_and_crop
from tests.data.miniature import write_camvid, write_label_maps, write_masked, write_voc

SIZES = ((20, 30), (24, 18), (16, 16), (30, 20))
VOID = 255


@pytest.fixture
def files(tmp_path):
    found = [MaskedImage(tmp_path / f"{k}.jpg", tmp_path / f"m{k}.png") for k in range(len(SIZES))]
    for k, (pair, size) in enumerate(zip(found, SIZES, strict=True)):
        write_masked(*pair, size, seed=k)
    return found


def _samples(files, *, workers=0, crop=None):
    return FileSamples(MaskDecoder(files, void=VOID, crop=crop), workers=workers)


def _load(samples, indices, *, epoch=0, seed=3):
    return next(samples.load([(epoch, torch.tensor(indices))], seed=seed))


def test_whole_images_keep_their_pixels_and_come_as_lists(files):
    images, masks = _load(_samples(files), [1, 3])
    assert [tuple(mask.shape) for mask in masks] == [SIZES[1], SIZES[3]]
    assert [tuple(image.shape[1:]) for image in images] == [SIZES[1], SIZES[3]]
    assert masks[0].tolist() == np.array(Image.open(files[1].mask)).tolist()


def test_outside_of_a_small_image_the_label_is_void_and_the_input_near_zero(files):
    samples = _samples(files[2:3], crop=64)  # 16 pixels grow to 32 at most
    image, mask = (column[0] for column in _load(samples, [0]))
    outside = torch.zeros(64, 64, dtype=torch.bool)
    outside[33:], outside[:, 33:] = True, True
    assert (mask[outside] == VOID).all() or (mask.flip(-1)[outside] == VOID).all()
    empty = (mask == VOID).all(0)  # whole columns beyond the image
    assert empty.any()
    assert image[:, :, empty].abs().max() < 0.5 / (255 * 0.224)


def test_image_and_mask_are_scaled_and_cut_alike():
    values = torch.arange(20 * 30, dtype=torch.int64).reshape(20, 30) % 251
    image, mask = values.to(torch.uint8).expand(3, -1, -1), values.to(torch.uint8)
    picture, labels = scale_and_crop(image, mask, (0.5, 0.5, 0.5), size=10, void=VOID)  # scale 1
    assert torch.equal(picture[0], labels)
    assert torch.equal(labels, mask[5:15, 10:20])


@pytest.mark.parametrize("augmented, count", [(0, 2), (3, 3)])
@pytest.mark.parametrize("below", ["", "VOCdevkit/VOC2012"])
def test_voc_trains_on_the_augmented_list_if_there_is_one(tmp_path, augmented, count, below):
    write_voc(tmp_path / below, augmented=augmented)
    opened = open_voc(tmp_path, size=16)
    assert (len(opened.train), len(opened.test)) == (count, 1)
    assert _load(opened.train, [0, 1])[0].shape == (2, 3, 16, 16)


def test_camvid_pairs_images_with_annotations_by_name(tmp_path):
    write_camvid(tmp_path / "camvid")
    opened = open_camvid(tmp_path, size=16)
    assert (len(opened.train), len(opened.test)) == (3, 2)
    (tmp_path / "camvid/testannot/1.png").unlink()
    with pytest.raises(FileNotFoundError, match=r"testannot/1\.png"):
        open_camvid(tmp_path)


@pytest.mark.parametrize("names, void, found", [(("a", "b", "c"), 255, 255), (("a", "b", "c"), 3, 3), ((), 255, 255)])
def test_classes_and_void_of_ones_own_label_maps_are_found(tmp_path, names, void, found):
    write_label_maps(tmp_path, names=names, void=void)
    opened = open_label_maps(tmp_path)
    assert (len(opened.train), len(opened.test), opened.void) == (3, 2, found)
    assert opened.names == (names or ("class 0", "class 1", "class 2"))
    images, masks = _load(opened.train, [0, 1])
    assert images.shape == (2, 3, 24, 24)  # the larger side of an image
    assert set(masks.unique().tolist()) <= {*range(len(opened.names)), found}


def test_label_maps_with_more_labels_than_classes_and_void_are_refused_by_file(tmp_path):
    write_label_maps(tmp_path, names=("a", "b"))
    with pytest.raises(ValueError, match=r"names 2 classes, labels 0 to 1, .* are 2 \(.*0\.png\) and 255 \(.*0\.png\)"):
        open_label_maps(tmp_path)
    (tmp_path / "classes.txt").write_text("a\n")
    with pytest.raises(ValueError, match=r"names 1 classes"):
        open_label_maps(tmp_path)


@pytest.mark.parametrize(
    "names, values, message",
    [
        (("background", "road"), (0, 255), "class 'road', label 1 .* 255 was taken as void .* must be saved as 1"),
        (("background", "road", "car"), (0, 1, 255), "class 'car', label 2 .* 255 was taken .* must be saved as 2"),
        (("background", "road"), (1, 2), "class 'background', label 0 .* 2 was taken as void .* must be saved as 1"),
        ((), (0, 255), "at least 2 classes, got 1: class 0; the label 255 counts as void"),
    ],
)
def test_a_class_that_was_taken_as_void_is_named(tmp_path, names, values, message):
    write_label_maps(tmp_path, names=names)
    for path in tmp_path.glob("*/masks/*.png"):
        Image.fromarray(np.resize(np.array(values, dtype=np.uint8), (18, 24))).save(path)
    with pytest.raises(ValueError, match=message):
        open_label_maps(tmp_path)


@pytest.mark.parametrize("names, values", [("abcd", (0, 1, 3, 255)), ("abcd", (0, 1))])
def test_other_classes_may_have_no_pixels(tmp_path, names, values):
    write_label_maps(tmp_path, names=names)
    for path in tmp_path.glob("*/masks/*.png"):
        Image.fromarray(np.resize(np.array(values, dtype=np.uint8), (18, 24))).save(path)
    assert open_label_maps(tmp_path).names == tuple(names)


def test_an_image_without_a_mask_and_a_mask_without_an_image_are_named(tmp_path):
    write_label_maps(tmp_path)
    (tmp_path / "val/images/0.jpg").unlink()
    with pytest.raises(FileNotFoundError, match=r"masks/0\.png has no image of this name in .*val/images"):
        open_label_maps(tmp_path)
    (tmp_path / "val/masks/1.png").unlink()
    with pytest.raises(FileNotFoundError, match=r"images/1\.jpg has no mask .*val/masks/1\.png"):
        open_label_maps(tmp_path)


@pytest.mark.parametrize("opener", [open_voc, open_camvid, open_label_maps])
def test_a_missing_data_set_names_the_searched_folders(tmp_path, opener):
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        opener(tmp_path)


def test_a_file_that_was_cut_short_is_named_before_training(files):
    data = files[1].image.read_bytes()
    files[1].image.write_bytes(data[:-100])
    with pytest.raises(ValueError, match=r"1\.jpg ends before its image does"):
        _samples(files)
    files[1].image.write_bytes(b"no picture")
    with pytest.raises(ValueError, match=r"1\.jpg is not a readable image"):
        check_picture(files[1].image)


def test_data_after_the_pixels_of_a_jpeg_are_no_fault(files):
    path = files[1].image
    data = path.read_bytes()
    path.write_bytes(data + bytes(5000))  # as phones append a video
    assert check_picture(path) == (18, 24)
    thumbnail = b"\xff\xe1\x00\x06\xff\xd8\xff\xd9"  # a segment of four bytes with an end marker
    path.write_bytes(data[:2] + thumbnail + data[2:-100] + bytes(5000))
    with pytest.raises(ValueError, match=r"1\.jpg ends before its image does"):
        check_picture(path)


def test_a_mask_of_another_size_is_named_before_training(files):
    write_masked(files[0].image.with_name("x.jpg"), files[0].mask, (5, 5))
    with pytest.raises(ValueError, match=r"0\.jpg has 30×20 pixels, .*m0\.png has 5×5"):
        _samples(files)


@pytest.mark.parametrize(
    "opener, write, mask",
    [(open_voc, write_voc, "SegmentationClass/c.png"), (open_camvid, write_camvid, "testannot/1.png")],
)
def test_wrong_labels_and_colours_of_a_data_set_are_named_before_training(tmp_path, opener, write, mask):
    write(tmp_path)
    with Image.open(tmp_path / mask) as picture:
        size, values = picture.size, np.array(picture)
    values[3] = 77
    Image.fromarray(values).save(tmp_path / mask)
    with pytest.raises(ValueError, match=rf"{mask} has the label 77; labels must be below"):
        opener(tmp_path)
    Image.new("RGB", size).save(tmp_path / mask)
    with pytest.raises(ValueError, match=rf"one number per pixel .*{mask} has RGB"):
        opener(tmp_path)


def test_a_list_that_is_no_text_is_named(tmp_path):
    write_voc(tmp_path)
    (tmp_path / "ImageSets/Segmentation/val.txt").write_bytes(b"\xe9")
    with pytest.raises(ValueError, match=r"val\.txt must be text in UTF-8"):
        open_voc(tmp_path)


def test_a_coloured_mask_is_refused(files):
    Image.new("RGB", (30, 20)).save(files[0].mask)
    with pytest.raises(ValueError, match="one number per pixel"):
        _load(_samples(files), [0])
