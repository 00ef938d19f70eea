"""COCO's twelve figures for boxes and for masks, computed by faster-coco-eval."""

from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor

from micronorm.data.coco import encode_masks, load_mask_library, to_coco_boxes

FIGURES = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl")
"""Average precision and recall: at IoU 0.5 to 0.95, by the object's area, and by the number of detections."""


class CocoScore:
    """The detections in some images, and their figures beside the truth.

    Only images that were added are evaluated. Masks are kept as run-length encodings.

    Args:
        annotations: the truth as a COCO dictionary. Its categories, in the order of their ids, are the labels 1, 2, ….
        masks: whether to score masks as well. The truth must have them.

    Raises:
        ImportError: faster-coco-eval is not installed.

    Example:
        >>> import torch
        >>> truth = {"id": 1, "image_id": 7, "category_id": 3, "bbox": [2, 2, 4, 4], "area": 16, "iscrowd": 0}
        >>> images = [{"id": 7, "height": 9, "width": 9}]
        >>> annotations = {"images": images, "annotations": [truth], "categories": [{"id": 3, "name": "disc"}]}
        >>> score = CocoScore(annotations, masks=False)
        >>> found = {"boxes": [[2.0, 2.0, 6.0, 5.0]], "labels": [1], "scores": [0.9]}
        >>> score.add(0, {name: torch.tensor(value) for name, value in found.items()})
        >>> round(score.figures()["AP"], 1), "APl" in score.figures()
        (60.0, False)
    """

    def __init__(self, annotations: Mapping[str, Any], *, masks: bool) -> None:
        load_mask_library()
        self._annotations, self._masks = annotations, masks
        self._found: dict[int, dict[str, Any]] = {}

    def add(self, image: int, detection: Mapping[str, Tensor]) -> None:
        """Add the detections in one image.

        Args:
            image: its place in the list of images of the annotations.
            detection: "boxes" (K×4, x1 y1 x2 y2), "labels" (K, from 1), "scores" (K), and "masks" (K×1×H×W
                probabilities), as torchvision's detectors return them. A pixel is in a mask if it is above 0.5.

        Raises:
            ValueError: the image was added before.
        """
        found: dict[str, Any] = {name: detection[name].detach().cpu() for name in ("boxes", "labels", "scores")}
        if self._masks:
            found["masks"] = encode_masks(detection["masks"].detach()[:, 0] > 0.5)
        self._add({image: found})

    def merge(self, other: "CocoScore") -> None:
        """Add the detections in other images."""
        self._add(other._found)

    def figures(self) -> dict[str, float]:
        """Return the figures in per cent: for boxes, and with the prefix `mask_` for masks.

        A figure is left out if the images have no object of its area: there is nothing to average.
        """
        figures = self._evaluate("bbox")
        if self._masks:
            figures |= {f"mask_{name}": value for name, value in self._evaluate("segm").items()}
        return figures

    def state_dict(self) -> dict[str, Any]:
        """Return the detections by image."""
        return {str(image): dict(found) for image, found in self._found.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._found = {int(image): dict(found) for image, found in state.items()}

    def _add(self, found: Mapping[int, dict[str, Any]]) -> None:
        again = sorted(found.keys() & self._found.keys())
        if again:
            raise ValueError(f"image {again[0]} was scored before: add each image once")
        self._found |= found

    def _evaluate(self, kind: Literal["bbox", "segm"]) -> dict[str, float]:
        from faster_coco_eval import COCO, COCOeval_faster

        images = [self._annotations["images"][image] for image in sorted(self._found)]
        present = {image["id"] for image in images}
        entries = [entry for entry in self._annotations["annotations"] if entry["image_id"] in present]
        # Copies, because the library writes into them. Ids start at 1, because 0 means "no match" there.
        entries = [{**entry, "id": number} for number, entry in enumerate(entries, 1)]
        truth = COCO({**self._annotations, "images": images, "annotations": entries})
        evaluation = COCOeval_faster(truth, truth.loadRes(self._results(kind)), kind, print_function=_stay_silent)
        evaluation.run()
        stats = zip(FIGURES, map(float, evaluation.stats), strict=True)
        return {name: 100 * value for name, value in stats if value >= 0}

    def _results(self, kind: Literal["bbox", "segm"]) -> list[dict[str, Any]]:
        """Return the detections in COCO's format of results. Masks come without boxes, whose area would count."""
        categories = sorted(category["id"] for category in self._annotations["categories"])
        results = []
        for image, found in sorted(self._found.items()):
            entry = self._annotations["images"][image]
            if kind == "bbox":
                where = [{"bbox": box} for box in to_coco_boxes(found["boxes"])]
            else:
                size = [entry["height"], entry["width"]]
                where = [{"segmentation": {"size": size, "counts": counts}} for counts in found["masks"]]
            for place, label, score in zip(where, found["labels"].tolist(), found["scores"].tolist(), strict=True):
                results.append({"image_id": entry["id"], "category_id": categories[label - 1], "score": score, **place})
        return results


def _stay_silent(*text: Any) -> None:
    pass
