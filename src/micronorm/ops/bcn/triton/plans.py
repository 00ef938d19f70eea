"""The launches of one layer at one size. They are made once and kept; a forward or backward is a list of them."""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch

from micronorm.ops.activation import Activation, ActivationKind
from micronorm.ops.bcn.triton import backward, estimates, forward, sums, tiling
from micronorm.ops.bcn.triton.layout import Affine, Estimates, Strides
from micronorm.ops.launch import Launch
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
        """Return the constants of the kernels that do the N×C arithmetic, and of those that apply the activation."""
        rule, activation = self.rule, self.rule.activation
        constants = {"EPS": rule.eps, "ESTIMATES": rule.estimates.value, "AFFINE": self.affine.value}
        constants |= {"SIZE": self.channels // rule.groups, "HAS_BLEND": self.has_blend}
        return constants | {"ACTIVATION": activation.kind.value, "SLOPE": activation.slope}


_NO_ACTIVATION = {"ACTIVATION": ActivationKind.IDENTITY.value, "SLOPE": 0.0}
# For an elementwise pass that finds `numbers` complete: one compiled kernel then serves all layers.
_COMPLETE = {"EPS": 0.0, "ESTIMATES": Estimates.NONE.value, "AFFINE": Affine.NONE.value, "GROUPS": 1, "SIZE": 1}
_COMPLETE |= {"HAS_BLEND": False, "PIECES": 1, "FINISHES": False}


def _in_units(layer: Layer, *others: Strides | None) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Return N, C, S and the strides of all tensors, in units, and the constants that tell kernels the units.

    A unit is a number of elements: all rows of all tensors begin at multiples of it. It is 1 where it would not help:
    where the tensors differ in what is adjacent in memory, and where it would be 16, which Triton detects by itself.
    A tensor that does not exist has strides of zero.
    """
    last = layer.shape.channels_last
    existing = (layer.strides, *(s for s in others if s is not None))
    steps = [step for n, c, s in existing for step in ((n, s) if last else (n, c))]
    common = math.gcd(16, layer.channels if last else layer.space, *steps)
    align = common if common < 16 and _alike(layer, *others) else 1
    c_unit, s_unit = (1, align) if last else (align, 1)
    scalars = [layer.samples, layer.channels // s_unit, layer.space // c_unit]
    for n, c, s in (strides or (0, 0, 0) for strides in (layer.strides, *others)):
        scalars += (n // align, c // c_unit, s // s_unit)
    return tuple(scalars), {"ALIGN": align, "C_UNIT": c_unit, "S_UNIT": s_unit}


def _alike(layer: Layer, *strides: Strides | None) -> bool:
    """Return whether channels, or positions, are adjacent in memory in all tensors."""
    last = layer.shape.channels_last
    return {c if last else s for _, c, s in (layer.strides, *(s for s in strides if s is not None))} == {1}


class EstimatesLaunches(NamedTuple):
    """The launches that derive statistics from the input; None for those that are not needed."""

    pool: Launch | None
    compute: Launch | None
    write: Launch | None


def _launch(kernel: Any, tile: Any, scalars: tuple[int, ...], constants: dict[str, Any]) -> Launch:
    return Launch(kernel, tile.programs, scalars, constants | tile.constants, tile.warps)


def _finishing(tile: tiling.Pass, layer: Layer) -> dict[str, Any]:
    """Return the constants of an elementwise pass that does the N×C arithmetic itself."""
    return {"GROUPS": tile.channels // (layer.channels // layer.rule.groups), "FINISHES": True}


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
        shape, count = layer.shape, processors(layer.device)
        loads, alike = 1 if residual is None else 2, _alike(layer, residual, output)
        self.tile = tiling.in_one_launch(shape, count, tensors=1, loads=loads, alike=alike)
        self.moments = tiling.reduction(shape, count)
        self.numbers = tiling.numbers(shape, self.moments.pieces)
        self.elementwise = tiling.sweep(shape, count, kinds=tiling.ELEMENTWISE)
        self.finishing = tiling.finish(shape, count, self.moments.pieces)
        self.scalars, units = _in_units(layer, residual, output)
        self.constants = layer.constants | units
        self.constants |= {"HAS_RESIDUAL": residual is not None, "PIECES": tiling.next_power(self.moments.pieces)}
        self._estimates: dict[tuple[Any, ...], EstimatesLaunches] = {}

    @cached_property
    def parts(self) -> int:
        """Return the size of `parts`: the moments of the pieces, and memory for each program of `finish`."""
        own = 0 if self.finishing is None else 3 * self.finishing.channels * self.finishing.programs
        return 2 * self.layer.samples * self.moments.pieces * self.layer.channels + own

    @cached_property
    def whole(self) -> Launch:
        """Compute y and the numbers from x."""
        return _launch(forward.forward_whole, self.tile, self.scalars, self.constants)

    @cached_property
    def reduce(self) -> Launch:
        """Compute the moments of the pieces from x."""
        return _launch(forward.moments_part, self.moments, (*self.scalars[:6], *self.moments.cut), self.constants)

    @cached_property
    def terms(self) -> Launch:
        """Compute all numbers from the moments of the pieces."""
        scalars = (*self.layer.counts, *self.layer.strides[:2], *self.moments.cut[:2])
        return _launch(forward.forward_numbers, self.numbers, scalars, self.constants)

    @cached_property
    def finish(self) -> Launch:
        """Compute y and all numbers from x and the moments of the pieces."""
        assert self.finishing is not None
        scalars = (*self.scalars, *self.moments.cut[:2], *self.finishing.cut)
        constants = self.constants | _finishing(self.finishing, self.layer)
        return _launch(forward.forward_apply, self.finishing, scalars, constants)

    @cached_property
    def apply(self) -> Launch:
        """Compute y from x and the numbers."""
        scalars = (*self.scalars, 1, 1, *self.elementwise.cut)
        return _launch(forward.forward_apply, self.elementwise, scalars, self.constants | _COMPLETE)

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
        rows, width = tiling.over_estimates(batches, layer.channels, scans=micro_batch > 0)
        programs, every = -(-layer.channels // width), tiling.next_power(layer.channels)
        constants = {"ROWS": rows, "CHANNELS": width, "UNROLLED": min(tiling.next_power(cut[0]), 8)}
        constants |= {"HAS_RATE": has_rate, "MOVES": moves, "ALONE": programs == 1}
        scalars = (*layer.counts, *layer.strides[:2], *cut, *([micro_batch] if micro_batch else []))
        kernel = estimates.scan_estimates if micro_batch else estimates.batch_estimates
        pool, compute, write = None, Launch(kernel, programs, scalars, constants, 8), None
        if micro_batch and not (moves and programs == 1):
            tile = {"ROWS": 16, "CHANNELS": min(every, 128)}
            pool = Launch(estimates.pool_batches, -(-batches // 16), scalars, constants | tile, 8)
        if micro_batch and not moves:
            compute = None
        if moves and programs > 1:
            write = Launch(estimates.write_estimates, 1, layer.counts[:2], {"CHANNELS": every}, 8)
        return EstimatesLaunches(pool, compute, write)


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
        self.layer, self.columns = layer, layer.columns
        shape, count = layer.shape, processors(layer.device)
        loads, alike = 2 if gate is None else 3, _alike(layer, grad, gate, result)
        self.tile = None if from_batch else tiling.in_one_launch(shape, count, tensors=2, loads=loads, alike=alike)
        self.sums = tiling.sweep(shape, count, kinds=tiling.REDUCE) if from_batch else tiling.reduction(shape, count)
        self.numbers = tiling.numbers(shape, self.sums.pieces)
        self.elementwise = tiling.sweep(shape, count, kinds=tiling.ELEMENTWISE)
        self.finishing = None if from_batch else tiling.finish(shape, count, self.sums.pieces)
        self.parts = 2 * layer.samples * self.sums.pieces * layer.channels
        self.scalars, units = _in_units(layer, grad, gate, result)
        self.constants = layer.constants | units | {"HAS_RESIDUAL": gate is not None}
        self.constants |= {"PIECES": tiling.next_power(self.sums.pieces), "FROM_BATCH": from_batch}
        # With a residual the elementwise pass reads the gradient that the reduction has gated and stored.
        stored = grad if gate is None else result
        self.last_scalars, units = _in_units(layer, stored, result)
        self.last_constants = self.constants | units | ({} if gate is None else _NO_ACTIVATION)

    @cached_property
    def whole(self) -> Launch:
        """Compute dx and the samples' shares from x and dy."""
        return _launch(backward.backward_whole, self.tile, self.scalars, self.constants)

    @cached_property
    def reduce(self) -> Launch:
        """Compute the sums of the pieces from x and dy, and the residual's gradient if there is a residual."""
        return _launch(backward.backward_part, self.sums, (*self.scalars, *self.sums.cut), self.constants)

    @cached_property
    def terms(self) -> Launch:
        """Compute slopes and the samples' shares from the sums of the pieces."""
        scalars = (*self.layer.counts, self.sums.pieces)
        return _launch(backward.backward_numbers, self.numbers, scalars, self.constants)

    @cached_property
    def finish(self) -> Launch:
        """Compute dx and the samples' shares from x, dy and the sums of the pieces."""
        assert self.finishing is not None
        scalars = (*self.last_scalars, self.sums.pieces, *self.finishing.cut)
        constants = self.last_constants | _finishing(self.finishing, self.layer)
        return _launch(backward.backward_apply, self.finishing, scalars, constants)

    @cached_property
    def apply(self) -> Launch:
        """Compute dx from x, dy, the slopes and, if FROM_BATCH, the gradients of the parameters."""
        scalars = (*self.last_scalars, 1, *self.elementwise.cut)
        constants = self.last_constants | _COMPLETE
        if constants["FROM_BATCH"]:
            constants["EPS"] = self.layer.rule.eps
        return _launch(backward.backward_apply, self.elementwise, scalars, constants)

    @cached_property
    def total(self) -> Launch:
        """Sum the samples' shares to the gradients of the parameters."""
        rows, width = tiling.over_samples(self.layer.samples, self.columns)
        scalars, constants = (self.layer.samples, self.columns), {"SAMPLES": rows, "COLUMNS": width}
        return Launch(sums.sum_samples, -(-self.columns // width), scalars, constants, 4)


@lru_cache(maxsize=1024)
def gather_plan(samples: int, channels: int, space: int, groups: int, *kinds: torch.device | torch.dtype) -> Launch:
    """Return the launch that adds `numbers` to the layer's window; `kinds` are the device and dtypes of its tensors."""
    rows, width = tiling.over_samples(samples, channels)
    constants = {"SAMPLES": rows, "CHANNELS": width, "FLAGS": min(tiling.next_power(groups), 4096 // rows)}
    return Launch(sums.gather_window, -(-channels // width), (samples, channels, space, groups), constants, 4)
