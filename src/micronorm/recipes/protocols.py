"""Make recipes: the title, the classes and the samples that share a forward follow from network, data and norm."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from micronorm.engine.optimization import SGD
from micronorm.engine.settings import Settings
from micronorm.nn import BCN, BN, BRN, GN, SN, WS
from micronorm.nn.spec import NormSpec, WeightSpec
from micronorm.recipes.networks import TITLES
from micronorm.recipes.recipe import DATA, Recipe

OPTIMIZER = SGD(lr=0.1, momentum=0.9, weight_decay=1e-4)
MICRO: Mapping[str, tuple[NormSpec, WeightSpec | None]] = {
    "gn": (GN(), None),
    "gn-ws": (GN(), WS()),
    "bcn-ws": (BCN(), WS()),
}
"""The norm and the weight of the methods that most tables of ours compare, by row; all are norms of one sample."""

STEP = (
    'ours: BCN with statistics="step", whose estimates move once per optimizer step. The paper has no figure for it; '
    'its own micro-batch algorithm is statistics="sequential"'
)
OURS = 'our own table: the paper has none like it. BCN is statistics="step"'


def method(norm: NormSpec | None, weight: WeightSpec | None) -> str:
    """Return the name of the method as in the paper: "GN+WS"."""
    name = type(norm).__name__ if norm is not None else "BN"
    if weight is None:
        return name
    if isinstance(weight, WS) and not (weight.center and weight.scale):
        return f"{name}+WS, {'mean' if weight.center else 'scale'} only"
    return f"{name}+{type(weight).__name__}"


def shared_samples(norm: NormSpec | None, batch: int, *, frames: int = 1) -> tuple[int, int | None]:
    """Return how many samples a norm needs in one forward: `unit` and `largest` of the settings.

    A norm over all images of a forward needs exactly `batch` samples. A norm that treats them as micro-batches of its
    own size needs a multiple of this size. A norm of one image may be cut anywhere.

    Args:
        norm: the spec; None for BatchNorm.
        batch: samples of a forward: images, or clips.
        frames: images of a sample. The `micro_batch` of a norm counts images.

    Raises:
        ValueError: the micro-batch of the norm is not a number of whole clips.

    Example:
        >>> shared_samples(BN(), 128), shared_samples(BN(micro_batch=64), 128), shared_samples(BCN(), 128)
        ((128, 128), (64, None), (1, None))
        >>> shared_samples(BN(micro_batch=8), 32, frames=8)
        (1, None)
    """
    own: int | None = frames  # images
    if norm is None or (isinstance(norm, BCN) and norm.statistics == "batch"):
        own = None
    elif isinstance(norm, BN | SN | BRN) or (isinstance(norm, BCN) and norm.statistics == "sequential"):
        own = norm.micro_batch
    if own is None:
        return batch, batch
    if own % frames:
        raise ValueError(f"{norm} treats a batch as micro-batches of {own} images, but a clip has {frames}")
    return own // frames, None


def _title(network: str, data: str, norm: NormSpec | None, weight: WeightSpec | None, samples: str) -> str:
    estimates = ""
    if isinstance(norm, BCN):
        estimates = {"batch": "", "sequential": ", Algorithm 1", "step": ", estimates by step"}[norm.statistics]
    return f"{TITLES[network]}, {DATA[data].title}: {method(norm, weight)} of {samples}{estimates}"


def make(
    name: str,
    network: str,
    data: str,
    norm: NormSpec | None,
    weight: WeightSpec | None,
    *,
    settings: Settings,
    batch: int | None = None,
    title: str | None = None,
    frames: int = 1,
    **fields: Any,
) -> Recipe:
    """Make the recipe "table/row".

    The title, the classes, and the settings' `unit` and `largest` follow from the other arguments.

    Args:
        name: table and row.
        network: its key in `networks.NETWORKS`.
        data: its key in `DATA`.
        norm: replaces every norm.
        weight: replaces every convolution before a norm.
        settings: optimizer, schedule and samples per step.
        batch: samples that share the statistics of a norm over all images of a forward; None for those of a step.
        title: the row in words.
        frames: images of a sample.
        fields: further fields of `Recipe`.
    """
    table, _, row = name.partition("/")
    unit, largest = shared_samples(norm, batch or settings.step_batch, frames=frames)
    sample = "image" if frames == 1 else "clip"
    samples = f"one {sample}" if unit == 1 else f"{unit} {sample}s"
    return Recipe(
        table=table,
        row=row,
        title=title or _title(network, data, norm, weight, samples),
        network=network,
        classes=DATA[data].classes,
        norm=norm,
        weight=weight,
        data=data,
        settings=replace(settings, unit=unit, largest=largest),
        micro_batch=unit,
        **fields,
    )


def make_rows(
    table: str, network: str, data: str, methods: Mapping[str, tuple[NormSpec, WeightSpec | None]], **options: Any
) -> tuple[Recipe, ...]:
    """Make one recipe per method, with further arguments of `make`."""
    return tuple(
        make(f"{table}/{row}", network, data, norm, weight, **options) for row, (norm, weight) in methods.items()
    )


def frozen_bn(recipe: Recipe) -> Recipe:
    """Return the recipe of a network with FrozenBatchNorm, whose images may share a forward."""
    title = recipe.title.replace(": BN of one image", ": frozen BN")
    return replace(recipe, title=title, settings=replace(recipe.settings, largest=None))
