"""Cell nuclei, from images and labels."""

import numpy as np
import pytest
import torch
from faster_coco_eval import mask as mask_library
from PIL import Image

from micronorm.data.files import fold_of
from micronorm.data.nuclei import LEAST_PIXELS, open_nuclei
from tests.data.miniature import write_nuclei


def _load(samples, indices, *, epoch=0, seed=3):
    return next(samples.load([(epoch, torch.tensor(indices))], seed=seed))


def _relabel(path, nuclei):
    Image.fromarray(nuclei.astype(np.uint16)).save(path)


def test_a_hash_of_the_name_decides_the_split(tmp_path):
    write_nuclei(tmp_path / "dsb2018")
    train, test, names = open_nuclei(tmp_path, masks=False, crop=8)
    files = [[image["file_name"] for image in part.annotations["images"]] for part in (train, test)]
    assert files == [["a.jpg", "c.jpg", "f.jpg"], ["b.jpg", "d.jpg", "e.jpg"]]
    assert names == ("background", "nucleus")


def test_about_one_in_five_is_for_testing():
    assert 0.19 < np.mean([fold_of(str(k)) == 0 for k in range(5000)]) < 0.21


def test_test_images_are_whole_and_black_up_to_a_multiple_of_32_with_one_target_per_nucleus(tmp_path):
    write_nuclei(tmp_path)
    opened = open_nuclei(tmp_path, masks=True)
    images, targets, keys = _load(opened.test, [0, 2])
    assert [image.shape for image in images] == [(3, 32, 32)] * 2
    assert all(image[:, :20, :24].any() and not image[:, 20:].any() and not image[:, :, 24:].any() for image in images)
    assert [(entry["height"], entry["width"]) for entry in opened.test.annotations["images"]][:1] == [(32, 32)]
    assert targets[1]["boxes"].tolist() == [[3, 2, 9, 8], [12, 10, 20, 18]]
    assert targets[1]["labels"].tolist() == [1, 1]
    assert targets[1]["masks"].sum((1, 2)).tolist() == [36, 64]
    assert (targets[1]["image"], len(keys)) == (2, 2)


@pytest.mark.parametrize("crop", [9, 32])
def test_a_crop_keeps_image_boxes_and_masks_together(tmp_path, crop):
    write_nuclei(tmp_path)
    for name in "acf":  # the image shows the labels
        nuclei = np.array(Image.open(tmp_path / f"labels/{name}.png"))
        picture = np.repeat((nuclei > 0)[..., None] * np.uint8(255), 3, axis=2)
        Image.fromarray(picture).save(tmp_path / f"images/{name}.png")
        (tmp_path / f"images/{name}.jpg").unlink()
    train = open_nuclei(tmp_path, masks=True, crop=crop).train
    for epoch in range(8):
        images, targets, _ = _load(train, [0, 1, 2], epoch=epoch)
        for image, target in zip(images, targets, strict=True):
            assert image.shape == (3, crop, crop)
            assert target["masks"].shape[1:] == (crop, crop)
            pixels = target["masks"].sum((1, 2))
            assert (pixels >= LEAST_PIXELS).all()
            # a dropped remainder has fewer pixels than the least
            assert 0 <= (image[0] > 0.5).sum() - pixels.sum() < 2 * LEAST_PIXELS
            assert (image[0][target["masks"].bool().any(0)] == 1).all()
            for box, mask in zip(target["boxes"], target["masks"], strict=True):
                rows, columns = torch.nonzero(mask, as_tuple=True)
                assert box.tolist() == [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]


def test_images_without_a_nucleus_are_kept(tmp_path):
    write_nuclei(tmp_path)
    for name in "ab":
        _relabel(tmp_path / f"labels/{name}.png", np.zeros((20, 24)))
    for samples in open_nuclei(tmp_path, masks=True, crop=16)[:2]:
        target = _load(samples, [0])[1][0]
        assert target["boxes"].shape == (0, 4)
        assert len(target["masks"]) == len(target["labels"]) == 0
        assert len(samples.annotations["annotations"]) == 4


def test_labels_without_any_nucleus_are_refused(tmp_path):
    write_nuclei(tmp_path)
    for name in "bde":
        _relabel(tmp_path / f"labels/{name}.png", np.zeros((20, 24)))
    with pytest.raises(ValueError, match=r"none of the 3 label maps \(.*b\.png and others\) has a nucleus"):
        open_nuclei(tmp_path, masks=False)


def test_annotations_hold_each_nucleus_with_its_pixels(tmp_path):
    write_nuclei(tmp_path)
    annotations = open_nuclei(tmp_path, masks=True).test.annotations
    assert [entry["bbox"] for entry in annotations["annotations"][:2]] == [[3, 2, 6, 6], [12, 10, 8, 8]]
    mask = mask_library.decode(annotations["annotations"][1]["segmentation"])
    assert (mask[10:18, 12:20].all(), mask.sum(), annotations["annotations"][1]["area"]) == (True, 64, 64)
    plain = open_nuclei(tmp_path, masks=False).test.annotations["annotations"]
    assert "segmentation" not in plain[0]


def test_broken_files_are_named(tmp_path):
    write_nuclei(tmp_path)
    label, image = tmp_path / "labels/c.png", tmp_path / "images/c.jpg"
    whole = image.read_bytes()
    image.write_bytes(whole[:-50])
    with pytest.raises(ValueError, match=r"c\.jpg ends before its image does"):
        open_nuclei(tmp_path, masks=False)
    image.write_bytes(whole)
    _relabel(label, np.zeros((5, 6)))
    with pytest.raises(ValueError, match=r"c\.jpg has 24×20 pixels, .*c\.png has 6×5"):
        open_nuclei(tmp_path, masks=False)
    Image.new("RGB", (24, 20)).save(label)
    with pytest.raises(ValueError, match=r"c\.png has RGB"):
        open_nuclei(tmp_path, masks=False)
    damaged = bytearray((tmp_path / "labels/a.png").read_bytes())
    damaged[45:50] = b"wrong"
    label.write_bytes(damaged)
    with pytest.raises(ValueError, match=r"c\.png is not a readable label map"):
        open_nuclei(tmp_path, masks=False)
    label.unlink()
    with pytest.raises(FileNotFoundError, match=r"c\.png"):
        open_nuclei(tmp_path, masks=False)


def test_a_folder_without_nuclei_or_without_test_images_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="dsb2018"):
        open_nuclei(tmp_path, masks=False)
    write_nuclei(tmp_path, names="ac")
    with pytest.raises(ValueError, match="2 samples for training and 0 for testing: add more"):
        open_nuclei(tmp_path, masks=False)
    with pytest.raises(ValueError, match="crop must be positive, got 0"):
        open_nuclei(tmp_path, masks=False, crop=0)
