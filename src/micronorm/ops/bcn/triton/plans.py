"""The launches of one layer at one size. They are made once and kept; a forward or backward is a list of them."""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch

from micronorm.ops.activation import Activation, ActivationKind
from micronorm.ops.bcn.triton import backward, estimates, forward, sums, tiling
from micronorm.ops.bcn.triton.launch import Launch
from micronorm.ops.bcn.triton.layout import Affine, Estimates, Strides
from micronorm.ops.moments import compute_dtype
from micronorm.ops.packed import numbers_size
from micronorm.ops.runtime import processors

MOST_KEPT = 4096
"""Plans and rules that are kept: sizes that never come again must not fill the memory."""


@dataclass(frozen=True, eq=False)
class Rule:
    """What a normalization computes, whatever its input. `rule` makes one object of each, so identity is equality."""

    estimates: Estimates
    groups: int
    eps: float
    activation: Activation


@lru_cache(maxsize=MOST_KEPT)
def rule(estimates: Estimates, groups: int, eps: float, kind: str, slope: float) -> Rule:
    """Return the rule with these properties."""
    return Rule(estimates, groups, eps, Activation(ActivationKind(kind), slope))


class Layer(NamedTuple):
    """A rule and the tensors it is applied to."""

    samples: int
    channels: int
    space: int
    strides: Strides
    dtype: torch.dtype
    device: torch.device
    rule: Rule
    affine: Affine
    has_blend: bool

    @property
    def shape(self) -> tiling.Shape:
        """Return what the choice of tiles depends on."""
        channels_last = self.strides[1] < self.strides[2] or self.space == 1
        return tiling.Shape(
            self.samples, self.channels, self.space, self.rule.groups, self.dtype.itemsize, channels_last=channels_last
        )

    @property
    def counts(self) -> tuple[int, int, int]:
        """Return N, C and S."""
        return self.samples, self.channels, self.space

    @property
    def columns(self) -> int:
        """Return how many entries γ^b, β^b, γ^c and β^c have together."""
        before = 0 if self.rule.estimates == Estimates.NONE else self.channels
        sizes = {Affine.NONE: 0, Affine.PER_GROUP: self.rule.groups, Affine.PER_CHANNEL: self.channels}
        return 2 * (before + sizes[self.affine])

    @property
    def constants(self) -> dict[str, Any]:
        """Return the constants of kernels that do the N×C arithmetic."""
        rule = self.rule
        constants = {"EPS": rule.eps, "ESTIMATES": rule.estimates.value, "AFFINE": self.affine.value}
        return constants | {"SIZE": self.channels // rule.groups}

    @property
    def gate(self) -> dict[str, Any]:
        """Return the constants of kernels that apply the activation."""
        return {"ACTIVATION": self.rule.activation.kind.value, "SLOPE": self.rule.activation.slope}


_NO_GATE = {"ACTIVATION": ActivationKind.IDENTITY.value, "SLOPE": 0.0}
# For an elementwise pass that finds `numbers` complete: one compiled kernel then serves all layers.
_COMPLETE = {"EPS": 0.0, "ESTIMATES": Estimates.NONE.value, "AFFINE": Affine.NONE.value, "GROUPS": 1, "SIZE": 1}
_COMPLETE |= {"PIECES": 1, "FINISHES": False}


class _Units(NamedTuple):
    """The unit, in elements, in which kernels get strides and sizes; all rows of all tensors begin at multiples of it.

    It is 1 where it would not help: where the tensors differ in what is adjacent in memory, and where it would be 16,
    which Triton detects by itself.
    """

    align: int
    channels_last: bool

    @property
    def constants(self) -> dict[str, Any]:
        """Return the constants of the kernels."""
        c, s = (1, self.align) if self.channels_last else (self.align, 1)
        return {"ALIGN": self.align, "C_UNIT": c, "S_UNIT": s}

    def scalars(self, layer: Layer, *each: Strides | None) -> tuple[int, ...]:
        """Return N, C, S and the strides of the tensors, in units; zeros for a tensor that does not exist."""
        c_unit, s_unit = (1, self.align) if self.channels_last else (self.align, 1)
        found = [layer.samples, layer.channels // s_unit, layer.space // c_unit]
        for n, c, s in (strides or (0, 0, 0) for strides in each):
            found += (n // self.align, c // c_unit, s // s_unit)
        return tuple(found)


def _units(layer: Layer, *strides: Strides | None) -> _Units:
    last = layer.shape.channels_last
    each = [layer.strides, *(s for s in strides if s is not None)]
    steps = [step for n, c, s in each for step in ((n, s) if last else (n, c))]
    common = math.gcd(16, layer.channels if last else layer.space, *steps)
    return _Units(common if common < 16 and _alike(layer, *strides) else 1, last)


def _alike(layer: Layer, *strides: Strides | None) -> bool:
    """Return whether channels, or positions, are adjacent in memory in all tensors."""
    last = layer.shape.channels_last
    return {c if last else s for _, c, s in (layer.strides, *(s for s in strides if s is not None))} == {1}


class EstimatesLaunches(NamedTuple):
    """The launches that derive statistics from the input; the first and the last only if there are many channels."""

    check: Launch | None
    compute: Launch
    write: Launch | None


class Forward:
    """The launches of a forward. Each is made when it is first used.

    Args:
        layer: the layer and its input.
        residual: strides of the residual, or None.
        output: strides of the output.
    """

    def __init__(self, layer: Layer, residual: Strides | None, output: Strides) -> None:
        self.layer, self.compute = layer, compute_dtype(layer.dtype)
        self.size = numbers_size(layer.samples, layer.channels, layer.rule.groups)
        self.has_residual = {"HAS_RESIDUAL": residual is not None}
        self.has_blend = {"HAS_BLEND": layer.has_blend}
        shape, count = layer.shape, processors(layer.device)
        loads, alike = 1 if residual is None else 2, _alike(layer, residual, output)
        self.tile = tiling.in_one_launch(shape, count, tensors=1, loads=loads, alike=alike)
        self.moments = tiling.reduction(shape, count)
        self.numbers = tiling.numbers(shape, self.moments.pieces)
        self.elementwise = tiling.sweep(shape, count, kinds=tiling.ELEMENTWISE)
        self.finishing = tiling.finish(shape, count, self.moments.pieces)
        self.units = _units(layer, residual, output)
        self.scalars = self.units.scalars(layer, layer.strides, residual, output)
        self._estimates: dict[tuple[Any, ...], EstimatesLaunches] = {}

    @cached_property
    def parts(self) -> int:
        """Return the size of `parts`: the moments of the pieces, and memory for each program of `finish`."""
        own = 0 if self.finishing is None else 3 * self.finishing.channels * self.finishing.programs
        return 2 * self.layer.samples * self.moments.pieces * self.layer.channels + own

    @cached_property
    def whole(self) -> Launch:
        """Compute y and the numbers from x."""
        assert self.tile is not None
        constants = self.layer.constants | self.layer.gate | self.has_blend | self.has_residual
        constants |= self.units.constants | self.tile.constants
        return Launch(forward.forward_whole, (self.tile.programs,), self.scalars, constants, self.tile.warps)

    @cached_property
    def reduce(self) -> Launch:
        """Compute the moments of the pieces from x."""
        tile = self.moments
        constants = tile.constants | self.units.constants
        return Launch(forward.moments_part, (tile.programs,), (*self.scalars[:6], *tile.cut), constants, tile.warps)

    @cached_property
    def terms(self) -> Launch:
        """Compute all numbers from the moments of the pieces."""
        tile, layer = self.numbers, self.layer
        constants = layer.constants | self.has_blend | {"PIECES": tiling.next_power(self.moments.pieces)}
        constants |= {"GROUPS": tile.groups, "CHANNELS": tile.channels}
        scalars = (*layer.counts, *layer.strides[:2], *self.moments.cut[:2])
        return Launch(forward.forward_numbers, (tile.programs,), scalars, constants, 4)

    def estimates(self, micro_batch: int, moves: bool, has_rate: bool, *dtypes: torch.dtype) -> EstimatesLaunches:
        """Return the launches that derive statistics from x; `dtypes` are those of the estimates and the rate.

        `micro_batch` is the number of samples in a micro-batch, or 0 for the moments of the whole batch.
        """
        key = (micro_batch, moves, has_rate, *dtypes)
        if key not in self._estimates:
            self._estimates[key] = self._new_estimates(micro_batch, moves, has_rate)
        return self._estimates[key]

    def _new_estimates(self, micro_batch: int, moves: bool, has_rate: bool) -> EstimatesLaunches:
        layer, cut = self.layer, self.moments.cut[:2]
        batches = -(-layer.samples // max(micro_batch, 1))
        rows, width = tiling.over_estimates(batches, layer.channels)
        programs = -(-layer.channels // width)
        tile = {"ROWS": rows, "CHANNELS": width, "UNROLLED": min(tiling.next_power(cut[0]), 8)}
        constants = {"HAS_RATE": has_rate, "MOVES": moves, "ALONE": programs == 1}
        scalars = (*layer.counts, *layer.strides[:2], *cut, *([micro_batch] if micro_batch else []))
        kernel = estimates.scan_estimates if micro_batch else estimates.batch_estimates
        compute, check, write = Launch(kernel, (programs,), scalars, constants | tile, 8), None, None
        if programs > 1 and moves:
            every = {"CHANNELS": tiling.next_power(layer.channels)}
            write = Launch(estimates.write_estimates, (1,), layer.counts[:2], every, 8)
            if micro_batch:
                tile |= {"ROWS": 16, "CHANNELS": min(tiling.next_power(layer.channels), 128)}
                check = Launch(estimates.check_batches, (-(-batches // 16),), scalars, tile, 8)
        return EstimatesLaunches(check, compute, write)

    @cached_property
    def finish(self) -> Launch:
        """Compute y and all numbers from x and the moments of the pieces."""
        tile, layer = self.finishing, self.layer
        assert tile is not None
        constants = layer.constants | layer.gate | self.has_blend | self.has_residual
        constants |= tile.constants | self.units.constants
        constants |= _finishing(tile, layer, self.moments.pieces)
        scalars = (*self.scalars, *self.moments.cut[:2], *tile.cut)
        return Launch(forward.forward_apply, (tile.programs,), scalars, constants, tile.warps)

    @cached_property
    def apply(self) -> Launch:
        """Compute y from x and the numbers."""
        tile = self.elementwise
        constants = _COMPLETE | {"HAS_BLEND": False} | self.layer.gate | self.has_residual
        constants |= tile.constants | self.units.constants
        scalars = (*self.scalars, 1, 1, *tile.cut)
        return Launch(forward.forward_apply, (tile.programs,), scalars, constants, tile.warps)


def _finishing(tile: tiling.Pass, layer: Layer, pieces: int) -> dict[str, Any]:
    """Return the constants of an elementwise pass that does the N×C arithmetic itself."""
    groups = tile.channels // (layer.channels // layer.rule.groups)
    return {"PIECES": tiling.next_power(pieces), "GROUPS": groups, "FINISHES": True}


class Backward:
    """The launches of a backward. Each is made when it is first used.

    Args:
        layer: the layer and its input.
        grad: strides of dL/dy.
        gate: strides of the output, if the activation's derivative is taken from it (with a residual); else None.
        result: strides of dL/dx.
        from_batch: the channels were normalized with the batch's own moments. The elementwise pass then needs the
            gradients of the parameters, so the backward takes neither one launch nor `finish`.
    """

    def __init__(self, layer: Layer, grad: Strides, gate: Strides | None, result: Strides, *, from_batch: bool) -> None:
        self.layer, self.from_batch = layer, from_batch
        self.has_residual = {"HAS_RESIDUAL": gate is not None}
        self.units = _units(layer, grad, gate, result)
        self.scalars = self.units.scalars(layer, layer.strides, grad, gate, result)
        # With a residual the elementwise pass reads the gradient that the reduction has gated and stored.
        later = grad if gate is None else result
        units = _units(layer, later, result)
        self.later = (layer.gate if gate is None else _NO_GATE) | units.constants
        self.later_scalars = units.scalars(layer, layer.strides, later, result)
        shape, count = layer.shape, processors(layer.device)
        loads, alike = 2 if gate is None else 3, _alike(layer, grad, gate, result)
        self.tile = None if from_batch else tiling.in_one_launch(shape, count, tensors=2, loads=loads, alike=alike)
        self.sums = tiling.sweep(shape, count, kinds=tiling.REDUCE) if from_batch else tiling.reduction(shape, count)
        self.numbers = tiling.numbers(shape, self.sums.pieces)
        self.elementwise = tiling.sweep(shape, count, kinds=tiling.ELEMENTWISE)
        self.finishing = None if from_batch else tiling.finish(shape, count, self.sums.pieces)
        self.parts = 2 * layer.samples * self.sums.pieces * layer.channels
        self.columns = layer.columns

    @cached_property
    def whole(self) -> Launch:
        """Compute dx and the samples' shares from x and dy."""
        tile = self.tile
        assert tile is not None
        constants = self.layer.constants | self.layer.gate | self.has_residual | self.units.constants | tile.constants
        return Launch(backward.backward_whole, (tile.programs,), self.scalars, constants, tile.warps)

    @cached_property
    def reduce(self) -> Launch:
        """Compute the sums of the pieces from x and dy, and the residual's gradient if there is a residual."""
        tile = self.sums
        constants = self.layer.gate | self.has_residual | tile.constants | self.units.constants
        return Launch(backward.backward_part, (tile.programs,), (*self.scalars, *tile.cut), constants, tile.warps)

    @cached_property
    def terms(self) -> Launch:
        """Compute slopes and the samples' shares from the sums of the pieces."""
        tile, layer = self.numbers, self.layer
        constants = layer.constants | {"GROUPS": tile.groups, "CHANNELS": tile.channels}
        constants |= {"PIECES": tiling.next_power(self.sums.pieces)}
        scalars = (*layer.counts, self.sums.pieces)
        return Launch(backward.backward_numbers, (tile.programs,), scalars, constants, 4)

    @cached_property
    def finish(self) -> Launch:
        """Compute dx and the samples' shares from x, dy and the sums of the pieces."""
        tile, layer = self.finishing, self.layer
        assert tile is not None
        constants = layer.constants | self.later | tile.constants | _finishing(tile, layer, self.sums.pieces)
        constants |= {"FROM_BATCH": False}
        scalars = (*self.later_scalars, self.sums.pieces, *tile.cut)
        return Launch(backward.backward_apply, (tile.programs,), scalars, constants, tile.warps)

    @cached_property
    def apply(self) -> Launch:
        """Compute dx from x, dy, the slopes and, with `from_batch`, the gradients of the parameters."""
        tile = self.elementwise
        scalars = (*self.later_scalars, 1, *tile.cut)
        constants = _COMPLETE | self.later | tile.constants | {"FROM_BATCH": self.from_batch}
        if self.from_batch:
            constants["EPS"] = self.layer.rule.eps
        return Launch(backward.backward_apply, (tile.programs,), scalars, constants, tile.warps)

    @cached_property
    def total(self) -> Launch:
        """Sum the samples' shares to the gradients of the parameters."""
        rows, width = tiling.over_samples(self.layer.samples, self.columns)
        scalars, constants = (self.layer.samples, self.columns), {"SAMPLES": rows, "COLUMNS": width}
        return Launch(sums.sum_samples, (-(-self.columns // width),), scalars, constants, 4)


@lru_cache(maxsize=1024)
def gather_plan(samples: int, channels: int, space: int, groups: int, *kinds: torch.device | torch.dtype) -> Launch:
    """Return the launch that adds `numbers` to the layer's window; `kinds` are the device and dtypes of its tensors."""
    rows, width = tiling.over_samples(samples, channels)
    constants = {"SAMPLES": rows, "CHANNELS": width, "FLAGS": min(tiling.next_power(groups), 4096 // rows)}
    return Launch(sums.gather_window, (-(-channels // width),), (samples, channels, space, groups), constants, 4)
