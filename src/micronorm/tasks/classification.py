"""Image classification: cross entropy of logits, and the number of wrong answers."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from micronorm.data.cifar import CLASSES, STANDARDIZATION, open_cifar
from micronorm.data.digits import SCALE, open_digits
from micronorm.data.files import decode, to_pixels
from micronorm.data.folders import TINY, crop_centre, open_folders
from micronorm.data.samples import IMAGENET, Standardizer
from micronorm.tasks import open_task
from micronorm.tasks.pictures import encode_picture, in_eval_mode, load_few, to_picture
from micronorm.tasks.scores import Prediction, SumLoss, SumScore, compute_logits, list_shares


class Classification:
    """Predict the class of an image.

    Args:
        train: the training samples. A batch is (images, labels), N×C×H×W floating and N int64.
        test: the test samples.
        classes: the number of classes, and of logits that the model returns.
        names: the names of the classes by label; None to show their numbers.

    Example:
        >>> train, test = open_digits()
        >>> task = Classification(train, test, classes=10)
        >>> model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        >>> batch = next(task.train.load([(0, torch.arange(4))], seed=0))
        >>> task.loss(model, batch).count
        4
        >>> sorted(task.score(model, batch).sums)
        ['count', 'loss', 'wrong', 'wrong5']
        >>> task.figures({"loss": 3.0, "wrong": 1, "wrong5": 0, "count": 4})
        {'loss': 0.75, 'top1': 25.0, 'top5': 0.0}
    """

    sample = "image"
    evaluation_batch = 256

    def __init__(self, train: Any, test: Any, *, classes: int, names: Sequence[str] | None = None) -> None:
        if classes < 2:
            raise ValueError(f"classification needs at least 2 classes, got {classes}")
        self.train, self.test, self.classes, self.names = train, test, classes, names

    def loss(self, model: nn.Module, batch: tuple[Any, ...]) -> SumLoss:
        """Return the cross entropy summed over the batch, in float32 at least."""
        images, labels = batch
        logits = self._logits(model, images)
        entropy = F.cross_entropy(logits, labels, reduction="sum")
        return SumLoss(entropy, len(labels), {"wrong": (_ahead(logits.detach(), labels) >= 1).sum()})

    def new_score(self) -> SumScore:
        """Return the score of no samples."""
        return SumScore(self.figures)

    def score(self, model: nn.Module, batch: tuple[Any, ...]) -> SumScore:
        """Return "count", "loss", "wrong", and "wrong5" if there are more than 5 classes.

        "wrong5" counts labels that are not among the five largest logits. Of equal logits the first class counts as the
        larger, as in argmax. NaN is larger than any number, so that the answer of a broken model is always wrong.
        """
        images, labels = batch
        logits = self._logits(model, images)
        ahead = _ahead(logits, labels)
        sums = {
            "count": torch.full((), len(labels), dtype=torch.int64, device=logits.device),
            "loss": F.cross_entropy(logits, labels, reduction="sum"),
            "wrong": (ahead >= 1).sum(),
        }
        return SumScore(self.figures, {**sums, "wrong5": (ahead >= 5).sum()} if self.classes > 5 else sums)

    def figures(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the mean loss, and the errors "top1" and, if it was counted, "top5" in per cent."""
        count = sums["count"]
        if not count:
            raise ValueError("0 samples have no score; score at least one batch")
        figures = {"loss": sums["loss"] / count, "top1": 100 * sums["wrong"] / count}
        return {**figures, "top5": 100 * sums["wrong5"] / count} if "wrong5" in sums else figures

    @torch.no_grad()
    def examples(self, model: nn.Module, *, count: int = 16) -> list[dict[str, Any]]:
        """Return the predictions for `count` test images, spread evenly over all of them, as a record stores them.

        Example:
            >>> task = Classification(*open_digits(), classes=10)
            >>> found = task.examples(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), count=2)
            >>> [(sample["label"], sample["height"], sample["channels"]) for sample in found]
            [('4', 8, 1), ('8', 8, 1)]
        """
        found = []
        with in_eval_mode(model) as parameter:
            for images, labels in load_few(self.test, count):
                logits = self._logits(model, images.to(parameter.device, parameter.dtype))
                probability, prediction = logits.softmax(1).max(1)
                answer = {"label": self._name(int(labels)), "prediction": self._name(int(prediction))}
                picture = encode_picture(self._picture(images[0]))
                found.append(picture | answer | {"probability": probability.item()})
        return found

    def _name(self, label: int) -> str:
        return str(label) if self.names is None or label >= len(self.names) else self.names[label]

    def _picture(self, image: Tensor) -> Tensor:
        """Return what is shown of a sample, C×H×W uint8."""
        return to_picture(image)

    def _logits(self, model: nn.Module, images: Tensor) -> Tensor:
        return compute_logits(model, images, (self.classes,))


class FileClassification(Classification):
    """Classify image files, prepared as the images of a data set.

    Args:
        data: the name of the data set.
        names: the names of the classes.
        size: height and width of the inputs.
    """

    def __init__(self, data: str, *, names: Sequence[str], size: int) -> None:
        super().__init__((), (), classes=len(names), names=names)
        self._data, self._size = data, size

    @torch.no_grad()
    def predict(self, model: nn.Module, path: Path) -> Prediction:
        """Return the five most probable classes."""
        parameter = next(model.parameters())
        logits = self._logits(model, self._read(path).to(parameter.device, parameter.dtype))
        found = logits.softmax(1)[0].topk(min(5, self.classes))
        probable = {self._name(k): p for k, p in zip(found.indices.tolist(), found.values.tolist(), strict=True)}
        return Prediction(list_shares(probable, most=3), {"prediction": next(iter(probable)), "probability": probable})

    def _read(self, path: Path) -> Tensor:
        """Return the image as a batch of one."""
        image, size = decode(path), (self._size, self._size)
        if self._data == "digits":  # 16 shades of grey
            grey = torch.from_numpy(np.array(image.convert("L").resize(size))) * (16 / 255)
            return Standardizer(SCALE)(grey[None, None])
        cifar = self._data.startswith("cifar")
        image = image.resize(size) if cifar else crop_centre(image, self._size)
        standardization = STANDARDIZATION[int(self._data.removeprefix("cifar"))] if cifar else IMAGENET
        return Standardizer(standardization)(to_pixels(image)[None])


open_predictor = FileClassification


def _ahead(logits: Tensor, labels: Tensor) -> Tensor:
    """Return how many classes have a larger logit than the true one, N."""
    own = logits.gather(1, labels[:, None])
    earlier = torch.arange(logits.shape[1], device=logits.device) < labels[:, None]
    # Not `>`: comparisons with NaN are false, and NaN must count as larger.
    return (~(logits <= own) | ((logits == own) & earlier)).sum(1)


def _fit(train: Any, test: Any, labels: int, classes: int | None, names: Sequence[str] | None = None) -> Classification:
    """Return the task of a data set with `labels` classes, for a model with as many outputs or more (`classes`)."""
    if classes is not None and classes < labels:
        raise ValueError(f"the data set has {labels} classes, and a model of {classes} outputs cannot name them all")
    return Classification(train, test, classes=classes or labels, names=names)


def _open_digits(*, device: torch.device | str = "cpu", classes: int | None = None) -> Classification:
    return _fit(*open_digits(device=device), 10, classes)


def _open_cifar(
    labels: Literal[10, 100],
    folder: Path | str | None = None,
    *,
    device: torch.device | str = "cpu",
    download: bool = False,
    verify: bool = True,
    classes: int | None = None,
) -> Classification:
    opened = open_cifar(folder, classes=labels, device=device, verify=verify, download=download)
    return _fit(*opened, labels, classes, CLASSES[labels])


def _open_folders(
    name: str, folder: Path | str | None = None, *, size: int, workers: int = 0, classes: int | None = None
) -> Classification:
    train, test, names = open_folders(folder, name=name, size=size, workers=workers)
    return _fit(train, test, len(names), classes, names)


DATA_SETS = {
    "digits": _open_digits,
    "cifar10": partial(_open_cifar, 10),
    "cifar100": partial(_open_cifar, 100),
    "imagenet": partial(_open_folders, "imagenet", size=224),
    TINY: partial(_open_folders, TINY, size=64),
    "image_folders": partial(_open_folders, "image_folders", size=224),
}
open_classification = partial(open_task, "classification")
