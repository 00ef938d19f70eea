"""COCO's images and objects, from files."""

import json
import sys

import numpy as np
import pytest
import torch
from faster_coco_eval import mask as mask_library
from PIL import Image

from micronorm.data.coco import open_coco
from tests.data.miniature import COCO_SIZE, coco_object, coco_objects, write_coco

HEIGHT, WIDTH = COCO_SIZE


def _load(samples, indices, *, epoch=0, seed=3):
    return next(samples.load([(epoch, torch.tensor(indices))], seed=seed))


def _edit(file, change):
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


@pytest.mark.parametrize("official", [True, False])
@pytest.mark.parametrize("below", ["", "coco"])
def test_both_layouts_are_read(tmp_path, official, below):
    write_coco(tmp_path / below, official=official)
    train, test, names = open_coco(tmp_path, masks=True)
    assert (len(train), len(test)) == (2, 3)  # training leaves images without an object out
    assert names == ("background", "person", "car", "toothbrush")


def test_the_training_images_can_be_tested_on(tmp_path):
    write_coco(tmp_path / "small")
    train, test, _ = open_coco(tmp_path, masks=True, child="small", test="train")
    assert (len(train), len(test)) == (2, 3)
    assert train.annotations["images"] == test.annotations["images"][:2]
    assert any(torch.equal(_load(train, [0], epoch=k)[0][0], _load(test, [0])[0][0]) for k in range(9))


def test_the_aspect_ratios_are_those_of_the_images(tmp_path):
    write_coco(tmp_path)
    for samples in open_coco(tmp_path, masks=False)[:2]:
        images, _, _ = _load(samples, range(len(samples)))
        assert samples.aspect_ratios.tolist() == pytest.approx([image.shape[2] / image.shape[1] for image in images])


def test_category_ids_with_gaps_become_consecutive_labels_in_the_order_of_ids(tmp_path):
    write_coco(tmp_path)
    test = open_coco(tmp_path, masks=False).test
    targets = _load(test, [0, 1, 2])[1]
    assert [target["labels"].tolist() for target in targets] == [[3, 2], [2], []]
    assert [category["id"] for category in test.annotations["categories"]] == [1, 3, 90]


def test_targets_are_pixels_of_the_image_without_crowds_and_boxes_without_an_area(tmp_path):
    write_coco(tmp_path)
    images, targets, keys = _load(open_coco(tmp_path, masks=True).test, [0, 1, 2])
    assert [image.shape for image in images] == [(3, HEIGHT, WIDTH)] * 3
    assert all(image.dtype == torch.float32 and image.min() >= 0 and image.max() <= 1 for image in images)
    assert targets[0]["boxes"].tolist() == [[4, 4, 12, 12], [4, 4, 28, 12]]
    assert targets[1]["boxes"].tolist() == [[8, 2, WIDTH, 12]]  # cut off at the border
    assert targets[2]["boxes"].shape == (0, 4)
    assert [target["masks"].shape for target in targets] == [(k, HEIGHT, WIDTH) for k in (2, 1, 0)]
    assert [target["image"] for target in targets] == [0, 1, 2]
    expected = torch.zeros(2, HEIGHT, WIDTH, dtype=torch.uint8)
    expected[:, 4:12, 4:12], expected[1, 4:12, 20:28] = 1, 1  # an outline of two parts
    assert torch.equal(targets[0]["masks"], expected)
    assert (keys.shape, keys.dtype) == ((3,), torch.int64)


def test_without_masks_no_target_has_any(tmp_path):
    write_coco(tmp_path)
    targets = _load(open_coco(tmp_path, masks=False).test, [0, 2])[1]
    assert [target.keys() for target in targets] == [{"boxes", "labels", "image"}] * 2


def test_an_image_is_mirrored_with_its_boxes_and_masks(tmp_path):
    write_coco(tmp_path)
    train, test, _ = open_coco(tmp_path, masks=True, test="train")
    straight = _load(test, [0])
    seen = set()
    for epoch in range(16):
        images, targets, _ = _load(train, [0], epoch=epoch)
        mirrored = not torch.equal(images[0], straight[0][0])
        seen.add(mirrored)
        for box, mask in zip(targets[0]["boxes"], targets[0]["masks"], strict=True):
            rows, columns = torch.nonzero(mask, as_tuple=True)
            assert box.tolist() == [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
        if mirrored:
            assert torch.equal(images[0], straight[0][0].flip(-1))
            assert torch.equal(targets[0]["masks"], straight[1][0]["masks"].flip(-1))
    assert seen == {True, False}
    assert torch.equal(_load(test, [0], epoch=0)[0][0], _load(test, [0], epoch=1)[0][0])


def test_polygons_and_runs_are_kept_as_compressed_runs(tmp_path):
    write_coco(tmp_path)
    entries = {entry["id"]: entry for entry in open_coco(tmp_path, masks=True).test.annotations["annotations"]}
    masks = mask_library.decode([entries[k]["segmentation"] for k in (1, 3)])
    assert (masks[4:12, 4:12, 0] == 1).all()
    assert masks[..., 0].sum() == 64
    assert np.array_equal(np.flatnonzero(masks[..., 1].any(0)), [0, 1])


def test_a_compressed_crowd_is_read_and_a_crowd_without_an_outline_covers_its_box(tmp_path):
    runs = mask_library.encode(np.asfortranarray(np.eye(HEIGHT, WIDTH, dtype=np.uint8)))
    crowds = [
        coco_object(6, 20, 1, crowd=1, outline={**runs, "counts": runs["counts"].decode()}),
        coco_object(7, 20, 1, crowd=1, outline=[]),
    ]
    write_coco(tmp_path, objects=[*coco_objects(), *crowds])
    entries = {entry["id"]: entry for entry in open_coco(tmp_path, masks=True).test.annotations["annotations"]}
    assert mask_library.area([entries[k]["segmentation"] for k in (6, 7)]).tolist() == [HEIGHT, 64]


@pytest.mark.parametrize("masks, area", [(False, 64), (True, 16)])
def test_a_missing_area_is_that_of_the_box_or_mask_and_a_missing_crowd_is_none(tmp_path, masks, area):
    entry = coco_object(1, 10, 1, outline=[[4.0, 4.0, 8.0, 4.0, 8.0, 8.0, 4.0, 8.0]])
    write_coco(tmp_path, objects=[{key: entry[key] for key in entry if key not in ("area", "iscrowd")}])
    train = open_coco(tmp_path, masks=masks).train
    (found,) = train.annotations["annotations"]
    assert (found["area"], found["iscrowd"], len(_load(train, [0])[1][0]["labels"])) == (area, 0, 1)


def test_training_annotations_are_those_of_the_images_that_are_left(tmp_path):
    write_coco(tmp_path)
    train, test, _ = open_coco(tmp_path, masks=False)
    assert [image["id"] for image in train.annotations["images"]] == [10, 20]
    assert [image["id"] for image in test.annotations["images"]] == [10, 20, 30]


def test_a_missing_data_set_names_the_searched_folders(tmp_path):
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        open_coco(tmp_path, masks=False)
    write_coco(tmp_path)
    (tmp_path / "annotations/instances_val2017.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"instances_val2017\.json"):
        open_coco(tmp_path, masks=False)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '"text"',
        "[]",
        "{}",
        '{"images": [], "annotations": [{}], "categories": []}',
        '{"images": [], "annotations": [], "categories": [7]}',
        '{"images": [], "annotations": [], "categories": [{"id": [], "name": "dog"}]}',
    ],
)
def test_a_file_that_is_no_coco_is_named(tmp_path, text):
    file = write_coco(tmp_path)
    file.write_text(text)
    with pytest.raises(ValueError, match=r"instances_train2017\.json is not a (JSON|COCO) file"):
        open_coco(tmp_path, masks=False)


NAN = float("nan")


@pytest.mark.parametrize(
    "broken, message",
    [
        (coco_object(9, 99, 1), "image_id 99 is not among the images"),
        (coco_object(9, 10, 2), "category_id 2 is not among the categories"),
        (coco_object(9, 10, 1, box=(4, 4, -1, 8)), "bbox must be x, y, width and height"),
        (coco_object(9, 10, 1, box=(4, 4, NAN, 8)), "bbox must be x, y, width and height"),
        (
            coco_object(9, 10, 1, box=(20, 4, 28, 12)),
            r"not two corners\) in the image of 32×24 .* got \[20, 4, 28, 12\]",
        ),
        (coco_object(9, 10, 1, box=(4, 12, 8, 14.1)), r"not two corners\) .* got \[4, 12, 8, 14.1\]"),  # 2.1 too low
        (coco_object(9, 10, 1, outline=[[1.0, 2.0, 3.0, 4.0]]), "3 points or more, .* got 2 points"),
        (coco_object(9, 10, 1, outline=[[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]]), "got 3.5 points"),
        (coco_object(9, 10, 1, outline=[[1.0, 2.0, NAN, 4.0, 5.0, 6.0]]), "points of a polygon must be numbers"),
        (coco_object(9, 10, 1, outline=[[1.0, 2.0, 1e9, 4.0, 5.0, 6.0]]), "in or near the image"),
        (coco_object(9, 10, 1, outline=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]), "got 0 points"),
        (coco_object(9, 10, 1, outline=[]), "it has no segmentation, which masks need"),
        (coco_object(9, 10, 1, crowd=1, outline={"size": [9, 9], "counts": [81]}), r"runs .* size \[24, 32\]"),
        (coco_object(9, 10, 1, crowd=1, outline={"size": [HEIGHT, WIDTH], "counts": [5, 6]}), "must add up to the 768"),
        (
            coco_object(9, 10, 1, crowd=1, outline={"size": [HEIGHT, WIDTH], "counts": "a"}),
            "runs .* do not fill",
        ),
        (coco_object(9, 10, 1, outline="square"), "segmentation must be polygons, or runs"),
    ],
)
def test_a_broken_annotation_is_named_with_its_file(tmp_path, broken, message):
    write_coco(tmp_path, objects=[*coco_objects(), broken])
    with pytest.raises(ValueError, match=rf"instances_train2017\.json, annotation 9: .*{message}.*; repair it"):
        open_coco(tmp_path, masks=True)


def test_masks_need_the_library_and_boxes_do_not(tmp_path, monkeypatch):
    write_coco(tmp_path)
    monkeypatch.setitem(sys.modules, "faster_coco_eval", None)
    assert len(_load(open_coco(tmp_path, masks=False).test, [0])[1][0]["boxes"]) == 2
    with pytest.raises(ImportError, match="pip install faster-coco-eval"):
        open_coco(tmp_path, masks=True)


def test_outlines_are_checked_only_if_masks_are_read(tmp_path):
    write_coco(tmp_path, objects=[*coco_objects(), coco_object(9, 10, 1, outline=[])])
    assert len(open_coco(tmp_path, masks=False).train) == 2


@pytest.mark.parametrize("objects", [[], [coco_object(1, 10, 1, crowd=1)]])
def test_annotations_without_an_object_are_named(tmp_path, objects):
    write_coco(tmp_path, objects=objects)
    with pytest.raises(ValueError, match=r"instances_train2017\.json annotates no object in 3 images"):
        open_coco(tmp_path, masks=False)


def test_a_missing_or_broken_image_is_named(tmp_path):
    write_coco(tmp_path)
    path = tmp_path / "val2017/000000000030.jpg"
    whole = path.read_bytes()
    path.write_bytes(whole[:-50])
    with pytest.raises(ValueError, match=r"000000000030\.jpg ends before its image does"):
        open_coco(tmp_path, masks=False)
    Image.new("RGB", (WIDTH, HEIGHT + 1)).save(path)
    with pytest.raises(ValueError, match=r"000000000030\.jpg has 32×25 pixels, but 32×24 in .*val2017\.json"):
        open_coco(tmp_path, masks=False)
    path.unlink()
    with pytest.raises(
        FileNotFoundError, match=r"30\.jpg: .*val2017\.json names it '0.*', and .* relative to .*val2017$"
    ):
        open_coco(tmp_path, masks=False)


def test_training_and_test_must_have_the_same_categories_and_ids_must_be_unique(tmp_path):
    file = write_coco(tmp_path)
    _edit(file, lambda content: content["categories"].append({"id": 4, "name": "boat"}))
    with pytest.raises(ValueError, match="must have the same categories"):
        open_coco(tmp_path, masks=False)
    for part, number in (("categories", 90), ("annotations", 1), ("images", 10)):
        _edit(file, lambda content, part=part: content[part].append(content[part][0]))
        with pytest.raises(ValueError, match=rf"instances_train2017\.json has {part} of the same id {number};"):
            open_coco(tmp_path, masks=False)
        _edit(file, lambda content, part=part: content[part].pop())
