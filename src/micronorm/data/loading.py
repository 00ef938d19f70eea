"""Samples in files, decoded by worker processes whose number does not change a batch."""

import signal
from collections.abc import Generator, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from micronorm.data.samples import check_indices
from micronorm.ops.keyed import sample_keys

_AHEAD = 2  # shares that each worker decodes in advance


class Order(NamedTuple):
    """A share, as it is sent to a worker."""

    seed: int
    epoch: int
    indices: list[int]

    @property
    def keys(self) -> Tensor:
        """Return one random key per sample, int64 N: a function of seed, epoch and index."""
        return sample_keys(torch.tensor(self.indices, dtype=torch.int64), seed=self.seed, epoch=self.epoch)


class Decoder(Protocol):
    """Reads samples from files. It is copied into the workers."""

    def __len__(self) -> int: ...

    def __getitem__(self, order: Order) -> tuple[Any, ...]:
        """Return the batch of a share. Runs in a worker, which sends bytes faster than floating numbers."""
        ...

    def finish(self, batch: Any) -> tuple[Any, ...]:
        """Return what `FileSamples.load` yields for a decoded batch. Runs in the training process."""
        ...


class FileSamples:
    """Samples that a decoder reads from files.

    A worker decodes whole shares, two in advance. The workers end when this object is deleted. torch's global random
    generator is not used.

    Args:
        decoder: reads the samples.
        workers: processes that decode; 0 decodes in this one. The batches do not depend on their number.
    """

    def __init__(self, decoder: Decoder, *, workers: int = 0) -> None:
        if workers < 0:
            raise ValueError(f"workers must not be negative, got {workers}")
        self._decoder, self._workers = decoder, workers
        self._idle: list[tuple[DataLoader, _Shares]] = []

    def __len__(self) -> int:
        return len(self._decoder)

    def load(self, shares: Iterable[tuple[int, Tensor]], *, seed: int) -> Iterator[tuple[Any, ...]]:
        """Yield one batch for each share (epoch, indices), in order."""
        # A loader and its workers serve one `load` at a time and are kept for the next; a concurrent one gets its own.
        # They must not be part of a reference cycle: the garbage collector would wait seconds for the workers to end.
        loader, queue = self._idle.pop() if self._idle else self._new_loader()
        queue.shares = orders = self._orders(shares, seed)
        try:
            for batch in loader:
                if isinstance(batch, ValueError):
                    raise ValueError(str(batch))
                yield self._decoder.finish(batch)
        except Exception as error:
            if not self._workers:
                raise
            # The frames of this traceback would hold the loader in a cycle.
            raise error.with_traceback(None)  # noqa: B904
        finally:
            orders.close()  # an unfinished generator would hold this object in a cycle
            self._idle.append((loader, queue))

    def _orders(self, shares: Iterable[tuple[int, Tensor]], seed: int) -> Generator[Order, None, None]:
        for epoch, indices in shares:
            check_indices(indices, len(self))
            yield Order(seed, epoch, indices.tolist())

    def _new_loader(self) -> tuple[DataLoader, "_Shares"]:
        queue = _Shares()
        loader = DataLoader(
            _Decoding(self._decoder),
            sampler=queue,
            batch_size=None,  # one item of the decoder is a batch
            num_workers=self._workers,
            prefetch_factor=_AHEAD if self._workers else None,
            persistent_workers=self._workers > 0,
            worker_init_fn=_ignore_interrupts,
            generator=torch.Generator(),  # otherwise the loader draws its workers' seeds from the global generator
        )
        return loader, queue


class _Decoding(Dataset[Any]):
    """Decodes batches. A worker returns the error of a broken file: a raised one would arrive with a traceback."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def __getitem__(self, order: Order) -> Any:
        try:
            return self._decoder[order]
        except ValueError as error:
            if get_worker_info() is None:
                raise
            return error


class _Shares(Sampler[Order]):
    """The shares of the present `load`, read one by one."""

    shares: Iterator[Order]

    def __iter__(self) -> Iterator[Order]:
        return self.shares


def _ignore_interrupts(worker: int) -> None:
    """Ignore Ctrl-C in a worker. It reaches all processes of a terminal; the training process decides when to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
