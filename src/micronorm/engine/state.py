"""The state of a run between two steps: model, optimizer, loss scale, statistics, random states and position.

Optimizer state is stored by the names of parameters, not by their numbers. So a run can be resumed replicated if it was
sharded before, or the other way round, on any number of ranks. Learning rates and other options come from the settings.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from micronorm.commit.handle import merge_states
from micronorm.commit.snapshot import RandomState
from micronorm.convert.checkpoint import load_state
from micronorm.engine.checkpoint import digest
from micronorm.engine.parallel import ShardedRanks
from micronorm.engine.settings import is_huge
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
    """Restore what `whole_state` returned, on every rank, however the model is distributed now.

    Raises:
        ValueError: the model's layers compute something else than those that were saved.
    """
    if not isinstance(step.parallel, ShardedRanks):
        load_state(step.model, state["model"])
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


def _wrong_type(value: Any, wanted: Any, name: str) -> str | None:
    """Return what is wrong with a field, or None. The schema bounds the depth, so that cycles do not matter."""
    kind = type(wanted) if isinstance(wanted, (dict, list)) else wanted
    if not isinstance(value, kind):
        kinds = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
        return f"{name} must be {kinds}, got {type(value).__name__}"
    if is_huge(value):
        return f"{name} is an integer of more than 64 bits"
    inner: list[tuple[str, Any, Any]] = []
    if isinstance(wanted, list):
        inner = [(f"{name}[{k}]", item, wanted[0]) for k, item in enumerate(value)]
    elif isinstance(wanted, dict):
        lacking = [key for key in wanted if key is not str and key not in value]
        if lacking:
            return f"{name} lacks {lacking[0]!r}".lstrip()
        keys = value if str in wanted else wanted
        if not all(isinstance(key, str) for key in keys):
            return f"the keys of {name} must be strings"
        inner = [(f"{name}.{key}".lstrip("."), value[key], wanted.get(key, wanted.get(str))) for key in keys]
    return next(filter(None, (_wrong_type(item, kind, where) for where, item, kind in inner)), None)


def check_state(step: Step, state: Mapping[str, Any], *, ema: bool) -> str | None:
    """Return why a checkpoint cannot be restored, or None. Nothing is changed.

    Raises:
        ValueError: it is of another model.
    """
    fields = {**_FIELDS, "ema": {str: Tensor}} if ema else _FIELDS
    fault = _wrong_type(state, fields, "")
    if fault is not None:
        return fault
    if state["position"]["step"] != state["step"]:
        return "position.step is not the step in its name"
    for name in ("windows", "buffers", "random"):
        if not state[name]:
            return f"{name} must hold an entry per rank, got none"
    for name in ("model", "ema") if ema else ("model",):
        _check_model(step, state[name])
    parameters, buffers = dict(step.model.named_parameters()), dict(step.model.named_buffers())
    for name, values in state["optimizer"].items():
        if name not in parameters:
            return f"the optimizer holds {name!r}, which the model lacks"
        for key in _LIKE_PARAMETERS & values.keys():
            if not isinstance(values[key], Tensor) or values[key].shape != parameters[name].shape:
                return f"optimizer.{name}.{key} does not have the shape of its parameter"
    for name, value in (item for rank in state["buffers"] for item in rank.items()):
        if name not in buffers or buffers[name].shape != value.shape:
            return f"the buffer {name!r} is one that the model lacks or has in another shape"
    windows = step.transaction.state_dict()
    if any(_shapes(found) != _shapes(windows) for found in state["windows"]):
        return "the windows are not those of the model's layers"
    return _check_random(state["random"], step.device)


_LIKE_PARAMETERS = {"momentum_buffer", "exp_avg", "exp_avg_sq"}


def _shapes(windows: Mapping[str, Any]) -> list[Any]:
    return [*(value.shape for name in ("sums", "lost") for value in windows[name]), len(windows["forwards"])]


def _check_random(states: Sequence[Any], device: torch.device) -> str | None:
    kept = RandomState.get(device)
    try:
        for state in states:
            RandomState.set(state, device)
    except Exception as error:  # torch, numpy and Python raise errors of many types
        return f"the random states cannot be restored ({type(error).__name__})"
    finally:
        RandomState.set(kept, device)
    return None


def _check_model(step: Step, state: Mapping[str, Any]) -> None:
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
            f"the checkpoint is of another model: {len(different)} tensors differ, at first {name!r}, {was} there and "
            f"{now} here; build the model it was made with, or start a new run"
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
    buffers = dict(step.model.named_buffers())
    with torch.no_grad():
        for name, value in {**state["buffers"][0], **(state["buffers"][rank:] or [{}])[0]}.items():
            buffers[name].copy_(value)
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
