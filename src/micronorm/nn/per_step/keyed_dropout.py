"""Dropout and drop-path whose masks depend on the sample only, so that a step does not depend on how it is cut.

torch's layers draw from one stream of random numbers, so a sample's mask depends on the samples before it. Here bit `i`
of a sample's mask is a hash of the sample's key, the layer's stream, the number of the call of this layer, and i. The
distribution is the same. Declare the keys around the forward and its backward: `with dropout_keys(keys): ...`.

As in `micronorm.nn.gather`, custom operators read what changes between forwards at run time, for compiled graphs.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from micronorm.nn.checkpointing import inside_backward
from micronorm.nn.gather import register_operator, run
from micronorm.ops import keyed
from micronorm.ops.private_api import DropoutNd

# Augmentation uses the same keys with small stream numbers; dropout uses the upper half of all streams.
_FIRST_STREAM = 1 << 63
_CALL_BITS = 24
_LAYER_BITS = 32
# A mask is made in pieces of so many elements, because its random words take several times eight bytes each.
_PIECE = 1 << 22
_PROBES = 4  # elements per axis by which the input of a repeated call is recognised


@dataclass(eq=False)
class _Declaration:
    """The keys of a micro-batch, and the calls that used them."""

    keys: Tensor
    calls: dict[int, list[tuple[torch.Size, Tensor]]] = field(default_factory=dict)
    """The calls by stream, in their order: the shape of the input and some of its elements, to recognise it again."""

    def on(self, device: torch.device) -> Tensor:
        """Return the keys on a device. They are moved once."""
        if self.keys.device != device:
            self.keys = self.keys.to(device)
        return self.keys


# Not a ContextVar: autograd repeats checkpointed forwards in its own threads, which need the keys too.
_in_force: list[_Declaration] = []


@contextmanager
def dropout_keys(keys: Tensor) -> Iterator[None]:
    """Declare the keys of the samples for all forwards in this block, for every keyed layer of the process.

    Put the backward inside too: activation checkpointing repeats forwards there. Open one block per micro-batch, in the
    training thread. Within a block, the calls of one layer have independent masks.

    Args:
        keys: int64 N, one per sample in the order of the batch, as `ops.keyed.sample_keys` makes them. They are read on
            their device, without a sync; a captured graph reads them at each replay.

    Example:
        >>> drop, x = KeyedDropout(0.5), torch.ones(4, 100)
        >>> keys = keyed.sample_keys(torch.arange(4), seed=0, epoch=0)
        >>> with dropout_keys(keys):
        ...     whole = drop(x)
        >>> with dropout_keys(keys[1:3]):
        ...     part = drop(x[1:3])
        >>> torch.equal(part, whole[1:3])
        True
    """
    if torch.compiler.is_compiling():
        raise RuntimeError("open `with dropout_keys(keys):` around the compiled function, not inside it")
    if keys.dtype != torch.int64 or keys.ndim != 1:
        raise ValueError(
            f"keys must be int64 with one axis, one per sample; got {keys.dtype} of shape {tuple(keys.shape)}. "
            "micronorm.ops.keyed.sample_keys makes them from the samples' indices."
        )
    declaration = _Declaration(keys)
    _in_force.append(declaration)
    try:
        yield
    finally:
        _in_force.remove(declaration)


class KeyedDropout(DropoutNd):
    """nn.Dropout, or nn.Dropout1d/2d/3d, with masks from the keys that `dropout_keys` declares.

    y = x/(1 − p) for elements that the mask keeps, 0 for the others. Without declared keys it is torch's own layer. The
    first axis of the input has one row per sample, or equally many rows of each sample (frames, crops), sample after
    sample.

    Args:
        p: probability to drop an element (dims=0) or a channel.
        dims: 0 for nn.Dropout; 1, 2 or 3 for the layer that drops whole channels of so many spatial axes.
        inplace: used without keys only; with keys the result is a new tensor.
        stream: a number for each layer of a model, from 0 to 2³² − 1; layers with equal numbers still get independent
            masks.

    Example:
        >>> drop = KeyedDropout(0.5, 2)
        >>> with dropout_keys(torch.tensor([7, 8])):
        ...     y = drop(torch.ones(2, 3, 4, 4))
        >>> torch.equal(y, y[..., :1, :1].expand_as(y)), sorted(set(y.flatten().tolist()))
        (True, [0.0, 2.0])
    """

    def __init__(self, p: float = 0.5, dims: int = 0, inplace: bool = False, *, stream: int = 0) -> None:
        super().__init__(p, inplace)
        if dims not in _PLAIN:
            raise ValueError(f"dims must be 0 (elements) or 1, 2, 3 (channels with so many axes), got {dims}")
        self.dims = dims
        self.stream = _checked(stream)
        self._had_keys = _new_flag()

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        if not _keys_in_force(self._had_keys):
            return _PLAIN[self.dims](x, self.p, True, self.inplace)
        if self.dims in (1, 3) and x.ndim == self.dims + 1:  # torch treats such an input as one sample
            return self(x[None])[0]
        mask = run(dropped, x, 2 if self.dims else x.ndim, self.p, self.stream, self._had_keys)
        return _zeroed(x, mask, keep=1 - self.p)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, dims={self.dims}, stream={self.stream}"


class KeyedDropPath(nn.Module):
    """timm's DropPath and torchvision's StochasticDepth(mode="row"), with masks from the keys of `dropout_keys`.

    Each row of the input (see `KeyedDropout`) is divided by (1 − p) or set to zero. Without declared keys, the rows are
    drawn from torch's generator.

    Args:
        drop_prob: probability to drop a row.
        scale_by_keep: divide what is kept by its probability.
        stream: as in `KeyedDropout`.
    """

    def __init__(self, drop_prob: float = 0.0, scale_by_keep: bool = True, *, stream: int = 0) -> None:
        super().__init__()
        if not 0 <= drop_prob <= 1:
            raise ValueError(f"drop_prob must be a probability between 0 and 1, got {drop_prob}")
        self.drop_prob = drop_prob
        self.scale_by_keep = scale_by_keep
        self.stream = _checked(stream)
        self._had_keys = _new_flag()

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.drop_prob == 0:
            return x
        if _keys_in_force(self._had_keys):
            mask = run(dropped, x, 1, self.drop_prob, self.stream, self._had_keys)
        else:
            mask = torch.rand(_mask_shape(x, 1), device=x.device) < self.drop_prob
        return _zeroed(x, mask, keep=1 - self.drop_prob if self.scale_by_keep else 1.0)

    def extra_repr(self) -> str:
        return f"drop_prob={self.drop_prob}, scale_by_keep={self.scale_by_keep}, stream={self.stream}"


_PLAIN = {0: F.dropout, 1: F.dropout1d, 2: F.dropout2d, 3: F.dropout3d}


def _checked(stream: int) -> int:
    if not 0 <= stream < 1 << _LAYER_BITS:
        raise ValueError(f"stream must be between 0 and 2**{_LAYER_BITS} - 1, got {stream}")
    return stream


def _new_flag() -> Tensor:
    """Return a flag: 1 if the layer's latest forward had keys. A tensor, so that compiled graphs order its readers."""
    return torch.zeros(1, dtype=torch.int64, device="cpu")


def _keys_in_force(had_keys: Tensor) -> bool:
    if _in_force:
        return True
    run(pass_without_keys, had_keys)
    return False


def _zeroed(x: Tensor, mask: Tensor, *, keep: float) -> Tensor:
    # x first, because it decides the memory format; a bool mask, because the backward saves one byte per element.
    return (x / keep if keep > 0 else x) * ~mask


def _mask_shape(x: Tensor, axes: int) -> list[int]:
    return [*x.shape[:axes], *(1 for _ in x.shape[axes:])]


def pass_without_keys(had_keys: Tensor) -> None:
    """Record a forward without keys; raise if it repeats one that had keys."""
    if not inside_backward():
        had_keys[0] = 0
    elif had_keys[0]:
        raise RuntimeError(
            "a checkpointed forward with keyed dropout is being recomputed without its keys, so its masks are lost. "
            "Keep the backward inside the `with dropout_keys(keys):` of its forward."
        )


def dropped(x: Tensor, axes: int, p: float, stream: int, had_keys: Tensor) -> Tensor:
    """Return the mask of what to drop: bool over the first `axes` axes of x, the other axes of size 1."""
    if not _in_force:
        pass_without_keys(had_keys)
        raise RuntimeError("a graph compiled with keys ran without them: call it inside `with dropout_keys(keys):`")
    declaration = _in_force[-1]
    calls = declaration.calls.setdefault(stream, [])
    if inside_backward():
        call = _repeated(x, calls)
    else:
        had_keys[0] = 1
        call = len(calls)
        calls.append((x.shape, _probes_of(x)))
    keys = declaration.on(x.device)
    draws = _draws_per_sample(x, axes, samples=len(keys))
    layer_stream = _FIRST_STREAM + (stream << _CALL_BITS) + call
    pieces = keys.split(max(1, _PIECE // max(1, draws)))
    mask = torch.cat([keyed.uniforms(piece, draws, stream=layer_stream) < p for piece in pieces])
    return mask.view(_mask_shape(x, axes))


def _draws_per_sample(x: Tensor, axes: int, *, samples: int) -> int:
    rows = x.shape[0] if x.ndim else 1
    if rows % samples if samples else rows:
        raise ValueError(
            f"keyed dropout needs the same number of rows for each sample in the first axis, got shape "
            f"{tuple(x.shape)} and {samples} keys. Give this micro-batch's keys; a layer whose rows are not samples "
            "(sequence first, regions of interest) cannot be keyed."
        )
    return rows // samples * math.prod(x.shape[1:axes]) if samples else 0


def _probes_of(x: Tensor) -> Tensor:
    """Return a few elements spread over x, enough to recognise it in any memory format."""
    return x.detach()[tuple(slice(None, None, -(-size // _PROBES) or 1) for size in x.shape)].clone()


def _repeated(x: Tensor, calls: list[tuple[torch.Size, Tensor]]) -> int:
    """Return the number of the call that activation checkpointing repeats."""
    alike = [i for i, (shape, _) in enumerate(calls) if shape == x.shape]
    if len(alike) > 1:  # only then, because a comparison waits for the device
        probes = _probes_of(x)
        alike = [i for i in alike if torch.allclose(calls[i][1], probes, rtol=0, atol=0, equal_nan=True)]
    if len(alike) != 1:
        raise RuntimeError(
            f"a checkpointed forward with keyed dropout is being recomputed, and {len(alike) or 'none'} of that "
            "layer's calls under these keys match it: the mask to repeat is unknown. Give each forward a block of its "
            "own (`with dropout_keys(keys):`) with its backward inside, and each place in the model a layer of its own."
        )
    return alike[0]


register_operator(pass_without_keys, "had_keys")
register_operator(dropped, "had_keys", lambda x, axes, *rest: x.new_empty(_mask_shape(x, axes), dtype=torch.bool))
