"""The ranks of a run: alone, each with a replica of the model, or each with a shard of it.

All three answer the same questions, so that a step is written once. Nothing is reduced before every rank has said that
its micro-batches came through: an all-reduce that one rank, out of memory, never joins would hang the others.
"""

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

TIMEOUT = timedelta(minutes=10)

T = TypeVar("T")


class Wishes(NamedTuple):
    """What a rank would like to happen after the step; all do it when one does."""

    stop: bool = False
    save: bool = False


NO_WISHES = Wishes()


class Verdict(NamedTuple):
    """How an attempt at a step went; what is true on one rank is true of all."""

    failed: bool
    """Memory ran out."""
    broken: bool
    """Another error was met, which is about to end the rank."""
    wishes: Wishes


class Alone:
    """One process."""

    rank, world = 0, 1

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def prepare(self, model: nn.Module) -> nn.Module:
        """The model as this rank computes with it."""
        self.model = model
        return model

    def share(self, samples: int, *, unit: int = 1) -> slice:
        """This rank's part of a step's samples: shares differ by one unit at most, and no unit is cut.

        Where there are samples rank 0 has some: its running statistics are those that are kept.
        """
        units = math.ceil(samples / unit)
        first, last = (-(-rank * units // self.world) for rank in (self.rank, self.rank + 1))
        return slice(first * unit, min(last * unit, samples))

    def largest_share(self, samples: int, *, unit: int = 1) -> int:
        """How many samples of a step the rank with the most of them takes, in whole units."""
        return math.ceil(math.ceil(samples / unit) / self.world) * unit

    def passes(self, samples: int, *, unit: int, size: int) -> int:
        """How many forwards this rank makes for its share of a step; no fewer where all ranks must make as many."""
        share = self.share(samples, unit=unit)
        return math.ceil((share.stop - share.start) / size)

    def agree(self, verdict: Verdict) -> Verdict:
        """The worst that any rank has to say. Every rank calls it once per attempt."""
        return verdict

    def total(self, sums: Tensor) -> Tensor:
        """The sum over ranks."""
        return sums

    def reduce_gradients(self) -> None:
        """Make every rank's gradients the mean over ranks."""

    @contextlib.contextmanager
    def accumulating(self, *, last: bool) -> Iterator[None]:
        """Around one micro-batch: whether gradients may stay where they are."""
        yield

    @contextlib.contextmanager
    def one_model(self) -> Iterator[None]:
        """Within this block every rank computes with rank 0's buffers, which are what a checkpoint keeps. Collective.

        Statistics that nothing merges, such as a BatchNorm's, are those of the samples that the rank has seen.
        """
        yield

    def local(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The parts of these tensors that lie on this rank."""
        return list(tensors)

    def smallest(self, number: int) -> int:
        """The smallest of the ranks' numbers."""
        return number

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value."""
        return value

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank."""
        return [value]

    def barrier(self) -> None:
        """Wait for every rank."""

    def close(self) -> None:
        """Leave the group, where this object opened it."""


class _Group(Alone):
    """What replicas and shards share: a process group with a CPU side for what is known on the host."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.opened = not dist.is_initialized()
        if self.opened:
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=TIMEOUT)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    @override
    def agree(self, verdict: Verdict) -> Verdict:
        flags = torch.tensor([verdict.failed, verdict.broken, *verdict.wishes], dtype=torch.int32)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        failed, broken, *wishes = map(bool, flags.tolist())
        return Verdict(failed, broken, Wishes(*wishes))

    @override
    def total(self, sums: Tensor) -> Tensor:
        dist.all_reduce(sums)
        return sums

    @override
    @contextlib.contextmanager
    def one_model(self) -> Iterator[None]:
        buffers = [buffer.detach() for buffer in self.model.buffers()]
        own = [buffer.clone() for buffer in buffers]
        for buffer in buffers:
            dist.broadcast(buffer, src=0)
        try:
            yield
        finally:
            for buffer, value in zip(buffers, own, strict=True):
                buffer.copy_(value)

    @override
    def smallest(self, number: int) -> int:
        tensor = torch.tensor(number)
        dist.all_reduce(tensor, op=dist.ReduceOp.MIN)
        return int(tensor)

    @override
    def broadcast(self, value: Any) -> Any:
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    @override
    def gather(self, value: Any) -> list[Any]:
        boxes: list[Any] = [None] * self.world
        dist.all_gather_object(boxes, value)
        return boxes

    @override
    def barrier(self) -> None:
        dist.barrier()

    @override
    def close(self) -> None:
        if self.opened and dist.is_initialized():
            dist.destroy_process_group()


class _Touch(nn.Module):
    """A forward that reaches every parameter and adds zero to its gradient: what DDP needs in order to reduce it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self) -> Tensor:
        """0, with a gradient of zeros for every parameter that is trained."""
        zeros = [(parameter * 0).sum() for parameter in self.parameters() if parameter.requires_grad]
        return torch.stack([zero.double() for zero in zeros]).sum()


class Replicated(_Group):
    """Every rank holds the whole model, and DistributedDataParallel averages the gradients.

    Micro-batches run without it, as under `no_sync`. When all ranks have agreed that theirs came through, one backward
    pass over zeros lets DDP reduce what was accumulated, in its buckets. That pass needs no memory that DDP has not
    taken already; reducing in the last micro-batch's own backward would hang the others where one rank fails there.
    """

    @override
    def prepare(self, model: nn.Module) -> nn.Module:
        self.model = model
        # Buffers belong to the ranks until a commit merges them: DDP would overwrite them with rank 0's.
        ids = [self.device] if self.device.type == "cuda" else None
        self.reducer = DistributedDataParallel(_Touch(model), broadcast_buffers=False, device_ids=ids)
        # DDP lays its buckets out anew after its first pass, and of three ranks on the order of a sum follows them: the
        # first step of a resumed run must not round otherwise than it did when the run went on.
        self.reducer().backward()
        model.zero_grad(set_to_none=True)
        return model

    @override
    def reduce_gradients(self) -> None:
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        used = torch.tensor([parameter.grad is not None for parameter in trained], dtype=torch.int32)
        dist.all_reduce(used, op=dist.ReduceOp.MAX)
        self.reducer().backward()
        for parameter, is_used in zip(trained, used.tolist(), strict=True):
            if not is_used:  # on no rank: as on one rank alone, an optimizer must not decay it
                parameter.grad = None


class Sharded(_Group):
    """Every rank holds a shard of parameters, gradients and optimizer state (FSDP2).

    Forwards are collective here, so every rank makes as many as the others: one without samples computes a pass that
    counts for nothing. For the same reason a rank that runs out of memory cannot tell the others in time: the run ends,
    and is resumed with half the micro-batch.
    """

    @override
    def prepare(self, model: nn.Module) -> nn.Module:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        if self.device.type == "cpu" and torch.__version__ < "2.7":
            raise ValueError(f"FSDP2 on a CPU needs torch 2.7, this is {torch.__version__}; use --parallel ddp")
        mesh = init_device_mesh(self.device.type, (self.world,))
        for block in _blocks(model):
            fully_shard(block, mesh=mesh)
        self.model: Any = fully_shard(model, mesh=mesh)
        return self.model

    @override
    def passes(self, samples: int, *, unit: int, size: int) -> int:
        return max(1, math.ceil(self.largest_share(samples, unit=unit) / size))

    @override
    @contextlib.contextmanager
    def accumulating(self, *, last: bool) -> Iterator[None]:
        self.model.set_requires_gradient_sync(last)
        yield

    @override
    def local(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        from torch.distributed.tensor import DTensor

        return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The units of sharding: the composite children of sequences, where a network keeps its repeated blocks."""
    found = []
    for module in model.modules():
        if isinstance(module, (nn.Sequential, nn.ModuleList)) and module is not model:
            found += [
                c for c in module.children() if next(c.children(), None) and next(c.parameters(), None) is not None
            ]
    return [block for block in found if not any(block is not other and block in other.modules() for other in found)]


def on_rank_0(parallel: Alone, act: Callable[[], T]) -> T:
    """What `act` gives on rank 0, on every rank; or its error, on every rank: none may wait for one that is gone."""
    value, error = None, None
    if parallel.rank == 0:
        try:
            value = act()
        except Exception as caught:
            error = caught
    value, error = parallel.broadcast((value, error))
    if error is not None:
        raise error
    return value  # type: ignore[return-value]


def own_device(device: torch.device | None) -> torch.device:
    """Where this rank computes: each on a GPU of its own, where torchrun says which (LOCAL_RANK)."""
    if device is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % max(torch.cuda.device_count(), 1))
    return device


def open_ranks(device: torch.device | None, mode: str) -> Alone:
    """The ranks torchrun started (it sets RANK and WORLD_SIZE), a group that is open already, or one process alone."""
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    device = own_device(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not (launched or dist.is_initialized()):
        return Alone(device)
    return Replicated(device) if mode == "ddp" else Sharded(device)
