"""COCO's figures, beside those of pycocotools."""

import contextlib
import io
import sys

import numpy as np
import pytest
import torch
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from micronorm.data.coco import load_mask_library
from micronorm.tasks.coco_score import FIGURES, CocoScore
from tests.tasks.exchange import sent

TOLERANCE = 1e-6  # per cent; both libraries compute in float64
SIZE = 200


def _plane(box):
    """An ellipse in this box, as a mask."""
    x, y, w, h = box
    rows, columns = np.mgrid[:SIZE, :SIZE] + 0.5
    return ((columns - x - w / 2) / (w / 2)) ** 2 + ((rows - y - h / 2) / (h / 2)) ** 2 <= 1


def _encode(plane):
    runs = load_mask_library().encode(np.asfortranarray(plane.astype(np.uint8)))
    return {"size": [SIZE, SIZE], "counts": runs["counts"].decode()}


def _random_box(random):
    width, height = random.choice([15, 60, 120], p=[0.4, 0.4, 0.2]) * random.uniform(0.8, 1.2, 2)
    return [*(random.uniform(0, 1, 2) * (SIZE - np.array([width, height]))), width, height]


@pytest.fixture(scope="module")
def truth():
    """Objects of three categories and all areas in twelve images: crowds, and images without an object."""
    random = np.random.default_rng(0)
    entries = []
    for image in range(2, 12):
        for _ in range(random.integers(1, 7)):
            box = _random_box(random)
            plane = _plane(box)
            entries.append(
                {
                    "id": len(entries) + 1,
                    "image_id": 100 + image,
                    "category_id": int(random.choice([2, 5, 90])),
                    "bbox": box,
                    "area": float(plane.sum()),
                    "iscrowd": int(random.uniform() < 0.15),
                    "segmentation": _encode(plane),
                }
            )
    images = [{"id": 100 + k, "height": SIZE, "width": SIZE} for k in range(12)]
    return {"images": images, "annotations": entries, "categories": [{"id": k, "name": str(k)} for k in (2, 5, 90)]}


def _detections(truth, *, seed=1):
    """Shifted objects, wrong labels, false alarms, equal scores; image 3 has none."""
    random = np.random.default_rng(seed)
    labels = {category["id"]: k for k, category in enumerate(truth["categories"], 1)}
    found = []
    for k, image in enumerate(truth["images"]):
        boxes, classes = [], []
        for entry in truth["annotations"]:
            if entry["image_id"] == image["id"] and k != 3:
                for _ in range(random.integers(0, 3)):
                    boxes.append(np.array(entry["bbox"]) + random.normal(0, 2, 4) * [1, 1, 0.5, 0.5])
                    classes.append(labels[entry["category_id"]] if random.uniform() < 0.9 else 1)
        for _ in range(0 if k == 3 else random.integers(0, 4)):
            boxes.append(_random_box(random))
            classes.append(int(random.integers(1, 4)))
        planes = np.array([_plane(box) for box in boxes]).reshape(-1, 1, SIZE, SIZE)
        corners = torch.tensor(np.array(boxes).reshape(-1, 4), dtype=torch.float32)
        corners[:, 2:] += corners[:, :2]
        found.append(
            {
                "boxes": corners,
                "labels": torch.tensor(classes, dtype=torch.int64),
                "scores": torch.tensor(random.uniform(0, 1, len(boxes)).round(1), dtype=torch.float32),
                "masks": torch.tensor(planes * random.uniform(0.51, 1, planes.shape), dtype=torch.float32),
            }
        )
    return found


def _score(truth, detections, images=None, *, masks=True):
    score = CocoScore(truth, masks=masks)
    for image in range(len(truth["images"])) if images is None else images:
        score.add(image, detections[image])
    return score


def _pycocotools(truth, detections, kind):
    """The twelve figures in per cent, from pycocotools; -1 if there is no object of the area."""
    ids = sorted(category["id"] for category in truth["categories"])
    results = []
    for image, found in zip(truth["images"], detections, strict=True):
        for k, (x1, y1, x2, y2) in enumerate(found["boxes"].double().tolist()):
            box, plane = [x1, y1, x2 - x1, y2 - y1], found["masks"][k, 0].numpy() > 0.5
            place = {"bbox": box} if kind == "bbox" else {"segmentation": _encode(plane)}
            label, score = int(found["labels"][k]), float(found["scores"][k])
            results.append({"image_id": image["id"], "category_id": ids[label - 1], "score": score, **place})
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO()
        coco.dataset = {**truth, "info": {}, "annotations": [dict(entry) for entry in truth["annotations"]]}
        coco.createIndex()
        evaluation = COCOeval(coco, coco.loadRes(results), kind)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return {name: 100 * value if value >= 0 else -1 for name, value in zip(FIGURES, evaluation.stats, strict=True)}


def test_figures_are_those_of_pycocotools(truth):
    detections = _detections(truth)
    figures = _score(truth, detections).figures()
    expected = _pycocotools(truth, detections, "bbox")
    expected |= {f"mask_{name}": value for name, value in _pycocotools(truth, detections, "segm").items()}
    assert min(expected.values()) > 0  # every area occurs
    assert figures == pytest.approx(expected, rel=0, abs=TOLERANCE)
    assert 10 < figures["AP"] < 90


def test_masks_are_scored_only_if_asked_for(truth):
    figures = _score(truth, _detections(truth), masks=False).figures()
    assert tuple(figures) == FIGURES


def test_merged_scores_have_the_figures_of_one(truth):
    detections = _detections(truth)
    whole = _score(truth, detections)
    total = CocoScore(truth, masks=True)
    for images in ([5, 1, 9], [], [0, 2, 3, 4, 6], [7, 8, 10, 11]):  # another order, as ranks and batches give
        part = CocoScore(truth, masks=True)
        part.load_state_dict(sent(_score(truth, detections, images).state_dict()))
        total.merge(part)
    assert total.figures() == whole.figures()
    with pytest.raises(ValueError, match="image 2 was scored before"):
        total.merge(_score(truth, detections, [2]))


def test_only_images_that_were_added_count(truth):
    detections = _detections(truth)
    kept = {**truth, "images": truth["images"][4:9]}
    kept["annotations"] = [entry for entry in truth["annotations"] if 104 <= entry["image_id"] < 109]
    expected = _score(kept, detections[4:9]).figures()
    assert _score(truth, detections, range(4, 9)).figures() == expected


def test_no_detections_score_zero(truth):
    nothing = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64), "scores": torch.zeros(0)}
    nothing["masks"] = torch.zeros(0, 1, SIZE, SIZE)
    figures = _score(truth, [nothing] * 12).figures()
    assert set(figures.values()) == {0.0}
    assert len(figures) == 24


def test_figures_of_areas_without_an_object_are_left_out(truth):
    small = {**truth, "annotations": [entry for entry in truth["annotations"] if entry["area"] < 32**2]}
    detections = _detections(truth)
    figures = _score(small, detections, masks=False).figures()
    expected = _pycocotools(small, detections, "bbox")
    assert {name for name, value in expected.items() if value < 0} == {"APm", "APl", "ARm", "ARl"}
    assert figures == pytest.approx({k: v for k, v in expected.items() if v >= 0}, rel=0, abs=TOLERANCE)
    assert _score({**truth, "annotations": []}, detections).figures() == {}


def test_scoring_leaves_the_annotations_as_they_are(truth):
    before = [dict(entry) for entry in truth["annotations"]]
    score = _score(truth, _detections(truth))
    assert score.figures() == score.figures()
    assert truth["annotations"] == before


def test_an_annotation_with_id_0_counts_like_any_other(truth):
    shifted = {**truth, "annotations": [{**entry, "id": entry["id"] - 1} for entry in truth["annotations"]]}
    detections = _detections(truth)
    assert _score(shifted, detections).figures() == _score(truth, detections).figures()


def test_without_the_library_the_error_says_what_to_install(truth, monkeypatch):
    monkeypatch.setitem(sys.modules, "faster_coco_eval", None)
    with pytest.raises(ImportError, match="pip install faster-coco-eval"):
        CocoScore(truth, masks=False)
