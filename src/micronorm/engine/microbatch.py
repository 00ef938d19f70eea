"""How large a micro-batch may be: a performance knob that memory turns.

A step of n samples is computed in pieces of at most `size` samples. Where the statistics of a network bind samples
together (a BatchNorm over 64 images), pieces are whole multiples of that unit; everywhere else the unit is one.
"""

import gc

import torch
from torch import nn

# Of the memory that is free for the run, how much the first guess may take: fragmentation, workspaces and larger images
# take the rest.
MARGIN = 0.85

_ALLOCATION_FAILURES = (
    "out of memory",
    "can't allocate memory",  # torch's CPU allocator
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this error says that memory ran out, on whichever device and in whichever library."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _ALLOCATION_FAILURES)


def release_memory() -> None:
    """Return what a failed attempt held; call it outside the `except` block, whose traceback keeps tensors alive."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


class MicroBatch:
    """The present size of a micro-batch.

    Args:
        size: what to begin with, at most; rounded down to a multiple of `unit`.
        unit: samples that must stay together.
        largest: samples that a micro-batch may hold at most.

    Example:
        >>> cut = MicroBatch(8)
        >>> cut.pieces(20)
        [slice(0, 8, None), slice(8, 16, None), slice(16, 20, None)]
        >>> cut.halve()
        4
    """

    def __init__(self, size: int, *, unit: int = 1, largest: int | None = None) -> None:
        if size < unit:
            raise ValueError(
                f"micro_batch must be at least {unit}, got {size}: this network's statistics are over {unit} samples, "
                "and a smaller micro-batch would change them"
            )
        if largest is not None:
            size = min(size, largest)
        self.unit = unit
        self.size = size // unit * unit

    def pieces(self, samples: int) -> list[slice]:
        """The slices that `samples` samples are computed in; the last one may be shorter."""
        return [slice(start, min(start + self.size, samples)) for start in range(0, samples, self.size)]

    def halve(self) -> int:
        """The next smaller size, which is then the present one.

        Raises:
            MemoryError: it is one unit already.
        """
        if self.size == self.unit:
            together = "" if self.unit == 1 else f" (this network's statistics are over {self.unit} samples)"
            raise MemoryError(
                f"out of memory with {self.unit} sample{'s' * (self.unit > 1)} per micro-batch, the least "
                f"possible{together}; use smaller inputs, --dtype bfloat16 or activation checkpointing"
            )
        self.size = max(self.unit, self.size // 2 // self.unit * self.unit)
        return self.size


class MemoryProbe:
    """Measures what one micro-batch takes on a GPU, and says how many samples fit."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.readings: list[tuple[int, int]] = []

    def begin(self) -> None:
        """Before a trial run."""
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)

    def end(self, samples: int) -> None:
        """After a trial run with so many samples."""
        torch.cuda.synchronize(self.device)
        self.readings.append((samples, torch.cuda.max_memory_allocated(self.device)))

    def fitting(self) -> int:
        """The samples that fit: peak memory is taken for a straight line through the two readings."""
        (few, low), (many, high) = self.readings
        slope = max((high - low) / (many - few), 1.0)
        free, _ = torch.cuda.mem_get_info(self.device)
        available = MARGIN * (free + torch.cuda.memory_reserved(self.device))
        return max(few, int((available - low) / slope) + few)


def describe_randomness(model: nn.Module, unkeyed: list[str]) -> str | None:
    """The sentence a run must say where its randomness cannot be keyed by sample; None where all of it is."""
    if not unkeyed:
        return None
    shown = ", ".join(unkeyed[:4]) + (f" and {len(unkeyed) - 4} more" if len(unkeyed) > 4 else "")
    return f"invariant in distribution only: {shown} of {type(model).__name__} draw from the global generator"
