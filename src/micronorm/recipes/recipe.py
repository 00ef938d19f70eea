"""A recipe: everything that determines the result of a training run, and the paper's figures for it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from micronorm.convert import convert
from micronorm.convert.norms import describe_norm, looks_like_a_norm
from micronorm.engine.settings import Settings
from micronorm.nn import BCN, BN
from micronorm.nn.spec import NormSpec, WeightSpec
from micronorm.recipes.networks import NETWORKS, build_network
from micronorm.tasks import TASKS


@dataclass(frozen=True)
class DataFacts:
    """The size of a data set. A run counts as a result only if its data have this size."""

    title: str
    train: int
    test: int
    classes: int
    shape: tuple[int, ...]
    """Channels, height and width of the network's input; of a volume channels, depth, height and width."""


DATA: Mapping[str, DataFacts] = {
    "digits": DataFacts("scikit-learn's digits", train=1297, test=500, classes=10, shape=(1, 8, 8)),
    "cifar10": DataFacts("CIFAR-10", train=50_000, test=10_000, classes=10, shape=(3, 32, 32)),
    "cifar100": DataFacts("CIFAR-100", train=50_000, test=10_000, classes=100, shape=(3, 32, 32)),
    "shapes": DataFacts("generated shapes", train=2048, test=128, classes=4, shape=(3, 32, 32)),
    "voc": DataFacts("PASCAL VOC 2012", train=10_582, test=1_449, classes=21, shape=(3, 513, 513)),
    "label_maps": DataFacts("images and label maps of your own", train=0, test=0, classes=0, shape=(3, 513, 513)),
    "camvid": DataFacts("CamVid", train=367, test=233, classes=11, shape=(3, 180, 180)),
    "coco": DataFacts("COCO", train=117_266, test=5_000, classes=81, shape=(3, 800, 1333)),
    "coco128": DataFacts("128 images of COCO", train=126, test=128, classes=81, shape=(3, 320, 512)),
    "objects": DataFacts("objects in images of your own", train=0, test=0, classes=0, shape=(3, 800, 1333)),
    "nuclei": DataFacts("nuclei of the 2018 Data Science Bowl", train=519, test=145, classes=2, shape=(3, 256, 256)),
    "tiny_imagenet20": DataFacts("20 classes of Tiny ImageNet", train=2_000, test=1_000, classes=20, shape=(3, 64, 64)),
    "image_folders": DataFacts("image folders of your own", train=0, test=0, classes=0, shape=(3, 224, 224)),
    "something": DataFacts("Something-Something V1", train=86_017, test=11_522, classes=174, shape=(3, 224, 224)),
    "jester": DataFacts("Jester", train=118_562, test=14_787, classes=27, shape=(3, 224, 224)),
    **{
        f"clips-{k}": DataFacts(f"hand swipes, fold {k}", train=230 - test, test=test, classes=2, shape=(3, 64, 64))
        for k, test in enumerate((49, 51, 50, 38, 42))
    },
    "motion": DataFacts("moving digits", train=3_000, test=1_000, classes=10, shape=(1, 24, 24)),
    **{
        f"hippocampus-fold{k}": DataFacts("hippocampus", train=260 - test, test=test, classes=3, shape=(1, 32, 48, 32))
        for k, test in enumerate((55, 47, 50, 60, 48))
    },
    "imagenet": DataFacts("ImageNet", train=1_281_167, test=50_000, classes=1000, shape=(3, 224, 224)),
}
"""By the name that a recipe uses, with the counts of the official releases. The test sets of ImageNet, VOC, COCO,
Something-Something and Jester are their validation sets. Images of COCO without an object are not trained on. coco128
is tested on its own training images: it shows that a detector can learn them. The counts of "label_maps", "objects" and
"image_folders" depend on the folder."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One row of a table: a network, a normalization, data and settings.

    Args:
        table: the table's name, the paper's label without `tab:`, or one of ours.
        row: its name in the table.
        title: the row in words.
        paper: the paper's figures, errors in %; None if the paper has none.
        network: its key in `networks.NETWORKS`.
        classes: outputs of the classifier; 0 for as many as the data set has.
        norm: replaces every norm; None keeps the network's own BatchNorm.
        weight: replaces every convolution before a norm; None keeps it plain.
        data: its key in `DATA`.
        task: its key in `micronorm.tasks.TASKS`.
        settings: optimizer, schedule, samples per step, and which samples share a forward.
        micro_batch: the paper's batch size per GPU, for information. The settings' `unit` and `largest` decide how many
            images are computed at once.
        notes: what the paper leaves open and what was chosen, a sentence each.
        unavailable: why the row cannot be run; None if it can.
        zero_start: start the last norm of every residual block at zero, so that each block begins as its shortcut.
        start: the recipe whose trained weights the row starts from (`--weights`); None starts from initial weights.
        frozen: prefixes of the names of parameters that are not trained if the run starts from weights.
    """

    table: str
    row: str
    title: str
    network: str
    classes: int
    norm: NormSpec | None
    weight: WeightSpec | None
    data: str
    settings: Settings
    micro_batch: int
    task: str = "classification"
    paper: Mapping[str, float] | None = None
    notes: tuple[str, ...] = ()
    unavailable: str | None = None
    zero_start: bool = False
    start: str | None = None
    frozen: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        named = (("network", self.network, NETWORKS), ("data", self.data, DATA), ("task", self.task, TASKS))
        for name, value, known in named:
            if value not in known:
                raise ValueError(f"{self.name}: no {name} {value!r}; there are {', '.join(known)}")

    @property
    def name(self) -> str:
        """Table and row: "cifar1/c10-bn"."""
        return f"{self.table}/{self.row}"

    def build(self, seed: int, *, classes: int | None = None) -> nn.Module:
        """Return the converted network on the CPU. Recipes that differ in the method alone start from the same weights.

        torch's random state does not change. Raise ValueError if the row is `unavailable`, or if the recipe has no
        number of classes and `classes` is missing.

        Example:
            >>> from micronorm import recipes
            >>> bcn, gn = (recipes.find(f"digits/{row}").build(seed=0) for row in ("bcn-ws", "gn"))
            >>> torch.equal(bcn.conv.weight, gn.conv.weight)
            True
        """
        if self.unavailable is not None:
            raise ValueError(f"{self.name} cannot be built: {self.unavailable}")
        outputs = self.classes or classes
        if not outputs:
            raise ValueError(f"{self.name} has as many outputs as its data set has classes: give classes=")
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.random.default_generator.manual_seed(seed)  # torch.manual_seed would seed every GPU too
            network = build_network(self.network, classes=outputs)
        return self.equip(network)

    def equip(self, network: nn.Module) -> nn.Module:
        """Convert a plain network in place to the recipe's norms and weights, and return it.

        Example:
            >>> from micronorm import recipes
            >>> recipes.find("digits/gn").equip(nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16)))[1]
            GroupNorm(4, 16, eps=1e-05, affine=True)
        """
        plain = self.norm in (None, BN()) and self.weight is None
        if plain and not self.zero_start:  # `convert` raises an error if it would change nothing
            return network
        for part, norm in parts_to_convert(network, self.norm):
            convert(part, norm, self.weight, zero_init_residual=self.zero_start)
        return network

    def freeze(self, network: nn.Module) -> None:
        """Exclude the `frozen` parameters from training. A BatchChannelNorm among them keeps its estimates."""
        for name, parameter in network.named_parameters():
            if name.startswith(self.frozen):
                parameter.requires_grad_(False)

    def definition(self) -> dict[str, Any]:
        """Return everything that determines the result, in JSON types. Equal definitions are the same experiment.

        A record stores it, so that a run from before a change of the recipe does not count.

        Example:
            >>> from micronorm import recipes
            >>> recipes.find("abl/gn").definition() == recipes.find("cwn/gn").definition()
            True
        """
        settings = self.settings
        # Keys that came later appear only if they are set, so that earlier records keep their definition.
        later = {
            "task": None if self.task == "classification" else self.task,
            "steps": settings.steps,
            "groups": repr(settings.groups) if settings.groups else None,
            "ema": settings.ema,
            "zero_start": self.zero_start or None,
            "start": self.start,
            "frozen": list(self.frozen) or None,
        }
        return {
            "network": self.network,
            "classes": self.classes,
            "norm": None if self.norm is None else repr(self.norm),
            "weight": None if self.weight is None else repr(self.weight),
            "data": self.data,
            "epochs": settings.epochs,
            "step_batch": settings.step_batch,
            "optimizer": repr(settings.optimizer),
            "schedule": repr(settings.schedule),
            "unit": settings.unit,
            "largest": settings.largest,
            **{name: value for name, value in later.items() if value is not None},
        }


def parts_to_convert(network: Any, norm: NormSpec | None) -> list[tuple[nn.Module, NormSpec | None]]:
    """Return the backbone of a detector and the heads that have norms, with their specs; else the network itself.

    The parts can be traced symbolically. The whole detector must be run instead, on an image of 800 pixels. A spec
    whose micro-batch is one image takes all regions of an image as the micro-batch of a head.

    Example:
        >>> from micronorm.recipes.rcnn import build_rcnn
        >>> network = build_rcnn((1, 1, 1, 1), classes=3, masks=False, channels=32, hidden=64)
        >>> [part_norm.micro_batch for _, part_norm in parts_to_convert(network, BN(micro_batch=1))]
        [1, 512]
    """
    heads = getattr(network, "roi_heads", None)
    if heads is None:
        return [(network, norm)]
    regions = norm
    if (isinstance(norm, BN) and norm.micro_batch) or (isinstance(norm, BCN) and norm.statistics == "sequential"):
        regions = replace(norm, micro_batch=heads.fg_bg_sampler.batch_size_per_image)
    # `convert` refuses a part without norms, such as torchvision's usual box head of two linear layers.
    normed = [head for head in (heads.box_head, heads.mask_head) if head is not None and _has_norm(head)]
    return [(network.backbone, norm), *((head, regions) for head in normed)]


def _has_norm(part: nn.Module) -> bool:
    return any(looks_like_a_norm(module) or describe_norm(module) is not None for module in part.modules())


@dataclass(frozen=True, kw_only=True)
class Table:
    """The recipes of one table.

    Args:
        name: the paper's label without `tab:`, or one of ours.
        title: one line.
        rows: in the paper's order.
        default: the row that `find` returns for the table's name, or None.
    """

    name: str
    title: str
    rows: tuple[Recipe, ...]
    default: str | None = None

    def __post_init__(self) -> None:
        names = [recipe.row for recipe in self.rows]
        foreign = [recipe.name for recipe in self.rows if recipe.table != self.name]
        if foreign or len(set(names)) < len(names) or self.default not in (None, *names):
            raise ValueError(
                f"table {self.name}: rows must be its own and named once, the default one of them; got "
                f"{', '.join(recipe.name for recipe in self.rows)} with default {self.default!r}"
            )
