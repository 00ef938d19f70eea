"""The ranks of a run: one process, replicas of the model (DDP), or shards of it (FSDP2).

The three classes have the same methods, so that a step is written once. Nothing is reduced before every rank has
reported that its micro-batches succeeded. Otherwise a rank that ran out of memory would never join the all-reduce, and
the other ranks would hang in it.
"""

import atexit
import contextlib
import gc
import io
import math
import os
import pickle
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


class Flags(NamedTuple):
    """How an attempt at a step went, and what should follow. A flag that one rank sets is set for all of them."""

    out_of_memory: bool = False
    failed: bool = False
    """Another error occurred, which is about to end the rank."""
    stop: bool = False
    """End the run after this step."""
    save: bool = False
    """Write a checkpoint after this step."""


NO_FLAGS = Flags()


class OneRank:
    """A single process."""

    rank, world = 0, 1

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def prepare(self, model: nn.Module) -> nn.Module:
        """Return the model as this rank computes with it."""
        self.model = model
        return model

    def share(self, samples: int, *, unit: int = 1) -> slice:
        """Return this rank's part of a step's samples. Shares differ by at most one unit, and no unit is cut.

        Rank 0 gets samples whenever there are any, because its running statistics are the ones that are saved.
        """
        units = math.ceil(samples / unit)
        first, last = (-(-rank * units // self.world) for rank in (self.rank, self.rank + 1))
        return slice(first * unit, min(last * unit, samples))

    def largest_share(self, samples: int, *, unit: int = 1) -> int:
        """Return the size of the largest share of a step, in whole units."""
        return math.ceil(math.ceil(samples / unit) / self.world) * unit

    def forward_count(self, samples: int, *, unit: int, size: int) -> int:
        """Return how many forward passes this rank makes for its share of a step."""
        share = self.share(samples, unit=unit)
        return math.ceil((share.stop - share.start) / size)

    def agree(self, flags: Flags) -> Flags:
        """Combine the flags of all ranks. Every rank calls it once per attempt."""
        return flags

    def total(self, sums: Tensor) -> Tensor:
        """Return the sum over ranks."""
        return sums

    def reduce_gradients(self) -> None:
        """Replace every rank's gradients by their mean over ranks."""

    @contextlib.contextmanager
    def accumulating(self, *, last: bool) -> Iterator[None]:
        """Wrap one micro-batch; `last` says whether it is the last of the step."""
        yield

    @contextlib.contextmanager
    def buffers_of_rank_0(self) -> Iterator[None]:
        """Give every rank the buffers of rank 0, which a checkpoint stores, within this block. Collective.

        Statistics that are never merged, such as a BatchNorm's, differ between ranks.
        """
        yield

    def local(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the parts of these tensors that are stored on this rank."""
        return list(tensors)

    def release_gathered_weights(self) -> None:
        """Make the next forward read the parameters anew, after they were written in place."""

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value."""
        return value

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, by rank: tensors, numbers, strings, None, and lists and dictionaries of these.

        Raises:
            TypeError: a value holds anything else.
        """
        return [value]

    def barrier(self) -> None:
        """Wait for every rank."""

    def close(self) -> None:
        """Close the process group if this object opened it."""


class _Group(OneRank):
    """What replicas and shards have in common: a process group that also exchanges CPU tensors."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.opened = not dist.is_initialized()
        if self.opened:
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=TIMEOUT)
            # DDP keeps the group in reference cycles. If Python frees the group only at its own end, the process may
            # abort: gloo's threads then release tensors without an interpreter.
            atexit.register(gc.collect)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    @override
    def agree(self, flags: Flags) -> Flags:
        numbers = torch.tensor(flags, dtype=torch.int32)
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
        return Flags(*map(bool, numbers.tolist()))

    @override
    def total(self, sums: Tensor) -> Tensor:
        dist.all_reduce(sums)
        return sums

    @override
    @contextlib.contextmanager
    def buffers_of_rank_0(self) -> Iterator[None]:
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
    def broadcast(self, value: Any) -> Any:
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    @override
    def gather(self, value: Any) -> list[Any]:
        file = io.BytesIO()
        torch.save(value, file)
        own = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        dist.all_gather(sizes, torch.tensor([len(own)]))
        longest = max(int(size) for size in sizes)
        received = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.world)]
        dist.all_gather(received, nn.functional.pad(own, (0, longest - len(own))))
        files = [io.BytesIO(data[: int(size)].numpy().tobytes()) for data, size in zip(received, sizes, strict=True)]
        try:  # weights_only: nothing that another rank sent is executed
            return [torch.load(file, map_location="cpu", weights_only=True) for file in files]
        except pickle.UnpicklingError as error:
            raise TypeError("ranks exchange tensors, numbers, strings, lists and dictionaries alone") from error

    @override
    def barrier(self) -> None:
        dist.barrier()

    @override
    def close(self) -> None:
        if self.opened and dist.is_initialized():
            dist.destroy_process_group()


class _ZeroLoss(nn.Module):
    """A forward pass that reaches every parameter and adds zero to its gradient, so that DDP reduces it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self) -> Tensor:
        """Return 0, with a gradient of zeros for every parameter that is trained."""
        zeros = [(parameter * 0).sum() for parameter in self.parameters() if parameter.requires_grad]
        return torch.stack([zero.double() for zero in zeros]).sum()


class ReplicatedRanks(_Group):
    """Every rank holds the whole model, and DistributedDataParallel averages the gradients.

    Micro-batches run without DDP, as under `no_sync`. When all ranks have agreed that theirs succeeded, one backward
    pass over zeros makes DDP reduce the accumulated gradients in its buckets. It uses only memory that DDP has
    allocated already. If DDP reduced in the backward of the last micro-batch, a failing rank would hang the others.
    """

    @override
    def prepare(self, model: nn.Module) -> nn.Module:
        self.model = model
        # DDP would overwrite the buffers of a rank with those of rank 0 before a commit has merged them.
        ids = [self.device] if self.device.type == "cuda" else None
        self.reducer = DistributedDataParallel(_ZeroLoss(model), broadcast_buffers=False, device_ids=ids)
        # DDP rebuilds its buckets after its first pass, and with three or more ranks the order of a sum depends on
        # them. The first step of a resumed run must round as it would have in the uninterrupted run.
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
            if not is_used:  # on no rank: an optimizer must not apply weight decay to it
                parameter.grad = None


class ShardedRanks(_Group):
    """Every rank holds a shard of parameters, gradients and optimizer state (FSDP2).

    Forward passes are collective here, so every rank makes the same number of them. A rank without samples computes one
    whose result is dropped. A rank that runs out of memory cannot inform the others in time: the run ends, and is
    resumed with half the micro-batch.
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
    def forward_count(self, samples: int, *, unit: int, size: int) -> int:
        return max(1, math.ceil(self.largest_share(samples, unit=unit) / size))

    @override
    @contextlib.contextmanager
    def accumulating(self, *, last: bool) -> Iterator[None]:
        self.model.set_requires_gradient_sync(last)
        yield

    @override
    def release_gathered_weights(self) -> None:
        # FSDP keeps the gathered parameters of the root module after a forward without backward.
        for module in self.model.modules():
            if hasattr(module, "reshard"):
                module.reshard()

    @override
    def local(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        from torch.distributed.tensor import DTensor

        return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def _blocks(model: nn.Module) -> list[nn.Module]:
    """Return the modules to shard one by one: composite children of sequences, where networks repeat their blocks."""
    found = []
    for module in model.modules():
        if isinstance(module, (nn.Sequential, nn.ModuleList)) and module is not model:
            found += [
                c for c in module.children() if next(c.children(), None) and next(c.parameters(), None) is not None
            ]
    return [block for block in found if not any(block is not other and block in other.modules() for other in found)]


def on_rank_0(parallel: OneRank, act: Callable[[], T]) -> T:
    """Call `act` on rank 0 and return its value, or raise its error, on every rank: none may wait for a dead one."""
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
    """Return the device of this rank: the GPU that torchrun assigns (LOCAL_RANK) if there are GPUs."""
    if device is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % max(torch.cuda.device_count(), 1))
    return device


def open_ranks(device: torch.device | None, mode: str) -> OneRank:
    """Join the ranks that torchrun started (RANK, WORLD_SIZE) or an open process group; otherwise be the only rank."""
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    device = own_device(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not (launched or dist.is_initialized()):
        return OneRank(device)
    return ReplicatedRanks(device) if mode == "ddp" else ShardedRanks(device)
