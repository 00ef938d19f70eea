"""The launches of one layer at one size, made once and kept: a forward and a backward are lists of them."""

import math
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch

from micronorm.ops.activation import Activation
from micronorm.ops.bcn.triton import backward, backward_split, forward, forward_split, tiling
from micronorm.ops.bcn.triton.gather import gather_window
from micronorm.ops.bcn.triton.launch import Launch, processors
from micronorm.ops.bcn.triton.layout import Strides, numbers_size

_ACTIVATIONS = {None: 0, "relu": 1, "leaky_relu": 2, "silu": 3}
_ESTIMATES = {"none": 0, "shared": 1, "per sample": 2, "kept": 3}
_AFFINE = {"none": 0, "per group": 1, "per channel": 2}


class Layer(NamedTuple):
    """What is computed and on what: hashable, so that plans can be kept by it.

    `dtypes` are those of the tensors besides x, which the compiled kernels depend on.
    """

    samples: int
    channels: int
    space: int
    strides: Strides
    dtype: torch.dtype
    device: torch.device
    groups: int
    eps: float
    activation: Activation
    estimates: str
    affine: str
    dtypes: tuple[torch.dtype | None, ...]

    @property
    def shape(self) -> tiling.Shape:
        """What the choice of tiles depends on."""
        channels_last = self.strides[1] < self.strides[2] or self.space == 1
        return tiling.Shape(
            self.samples, self.channels, self.space, self.groups, self.dtype.itemsize, channels_last=channels_last
        )

    @property
    def counts(self) -> tuple[int, int, int]:
        """N, C and S."""
        return self.samples, self.channels, self.space

    @property
    def compute(self) -> torch.dtype:
        """The dtype of everything between loads and stores."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def parameters(self) -> tuple[int, int, int, int]:
        """How many entries γ^b, β^b, γ^c and β^c have, those there are."""
        before = 0 if self.estimates == "none" else self.channels
        after = {"none": 0, "per group": self.groups, "per channel": self.channels}[self.affine]
        return before, before, after, after

    @property
    def constants(self) -> dict[str, Any]:
        """What kernels that do the N×C arithmetic know when they are compiled."""
        return {
            "EPS": self.eps,
            "ESTIMATES": _ESTIMATES[self.estimates],
            "AFFINE": _AFFINE[self.affine],
            "SIZE": self.channels // self.groups,
        }

    @property
    def gate(self) -> dict[str, Any]:
        """What kernels with the activation know when they are compiled."""
        return {"ACTIVATION": _ACTIVATIONS[self.activation.kind], "SLOPE": self.activation.slope}


# For an elementwise pass that finds its numbers done; of other layers it need not be compiled anew.
_DONE = {"EPS": 0.0, "ESTIMATES": 0, "AFFINE": 0, "GROUPS": 1, "SIZE": 1, "PIECES": 1, "FINISHES": False}


class _Units(NamedTuple):
    """What all rows of all tensors begin at multiples of, in elements; kernels are given strides in these units.

    One where it says nothing: where the tensors do not share what lies side by side, and where it is 16, which triton
    sees for itself.
    """

    align: int
    channels_last: bool

    @property
    def constants(self) -> dict[str, Any]:
        """What kernels know when they are compiled."""
        c, s = (1, self.align) if self.channels_last else (self.align, 1)
        return {"ALIGN": self.align, "C_UNIT": c, "S_UNIT": s}

    def counts(self, layer: Layer) -> tuple[int, int, int]:
        """N, C and S."""
        if self.channels_last:
            return layer.samples, layer.channels // self.align, layer.space
        return layer.samples, layer.channels, layer.space // self.align

    def strides(self, *each: Strides | None) -> tuple[int, ...]:
        """Those of all tensors, one after the other; zeros for one that is not there."""
        found: list[int] = []
        for n, c, s in (strides or (0, 0, 0) for strides in each):
            across = (
                (n // self.align, c, s // self.align) if self.channels_last else (n // self.align, c // self.align, s)
            )
            found += across
        return tuple(found)


def _units(layer: Layer, *strides: Strides | None) -> _Units:
    last = layer.shape.channels_last
    each = [layer.strides, *(s for s in strides if s is not None)]
    steps = [step for n, c, s in each for step in ((n, s) if last else (n, c))]
    common = math.gcd(16, layer.channels if last else layer.space, *steps)
    return _Units(common if common < 16 and _alike(layer, *strides) else 1, last)


def _alike(layer: Layer, *strides: Strides | None) -> bool:
    """Whether channels, or positions, lie side by side in the input and in all others."""
    last = layer.shape.channels_last
    return {c if last else s for _, c, s in (layer.strides, *(s for s in strides if s is not None))} == {1}


class Forward:
    """The launches of a forward; those that a scheme does not need are never made."""

    def __init__(self, layer: Layer, residual: Strides | None, output: Strides) -> None:
        self.layer, self.residual, self.output = layer, residual, output
        shape, count = layer.shape, processors(layer.device)
        loads, alike = 1 if residual is None else 2, _alike(layer, residual, output)
        self.tile = tiling.in_one_launch(shape, count, tensors=1, loads=loads, alike=alike)
        self.moments = tiling.reduction(shape, count)
        self.alone = tiling.sweep(shape, count, kinds=tiling.REDUCE)
        self.numbers = tiling.numbers(shape, self.moments.pieces)
        self.elementwise = tiling.sweep(shape, count, kinds=tiling.ELEMENTWISE)
        self.finishing = tiling.finish(shape, count, self.moments.pieces)
        self.units = _units(layer, residual, output)
        self.counts, self.strides = self.units.counts(layer), self.units.strides(layer.strides, residual, output)
        self.limit = {"MAX": torch.finfo(layer.compute).max, "HAS_BLEND": layer.dtypes[-1] is not None}

    @cached_property
    def compute(self) -> torch.dtype:
        """The dtype of everything between loads and stores."""
        return self.layer.compute

    @cached_property
    def size(self) -> int:
        """How many numbers it leaves."""
        return numbers_size(self.layer.samples, self.layer.channels, self.layer.groups)

    @cached_property
    def parts(self) -> int:
        """How many numbers the pieces give, and the programs that finish keep for themselves."""
        own = 0 if self.finishing is None else 3 * self.finishing.channels * self.finishing.programs
        pieces = max(self.moments.pieces, self.alone.pieces)
        return 2 * self.layer.samples * pieces * self.layer.channels + own

    @cached_property
    def whole(self) -> Launch:
        """x → y and the numbers, in one."""
        tile = self.tile
        assert tile is not None
        kernel = forward.forward_twice if isinstance(tile, tiling.Twice) else forward.forward_whole
        constants = self.layer.constants | self.layer.gate | self.limit | {"HAS_RESIDUAL": self.residual is not None}
        constants |= self.units.constants | tile.constants
        return Launch(kernel, (tile.programs,), (*self.counts, *self.strides), constants, tile.warps)

    def _reduce(self, tile: tiling.Pass) -> Launch:
        scalars = (*self.counts, *self.strides[:3], *tile.cut)
        constants = tile.constants | self.units.constants
        return Launch(forward_split.moments_part, (tile.programs,), scalars, constants, tile.warps)

    @cached_property
    def reduce(self) -> Launch:
        """x → the moments of its pieces."""
        return self._reduce(self.moments)

    @cached_property
    def reduce_alone(self) -> Launch:
        """The same where `merge` comes next: in as many pieces as are best for this pass."""
        return self._reduce(self.alone)

    @cached_property
    def merge(self) -> Launch:
        """The moments of the pieces → those of the samples, alone."""
        tile, layer = self.alone, self.layer
        channels = min(tiling.next_power(layer.channels), 32)
        scalars = (*layer.counts, *layer.strides[:2], *tile.cut[:2])
        constants = {"CHANNELS": channels, "PIECES": tiling.next_power(tile.pieces)}
        return Launch(
            forward_split.moments_merge, (layer.samples, -(-layer.channels // channels)), scalars, constants, 4
        )

    def _terms(self, *, has_parts: bool) -> Launch:
        tile, layer = self.numbers, self.layer
        pieces = self.moments.pieces if has_parts else 1
        constants = layer.constants | self.limit | {"HAS_PARTS": has_parts, "PIECES": tiling.next_power(pieces)}
        constants |= {"GROUPS": tile.groups, "CHANNELS": tile.channels}
        scalars = (*layer.counts, *layer.strides[:2], self.moments.pieces, self.moments.piece)
        return Launch(forward_split.forward_numbers, (tile.programs,), scalars, constants, 4)

    @cached_property
    def terms(self) -> Launch:
        """The moments of the pieces → all numbers."""
        return self._terms(has_parts=True)

    @cached_property
    def terms_of_given(self) -> Launch:
        """Moments that lie in the buffer → all numbers."""
        return self._terms(has_parts=False)

    @cached_property
    def finish(self) -> Launch:
        """x and the moments of the pieces → y and all numbers."""
        tile, layer = self.finishing, self.layer
        assert tile is not None
        constants = layer.constants | layer.gate | self.limit | tile.constants | self.units.constants
        constants |= {"HAS_RESIDUAL": self.residual is not None, "PIECES": tiling.next_power(self.moments.pieces)}
        constants |= {"GROUPS": tile.channels // (layer.channels // layer.groups), "FINISHES": True}
        scalars = (*self.counts, *self.strides, *self.moments.cut[:2], *tile.cut)
        return Launch(forward_split.forward_apply, (tile.programs,), scalars, constants, tile.warps)

    @cached_property
    def apply(self) -> Launch:
        """x and the numbers → y."""
        tile, layer = self.elementwise, self.layer
        constants = _DONE | layer.gate | {"HAS_RESIDUAL": self.residual is not None, "HAS_BLEND": False, "MAX": 0.0}
        constants |= tile.constants | self.units.constants
        scalars = (*self.counts, *self.strides, 1, 1, *tile.cut)
        return Launch(forward_split.forward_apply, (tile.programs,), scalars, constants, tile.warps)


class Backward:
    """The launches of a backward; `gate` holds the strides of the output where that is what the activation knows."""

    def __init__(self, layer: Layer, grad: Strides, gate: Strides | None, result: Strides, *, split: bool) -> None:
        self.layer = layer
        self.has_residual = {"HAS_RESIDUAL": gate is not None}
        self.units = _units(layer, grad, gate, result)
        self.counts = self.units.counts(layer)
        self.strides = self.units.strides(layer.strides, grad, gate, result)
        # With a residual the elementwise pass reads the gradient that the reduction has gated and stored.
        later = grad if gate is None else result
        units = _units(layer, later, result)
        self.later = layer.gate if gate is None else {"ACTIVATION": _ACTIVATIONS[None], "SLOPE": 0.0}
        self.later |= units.constants
        self.later_scalars = (*units.counts(layer), *units.strides(layer.strides, later, result))
        shape, count = layer.shape, processors(layer.device)
        loads, alike = 2 if gate is None else 3, _alike(layer, grad, gate, result)
        tile = tiling.in_one_launch(shape, count, tensors=2, loads=loads, alike=alike)
        self.tile = None if split else tile
        self.sums = tiling.sweep(shape, count, kinds=tiling.REDUCE) if split else tiling.reduction(shape, count)
        self.numbers = tiling.numbers(shape, self.sums.pieces)
        self.elementwise = tiling.sweep(shape, count, kinds=tiling.ELEMENTWISE)
        self.finishing = None if split else tiling.finish(shape, count, self.sums.pieces)

    @cached_property
    def parts(self) -> int:
        """How many numbers the pieces give."""
        return 2 * self.layer.samples * self.sums.pieces * self.layer.channels

    @cached_property
    def columns(self) -> int:
        """How many numbers a sample gives to the gradients of the parameters."""
        return sum(self.layer.parameters)

    @cached_property
    def whole(self) -> Launch:
        """x and dy → dx and the samples' shares, in one."""
        tile = self.tile
        assert tile is not None
        kernel = backward.backward_twice if isinstance(tile, tiling.Twice) else backward.backward_whole
        constants = self.layer.constants | self.layer.gate | self.has_residual | self.units.constants | tile.constants
        return Launch(kernel, (tile.programs,), (*self.counts, *self.strides), constants, tile.warps)

    @cached_property
    def reduce(self) -> Launch:
        """x and dy → the sums of the pieces, and the residual's gradient where there is one."""
        tile, layer = self.sums, self.layer
        constants = layer.gate | self.has_residual | tile.constants | self.units.constants
        scalars = (*self.counts, *self.strides, *tile.cut)
        return Launch(backward_split.backward_part, (tile.programs,), scalars, constants, tile.warps)

    @cached_property
    def terms(self) -> Launch:
        """The sums of the pieces → slopes and the samples' shares."""
        tile, layer = self.numbers, self.layer
        constants = layer.constants | {"GROUPS": tile.groups, "CHANNELS": tile.channels}
        constants |= {"PIECES": tiling.next_power(self.sums.pieces)}
        return Launch(
            backward_split.backward_numbers, (tile.programs,), (*layer.counts, self.sums.pieces), constants, 4
        )

    @cached_property
    def through_batch(self) -> Launch:
        """The gradients of the parameters → what the batch's own moments add to the slopes."""
        layer = self.layer
        channels = min(tiling.next_power(layer.channels), 128)
        grid = (layer.samples, -(-layer.channels // channels))
        return Launch(backward_split.backward_batch, grid, layer.counts, {"EPS": layer.eps, "CHANNELS": channels}, 4)

    @cached_property
    def finish(self) -> Launch:
        """x, dy and the sums of the pieces → dx and the samples' shares."""
        tile, layer = self.finishing, self.layer
        assert tile is not None
        constants = layer.constants | self.later | tile.constants
        constants |= {"PIECES": tiling.next_power(self.sums.pieces)}
        constants |= {"GROUPS": tile.channels // (layer.channels // layer.groups), "FINISHES": True}
        scalars = (*self.later_scalars, self.sums.pieces, *tile.cut)
        return Launch(backward_split.backward_apply, (tile.programs,), scalars, constants, tile.warps)

    @cached_property
    def apply(self) -> Launch:
        """x, dy and the slopes → dx."""
        tile = self.elementwise
        constants = _DONE | self.later | tile.constants
        scalars = (*self.later_scalars, 1, *tile.cut)
        return Launch(backward_split.backward_apply, (tile.programs,), scalars, constants, tile.warps)

    @cached_property
    def total(self) -> Launch:
        """The samples' shares → the gradients of the parameters."""
        rows, width = tiling.over_samples(self.layer.samples, self.columns)
        constants = {"SAMPLES": rows, "COLUMNS": width}
        return Launch(
            backward.sum_samples, (-(-self.columns // width),), (self.layer.samples, self.columns), constants, 4
        )


@lru_cache(maxsize=1024)
def gather_plan(samples: int, channels: int, space: int, groups: int, *kinds: torch.device | torch.dtype) -> Launch:
    """The numbers → the layer's window; `kinds` are the device and the dtypes of the tensors it is called with."""
    rows, width = tiling.over_samples(samples, channels)
    constants = {"SAMPLES": rows, "CHANNELS": width, "FLAGS": min(tiling.next_power(samples * groups), 4096)}
    return Launch(gather_window, (-(-channels // width),), (samples, channels, space, groups), constants, 4)
