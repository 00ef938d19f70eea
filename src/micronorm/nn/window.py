"""The window of a layer: sums over everything the layer has seen since its last commit.

A BatchChannelNorm in "step" mode normalizes with estimates μ̂ and σ̂² that stay constant during an optimizer step. Each
training forward adds to the layer's window: the number of elements n, s₁ = Σ(x − μ̂) and s₂ = Σ(x − μ̂)². When the
optimizer steps, `micronorm.commit` moves the estimates by these sums and empties the window. That is a commit.

The sums are measured from a copy of μ̂ that belongs to the window. So μ̂ itself may change in mid-window, for example
when a loop swaps averaged weights in to evaluate and swaps the old ones back.

How a forward fills the window is in `micronorm.nn.gather`.
"""

import itertools
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from micronorm.ops.bcn import Sums, shift_sums
from micronorm.ops.moments import Moments, wide_dtype

MAX_FORWARDS = 1024
MAX_SCANNED = 64
"""How many forwards a "sequential" layer remembers, for activation checkpointing to repeat."""


@dataclass
class Control:
    """What `mn.attach` sets on a layer. It is not copied, pickled or saved with the layer."""

    name: str = ""
    rate: float | str | None = None
    """Replaces the layer's own rate, unless None."""
    learning_rate: Callable[[], float | Tensor] | None = None
    """Returns the learning rate of the parameter group that holds the layer's weight. A tensor may exceed [0, 1]."""
    optimizers: tuple[weakref.ref, ...] = ()
    """The only optimizers that commit the layer; if empty, any optimizer that holds its weight does."""
    process_group: object = ...
    """The ranks to merge with: `...` for those of DDP, else all; None for this rank alone."""
    max_forwards: int = MAX_FORWARDS
    handle: weakref.ref | None = None
    """The handle that can detach this control; None for the default control, which nothing detaches."""


@dataclass
class ScannedForward:
    """One forward of a "sequential" layer: the moments of its input and the estimates it was normalized with."""

    data: Moments
    estimates: Moments


@dataclass(eq=False)
class Window:
    """The sums of one layer since its last commit, and the facts about the layer that a commit needs.

    The tensors are plain attributes and not buffers: DDP broadcasts buffers, and weight averaging averages them. They
    keep their addresses from commit to commit.

    - `sums`: n, s₁ and s₂ in one vector of 1 + 2C numbers. `split` has the three as views.
    - `reference`: the C numbers that s₁ and s₂ are measured from, μ̂ as the last commit left it.
    - `lost`: two counts on the device, of the samples and the windows left out because they were not finite.
      `lost_windows` is the second as a view.
    - `device_rate`: the rate of the next commit, on the device. A captured commit reads it at each replay.
    - `counter`: two integers on the CPU: the forwards gathered since the last commit, and the number under which
      `find_window` finds this object. `counts` are the same as an array, which is faster to index.
    """

    channels: int
    device: torch.device
    owner: weakref.ref
    """The layer."""
    controls: list[Control] = field(default_factory=lambda: [Control()])
    """The default, and the control of each `mn.attach` that was not detached. The last one is in force."""
    scanned: deque[ScannedForward] = field(default_factory=lambda: deque(maxlen=MAX_SCANNED))
    """The latest forwards of a "sequential" layer since the last commit."""
    agreements: dict[tuple, int] = field(default_factory=dict)
    """For a process group and a list of layers, how often all ranks were found to share it."""
    data_parallel: weakref.ref | None = None
    """The DistributedDataParallel module around the layer."""
    searched: bool = False
    """Whether such a module was searched for."""
    paused: int = 0
    """How many `Handle.paused` blocks are open."""
    reported_losses: int = 0
    """How many of the lost samples and windows a warning was given for."""
    warned: bool = False
    """Whether the warning about small groups was given."""
    ran: bool = False
    """Whether the layer ran in training mode since the last optimizer step; "step" layers and frozen ones set it."""
    idle_steps: int = 0
    """How many optimizer steps followed such forwards without a commit; see `micronorm.commit.idle`."""
    checked: bool = False
    """Whether the search for the reason of idle steps was made."""
    written_rate: float | None = None
    """The number that `device_rate` was last filled with; None after it was copied from a tensor."""

    def __post_init__(self) -> None:
        wide = wide_dtype(self.device)
        self.sums = torch.zeros(1 + 2 * self.channels, dtype=wide, device=self.device)
        self.reference = torch.zeros(self.channels, dtype=wide, device=self.device)
        self.lost = torch.zeros(2, dtype=torch.int64, device=self.device)
        self.device_rate = torch.zeros(1, dtype=wide, device=self.device)
        self._make_views()
        with _lock:
            number = next(_numbers)
            self.counter = torch.tensor([0, number], dtype=torch.int64, device="cpu")
            # Tracers make layers of fake tensors, which cannot be arrays.
            self.counts: Any = self.counter.numpy() if type(self.counter) is Tensor else self.counter
            _live[number] = weakref.ref(self)
            while _first_window_callbacks:
                _first_window_callbacks.pop()()

    @property
    def control(self) -> Control:
        """Return the control in force."""
        return self.controls[-1]

    @property
    def layer(self) -> Any:
        """Return the layer this window belongs to."""
        layer = self.owner()
        assert layer is not None, "a window does not outlive its layer"
        return layer

    @property
    def rate(self) -> float | str:
        """Return the rate in force: the one given to `mn.attach`, else the layer's own."""
        return self.layer.rate if self.control.rate is None else self.control.rate

    def known_rate(self) -> float | Tensor:
        """Return the rate for code that needs it before an optimizer steps. A tensor may exceed [0, 1].

        Raises:
            RuntimeError: the rate is "lr", and no optimizer is attached to read it from.
        """
        if isinstance(self.rate, float):
            return self.rate
        if self.control.learning_rate is None:
            raise RuntimeError(
                f'{self.describe()} has rate="lr", and a "sequential" forward and `handle.commit()` need the learning '
                "rate before an optimizer steps. Call mn.attach(model, optimizer), or give a float rate in [0, 1]: to "
                "the layer, or as mn.attach(model, rate=...)."
            )
        return self.control.learning_rate()

    @property
    def forwards(self) -> int:
        """Return how many forwards were gathered since the last commit."""
        return int(self.counts[0])

    def clear(self) -> None:
        """Empty the window. The tensors keep their addresses."""
        self.sums.zero_()
        self.follow_estimates()
        self.restart()

    @torch.no_grad()
    def follow_estimates(self) -> None:
        """Measure from the layer's present μ̂, if the window is empty. A window with sums keeps its reference."""
        mean = self.layer.running_mean.to(self.reference.dtype)
        self.reference.copy_(torch.where(self.sums[0] > 0, self.reference, mean))

    @torch.no_grad()
    def sums_around(self, mean: Tensor) -> Sums:
        """Return n, s₁ and s₂ measured from `mean`."""
        return shift_sums(self.split, self.reference - mean)

    def absorb(self, other: "Window") -> None:
        """Add the sums of another window over the same estimates, and empty it."""
        self.sums.add_(torch.cat(other.sums_around(self.reference)))
        self.counter[0] += other.forwards
        other.clear()

    def restart(self) -> None:
        """Set the number of forwards to zero and forget the forwards that checkpointing might repeat."""
        self.counts[0] = 0
        self.scanned.clear()
        self.ran, self.idle_steps = False, 0

    def attach(self, control: Control) -> None:
        """Make `control` the current one. Remove the controls that precede one whose handle was deleted."""
        gone = [i for i, c in enumerate(self.controls) if c.handle is not None and c.handle() is None]
        self.controls[:] = [*self.controls[max(gone, default=0) :], control]

    def host_state(self) -> tuple[Any, ...]:
        """Return what is not in `sums`, `reference` and `lost`, for `restore_host_state`."""
        return self.forwards, list(self.scanned), self.reported_losses, self.warned

    def restore_host_state(self, state: tuple[Any, ...]) -> None:
        """Put back what `host_state` returned."""
        self.counter[0], scanned, self.reported_losses, self.warned = state
        self.scanned.clear()
        self.scanned.extend(scanned)

    def to(self, device: torch.device) -> None:
        """Move to the layer's new device."""
        if device == self.device:
            return
        from_meta = self.device.type == "meta"
        self.device = device
        for name in ("sums", "reference", "lost", "device_rate"):
            old: Tensor = getattr(self, name)
            dtype = wide_dtype(device) if old.is_floating_point() else old.dtype
            new = torch.zeros_like(old, dtype=dtype, device=device) if from_meta else old.to(device, dtype)
            setattr(self, name, new)
        self._make_views()

    def _make_views(self) -> None:
        self.split = Sums(*self.sums.split([1, self.channels, self.channels]))
        self.lost_windows = self.lost[1:]

    def describe(self) -> str:
        """Return the layer's name for messages."""
        return self.control.name or f"a BatchChannelNorm over {self.channels} channels"

    def warn_of_losses(self, name: str = "") -> None:
        """Warn, with the layer's name, if anything was left out since the last warning. Reads the device."""
        if self.device.type == "meta":
            return
        samples, windows = self.lost.tolist()
        if samples + windows > self.reported_losses:
            self.reported_losses = samples + windows
            warnings.warn(
                f"{self.control.name or name or self.describe()}: {samples} samples and {windows} windows were left "
                "out of the estimates because their statistics were not finite. Look for overflow in the activations "
                "(fp16 range, learning rate).",
                RuntimeWarning,
                stacklevel=3,
            )


_numbers = itertools.count()
# Not a WeakValueDictionary, which may lose an entry at any moment: here only holders of the lock change the table.
_live: dict[int, weakref.ref[Window]] = {}
_lock = threading.Lock()
_first_window_callbacks: list[Callable[[], None]] = []


def live_windows() -> list[tuple[Window, Any]]:
    """Return the windows of all layers alive in this process, oldest first, each with its layer.

    Threads may make and delete layers at any time. Those in the list stay alive as long as the list does.
    """
    with _lock:
        windows = [(number, ref()) for number, ref in _live.items()]
        for number, window in windows:
            if window is None:
                del _live[number]
    found = [(window, window.owner()) for _, window in windows if window is not None]
    return [(window, layer) for window, layer in found if layer is not None]


def find_window(counter: Tensor) -> Window | None:
    """Return the window with this `counter`; None if its layer is gone, as in an exported graph."""
    ref = _live.get(int(counter.numpy()[1]))
    return None if ref is None else ref()


def call_at_first_window(callback: Callable[[], None]) -> None:
    """Call `callback` once, when the first window of this process is made.

    `micronorm.commit` installs its optimizer hooks this way, because layers must not import it. The first window is
    made with the first layer, before any forward: a rank without samples must commit with the others.
    """
    _first_window_callbacks.append(callback)


def list_names(names: Sequence[str]) -> str:
    """Return up to four names for a message, and how many more there are."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
