"""Object detection and instance segmentation: the losses of torchvision's R-CNN models, and the COCO figures.

`detection_losses`, for a training loop of your own, is in `rcnn_losses`.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from micronorm.data.coco import encode_masks, open_coco, to_coco_boxes
from micronorm.data.files import decode_pixels
from micronorm.data.nuclei import STRIDE, open_nuclei
from micronorm.data.samples import DataSet
from micronorm.tasks.coco_score import CocoScore
from micronorm.tasks.pictures import LARGEST_SCENE, draw_detections, encode_scene, in_eval_mode, load_few
from micronorm.tasks.rcnn_losses import detect, detection_losses
from micronorm.tasks.scores import Prediction, SumLoss

SURE = 0.5
"""Objects with a smaller score are not drawn in examples."""


class Detection:
    """Find objects: their boxes and, with `masks`, their pixels.

    A batch is (images, targets, keys): a list of 3×H×W images in [0, 1], a list of targets as in `detection_losses`,
    and the keys of the samples. A target also has "image", the index of its image in the data set. The model is an
    R-CNN of torchvision.

    Args:
        train: the training samples.
        test: the test samples, with `annotations`, a COCO dictionary.
        names: the names of the classes by label; the first is "background".
        masks: whether masks are learned and scored.
        stride: pad images to predict with black to a multiple of it, as the data set does for its test images.
    """

    sample = "image"
    evaluation_batch = 1  # images are detected one by one anyway, and a signal is heard between two batches

    def __init__(self, train: Any, test: Any, *, names: tuple[str, ...], masks: bool, stride: int = 1) -> None:
        self.train, self.test = train, test
        self.names, self.masks, self.stride = names, masks, stride

    def loss(self, model: nn.Module, batch: tuple[Any, ...]) -> SumLoss:
        """Return the sum over images of all losses; the terms are in `counts`."""
        images, targets, keys = batch
        losses = detection_losses(model, images, targets, keys)
        terms = {name.removeprefix("loss_"): value.detach() for name, value in losses.items()}
        return SumLoss(torch.stack(list(losses.values())).sum(), len(images), terms)

    def figures(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the mean loss per image, and the mean of each term."""
        count = max(sums["count"], 1)
        return {name: value / count for name, value in sums.items() if name != "count"}

    def new_score(self) -> CocoScore:
        """Return the score of no samples."""
        return CocoScore(self.test.annotations, masks=self.masks)

    def score(self, model: nn.Module, batch: tuple[Any, ...]) -> CocoScore:
        """Return the COCO score of the images of a batch."""
        images, targets, _ = batch
        score = self.new_score()
        for target, found in zip(targets, detect(model, images), strict=True):
            score.add(target["image"], found)
        return score

    @torch.no_grad()
    def examples(self, model: nn.Module, *, count: int = 8) -> list[dict[str, Any]]:
        """Return `count` test images, each beside its true objects and those found with a score above 0.5."""
        found = []
        with in_eval_mode(model) as parameter:
            for (image,), (target,), _ in load_few(self.test, count):
                (answer,) = detect(model, [image.to(parameter.device, parameter.dtype)])
                sure = answer["scores"] > SURE
                answer = {name: value[sure] for name, value in answer.items()}
                truth = {name: target[name] for name in ("boxes", "labels", "masks") if name in target}
                nothing = {name: value[:0] for name, value in truth.items()}
                scores = answer["scores"]
                found.append(
                    {
                        "image": self._draw(image, nothing),
                        "truth": self._draw(image, truth),
                        "answer": self._draw(image, answer),
                        "label": self._describe(truth["labels"]),
                        "prediction": self._describe(answer["labels"]),
                        "probability": scores.mean().item() if len(scores) else 0.0,
                        "note": f"{len(scores)} found with a score above {SURE}, {len(truth['labels'])} are there",
                    }
                )
        return found

    @torch.no_grad()
    def predict(self, model: nn.Module, path: Path) -> Prediction:
        """Return the objects with a score above 0.5, and a picture of them."""
        from PIL import Image

        parameter = next(model.parameters())
        image = decode_pixels(path).to(parameter.device, parameter.dtype) / 255
        height, width = image.shape[1:]
        (found,) = detect(model, [F.pad(image, (0, -width % self.stride, 0, -height % self.stride))])
        boxes = found["boxes"]
        kept = (found["scores"] > SURE) & (boxes[:, 0] < width) & (boxes[:, 1] < height)
        found = {name: value[kept].cpu() for name, value in found.items()}
        found["boxes"] = found["boxes"].minimum(found["boxes"].new_tensor([width, height, width, height]))
        if "masks" in found:
            found["masks"] = found["masks"][..., :height, :width]
        picture = draw_detections(image, found, self.names).permute(1, 2, 0).contiguous().numpy()
        return Prediction(
            self._describe(found["labels"]), {"objects": self._results(found)}, {"-objects": Image.fromarray(picture)}
        )

    def _results(self, found: Mapping[str, Tensor]) -> list[dict[str, Any]]:
        """Return objects with x, y, width and height of the box, and the mask as COCO's run-length encoding."""
        columns = (found["labels"].tolist(), to_coco_boxes(found["boxes"]), found["scores"].tolist())
        results: list[dict[str, Any]] = [
            {"label": label, "category": self.names[label], "bbox": box, "score": score}
            for label, box, score in zip(*columns, strict=True)
        ]
        if "masks" in found:
            masks = found["masks"][:, 0] > 0.5
            for result, counts in zip(results, encode_masks(masks), strict=True):
                result["segmentation"] = {"size": list(masks.shape[1:]), "counts": counts}
        return results

    def _draw(self, image: Tensor, objects: Mapping[str, Tensor]) -> str:
        return encode_scene(draw_detections(image, objects, self.names, largest=LARGEST_SCENE))

    def _describe(self, labels: Tensor) -> str:
        """Return how many objects of each class there are: "2 dog, 1 person"."""
        counts = labels.bincount().tolist()
        return ", ".join(f"{n} {self.names[k]}" for k, n in enumerate(counts) if n) or "nothing"


def open_predictor(data: str, names: tuple[str, ...]) -> Detection:
    """Return the task without its data, for images of any size."""
    return Detection((), (), names=names, masks=True, stride=STRIDE if data == "nuclei" else 1)


def _open_files(
    read: Callable[..., DataSet], masks: bool, folder: Path | str | None = None, *, workers: int = 0
) -> Detection:
    train, test, names = read(folder, masks=masks, workers=workers)
    return Detection(train, test, names=names, masks=masks)


_READERS: Mapping[str, Callable[..., DataSet]] = {
    "coco": open_coco,
    # any small set in COCO's format, tested on its own training images: a detector must be able to learn them
    "coco128": partial(open_coco, child="coco128", test="train"),
    "objects": partial(open_coco, child="objects"),
    "nuclei": open_nuclei,
}
DATA_SETS = {name: partial(_open_files, read, False) for name, read in _READERS.items()}
DATA_SETS_WITH_MASKS = {name: partial(_open_files, read, True) for name, read in _READERS.items()}
