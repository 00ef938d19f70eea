"""The size of a micro-batch: a performance knob that depends on the memory.

A step of n samples is computed in pieces of at most `size` samples. If a network's statistics bind samples together (a
BatchNorm over 64 images), pieces are whole multiples of that unit; otherwise the unit is one.
"""

import gc

import torch

_ALLOCATION_FAILURES = (
    "out of memory",
    "can't allocate memory",  # torch's CPU allocator
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether this error means that memory ran out, on any device and in any library."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _ALLOCATION_FAILURES)


def release_memory() -> None:
    """Free the memory of a failed attempt. Call it outside the `except` block, whose traceback keeps tensors alive."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


class MicroBatch:
    """The present size of a micro-batch.

    Args:
        size: the size to start with; rounded down to a multiple of `unit`.
        unit: samples that must stay together.
        largest: the most samples that a micro-batch may hold.

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
        """Return the slices in which `samples` samples are computed; the last one may be shorter."""
        return [slice(start, min(start + self.size, samples)) for start in range(0, samples, self.size)]

    def halve(self) -> int:
        """Halve the size and return it; raise MemoryError if it is one unit already."""
        if self.size == self.unit:
            together = "" if self.unit == 1 else f" (this network's statistics are over {self.unit} samples)"
            raise MemoryError(
                f"out of memory with {self.unit} sample{'s' * (self.unit > 1)} per micro-batch, the least "
                f"possible{together}; use smaller inputs, --dtype bfloat16 or activation checkpointing"
            )
        self.size = max(self.unit, self.size // 2 // self.unit * self.unit)
        return self.size
