"""Semantic segmentation: cross entropy per labelled pixel, and the intersection over union of each class."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from micronorm.data.files import decode, to_pixels
from micronorm.data.masks import MaskSet, open_camvid, open_label_maps, open_voc
from micronorm.data.samples import IMAGENET, Standardizer
from micronorm.data.shapes import CLASSES, VOID, ShapeSamples
from micronorm.tasks.pictures import (
    PALETTE,
    VOID_COLOUR,
    colour_code,
    colour_labels,
    draw_image,
    draw_labels,
    in_eval_mode,
    load_few,
)
from micronorm.tasks.scores import ConfusionMatrix, Prediction, SumLoss, compute_logits, list_shares


class Segmentation:
    """Predict the class of each pixel. A batch is (images, labels): N×C×H×W and N×H×W, with `void` for no label.

    Images of different sizes come as two lists. The model returns N×classes×H×W logits.

    Args:
        train: the training samples.
        test: the test samples.
        names: the names of the classes, in the order of their labels.
        void: the label of pixels that do not count.

    Example:
        >>> task = DATA_SETS["shapes"]()
        >>> batch = next(task.test.load([(0, torch.arange(2))], seed=0))
        >>> sorted(task.score(nn.Conv2d(3, 4, 1), batch).figures())
        ['accuracy', 'miou']
    """

    sample = "image"
    evaluation_batch = 8

    def __init__(self, train: Any, test: Any, *, names: tuple[str, ...], void: int = VOID) -> None:
        self.train, self.test = train, test
        self.names, self.void = names, void

    def loss(self, model: nn.Module, batch: tuple[Any, ...]) -> SumLoss:
        """Return the cross entropy summed over labelled pixels, in float32 at least."""
        pairs = self._predict(model, batch)
        entropy = [F.cross_entropy(y, labels, ignore_index=self.void, reduction="sum") for y, labels in pairs]
        labelled = [(labels != self.void).sum() for _, labels in pairs]
        wrong = [((y.detach().argmax(1) != labels) & (labels != self.void)).sum() for y, labels in pairs]
        return SumLoss(sum(entropy[1:], entropy[0]), torch.stack(labelled).sum(), {"wrong": torch.stack(wrong).sum()})

    def figures(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the mean loss per labelled pixel, and the share of wrong pixels in per cent."""
        count = max(sums["count"], 1)
        return {"loss": sums["loss"] / count, "pixel_error": 100 * sums["wrong"] / count}

    def new_score(self) -> ConfusionMatrix:
        """Return the score of no samples."""
        return ConfusionMatrix(len(self.names))

    def score(self, model: nn.Module, batch: tuple[Any, ...]) -> ConfusionMatrix:
        """Return the confusion matrix of the labelled pixels."""
        matrix = self.new_score()
        for logits, labels in self._predict(model, batch):
            matrix.add(labels, logits.argmax(1), void=self.void)
        return matrix

    @torch.no_grad()
    def examples(self, model: nn.Module, *, count: int = 8) -> list[dict[str, Any]]:
        """Return `count` test images, each with its true and its predicted label map.

        `label` and `prediction` name the classes that occur; `probability` is the mean confidence of the pixels.
        """
        found = []
        with in_eval_mode(model) as parameter:
            for (image, *_), (truth, *_) in load_few(self.test, count):
                logits = self._logits(model, image[None].to(parameter.device, parameter.dtype))
                probability, classes = logits.softmax(1).max(1)
                truth, answer = truth.cpu(), classes[0].cpu()
                present = sorted({*truth.unique().tolist(), *answer.unique().tolist()} - {self.void})
                colours = {self.names[k]: colour_code(k) for k in present}
                if (truth == self.void).any():
                    colours["no label"] = colour_code(VOID_COLOUR)
                right = (answer == truth)[truth != self.void].float().mean().item()
                found.append(
                    {
                        "image": draw_image(image),
                        "truth": draw_labels(truth, void=self.void),
                        "answer": draw_labels(answer, void=self.void),
                        "label": self._names(truth),
                        "prediction": self._names(answer),
                        "probability": probability.mean().item(),
                        "note": f"{100 * right:.0f} % of the pixels are right",
                        "colours": colours,
                    }
                )
        return found

    @torch.no_grad()
    def predict(self, model: nn.Module, path: Path) -> Prediction:
        """Return the share of each class, the label map over the image, and the label map with VOC's palette."""
        from PIL import Image

        image, parameter = decode(path), next(model.parameters())
        inputs = Standardizer(IMAGENET)(to_pixels(image)[None])
        labels = self._logits(model, inputs.to(parameter.device, parameter.dtype)).argmax(1)[0].cpu()
        counts = labels.unique(return_counts=True)
        shares = {self.names[k]: n / labels.numel() for k, n in zip(*(c.tolist() for c in counts), strict=True)}
        colours = colour_labels(labels, void=self.void).permute(1, 2, 0).contiguous().numpy()
        label_map = Image.fromarray(labels.to(torch.uint8).numpy())
        label_map.putpalette(PALETTE.flatten().tolist())
        overlay = Image.blend(image, Image.fromarray(colours), 0.5)
        return Prediction(list_shares(shares), {"shares": shares}, {"-overlay": overlay, "-labels": label_map})

    def _predict(self, model: nn.Module, batch: tuple[Any, ...]) -> list[tuple[Tensor, Tensor]]:
        """Return (logits, labels) of the whole batch; if images come as lists, one pair for each size among them."""
        images, labels = batch
        if isinstance(images, Tensor):
            return [(self._logits(model, images), labels)]
        by_size: dict[torch.Size, list[tuple[Tensor, Tensor]]] = {}
        for pair in zip(images, labels, strict=True):
            by_size.setdefault(pair[0].shape, []).append(pair)
        stacked = (map(torch.stack, zip(*pairs, strict=True)) for pairs in by_size.values())
        return [(self._logits(model, alike), truth) for alike, truth in stacked]

    def _logits(self, model: nn.Module, images: Tensor) -> Tensor:
        return compute_logits(model, images, (len(self.names), *images.shape[2:]))

    def _names(self, labels: Tensor) -> str:
        present = [self.names[k] for k in labels.unique().tolist() if k != self.void]
        return ", ".join(present) or "nothing"


def open_predictor(names: tuple[str, ...]) -> Segmentation:
    """Return the task without its data, for whole images of any size, standardized as those of ImageNet."""
    return Segmentation((), (), names=names)


def _open_shapes(*, device: torch.device | str = "cpu") -> Segmentation:
    """Open 2,048 training and 128 test images."""
    train = ShapeSamples(2048, seed=1, augment=True, device=device)
    return Segmentation(train, ShapeSamples(128, seed=2, device=device), names=CLASSES)


def _open_files(
    read: Callable[..., MaskSet], folder: Path | str | None = None, *, workers: int = 0, size: int | None = None
) -> Segmentation:
    train, test, names, void = read(folder, workers=workers, **({} if size is None else {"size": size}))
    return Segmentation(train, test, names=names, void=void)


DATA_SETS = {
    "shapes": _open_shapes,
    "voc": partial(_open_files, open_voc),
    "camvid": partial(_open_files, open_camvid),
    "label_maps": partial(_open_files, open_label_maps),
}
