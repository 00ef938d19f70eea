"""Load checkpoints of the paper's authors and of timm into networks of our layers. The outputs stay the same.

Two things differ. *Names*: the authors' Batch-Channel Normalization is a module with a group affine of 1×G×1 around a
child, `pbn` or `bn`, that holds the channel affine and the estimates. *Standardized weights*: all formulas compute
Ŵ = (W − μ)/D over the fan-in of each output channel, with different D. Ours is sqrt(var + ε) with the biased variance.
Because of ε our Ŵ depends on the scale of W. A factor s on a row gives their Ŵ:

    s/sqrt(s²·var + ε) = 1/D   with   s² = ε/(D² − var).

s exists if D² > var. An unbiased variance or an ε of their own makes D² larger. A model saved afterwards has an
ordinary state dict.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from micronorm.convert.checkpoint import read_state, shorten, strip_prefixes
from micronorm.nn.bcn import BatchChannelNorm
from micronorm.nn.inputs import check_eps
from micronorm.nn.reparameterized import _WS as Standardized
from micronorm.nn.reparameterized import rows_of
from micronorm.ops.weight import over_rows

_CHILDREN = ("pbn", "bn")  # the channel half of the authors' module
_CHANNEL_HALF = ("weight", "bias", "running_mean", "running_var")
_BOOKKEEPING = ("num_batches_tracked", "estbn_moving_speed")  # no output depends on them
_AUTHORS_EPS = 1e-5  # of both halves of their Batch-Channel Normalization


@dataclass(frozen=True, kw_only=True)
class Standardization:
    """The formula by which a network standardizes its weights: Ŵ = (W − μ)/D over the fan-in I of each output channel.

    Args:
        eps: the constant added for stability.
        unbiased: whether the variance divides by I − 1 (torch's default) or by I.
        eps_in_root: D = sqrt(var + eps) or, outside the root, D = sqrt(var) + eps.
    """

    eps: float
    unbiased: bool
    eps_in_root: bool

    def __post_init__(self) -> None:
        check_eps(self.eps)

    def excess(self, var: Tensor, fan_in: int) -> Tensor:
        """Return D² − var for the biased variance `var`, as a sum of non-negative terms, so that nothing cancels."""
        correction = var / (fan_in - 1) if self.unbiased else torch.zeros_like(var)
        if self.eps_in_root:
            return correction + self.eps
        return correction + 2 * self.eps * (var + correction).sqrt() + self.eps**2


AUTHORS_WS = Standardization(eps=1e-5, unbiased=True, eps_in_root=False)
"""joe-siyuan-qiao/WeightStandardization, and the DeepLab of joe-siyuan-qiao/Batch-Channel-Normalization; also mmcv."""

AUTHORS_BCN = Standardization(eps=1e-5, unbiased=True, eps_in_root=True)
"""The ImageNet networks of joe-siyuan-qiao/Batch-Channel-Normalization."""

TIMM_BIT = Standardization(eps=1e-8, unbiased=False, eps_in_root=True)
"""timm's BiT ResNetV2 family. timm's bare StdConv2d has eps=1e-6."""


@dataclass(frozen=True)
class RowScales:
    """The factors on the rows of one weight. Constant rows, which every formula standardizes to zero, are not scaled.

    Attributes:
        low: the smallest factor.
        high: the largest factor.
        eps: the `eps` of the layer with which the factors would have the geometric mean 1.
    """

    low: float
    high: float
    eps: float


@dataclass(frozen=True)
class ForeignReport:
    """The result of `load_foreign`.

    Attributes:
        loaded: the model's keys that came from the file.
        prefix: what was stripped from every key of the file.
        renamed: the file's keys (after stripping) that changed their names, with the new ones.
        dropped: the file's keys that no output depends on.
        rescaled: by layer, what the rows of its weight were multiplied by.
        unmoved: layers whose estimates in the file are (0, 1), where the authors' published code leaves them.
    """

    loaded: tuple[str, ...]
    prefix: str
    renamed: Mapping[str, str]
    dropped: tuple[str, ...]
    rescaled: Mapping[str, RowScales]
    unmoved: tuple[str, ...]

    def __str__(self) -> str:
        parts = [f"{len(self.loaded)} tensors loaded, {len(self.renamed)} renamed, {len(self.dropped)} dropped"]
        if self.rescaled:
            low, high = min(r.low for r in self.rescaled.values()), max(r.high for r in self.rescaled.values())
            parts.append(f"{len(self.rescaled)} weights rescaled by {low:.3g} to {high:.3g}")
        if self.unmoved:
            parts.append(f"{len(self.unmoved)} layers with estimates that never moved")
        return "; ".join(parts)


def load_foreign(
    model: nn.Module,
    source: str | os.PathLike[str] | Mapping[str, Any],
    *,
    standardization: Standardization | None = None,
) -> ForeignReport:
    """Load a checkpoint of the authors' repositories, or of timm, into a network built with our layers.

    The network must have the module names of the original, with a `BatchChannelNorm` in place of the authors'
    Batch-Channel Normalization and a `WS…` layer in place of each standardized one.

    Args:
        model: the network; its parameters and buffers are written in place.
        source: a file of torch.save or safetensors, or its contents. Wrapping dictionaries and prefixes such as
            `module.` are removed.
        standardization: the original's formula, required if the model has `WS…` layers. The file does not contain it:
            the authors' ImageNet and DeepLab networks have the same keys and different formulas.

    Returns:
        What was renamed, rescaled and dropped.

    Raises:
        ValueError: if keys or shapes do not fit. It names all of them, and the model is not changed.

    Example:
        >>> import torch
        >>> from micronorm.nn import WSConv2d
        >>> model = nn.Sequential(WSConv2d(3, 8, 3, bias=False), BatchChannelNorm(8, num_groups=2))
        >>> state = {"0.weight": torch.randn(8, 3, 3, 3)}
        >>> state |= {"1.weight": torch.ones(1, 2, 1), "1.bias": torch.zeros(1, 2, 1)}
        >>> state |= {f"1.pbn.{key}": value for key, value in nn.BatchNorm2d(8).state_dict().items()}
        >>> checkpoint = {"epoch": 90, "state_dict": {f"module.{key}": value for key, value in state.items()}}
        >>> report = load_foreign(model, checkpoint, standardization=AUTHORS_BCN)
        >>> report.renamed["1.weight"], report.renamed["1.pbn.weight"]
        ('1.group_weight', '1.weight')
    """
    norms = {n: m for n, m in model.named_modules(remove_duplicate=False) if isinstance(m, BatchChannelNorm)}
    ours_alone = {_key(name, leaf) for name in norms for leaf in ("blend", "warm_steps")}
    expected = {key: tensor for key, tensor in model.state_dict().items() if key not in ours_alone}
    file, prefix = strip_prefixes(read_state(source), expected)
    problems: list[str] = []
    names: dict[str, str | None] = {}
    for name, norm in norms.items():
        names |= _norm_names(file, name, norm, problems)
    renamed = {old: new for old, new in names.items() if new is not None}
    state = {renamed.get(key, key): tensor for key, tensor in file.items() if key not in names or key in renamed}
    for key in (new for old, new in renamed.items() if file[old].ndim == 3):  # the group affine
        state[key] = state[key].flatten()
    loaded = tuple(sorted(state.keys() & expected.keys()))
    problems += _mismatches(state, expected)
    rescaled = {} if problems else _rescale(model, state, standardization, problems)
    if problems:
        raise ValueError("nothing was loaded:\n  " + "\n  ".join(problems))
    model.load_state_dict(state)
    moments = {name: [state[_key(name, f"running_{half}")] for half in ("mean", "var")] for name in norms}
    unmoved = tuple(name for name, (mean, var) in moments.items() if not mean.any() and bool((var == 1).all()))
    dropped = tuple(old for old in names if old not in renamed)
    return ForeignReport(loaded, prefix, renamed, dropped, rescaled, unmoved)


def _key(name: str, leaf: str) -> str:
    return f"{name}.{leaf}" if name else leaf


def _norm_names(
    file: Mapping[str, Tensor], name: str, norm: BatchChannelNorm, problems: list[str]
) -> dict[str, str | None]:
    """Return {the file's key: our key, or None to drop it} for one layer; add errors to `problems`."""
    start = _key(name, "")
    if start + "group_weight" in file:
        problems.append(f"{start}group_weight: the file is micronorm's own, for model.load_state_dict")
    child = next((child for child in _CHILDREN if any(key.startswith(f"{start}{child}.") for key in file)), None)
    if child is None:
        return {}  # the missing keys are reported later
    if norm.eps != _AUTHORS_EPS:
        where = name or "the model"
        problems.append(f"{where}: built with eps={norm.eps}, the authors' is {_AUTHORS_EPS}; build it with that")
    names: dict[str, str | None] = {start + leaf: f"{start}group_{leaf}" for leaf in ("weight", "bias")}
    names |= {f"{start}{child}.{leaf}": start + leaf for leaf in _CHANNEL_HALF}
    names |= {f"{start}{child}.{leaf}": None for leaf in _BOOKKEEPING}
    return {old: new for old, new in names.items() if old in file}


def _mismatches(state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """Return messages on keys that only one side has, and on tensors of another shape or kind."""
    found = []
    # Files of torch before 0.4.1 have no num_batches_tracked; torch loads them without it.
    if missing := [key for key in expected if key not in state and not key.endswith("num_batches_tracked")]:
        found.append(f"missing in the file: {shorten(missing)}")
    if unexpected := [key for key in state if key not in expected]:
        found.append(f"in the file but not in the model: {shorten(unexpected)}")
    for key in state.keys() & expected.keys():
        theirs, ours = state[key], expected[key]
        if theirs.shape != ours.shape:
            found.append(f"{key}: shape {tuple(theirs.shape)} in the file, {tuple(ours.shape)} in the model")
        elif theirs.is_floating_point() != ours.is_floating_point():
            found.append(f"{key}: {theirs.dtype} in the file, {ours.dtype} in the model")
    return found


def _rescale(
    model: nn.Module, state: dict[str, Tensor], theirs: Standardization | None, problems: list[str]
) -> dict[str, RowScales]:
    """Rescale every standardized weight in `state`; add errors to `problems`."""
    layers = {name: m for name, m in model.named_modules(remove_duplicate=False) if isinstance(m, Standardized)}
    if theirs is None:
        if layers:
            problems.append(
                f"{shorten(list(layers))} standardize their weights, and a file does not say how its network did; "
                "give standardization=AUTHORS_WS, AUTHORS_BCN, TIMM_BIT or another Standardization"
            )
        return {}
    report = {}
    for name, layer in layers.items():
        key = _key(name, "weight")
        try:
            state[key], scales = rescale_rows(state[key], layer, theirs)
        except ValueError as error:
            problems.append(f"{key}: {error}")
        else:
            report |= {name: scales} if scales else {}
    return report


def rescale_rows(weight: Tensor, layer: Standardized, theirs: Standardization) -> tuple[Tensor, RowScales | None]:
    """Return the weight with which `layer` computes the Ŵ that `theirs` computes from `weight`, and the factors.

    The factors are None, and the weight is returned unchanged, if the two formulas are the same.

    Raises:
        ValueError: if no such factors exist.
    """
    if not (layer.center and layer.scale):
        raise ValueError(f"built with center={layer.center}, scale={layer.scale}; {theirs} does both")
    if theirs == Standardization(eps=layer.eps, unbiased=False, eps_in_root=True):
        return weight, None
    rows = rows_of(layer, weight).double()
    flat = rows.flatten(1)
    constant = flat.amax(1) == flat.amin(1)
    excess = theirs.excess(flat.var(1, correction=0), flat.shape[1])
    if layer.eps == 0 or bool((excess == 0).any()):
        raise ValueError(f"built with eps={layer.eps}, no scale of the weight gives {theirs}; build with another eps")
    scale = torch.where(constant, 1, (layer.eps / excess).sqrt())
    scaled = rows_of(layer, rows * over_rows(scale, rows))
    if not bool(scaled.to(layer.weight.dtype).isfinite().all()):
        raise ValueError(f"not finite in {layer.weight.dtype} once its rows are scaled")
    moved = excess[~constant]
    eps = moved.log().mean().exp().item() if len(moved) else layer.eps
    return scaled, RowScales(scale.min().item(), scale.max().item(), eps)
