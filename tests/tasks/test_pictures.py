"""Pictures of predictions: label maps in VOC's colours, and boxes with masks and names."""

import base64
import io

import numpy as np
import pytest
import torch
from PIL import Image

from micronorm.tasks.pictures import PALETTE, colour_labels, draw_detections, encode_scene, shrink

NAMES = ("background", "cat", "dog")


def detection(*labels, size=(40, 60), scores=True):
    boxes = torch.tensor([[4.0 + 20 * k, 5.0, 18.0 + 20 * k, 30.0] for k in range(len(labels))]).reshape(-1, 4)
    masks = torch.zeros(len(labels), 1, *size)
    for mask, (left, top, right, bottom) in zip(masks, boxes.int().tolist(), strict=True):
        mask[0, top:bottom, left:right] = 1
    found = {"boxes": boxes, "labels": torch.tensor(labels, dtype=torch.int64), "masks": masks}
    return {**found, "scores": torch.ones(len(labels))} if scores else found


def test_the_palette_is_that_of_pascal_voc():
    assert PALETTE[[0, 1, 2, 8, 15, 20, 255]].tolist() == [
        [0, 0, 0], [128, 0, 0], [0, 128, 0], [64, 0, 0], [192, 128, 128], [0, 64, 128], [224, 224, 192],
    ]  # fmt: skip
    coloured = colour_labels(torch.tensor([[1, 11]]), void=11)
    assert coloured[:, 0, 0].tolist() == [128, 0, 0]
    assert coloured[:, 0, 1].tolist() == [224, 224, 192]


def test_masks_and_boxes_are_drawn_where_they_are_and_nowhere_else():
    drawn = draw_detections(torch.zeros(3, 40, 60), detection(1), NAMES)
    assert (drawn.shape, drawn.dtype) == ((3, 40, 60), torch.uint8)
    assert drawn[:, 25, 10].tolist() == [64, 0, 0]  # half of the colour over black
    assert drawn[:, 30, 10].tolist() == PALETTE[1].tolist()  # the lower edge of the box
    assert not drawn[:, 32:].any()
    assert not drawn[:, :, 50:].any()


def test_several_classes_have_their_own_colours_and_one_class_a_colour_per_object():
    centres = [(slice(None), 25, 10), (slice(None), 25, 30)]
    image = torch.zeros(3, 40, 60)
    by_class = draw_detections(image, detection(2, 1), NAMES)
    assert [by_class[c].tolist() for c in centres] == [[0, 64, 0], [64, 0, 0]]
    by_object = draw_detections(image, detection(2, 2), NAMES)
    assert [by_object[c].tolist() for c in centres] == [[64, 0, 0], [0, 64, 0]]


def test_a_large_picture_is_shrunk_with_its_boxes_and_masks():
    large = detection(1, 2, size=(40, 60))
    drawn = draw_detections(torch.zeros(3, 40, 60), large, NAMES, largest=30)
    assert drawn.shape == (3, 20, 30)
    assert drawn[:, 15, 5].tolist() == PALETTE[1].tolist()  # the lower edge, at half its height
    assert not drawn[:, 17:].any()


@pytest.mark.parametrize("masks", [True, False])
def test_an_image_without_objects_and_a_box_without_area_are_drawn(masks):
    image = torch.rand(3, 20, 30)
    nothing = detection(size=(20, 30))
    alone = {**detection(1, size=(20, 30)), "boxes": torch.tensor([[5.0, 5.0, 4.0, 5.0]])}
    for found in (nothing, alone):
        found = found if masks else {key: value for key, value in found.items() if key != "masks"}
        assert draw_detections(image, found, NAMES, largest=16).shape == (3, 11, 16)
    assert torch.equal(draw_detections(image, nothing, NAMES), (image * 255).round().to(torch.uint8))


def decode_scene(text):
    image = Image.open(io.BytesIO(base64.b64decode(text)))
    return image.format, torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def test_a_label_map_is_stored_without_loss_and_a_photograph_in_less_space():
    labels = colour_labels(torch.randint(0, 21, (80, 70)), void=255)
    kind, stored = decode_scene(encode_scene(labels, lossless=True))
    assert kind == "PNG"
    assert torch.equal(stored, labels)
    kind, stored = decode_scene(encode_scene(torch.full((3, 256, 100), 77, dtype=torch.uint8)))
    assert (kind, stored.shape, stored.unique().tolist()) == ("JPEG", (3, 256, 100), [77])


def test_the_pixels_of_a_small_picture_are_repeated():
    labels = colour_labels(torch.randint(0, 4, (8, 32)), void=255)
    _, stored = decode_scene(encode_scene(labels, lossless=True))
    assert stored.shape == (3, 32, 128)
    assert torch.equal(stored[:, ::4, ::4], labels)


def test_a_picture_is_shrunk_with_its_ratio():
    assert shrink(torch.rand(3, 300, 600)).shape == (3, 128, 256)
    assert shrink(torch.rand(1, 30, 60)).shape == (1, 30, 60)
