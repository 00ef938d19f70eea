"""The state of a run between two steps: model, optimizer, loss scale, statistics, random states and position.

Optimizer state is stored by the names of parameters, not by their numbers. So a run can be resumed replicated if it was
sharded before, or the other way round, on any number of ranks. Learning rates and other options come from the settings.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from micronorm.commit.handle import merge_states
from micronorm.commit.snapshot import RandomState
from micronorm.convert.checkpoint import load_state
from micronorm.engine.checkpoint import digest
from micronorm.engine.parallel import ShardedRanks
from micronorm.engine.step import Step


class OtherRun(ValueError):
    """A checkpoint or a run directory that belongs to another run. The message begins after its name."""


def run_state(step: Step, *, done: int, seed: int) -> dict[str, Any]:
    """Return the state after `done` steps: model and optimizer, and what each rank has of its own. Collective."""
    return whole_state(step) | {
        "position": {"step": done, "seed": seed},
        "scaler": step.scaler.state_dict(),
        "windows": step.parallel.gather(step.transaction.state_dict()),
        "buffers": step.parallel.gather(_own_buffers(step)),
        "random": step.parallel.gather(RandomState.get(step.device)),
    }


def load_run_state(step: Step, state: dict[str, Any]) -> None:
    """Restore what `run_state` returned, on every rank, however many there are and however they share the model.

    Raises:
        OtherRun: the model is not the one that was saved, or its layers compute something else.
    """
    rank, world = step.parallel.rank, step.parallel.world
    _load_whole_state(step, state)
    step.scaler.load_state_dict(state["scaler"])
    # Other ranks take over the windows of ranks that no longer exist: the commit merges them all.
    step.transaction.load_state_dict(merge_states(state["windows"], state["windows"][rank::world]))
    buffers = dict(step.model.named_buffers())
    with torch.no_grad():
        for name, value in {**state["buffers"][0], **(state["buffers"][rank:] or [{}])[0]}.items():
            buffers[name].copy_(value)
    # New ranks keep their own seed, so that no two ranks draw the same numbers. What training draws is keyed by sample;
    # if a model's randomness cannot be keyed, the run has said so.
    if rank < len(state["random"]):
        RandomState.set(state["random"][rank], step.device)


def whole_state(step: Step) -> dict[str, Any]:
    """Return model and optimizer with every tensor whole. Collective if the model is sharded; rank 0 gets it."""
    if not isinstance(step.parallel, ShardedRanks):
        return {"model": step.model.state_dict(), "optimizer": _optimizer_state(step)}
    # This module of torch takes a second to import, and few runs need it.
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model, optimizer = get_state_dict(step.model, step.optimizer, options=options)
    return {"model": model, "optimizer": optimizer.get("state", {})}


def _load_whole_state(step: Step, state: dict[str, Any]) -> None:
    if not isinstance(step.parallel, ShardedRanks):
        try:
            load_state(step.model, state["model"])
        except ValueError as error:
            raise OtherRun(f"is of another model: {error}") from error
        groups = step.optimizer.state_dict()["param_groups"]
        step.optimizer.load_state_dict({"state": _by_number(step, state["optimizer"]), "param_groups": groups})
        return
    from torch.distributed.checkpoint import state_dict as torch_state

    options = torch_state.StateDictOptions(full_state_dict=True)
    # The optimizer first: torch takes a step with a learning rate of zero to create its state.
    groups = torch_state.get_optimizer_state_dict(step.model, step.optimizer)["param_groups"]  # on every rank
    optimizer: Any = {"state": state["optimizer"], "param_groups": groups}
    torch_state.set_optimizer_state_dict(step.model, step.optimizer, optimizer, options=options)
    torch_state.set_model_state_dict(step.model, state["model"], options=options)


_NUMBER = (int, float)
_FIELDS: Mapping[str, Any] = {
    "position": {"step": int, "seed": int},
    "micro_batch": int,
    "settings": dict,
    "figures": {str: _NUMBER},
    "epoch_sums": {str: _NUMBER},
    "scaler": {str: _NUMBER},
    "model": {str: object},
    "optimizer": {str: {str: (Tensor, *_NUMBER, type(None))}},
    "windows": [{"sums": [Tensor], "lost": [Tensor], "forwards": [int]}],
    "buffers": [{str: Tensor}],
    "random": [{"torch": Tensor, "cuda": (Tensor, type(None)), "numpy": list, "python": list}],
}
"""The types of a checkpoint's fields. {str: T} is a dictionary with any keys, [T] a list with any length."""

_LIKE_PARAMETERS = {"momentum_buffer", "exp_avg", "exp_avg_sq"}


def check_state(step: Step, state: Mapping[str, Any], *, ema: bool) -> None:
    """Raise ValueError if a checkpoint has a field of the wrong type, and OtherRun if it is of another model.

    `load_run_state` itself raises an error if anything else does not fit.
    """
    _check_type(state, {**_FIELDS, "ema": {str: Tensor}} if ema else _FIELDS, "")
    if state["position"]["step"] != state["step"]:
        raise ValueError("position.step is not the step in its name")
    for name in ("model", "ema") if ema else ("model",):
        _check_model(step, state[name])
    parameters = dict(step.model.named_parameters())
    buffers = dict(step.model.named_buffers())
    for name in (name for own in state["buffers"] for name in own if name not in buffers):
        raise ValueError(f"buffers has {name!r}, which is not a buffer of the model")
    for name, values in state["optimizer"].items():
        if name not in parameters:
            raise ValueError(f"optimizer has {name!r}, which is not a parameter of the model")
        for key in _LIKE_PARAMETERS & values.keys():  # torch does not compare the shapes
            if getattr(values[key], "shape", None) != parameters[name].shape:
                raise ValueError(f"optimizer.{name}.{key} does not have the shape of a parameter of the model")


def _check_type(value: Any, wanted: Any, name: str) -> None:
    """Raise ValueError if a field has the wrong type. The schema bounds the depth, so that cycles do not matter."""
    kind = type(wanted) if isinstance(wanted, (dict, list)) else wanted
    if not isinstance(value, kind):
        kinds = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
        raise ValueError(f"{name} must be {kinds}, got {type(value).__name__}")
    if isinstance(wanted, list):
        for k, item in enumerate(value):
            _check_type(item, wanted[0], f"{name}[{k}]")
    elif isinstance(wanted, dict):
        for key in value if str in wanted else wanted:
            if key not in value:
                raise ValueError(f"{name} lacks {key!r}".lstrip())
            if not isinstance(key, str):
                raise ValueError(f"the keys of {name} must be strings")
            _check_type(value[key], wanted.get(key, wanted.get(str)), f"{name}.{key}".lstrip("."))
    elif isinstance(value, int) and abs(value) >= 2**63:
        raise ValueError(f"{name} is an integer of more than 64 bits")


def _check_model(step: Step, state: Mapping[str, Any]) -> None:
    """Raise OtherRun if the tensors of a state dict do not have the names and shapes of the model's."""
    mine, theirs = (
        {name: value.shape for name, value in found.items() if isinstance(value, Tensor)}
        for found in (step.model.state_dict(), state)
    )
    different = sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
    if different:
        name, shapes = different[0], (theirs.get(different[0]), mine.get(different[0]))
        was, now = ("absent" if shape is None else str(tuple(shape)) for shape in shapes)
        raise OtherRun(
            f"is of another model: {len(different)} tensors differ, the first is {name!r}: {was} in the "
            f"checkpoint, {now} in the model; build the model it was made with, or start a new run"
        )


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


def _names(step: Step) -> list[str]:
    """Return the names of parameters in the order of their numbers in the optimizer's state dict."""
    names = {id(parameter): name for name, parameter in step.model.named_parameters()}
    return [names[id(parameter)] for group in step.optimizer.param_groups for parameter in group["params"]]


def _optimizer_state(step: Step) -> dict[str, Any]:
    names = _names(step)
    return {names[i]: values for i, values in step.optimizer.state_dict()["state"].items()}


def _by_number(step: Step, state: dict[str, Any]) -> dict[int, Any]:
    numbers = {name: i for i, name in enumerate(_names(step))}
    return {numbers[name]: values for name, values in state.items()}
