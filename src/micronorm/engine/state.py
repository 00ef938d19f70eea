"""What a run must keep to go on: model, optimizer, loss scale, statistics, random states, and its place.

Parameters are known by name here, not by their number in the optimizer: so a run may go on with its model replicated
where it was sharded before, or the other way round, on any number of ranks. Learning rates and the like are not part of
it: the settings say them.
"""

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from micronorm.commit.snapshot import RandomState
from micronorm.commit.transaction import merge_states
from micronorm.engine.checkpoint import digest
from micronorm.engine.parallel import Sharded
from micronorm.engine.step import Step
from micronorm.records import PARTIAL, write_atomically


def whole_state(step: Step) -> dict[str, Any]:
    """Model and optimizer with every tensor whole. Collective where the model is sharded; rank 0 gets it."""
    if isinstance(step.parallel, Sharded):
        from micronorm.engine import sharded  # here: torch's DCP takes a second to import, and few runs need it

        return sharded.gather_whole(step)
    return {"model": step.model.state_dict(), "optimizer": _by_name(step.model, step.optimizer.state_dict())}


def load_whole_state(step: Step, state: dict[str, Any]) -> None:
    """Put back what `whole_state` gave, on every rank, however the model is shared out now."""
    if isinstance(step.parallel, Sharded):
        from micronorm.engine import sharded

        sharded.scatter_whole(step, state)
    else:
        groups = step.optimizer.state_dict()["param_groups"]
        step.optimizer.load_state_dict({"state": _by_number(step.model, state["optimizer"]), "param_groups": groups})
        step.model.load_state_dict(state["model"])


def check_model(step: Step, theirs: Mapping[str, torch.Size], *, source: str) -> None:
    """Refuse a checkpoint of another model, before anything is read from it.

    Args:
        step: holds the model.
        theirs: the shapes of the checkpoint's tensors, by name.
        source: the checkpoint, for the message.
    """
    mine = {name: value.shape for name, value in step.model.state_dict().items() if isinstance(value, Tensor)}
    different = sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
    if different:
        name, shapes = different[0], (theirs.get(different[0]), mine.get(different[0]))
        was, now = ("absent" if shape is None else str(tuple(shape)) for shape in shapes)
        raise ValueError(
            f"{source} is of another model: {len(different)} tensors differ, at first {name!r}, {was} there and {now} "
            "here; build the model it was made with, or begin a new run"
        )


def rest_of_state(step: Step, *, done: int, seed: int) -> dict[str, Any]:
    """Everything but model and optimizer. Collective: it holds every rank's windows, buffers and random states."""
    return {
        "position": {"step": done, "seed": seed},
        "scaler": step.scaler.state_dict(),
        "windows": step.parallel.gather(step.transaction.state_dict()),
        "buffers": step.parallel.gather(_own_buffers(step)),
        "random": step.parallel.gather(RandomState.get(step.device)),
    }


def load_rest_of_state(step: Step, state: dict[str, Any]) -> int:
    """Put back what `rest_of_state` gave; the number of steps done."""
    rank, world = step.parallel.rank, step.parallel.world
    step.scaler.load_state_dict(state["scaler"])
    # What ranks that are gone had gathered, others take over: the commit merges them all.
    step.transaction.load_state_dict(merge_states(state["windows"], state["windows"][rank::world]))
    _load_buffers(step.model, {**state["buffers"][0], **(state["buffers"][rank:] or [{}])[0]})
    # Ranks that were not there before begin with their seed, so as not to draw what another one does. All that training
    # draws is keyed by sample, and where a model's randomness could not be, the run has said so.
    if rank < len(state["random"]):
        RandomState.set(state["random"][rank], step.device)
    return state["position"]["step"]


def _own_buffers(step: Step) -> dict[str, Tensor]:
    """This rank's buffers that rank 0's state dict does not hold: those that are not persistent or differ from its.

    Nothing merges the running statistics of ranks, and a layer such as BatchRenorm computes with them. Collective.
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


def save_weights(step: Step, path: Path) -> None:
    """Write the model as safetensors, atomically. Collective; tensors that share memory are written once."""
    import safetensors.torch

    if isinstance(step.parallel, Sharded):
        tensors: Any = whole_state(step)["model"]
        save = lambda target: safetensors.torch.save_file(tensors, target)  # noqa: E731
    else:
        save = lambda target: safetensors.torch.save_model(step.model, target)  # noqa: E731
    if step.parallel.rank == 0:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{PARTIAL}")
        save(str(temporary))
        # Not renamed: safetensors neither waits for the disk nor lets anyone but the owner read.
        write_atomically(path, temporary.read_bytes())
        temporary.unlink()


def _names(model: nn.Module) -> list[str]:
    """The parameters' names in the order `model.parameters()` gives them to an optimizer."""
    return [name for name, _ in model.named_parameters()]


def _by_name(model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    names = _names(model)
    return {names[i]: values for i, values in state["state"].items()}


def _by_number(model: nn.Module, state: dict[str, Any]) -> dict[int, Any]:
    numbers = {name: i for i, name in enumerate(_names(model))}
    unknown = [name for name in state if name not in numbers]
    if unknown:
        raise ValueError(
            f"the checkpoint's optimizer holds {len(unknown)} parameters the model lacks, at first {unknown[0]!r}; "
            "build the model the checkpoint was made with"
        )
    return {numbers[name]: values for name, values in state.items()}
