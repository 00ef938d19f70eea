"""The window: what a layer has seen since the last commit, and the bookkeeping every training forward does.

All decisions that may change from one forward to the next (is this a recomputation, is gathering paused, what is the
rate, how many forwards were gathered) are taken when the forward *runs*, inside a custom operator. A compiled graph
calls that operator as it stands, so none of these values is traced, guarded on, or able to cause a recompilation.
"""

import itertools
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from micronorm.nn.checkpointing import inside_backward
from micronorm.ops.bcn import Sums, batch_statistics, gather_fused, move_by_batch, scan, window_sums
from micronorm.ops.moments import Moments, bounded, wide_dtype

MAX_FORWARDS = 1024
BATCH_MOMENTUM = 0.1  # nn.BatchNorm2d's, for "batch" layers whose rate is not a number

# Below this many elements per group, normalizing over the group leaves little but signs.
_FEW_ELEMENTS = 4
# How many passes a "sequential" layer remembers for activation checkpointing to repeat.
_REMEMBERED = 64

on_first_use: list[Callable[[], None]] = []
"""Called once, when the first layer is made: `commit` puts the installation of its optimizer hooks here.

Not at the first forward: a rank that sees no sample must commit with the others.
"""


class Rate(Protocol):
    """Supplies a layer's rate at the moment it is asked."""

    def __call__(self) -> float | Tensor: ...


@dataclass
class Control:
    """What `attach` may set on a layer. Never copied, pickled or saved with it."""

    name: str = ""
    rate: float | str | None = None
    """Overrides the layer's own rate."""
    learning_rate: Rate | None = None
    """The lr of the parameter group holding the layer's weight."""
    optimizers: tuple[weakref.ref, ...] = ()
    """If any are named, only these commit the layer."""
    process_group: object = ...
    """The ranks to merge with: `...` for all of them, None for this one alone."""
    max_forwards: int = MAX_FORWARDS


@dataclass
class _Pass:
    """One forward of a "sequential" layer: its inputs' moments and the estimates it was normalized with."""

    data: Moments
    estimates: Moments


@dataclass(eq=False)
class Window:
    """The sums of one layer. Plain tensors, no buffers: DDP broadcasts buffers and EMA averages them.

    `sums` holds (n, s₁, s₂) in one vector of 1 + 2C numbers, so that a commit moves it in one piece. `lost` counts, on
    the device, the forwards and the windows left out because they were not finite. `ticket` stays on the CPU and holds
    the forwards gathered since the last commit and the number under which the operators find this object.
    """

    channels: int
    device: torch.device
    owner: weakref.ref
    """The layer: its rate, its weight (which tells the optimizer that commits it) and its buffers."""
    controls: list[Control] = field(default_factory=lambda: [Control()])
    """The default and what each `attach` that is still in force laid over it; the last one counts."""
    passes: deque[_Pass] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    agreed: set[tuple] = field(default_factory=set)
    """The layer lists, by process group, that all ranks were found to share."""
    paused: int = 0
    """How many `Handle.paused` blocks are open."""
    lost_seen: int = 0
    warned: bool = False
    host_rate: float | None = None
    """What `device_rate` was last filled with."""

    def __post_init__(self) -> None:
        wide = wide_dtype(self.device)
        self.sums = torch.zeros(1 + 2 * self.channels, dtype=wide, device=self.device)
        self.lost = torch.zeros(2, dtype=torch.int64, device=self.device)
        # The rate of the next commit, on the device: a captured commit reads it when it is replayed.
        self.device_rate = torch.zeros((), dtype=wide, device=self.device)
        number = next(_numbers)
        self.ticket = torch.tensor([0, number], dtype=torch.int64, device="cpu")
        _live[number] = self
        while on_first_use:
            on_first_use.pop()()

    @cached_property
    def counts(self) -> memoryview:
        """The numbers of the ticket; not before they are asked for, as a layer may be made of fake tensors."""
        return _counts(self.ticket)

    def __getstate__(self) -> dict[str, Any]:
        """What a copy has: its `counts` are those of its own ticket."""
        return {name: value for name, value in self.__dict__.items() if name != "counts"}

    @property
    def control(self) -> Control:
        """The control in force."""
        return self.controls[-1]

    @property
    def split(self) -> Sums:
        """Views of the count, the first and the second sums."""
        return Sums(*self.sums.split([1, self.channels, self.channels]))

    @property
    def forwards(self) -> int:
        """How many forwards were gathered since the last commit."""
        return int(self.ticket[0])

    def clear(self) -> None:
        """Forget what was gathered; the tensors stay where they are."""
        self.sums.zero_()
        self.restart()

    def restart(self) -> None:
        """Begin counting forwards anew and drop the passes that checkpointing might have repeated."""
        self.ticket[0] = 0
        self.passes.clear()

    def to(self, device: torch.device) -> None:
        """Follow the layer to another device."""
        if device == self.device:
            return
        from_meta = self.device.type == "meta"
        self.device = device
        for name in ("sums", "lost", "device_rate"):
            old: Tensor = getattr(self, name)
            dtype = wide_dtype(device) if old.is_floating_point() else old.dtype
            setattr(
                self, name, torch.zeros_like(old, dtype=dtype, device=device) if from_meta else old.to(device, dtype)
            )

    @property
    def layer(self) -> Any:
        """The layer this window belongs to."""
        layer = self.owner()
        assert layer is not None, "a window does not outlive its layer"
        return layer

    @property
    def rate(self) -> float | str:
        """The rate in force: the one given to `attach`, else the layer's own."""
        return self.layer.rate if self.control.rate is None else self.control.rate

    def describe(self) -> str:
        """The layer's name in messages."""
        return self.control.name or f"a BatchChannelNorm over {self.channels} channels"

    def warn_of_losses(self, name: str = "") -> None:
        """Warn, with the layer's name, of contributions dropped since the last warning. Reads the device."""
        if self.device.type == "meta":
            return
        forwards, windows = self.lost.tolist()
        if forwards + windows > self.lost_seen:
            self.lost_seen = forwards + windows
            warnings.warn(
                f"{self.control.name or name or self.describe()}: {forwards} forwards and {windows} windows were left "
                "out of the estimates because their statistics were not finite. Look for overflow in the activations "
                "(fp16 range, learning rate).",
                RuntimeWarning,
                stacklevel=3,
            )


def live_windows() -> list[Window]:
    """The windows of all layers alive in this process, oldest first."""
    return [window for _, window in sorted(_live.items()) if window.owner() is not None]


_numbers = itertools.count()
_live: weakref.WeakValueDictionary[int, Window] = weakref.WeakValueDictionary()


def _counts(ticket: Tensor) -> memoryview:
    """A ticket's numbers: a tensor's element costs microseconds, and small layers are made of those."""
    return ticket.numpy().data


def _open(ticket: Tensor, *, group_elements: int) -> Window | None:
    """The window that a ticket stands for, or None if this forward must leave no trace."""
    window = _live.get(_counts(ticket)[1])
    # None in an exported graph whose layer is gone: there is nobody to gather for.
    return None if window is None or not _is_open(window, group_elements) else window


def _is_open(window: Window, group_elements: int) -> bool:
    """Whether a forward of groups of so many elements leaves a trace; warns of few elements."""
    if group_elements < _FEW_ELEMENTS and not window.warned:
        window.warned = True
        warnings.warn(
            f"{window.describe()} normalizes over groups of {group_elements} elements: little but their signs is left. "
            "Use fewer groups where maps are this small.",
            UserWarning,
            stacklevel=2,
        )
    return not (window.paused or inside_backward())


def _count_forward(window: Window, counts: memoryview) -> None:
    forwards = counts[0]
    if forwards >= window.control.max_forwards:
        raise RuntimeError(
            f"{window.describe()} has gathered {forwards} training forwards without a commit: its estimates do "
            "not move. A torch.optim optimizer that holds the layer's weight commits when it steps; for any other loop "
            "keep handle = mn.attach(model, rate=...) and call handle.commit() after each update. Forwards that do not "
            "train belong after model.eval(), or into `with handle.paused():` where they need train mode. A layer that "
            "no optimizer holds is frozen by layer.requires_grad_(False). If a step really takes more forwards, raise "
            "the limit: mn.attach(model, max_forwards=...)."
        )
    counts[0] = forwards + 1


def gather(
    mean: Tensor,
    var: Tensor,
    around: Tensor,
    elements: int,
    group_elements: int,
    sums: Tensor,
    lost: Tensor,
    ticket: Tensor,
) -> None:
    """Add one forward to the window, unless its sums are not finite."""
    window = _open(ticket, group_elements=group_elements)
    if window is None:
        return
    _count_forward(window, _counts(ticket))
    contribution = torch.cat(window_sums(Moments(mean, var), elements=elements, around=around))
    finite = contribution.isfinite().all()
    sums.add_(torch.where(finite, contribution, 0.0))
    lost[0].add_(finite.logical_not())


def gather_numbers(
    numbers: Tensor,
    around: Tensor,
    samples: int,
    channels: int,
    elements: int,
    groups: int,
    sums: Tensor,
    lost: Tensor,
    ticket: Tensor,
) -> None:
    """`gather` from what the kernels of a forward left, by one more kernel."""
    window = _open(ticket, group_elements=elements * (channels // groups))
    if window is not None:
        _count_forward(window, _counts(ticket))
        gather_fused(numbers, around, sums, lost, (samples, channels, elements), groups)


def gather_own(window: Window, numbers: Tensor, around: Tensor, sizes: tuple[int, int, int], groups: int) -> None:
    """`gather_numbers` of N×C×S elements by the layer whose window it is, which eager code need not look for."""
    if torch.compiler.is_compiling():
        torch.ops.micronorm.gather_numbers(numbers, around, *sizes, groups, window.sums, window.lost, window.ticket)
    elif _is_open(window, sizes[2] * (sizes[1] // groups)):
        _count_forward(window, window.counts)
        gather_fused(numbers, around, window.sums, window.lost, sizes, groups)


def sequential_estimates(
    mean: Tensor,
    var: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    micro_batch: int,
    group_elements: int,
    lost: Tensor,
    ticket: Tensor,
) -> tuple[Tensor, Tensor]:
    """The estimates each sample of a "sequential" forward is normalized with; moves the running ones."""
    data = bounded(Moments(mean, var), running_var.dtype)
    window = _open(ticket, group_elements=group_elements)
    if window is None:
        source = _live.get(_counts(ticket)[1])
        if source is not None and inside_backward() and not source.paused:
            again = _repeated(source, data)
            return again.mean.clone(), again.var.clone()
        rows = mean.shape[0]
        return (
            running_mean.to(mean.dtype).expand(rows, -1).clone(),
            running_var.to(var.dtype).expand(rows, -1).clone(),
        )
    rate = _rate(window)
    per_sample, last = scan(Moments(running_mean, running_var), data, rate=rate, micro_batch=micro_batch)
    _store(last, running_mean, running_var, lost)
    window.passes.append(_Pass(data, per_sample))
    ticket[0] += 1
    return per_sample.mean.clone(), per_sample.var.clone()


def track_batch(
    mean: Tensor,
    var: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    elements: int,
    group_elements: int,
    lost: Tensor,
    ticket: Tensor,
) -> None:
    """Move the running statistics of a "batch" layer by one forward."""
    window = _open(ticket, group_elements=group_elements)
    if window is None:
        return
    momentum = window.rate if isinstance(window.rate, float) else BATCH_MOMENTUM
    batch = Moments(*(s.squeeze(0) for s in batch_statistics(bounded(Moments(mean, var), running_var.dtype))))
    total = elements * mean.shape[0]
    moved = move_by_batch(Moments(running_mean, running_var), batch, elements=total, momentum=momentum)
    _store(moved, running_mean, running_var, lost)
    ticket[0] += 1


def _rate(window: Window) -> float | Tensor:
    """The rate a "sequential" forward moves by; it is needed before any step, so the optimizer must be known."""
    if isinstance(window.rate, float):
        return window.rate
    if window.control.learning_rate is None:
        raise RuntimeError(
            f'{window.describe()} is in "sequential" mode with rate="lr": its forward needs the learning rate before '
            "the optimizer steps. Call mn.attach(model, optimizer), or give the layer a float rate in [0, 1]."
        )
    return window.control.learning_rate()


def _store(moved: Moments, running_mean: Tensor, running_var: Tensor, lost: Tensor) -> None:
    """Write both estimates, or neither where any number is not finite in the buffers' dtype."""
    mean, var = moved.mean.to(running_mean.dtype), moved.var.to(running_var.dtype)
    finite = mean.isfinite().all() & var.isfinite().all()
    running_mean.copy_(torch.where(finite, mean, running_mean))
    running_var.copy_(torch.where(finite, var, running_var))
    lost[0].add_(finite.logical_not())


def _repeated(window: Window, data: Moments) -> Moments:
    """The estimates of the earlier pass that this recomputation repeats."""
    alike = [p for p in window.passes if all(map(torch.equal, p.data, data))]
    if len(alike) != 1:
        raise RuntimeError(
            f'{window.describe()} is in "sequential" mode and a checkpointed forward is being recomputed, but '
            f"{len(alike) or 'none'} of the passes since the last step (the latest {_REMEMBERED} are kept) match it: "
            "the estimates to repeat are unknown. Run the backward before the optimizer steps, with distinct inputs, "
            'or use statistics="step".'
        )
    return alike[0].estimates


# The same functions as operators, for graphs that are being compiled. Eager code calls them directly.
torch.library.custom_op("micronorm::gather", gather, mutates_args=("sums", "lost", "ticket")).register_fake(
    lambda *args: None
)
torch.library.custom_op(
    "micronorm::gather_numbers", gather_numbers, mutates_args=("sums", "lost", "ticket")
).register_fake(lambda *args: None)
torch.library.custom_op(
    "micronorm::track_batch", track_batch, mutates_args=("running_mean", "running_var", "lost", "ticket")
).register_fake(lambda *args: None)
torch.library.custom_op(
    "micronorm::sequential_estimates",
    sequential_estimates,
    mutates_args=("running_mean", "running_var", "lost", "ticket"),
).register_fake(lambda mean, var, *args: (torch.empty_like(mean), torch.empty_like(var)))


def run(function: Callable, *args: object) -> Any:
    """Call one of the functions above; as the operator of its name where a graph is being compiled."""
    if torch.compiler.is_compiling():
        return getattr(torch.ops.micronorm, function.__name__)(*args)
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            "a BatchChannelNorm in training mode keeps statistics of what it sees, and transforms of torch.func (grad, "
            'vmap, jvp, ...) let no layer keep anything; call model.eval() for them, which in "step" mode changes no '
            "output, or freeze the layer by layer.requires_grad_(False)"
        )
    return function(*args)
