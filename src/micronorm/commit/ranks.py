"""Which ranks merge the statistics of a layer, and whether these ranks train the same model."""

import contextlib
import math
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from micronorm.commit.idle import find_objects
from micronorm.nn.window import Window, list_names
from micronorm.ops.private_api import foreach_norm
from micronorm.ops.runtime import capturing


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def find_data_parallel(windows: Sequence[Window]) -> None:
    """Note the DistributedDataParallel module around each layer. Search once, and again if that module was deleted."""
    if not _distributed() or all(w.searched and (w.data_parallel is None or w.data_parallel()) for w in windows):
        return
    around = {}
    for wrapper in find_objects(DistributedDataParallel):
        around.update((id(module), weakref.ref(wrapper)) for module in wrapper.modules())
    for window in windows:
        window.searched, window.data_parallel = True, around.get(id(window.layer))


def process_group(window: Window) -> Any:
    """Return the group to merge over, or None if this rank is alone.

    Raises:
        RuntimeError: inside `Join`, where ranks that have no samples left do not take part in commits.
    """
    group: Any = window.control.process_group
    if group is None or not _distributed():
        return None
    if group is ...:
        wrapper = None if window.data_parallel is None else window.data_parallel()
        group = dist.group.WORLD if wrapper is None else wrapper.process_group
        if wrapper is not None and wrapper._join_config.enable and dist.get_world_size(group) > 1:
            raise RuntimeError(
                f"{window.describe()} cannot merge its statistics inside torch.distributed.algorithms.Join: ranks that "
                "have run out of samples do not step. Leave Join and give such ranks empty batches, or call "
                "mn.attach(model, process_group=None) so that each rank keeps statistics of its own"
            )
    return group if dist.get_world_size(group) > 1 else None


def _names(windows: Sequence[Window]) -> str:
    return list_names([window.describe() for window in windows])


@contextlib.contextmanager
def _naming(windows: Sequence[Window]) -> Iterator[None]:
    """Name the layers if a collective fails, as it does at the timeout when a rank does not take part."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"merging the statistics of {_names(windows)} across ranks failed: all ranks of the group must step "
            "their optimizers equally often, also ranks without samples (or pass mn.attach(process_group=...))"
        ) from error


def all_reduce(flat: Tensor, group: Any, windows: Sequence[Window]) -> Tensor:
    """Sum a tensor over the ranks of the group, in place. The windows are for the message if that fails."""
    with _naming(windows):
        dist.all_reduce(flat, group=group)
    return flat


def agree(windows: Sequence[Window], group: Any) -> None:
    """Compare the ranks at the first two commits of a list of layers: the lists, and whether they train one model.

    Raises:
        RuntimeError: on every rank, if the ranks are about to merge different lists of layers.
    """
    mine = tuple((window.layer.statistics, window.channels) for window in windows)
    done = min(window.agreements.get((group, mine), 0) for window in windows)
    # Twice, because parameters are still equal after a first step at a learning rate of zero.
    if done >= 2 or (done and capturing(windows[0].device)):
        return
    everyone: list[Any] = [None] * dist.get_world_size(group)
    with _naming(windows):
        dist.all_gather_object(everyone, (mine, _fingerprint(windows)), group=group)
    if any(other != mine for other, _ in everyone):
        counts = ", ".join(f"rank {rank}: {len(other)} layers" for rank, (other, _) in enumerate(everyone))
        raise RuntimeError(
            f"ranks step with different lists of BatchChannelNorm layers ({counts}); here {_names(windows)}. Build the "
            "same model and the same optimizer groups on every rank, or give mn.attach a process_group."
        )
    prints = [numbers for _, numbers in everyone if numbers is not None]
    if len(prints) == len(everyone) and any(_differ(numbers, prints[0]) for numbers in prints):
        warnings.warn(
            f"the statistics of {_names(windows)} are merged over {len(everyone)} ranks, but the parameters of these "
            "layers differ between the ranks. If every rank trains a model of its own, call "
            "mn.attach(model, process_group=None). If several groups of ranks train a model each, pass the rank's "
            "group, or wrap the model in DistributedDataParallel with that group.",
            UserWarning,
            stacklevel=2,
        )
        done = 2  # warn once
    for window in windows:
        window.agreements[group, mine] = done + 1


def _fingerprint(windows: Sequence[Window]) -> list[float] | None:
    """Return the lengths of the layers' parameters; None if they need not be equal on all ranks or are sharded."""
    if any(window.control.process_group is not ... or window.data_parallel is not None for window in windows):
        return None
    parameters = [p for window in windows for p in window.layer.parameters(recurse=False)]
    sizes = {size for window in windows for size in (window.channels, window.layer.num_groups)}
    if any(type(p) is not torch.nn.Parameter or p.numel() not in sizes for p in parameters):
        return None
    return torch.stack([norm.double() for norm in foreach_norm(parameters)]).tolist()


def _differ(numbers: list[float], others: list[float]) -> bool:
    pairs = zip(numbers, others, strict=False)
    return len(numbers) != len(others) or any(not math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-12) for a, b in pairs)
