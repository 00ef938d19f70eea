"""Load checkpoints of the paper's authors and of timm into networks of our layers, which then compute the same.

Two things differ. *Names*: the authors' Batch-Channel Normalization is a module with a group affine of 1×G×1 around a
child, `pbn` or `bn`, that holds the channel affine and the estimates. *Standardized weights*: their rows are scaled so
that our formula gives the same result; see `standardization`. A model saved afterwards has an ordinary state dict.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from micronorm.convert.checkpoint import read_state, shorten, strip_prefixes
from micronorm.convert.standardization import (
    AUTHORS_BCN,
    AUTHORS_WS,
    TIMM_BIT,
    RowScales,
    Standardization,
    Standardized,
    rescale_rows,
)
from micronorm.nn.bcn import BatchChannelNorm

__all__ = ["AUTHORS_BCN", "AUTHORS_WS", "TIMM_BIT", "ForeignReport", "RowScales", "Standardization", "load_foreign"]

_CHILDREN = ("pbn", "bn")  # the channel half of the authors' module
_CHANNEL_HALF = ("weight", "bias", "running_mean", "running_var")
_BOOKKEEPING = ("num_batches_tracked", "estbn_moving_speed")  # no output depends on them
_AUTHORS_EPS = 1e-5  # of both halves of their Batch-Channel Normalization


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
    expected = _expected(model)
    file, prefix = strip_prefixes(read_state(source), expected)
    problems: list[str] = []
    state, renamed, dropped, unmoved = dict(file), {}, [], []
    for name, norm in _norms(model):
        names = _norm_names(file, name, norm, problems)
        for old in names:
            state.pop(old)
        for old, new in names.items():
            if new is None:
                dropped.append(old)
                continue
            state[new] = file[old].flatten() if new.startswith(_key(name, "group_")) else file[old]
            renamed[old] = new
        mean, var = (state.get(_key(name, f"running_{half}")) for half in ("mean", "var"))
        if names and mean is not None and var is not None and bool((mean == 0).all() and (var == 1).all()):
            unmoved.append(name)
    loaded = tuple(sorted(state.keys() & expected.keys()))
    for key in expected.keys() - state.keys():  # files of torch before 0.4.1 have none; torch too takes them so
        if key.endswith("num_batches_tracked"):
            state[key] = expected[key]
    problems += _mismatches(state, expected)
    rescaled: dict[str, RowScales] = {}
    if not problems:
        rescaled = _rescale(model, state, standardization, problems)
    if problems:
        raise ValueError("nothing was loaded:\n  " + "\n  ".join(problems))
    model.load_state_dict(state)
    return ForeignReport(loaded, prefix, renamed, tuple(dropped), rescaled, tuple(unmoved))


# --- names -----------------------------------------------------------------------------------------------------------


def _norms(model: nn.Module) -> list[tuple[str, BatchChannelNorm]]:
    """Return the layers with their names; a shared layer appears under each of its names, as in a state dict."""
    return [(name, m) for name, m in model.named_modules(remove_duplicate=False) if isinstance(m, BatchChannelNorm)]


def _key(name: str, leaf: str) -> str:
    return f"{name}.{leaf}" if name else leaf


def _expected(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's state dict without the keys that only our own files have."""
    state = model.state_dict()
    for name, _ in _norms(model):
        for leaf in ("blend", "warm_steps"):
            state.pop(_key(name, leaf), None)
    return state


def _norm_names(
    file: Mapping[str, Tensor], name: str, norm: BatchChannelNorm, problems: list[str]
) -> dict[str, str | None]:
    """Return {the file's key: our key, or None to drop it} for one layer; add errors to `problems`."""
    start = _key(name, "")
    leaves = [key.removeprefix(start) for key in file if key.startswith(start)]
    if not leaves:
        return {}  # the missing keys are reported later
    where = name or "the model"
    children = [child for child in _CHILDREN if any(leaf.startswith(child + ".") for leaf in leaves)]
    if len(children) != 1:
        hint = "; these are micronorm's own, for model.load_state_dict" if "group_weight" in leaves else ""
        known = " or ".join(f"'{child}.weight'" for child in _CHILDREN)
        problems.append(
            f"{where}: no known naming of Batch-Channel Normalization has {shorten(leaves)}; "
            f"known is a 1×G×1 'weight' around {known}{hint}"
        )
        return {}
    if norm.eps != _AUTHORS_EPS:
        problems.append(f"{where}: built with eps={norm.eps}, the authors' is {_AUTHORS_EPS}; build it with that")
    names: dict[str, str | None] = {}
    for leaf in ("weight", "bias"):
        if leaf in leaves:
            names[start + leaf] = start + "group_" + leaf
            shape, wanted = tuple(file[start + leaf].shape), (1, norm.num_groups, 1)
            if shape != wanted:
                problems.append(f"{start}{leaf}: shape {shape} in the file, {wanted} for {norm.num_groups} groups")
    half = start + children[0] + "."
    for leaf in _CHANNEL_HALF:
        if half + leaf in file:
            names[half + leaf] = start + leaf
    return names | {half + leaf: None for leaf in _BOOKKEEPING if half + leaf in file}


def _mismatches(state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """Return messages on keys that only one side has, and on tensors of another shape or kind."""
    found = []
    if missing := [key for key in expected if key not in state]:
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


# --- weights ---------------------------------------------------------------------------------------------------------


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
