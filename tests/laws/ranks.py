"""What runs in the processes of `test_ranks`: one rank of a gloo group, and the launcher."""

import contextlib
import copy
import pickle
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.distributed.algorithms import Join
from torch.nn.parallel import DistributedDataParallel

from tests.networks import SAMPLES, pieces, samples
from tests.processes import forks


def launch(function: Callable, world: int, *args: Any, timeout: float = 60) -> list[Any]:
    """Run function(rank, world, *args) on `world` gloo ranks; what each returned, or the first error."""
    forks()
    with tempfile.TemporaryDirectory() as folder:
        # As bytes: tensors would arrive in shared memory, and every rank trains its own.
        given = (world, folder, timeout, function, pickle.dumps(args))
        mp.start_processes(_rank, args=given, nprocs=world, join=True, start_method="forkserver")
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(world)]


def _rank(rank: int, world: int, folder: str, timeout: float, function: Callable, args: bytes) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout))
    result = function(rank, world, *pickle.loads(args))
    torch.save(result, Path(folder) / f"{rank}.pt")
    if function is not never_steps:  # its group is broken, as it means to show
        dist.barrier()  # a rank that leaves early would close the others' connections
        dist.destroy_process_group()  # a thread of gloo's that runs at the exit would abort the process


def train_ddp(rank: int, world: int, scenarios: list[dict]) -> list[dict[str, torch.Tensor]]:
    """Each scenario: a network trained by DDP on this rank's share of every step's samples."""
    return [_train_ddp(rank, world, **scenario) for scenario in scenarios]


def _train_ddp(
    rank: int, world: int, *, model: Any, shares: list[list[int]], steps: int, sync_each: bool, broadcast: bool
) -> dict[str, torch.Tensor]:
    net = DistributedDataParallel(model, broadcast_buffers=broadcast)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    start = sum(sum(share) for share in shares[:rank])
    for k in range(steps):
        x, labels = samples(seed=k)
        optimizer.zero_grad()
        parts = pieces(shares[rank])
        for i, part in enumerate(parts):
            part = slice(start + part.start, start + part.stop)
            last = i == len(parts) - 1
            with contextlib.nullcontext() if sync_each or last else net.no_sync():
                # DDP averages gradients over ranks; the loss is the sum over all samples divided by their count.
                (F.cross_entropy(net(x[part]), labels[part], reduction="sum") * world / SAMPLES).backward()
        optimizer.step()
    return net.module.state_dict()


def sequential_average(rank: int, world: int, layer: Any) -> dict[str, torch.Tensor]:
    """A "sequential" layer on each rank's own samples; the step averages the estimates."""
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    torch.manual_seed(rank)
    layer(torch.randn(3, 4, 2, 2, dtype=torch.float64) + rank).sum().backward()
    own = {"mean": layer.running_mean.clone(), "var": layer.running_var.clone()}
    optimizer.step()
    return {**own, "merged_mean": layer.running_mean, "merged_var": layer.running_var}


def merge_cases(rank: int, world: int) -> dict[str, Any]:
    """The smaller laws of merging, in one process start."""
    import micronorm as mn

    results: dict[str, Any] = {}
    x = torch.full((1, 2, 2, 2), float(rank + 1))

    def layer() -> tuple[Any, Any]:
        made = mn.nn.BatchChannelNorm(2, 1, rate=1.0)
        return made, torch.optim.SGD(made.parameters(), lr=0.0)

    norm, optimizer = layer()  # only rank 1 sees samples
    if rank == 1:
        norm(x)
    optimizer.step()
    results["one rank saw samples"] = norm.running_mean

    for statistics in ("sequential", "batch"):  # the same of a layer that is warmed
        norm = mn.nn.BatchChannelNorm(2, 1, statistics=statistics, rate=1.0)
        norm.warm(4)
        optimizer = torch.optim.SGD(norm.parameters(), lr=0.0)
        if rank == 1:
            norm(x)
        optimizer.step()
        optimizer.step()  # nobody saw any
        results[f"{statistics} blend"] = norm.blend

    norm, optimizer = layer()
    mn.attach(norm, optimizer, process_group=None)
    norm(x)
    optimizer.step()
    results["no group"] = norm.running_mean

    norm, optimizer = layer()
    pair = dist.new_group([0, 1])
    alone = dist.new_group([2]) if world > 2 else None
    mn.attach(norm, optimizer, process_group=pair if rank < 2 else alone)
    norm(x)
    optimizer.step()
    results["group of two"] = norm.running_mean

    norm, _ = layer()  # a fused optimizer found inf on rank 0 alone
    optimizer: Any = torch.optim.SGD(norm.parameters(), lr=0.0, fused=True)
    norm(x)
    optimizer.found_inf = torch.tensor(float(rank == 0))
    optimizer.step()
    results["skipped on one rank"] = norm.running_mean.clone()
    del optimizer.found_inf
    optimizer.step()
    results["joined the next step"] = norm.running_mean

    from torch.distributed.optim import ZeroRedundancyOptimizer

    net = torch.nn.Sequential(*(mn.nn.BatchChannelNorm(2, 1, rate=1.0) for _ in range(world + 1)))
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.0)
    net[0](x)
    optimizer.step()
    results["zero redundancy"] = net[0].running_mean

    norm, optimizer = layer()  # rank 1 alone trains on with a copy
    for k in range(3):
        if k == 2 and rank == 1:
            norm, optimizer = copy.deepcopy((norm, optimizer))
        norm(x)
        optimizer.step()
    results["a copy on one rank"] = norm.running_mean

    net = torch.nn.Sequential(*(mn.nn.BatchChannelNorm(2, 1) for _ in range(rank + 1)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    try:
        optimizer.step()
        net(x)
        optimizer.step()
        results["different lists"] = ""
    except RuntimeError as error:
        results["different lists"] = str(error)
    return results


def group_cases(rank: int, world: int) -> dict[str, Any]:
    """Which ranks a model's statistics are merged over; rank r sees the constant r + 1."""
    import warnings

    import micronorm as mn

    results: dict[str, Any] = {}
    x = torch.full((1, 2, 2, 2), float(rank + 1))

    def layer(lr: float = 0.0) -> tuple[Any, Any]:
        made = mn.nn.BatchChannelNorm(2, 1, rate=1.0)
        return made, torch.optim.SGD(made.parameters(), lr=lr)

    def step(model: Any, optimizer: Any, images: torch.Tensor) -> str:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.zero_grad()
            (model(images) * torch.tensor([1.0, 3.0])[:, None, None]).sum().backward()
            optimizer.step()
        return " ".join(str(warning.message) for warning in caught)

    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    norm, optimizer = layer()
    wrapped = DistributedDataParallel(norm, process_group=pairs[rank // 2])
    results["DDP in pairs"] = (norm.running_mean.clone(), step(wrapped, optimizer, x), norm.running_mean)

    torch.manual_seed(rank)  # a model per rank: other samples, no averaged gradients
    norm, optimizer = layer(lr=0.1)
    results["own models"] = [step(norm, optimizer, torch.randn(3, 2, 4, 4)) for _ in range(3)]

    norm, optimizer = layer(lr=0.1)  # the same without averaged gradients, but with the same samples
    torch.manual_seed(0)
    results["replicas"] = [step(norm, optimizer, torch.randn(3, 2, 4, 4)) for _ in range(3)]

    norm, optimizer = layer()
    wrapped = DistributedDataParallel(norm)
    with Join([wrapped]):
        wrapped(x).sum().backward()
        try:
            optimizer.step()
            results["Join"] = ""
        except RuntimeError as error:
            results["Join"] = str(error)
    return results


def never_steps(rank: int, world: int, flag: str) -> str:
    """Rank 1 never steps: the others end in the group's timeout, whose message names the layers."""
    import micronorm as mn

    net = torch.nn.Sequential(mn.nn.BatchChannelNorm(2, 1, rate=1.0))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    mn.attach(net, optimizer)
    net(torch.randn(1, 2, 2, 2))
    message = ""
    if rank == 0:
        try:
            optimizer.step()
        except RuntimeError as error:
            message = str(error)
        Path(flag).touch()
    else:
        import time

        while not Path(flag).exists():
            time.sleep(0.05)
    return message


def fsdp_step(rank: int, world: int, model: Any) -> dict[str, Any]:
    """One step of a network sharded by FSDP2, the samples shared out 7 + 17."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world,))
    for block in (model.block1, model.block2):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, labels = samples()
    part = slice(0, 7) if rank == 0 else slice(7, SAMPLES)
    (F.cross_entropy(model(x[part]), labels[part], reduction="sum") * world / SAMPLES).backward()
    optimizer.step()
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=False))
