"""Semantic segmentation: cross entropy per labelled pixel, and the intersection over union of each class."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from micronorm.data.folders import decode
from micronorm.data.masks import open_camvid, open_label_maps, open_voc
from micronorm.data.pixels import IMAGENET, Standardizer
from micronorm.data.search import open_first
from micronorm.data.shapes import CLASSES, VOID, ShapeSamples
from micronorm.tasks.pictures import (
    PALETTE,
    colour_labels,
    encode_scene,
    even_indices,
    in_eval_mode,
    shrink,
    stretch,
)
from micronorm.tasks.prediction import Prediction, list_shares
from micronorm.tasks.scores import ConfusionMatrix, SumLoss, compute_logits


class Segmentation:
    """Predict the class of each pixel. A batch is (images, labels): N×C×H×W and N×H×W, with `void` for no label.

    Images of different sizes come as two lists. The model returns N×classes×H×W logits.

    Args:
        train: the training samples.
        test: the test samples.
        names: the names of the classes, in the order of their labels.
        void: the label of pixels that do not count.

    Example:
        >>> task = open_segmentation("shapes")
        >>> batch = next(task.test.load([(0, torch.arange(2))], seed=0))
        >>> sorted(task.score(nn.Conv2d(3, 4, 1), batch).figures())
        ['accuracy', 'miou']
    """

    sample = "image"
    evaluation_batch = 64

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
        shares = ((0, index[None]) for index in even_indices(len(self.test), count))  # one image fits any memory
        with in_eval_mode(model) as parameter:
            for images, labels in self.test.load(shares, seed=0):
                logits = self._logits(model, images[0][None].to(parameter.device, parameter.dtype))
                probability, classes = logits.softmax(1).max(1)
                truth, answer = labels[0].cpu(), classes[0].cpu()
                scene = {
                    "image": encode_scene(stretch(shrink(images[0].float().cpu())).expand(3, -1, -1)),
                    "truth": self._draw(truth),
                    "answer": self._draw(answer),
                }
                present = sorted({*truth.unique().tolist(), *answer.unique().tolist()} - {self.void})
                colours = {self.names[k]: "#" + bytes(PALETTE[k].tolist()).hex() for k in present}
                right = (answer == truth)[truth != self.void].float().mean().item()
                words = {"label": self._names(truth), "prediction": self._names(answer)}
                note = f"{100 * right:.0f} % of the labelled pixels are right"
                found.append(
                    scene | words | {"probability": probability.mean().item(), "note": note, "colours": colours}
                )
        return found

    @torch.no_grad()
    def predict(self, model: nn.Module, path: Path) -> Prediction:
        """Return the share of each class, the label map over the image, and the label map with VOC's palette."""
        from PIL import Image

        image, parameter = decode(path), next(model.parameters())
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        inputs = Standardizer(IMAGENET, torch.device("cpu"))(pixels[None])
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

    def _draw(self, labels: Tensor) -> str:
        """Return H×W labels as a small picture in the colours of the classes."""
        size = shrink(labels[None].float()).shape[1:]
        small = F.interpolate(labels[None, None].float(), size, mode="nearest-exact")[0, 0].long()
        return encode_scene(colour_labels(small, void=self.void), lossless=True)


def open_predictor(data: str, *, names: tuple[str, ...], size: int) -> Segmentation:
    """Return the task without its data, for whole images of any size, standardized as those of ImageNet."""
    return Segmentation((), (), names=names)


_FILES = {"voc": open_voc, "camvid": open_camvid, "label_maps": open_label_maps}
NAMES = ("shapes", *_FILES)


def open_segmentation(
    name: str,
    folder: Path | str | None = None,
    *,
    device: torch.device | str = "cpu",
    workers: int = 0,
    download: bool = False,
    verify: bool = True,
    size: int | None = None,
    classes: int | None = None,
) -> Segmentation:
    """Open the segmentation task of a data set.

    Args:
        name: "shapes" (2,048 training and 128 test images, generated), "voc" (PASCAL VOC 2012), "camvid", or
            "label_maps": images and masks of your own, see `data.masks.open_label_maps`.
        folder: where the data are; None searches ./data, then ~/data. "label_maps" needs it.
        device: where generated images are kept. Images of files stay on the CPU.
        workers: processes that decode files.
        download: refused; none of the data sets can be downloaded.
        verify: not used: there are no published checksums.
        size: height and width of the training crops; None for 513 (voc), 180 (camvid), or at most 513 (label_maps).
        classes: outputs of the model; None for the number of classes of the data set.
    """
    if name not in NAMES:
        raise ValueError(f"no data set is known as {name!r}; there are {', '.join(NAMES)}")
    if name == "shapes":
        if folder is not None or download or workers or size is not None:
            raise ValueError("shapes are generated: leave --data, --download, --workers and --size out")
        names, void = CLASSES, VOID
        train: Any = ShapeSamples(2048, seed=1, augment=True, device=device)
        test: Any = ShapeSamples(128, seed=2, device=device)
    else:
        if download:
            raise ValueError(f"{name} cannot be downloaded by this command: leave --download out")
        if name == "label_maps" and folder is None:
            raise ValueError("label maps are yours: give their folder with --data")
        crop = {} if size is None else {"crop": size}
        train, test, names, void = open_first(_FILES[name], folder, workers=workers, **crop)
    if classes not in (None, len(names)):
        raise ValueError(f"{name} has {len(names)} classes, the model {classes} outputs")
    return Segmentation(train, test, names=names, void=void)
