"""Image classification: cross entropy of logits, and the number of wrong answers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from micronorm.data.cifar import STANDARDIZATION, USUAL, open_cifar
from micronorm.data.digits import SCALE, SHIFT, open_digits
from micronorm.data.folders import crop_centre, decode, open_folders
from micronorm.data.memory import MemorySamples
from micronorm.data.pixels import IMAGENET, Standardizer
from micronorm.data.search import TINY, find_data, locate, search_folders
from micronorm.tasks.pictures import encode_picture, even_indices, in_eval_mode, to_picture
from micronorm.tasks.prediction import Prediction, list_shares
from micronorm.tasks.scores import SumLoss, SumScore, compute_logits

NAMES = ("digits", "cifar10", "cifar100", "imagenet", TINY)
"""The data sets that `open_classification` can open."""

_SIZES = {"imagenet": 224, TINY: 64}  # of the crops of data sets in files


class Classification:
    """Predict the class of an image.

    Args:
        train: the training samples. A batch is (images, labels), N×C×H×W floating and N int64.
        test: the test samples.
        classes: the number of classes, and of logits that the model returns.
        names: of the classes, by label; None if they have none but their number.

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
            raise ValueError("there are no figures of 0 samples")
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
        shares = ((0, index[None]) for index in even_indices(len(self.test), count))  # one image fits any memory
        with in_eval_mode(model) as parameter:
            for images, labels in self.test.load(shares, seed=0):
                logits = self._logits(model, images.to(parameter.device, parameter.dtype))
                probability, prediction = logits.softmax(1).max(1)
                answer = {"label": self._name(int(labels)), "prediction": self._name(int(prediction))}
                picture = encode_picture(to_picture(images[0]))
                found.append(picture | answer | {"probability": probability.item()})
        return found

    def _name(self, label: int) -> str:
        return str(label) if self.names is None or label >= len(self.names) else self.names[label]

    def _logits(self, model: nn.Module, images: Tensor) -> Tensor:
        return compute_logits(model, images, (self.classes,))


class FileClassification(Classification):
    """Classify image files, prepared as the images of a data set.

    Args:
        data: the name of the data set.
        names: of the classes.
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
            return Standardizer(SCALE, torch.device("cpu"))(grey[None, None])
        cifar = self._data.startswith("cifar")
        image = image.resize(size) if cifar else crop_centre(image, self._size)
        standardization = STANDARDIZATION[int(self._data.removeprefix("cifar"))] if cifar else IMAGENET
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        return Standardizer(standardization, torch.device("cpu"))(pixels[None])


open_predictor = FileClassification


def _ahead(logits: Tensor, labels: Tensor) -> Tensor:
    """Return how many classes have a larger logit than the true one, N."""
    own = logits.gather(1, labels[:, None])
    earlier = torch.arange(logits.shape[1], device=logits.device) < labels[:, None]
    # Not `>`: comparisons with NaN are false, and NaN must count as larger.
    return (~(logits <= own) | ((logits == own) & earlier)).sum(1)


def open_classification(
    name: str,
    folder: Path | str | None = None,
    *,
    device: torch.device | str = "cpu",
    workers: int = 0,
    download: bool = False,
    verify: bool = True,
    size: int | None = None,
    classes: int | None = None,
) -> Classification:
    """Open the classification task of a data set.

    Args:
        name: "digits" (part of scikit-learn), "cifar10", "cifar100", "imagenet" (any folders of its layout) or
            "tiny_imagenet20".
        folder: where the data are; None searches ./data, then ~/data.
        device: where data sets that are kept in memory are kept. Images of files stay on the CPU.
        workers: processes that decode ImageNet's files. Data sets in memory need none.
        download: download CIFAR through torchvision into `folder` or ./data if it is not found.
        verify: require CIFAR's official files; otherwise they may be a miniature in the same format.
        size: height and width of the crops; None for 224, or 64 for Tiny ImageNet.
        classes: outputs of the model; None for the number of classes of the data set. More are allowed, as for a few
            folders of ImageNet and a model of 1000 outputs.

    Example:
        >>> len(open_classification("digits").train)
        1297
    """
    if name not in NAMES:
        raise ValueError(f"no data set is known as {name!r}; there are {', '.join(NAMES)}")
    if size is not None and name not in _SIZES:
        raise ValueError(f"size is for imagenet, the images of {name} have a fixed size: leave it out")
    if workers and name not in _SIZES:
        raise ValueError(f"workers decode the files of imagenet, {name} is held in memory: leave --workers out")
    if name in _SIZES:
        if download:
            raise ValueError(f"{name} cannot be downloaded without registration: leave --download out")
        opened = open_folders(locate(name, folder), size=size or _SIZES[name], workers=workers)
        train, test, names = opened
        labels = len(names)
    else:
        train, test = _open_small(name, folder, device=device, download=download, verify=verify)
        labels, names = 100 if name == "cifar100" else 10, None
    classes = labels if classes is None else classes
    if classes < labels:
        raise ValueError(f"{name} has {labels} classes here, and a model of {classes} outputs cannot name them all")
    return Classification(train, test, classes=classes, names=names)


def _open_small(
    name: str, folder: Path | str | None, *, device: torch.device | str, download: bool, verify: bool
) -> tuple[MemorySamples, MemorySamples]:
    if name == "digits":
        if folder is not None or download:
            raise ValueError("digits come with scikit-learn: leave the folder (--data) and --download out")
        return open_digits(augmentation=SHIFT, device=device)
    # Download into the first search folder. Without a download, the error lists all searched folders.
    place = find_data(folder).get(name) or (search_folders(folder)[0] if download else locate(name, folder))
    return open_cifar(
        place,
        classes=100 if name == "cifar100" else 10,
        augmentation=USUAL,
        device=device,
        verify=verify,
        download=download,
    )
