"""The state of a run between two steps: model, optimizer, loss scale, statistics, random states and position.

Optimizer state is stored by the names of parameters, not by their numbers. So a run can be resumed replicated if it was
sharded before, or the other way round, on any number of ranks. Learning rates and the like come from the settings.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from micronorm.commit.snapshot import RandomState
from micronorm.commit.transaction import merge_states
from micronorm.engine.checkpoint import digest
from micronorm.engine.parallel import ShardedRanks
from micronorm.engine.step import Step


def whole_state(step: Step) -> dict[str, Any]:
    """Return model and optimizer with every tensor whole. Collective if the model is sharded; rank 0 gets it."""
    if not isinstance(step.parallel, ShardedRanks):
        return {"model": step.model.state_dict(), "optimizer": _optimizer_state(step)}
    # This module of torch takes a second to import, and few runs need it.
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model, optimizer = get_state_dict(step.model, step.optimizer, options=options)
    return {"model": model, "optimizer": optimizer.get("state", {})}


def load_whole_state(step: Step, state: dict[str, Any]) -> None:
    """Restore what `whole_state` returned, on every rank, however the model is distributed now."""
    if not isinstance(step.parallel, ShardedRanks):
        groups = step.optimizer.state_dict()["param_groups"]
        step.optimizer.load_state_dict({"state": _by_number(step, state["optimizer"]), "param_groups": groups})
        step.model.load_state_dict(state["model"])
        return
    from torch.distributed.checkpoint import state_dict as torch_state

    options = torch_state.StateDictOptions(full_state_dict=True)
    # The optimizer first: torch takes a step with a learning rate of zero to create its state.
    groups = torch_state.get_optimizer_state_dict(step.model, step.optimizer)["param_groups"]  # on every rank
    optimizer: Any = {"state": state["optimizer"], "param_groups": groups}
    torch_state.set_optimizer_state_dict(step.model, step.optimizer, optimizer, options=options)
    torch_state.set_model_state_dict(step.model, state["model"], options=options)


def check_model(step: Step, state: Mapping[str, Any], *, source: str) -> None:
    """Raise ValueError if the tensors of a state dict do not have the names and shapes of the model's."""
    mine, theirs = (
        {name: value.shape for name, value in found.items() if isinstance(value, Tensor)}
        for found in (step.model.state_dict(), state)
    )
    different = sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
    if different:
        name, shapes = different[0], (theirs.get(different[0]), mine.get(different[0]))
        was, now = ("absent" if shape is None else str(tuple(shape)) for shape in shapes)
        raise ValueError(
            f"{source} is of another model: {len(different)} tensors differ, at first {name!r}, {was} there and {now} "
            "here; build the model it was made with, or start a new run"
        )


def rest_of_state(step: Step, *, done: int, seed: int) -> dict[str, Any]:
    """Return everything but model and optimizer: every rank's windows, buffers and random states. Collective."""
    return {
        "position": {"step": done, "seed": seed},
        "scaler": step.scaler.state_dict(),
        "windows": step.parallel.gather(step.transaction.state_dict()),
        "buffers": step.parallel.gather(_own_buffers(step)),
        "random": step.parallel.gather(RandomState.get(step.device)),
    }


def load_rest_of_state(step: Step, state: dict[str, Any]) -> int:
    """Restore what `rest_of_state` returned, and return the number of completed steps."""
    rank, world = step.parallel.rank, step.parallel.world
    step.scaler.load_state_dict(state["scaler"])
    # Other ranks take over the windows of ranks that no longer exist: the commit merges them all.
    step.transaction.load_state_dict(merge_states(state["windows"], state["windows"][rank::world]))
    _load_buffers(step.model, {**state["buffers"][0], **(state["buffers"][rank:] or [{}])[0]})
    # New ranks keep their own seed, so that no two ranks draw the same numbers. What training draws is keyed by sample;
    # if a model's randomness cannot be keyed, the run has said so.
    if rank < len(state["random"]):
        RandomState.set(state["random"][rank], step.device)
    return state["position"]["step"]


def _own_buffers(step: Step) -> dict[str, Tensor]:
    """Return this rank's buffers that rank 0's state dict does not hold: non-persistent or different ones. Collective.

    The running statistics of ranks are not merged, and a layer such as BatchRenorm computes with them.
    """
    mine = {name: buffer.detach().cpu() for name, buffer in step.model.named_buffers()}
    first = step.parallel.broadcast(mine)
    if step.parallel.rank == 0:
        known = step.model.state_dict().keys()
        return {name: buffer.clone() for name, buffer in mine.items() if name not in known}
    return {name: buffer for name, buffer in mine.items() if digest(buffer) != digest(first[name])}


@torch.no_grad()
def _load_buffers(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    here = dict(model.named_buffers())
    different = sorted(name for name, value in values.items() if name not in here or here[name].shape != value.shape)
    if different:
        raise ValueError(
            f"the checkpoint has {len(different)} buffers that the model lacks or has in another shape, at first "
            f"{different[0]!r}; build the model the checkpoint was made with"
        )
    for name, value in values.items():
        here[name].copy_(value)


def _names(step: Step) -> list[str]:
    """Return the names of parameters in the order of their numbers in the optimizer's state dict."""
    names = {id(parameter): name for name, parameter in step.model.named_parameters()}
    return [names[id(parameter)] for group in step.optimizer.param_groups for parameter in group["params"]]


def _optimizer_state(step: Step) -> dict[str, Any]:
    names = _names(step)
    return {names[i]: values for i, values in step.optimizer.state_dict()["state"].items()}


def _by_number(step: Step, state: dict[str, Any]) -> dict[int, Any]:
    numbers = {name: i for i, name in enumerate(_names(step))}
    unknown = [name for name in state if name not in numbers]
    if unknown:
        raise ValueError(
            f"the checkpoint's optimizer holds {len(unknown)} parameters the model lacks, at first {unknown[0]!r}; "
            "build the model the checkpoint was made with"
        )
    return {numbers[name]: values for name, values in state.items()}
