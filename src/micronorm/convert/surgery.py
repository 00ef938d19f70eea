"""Find and replace modules of a model, and methods of single modules.

A module that is registered under several names stays one module.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch import nn

# Every attribute in which torch.nn.Module keeps hooks. The dictionaries themselves move, so that handles stay valid.
_HOOKS = tuple(name for name in vars(nn.Module()) if "hook" in name)


WRAPPERS = {
    "DistributedDataParallel": "pass model.module",
    "DataParallel": "pass model.module",
    "FullyShardedDataParallel": "pass the model before it is sharded",
    "FSDPModule": "pass the model before it is sharded",
    "OptimizedModule": "pass model._orig_mod, the model before torch.compile",
    "ScriptModule": "pass the model that it was scripted from",
}
"""What to do with a model inside a wrapper, by the class name of the wrapper."""


def refuse_wrappers(model: Any, advice: Mapping[str, str] = WRAPPERS) -> None:
    """Raise if `model` is not a module, or is wrapped in DDP, FSDP and the like, which keep their own references."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"a torch.nn.Module is needed, got {type(model).__name__}")
    for name, module in model.named_modules():
        kind = next((base.__name__ for base in type(module).__mro__ if base.__name__ in advice), None)
        if kind is not None:
            raise ValueError(f"{f'{name!r}' if name else 'the model'} is wrapped in {kind}: {advice[kind]}")


def names_of(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Return every module of the model with all the names it is registered under, in the order of registration."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    return names


def replace(model: nn.Module, replacements: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """Put each new module in every place of the old one. Return the model, or the new module that replaces it.

    The places are submodules and attributes: a forward may call a layer through a list of its own, or a bound method.
    """

    def renewed(value: Any) -> Any:
        if isinstance(value, MethodType) and isinstance(value.__self__, nn.Module) and value.__self__ in replacements:
            return getattr(replacements[value.__self__], value.__name__, value)
        if type(value) is tuple:
            return tuple(map(renewed, value))
        return replacements.get(value, value) if isinstance(value, nn.Module) else value

    for parent in list(model.modules()):
        holders: list[Any] = [vars(parent), *vars(parent).values()]
        for holder in (h for h in holders if isinstance(h, dict | list)):
            for key, value in list(holder.items() if isinstance(holder, dict) else enumerate(holder)):
                if (new := renewed(value)) is not value:
                    holder[key] = new
    return replacements.get(model, model)


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Run the block in eval mode, then give each module its own mode back."""
    training = {module: module.training for module in model.modules()}
    try:
        model.eval()
        yield
    finally:
        for module, flag in training.items():
            module.training = flag


def adopt_hooks(new: nn.Module, old: nn.Module) -> None:
    """Give `new` the hooks of `old`; existing handles still remove them."""
    for name in _HOOKS:
        if name in old.__dict__:
            new.__dict__[name] = old.__dict__[name]


# --- methods of single modules ---------------------------------------------------------------------------------------

_MARK = "_micronorm_replaces"


def set_forward(module: nn.Module, forward: Callable[..., Any], method: str = "forward") -> None:
    """Replace a method of this one module by `forward(self, …)`, which must compute what the class's method does.

    A deep copy has the replacement too, bound to the copy. An unpickled module and a replica of nn.DataParallel run the
    class's own method: pickle finds methods by their name, and a replica would keep the original's layers.
    """
    original = getattr(type(module), method)

    @functools.wraps(original)
    def replacement(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    setattr(replacement, _MARK, method)
    module.__dict__[method] = MethodType(replacement, module)
    module.__dict__["_replicate_for_data_parallel"] = MethodType(_replicate_for_data_parallel, module)


def restore_forwards(model: nn.Module) -> int:
    """Remove every method that `set_forward` put on a module of the model; return how many modules had one."""
    count = sum(map(is_rewritten, model.modules()))
    for module in model.modules():
        _restore_methods(module)
    return count


def is_rewritten(module: nn.Module) -> bool:
    """Return whether the module runs a method that `set_forward` gave it."""
    return any(hasattr(value, _MARK) for value in vars(module).values())


def has_own_forward(module: nn.Module) -> bool:
    """Return whether someone other than `set_forward` has put a forward on this one module."""
    forward = vars(module).get("forward")
    return forward is not None and not hasattr(forward, _MARK) and not _is_of_class(module, "forward", forward)


def _is_of_class(module: nn.Module, name: str, value: Any) -> bool:
    """Return whether a value in the module's dictionary is its class's own method: what unpickling leaves there."""
    return isinstance(value, MethodType) and value.__func__ is getattr(type(module), name, None)


def _restore_methods(module: nn.Module) -> None:
    for name, value in list(vars(module).items()):
        if hasattr(value, _MARK) or _is_of_class(module, name, value):
            del module.__dict__[name]
    module.__dict__.pop("_replicate_for_data_parallel", None)


def _replicate_for_data_parallel(self: Any) -> nn.Module:
    replica = type(self)._replicate_for_data_parallel(self)
    _restore_methods(replica)
    return replica
