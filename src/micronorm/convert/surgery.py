"""Find and replace modules in a model; a module registered under several names stays one module."""

from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

from torch import nn

# Everything torch.nn.Module keeps hooks in. The dictionaries themselves move, so that handles given out stay valid.
_HOOKS = (
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks",
    "_forward_hooks_always_called",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_is_full_backward_hook",
    "_load_state_dict_post_hooks",
    "_load_state_dict_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
)


def refuse_wrappers(model: Any, advice: Mapping[str, str]) -> None:
    """Refuse what is no module, and models in DDP, FSDP and the like, which hold on to the modules they were given.

    Args:
        model: what the user gave.
        advice: by the name of a wrapper's class, what to do instead; also which classes are wrappers.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"a torch.nn.Module is needed, got {type(model).__name__}")
    for name, module in model.named_modules():
        kind = next((base.__name__ for base in type(module).__mro__ if base.__name__ in advice), None)
        if kind is not None:
            raise ValueError(f"{f'{name!r}' if name else 'the model'} is wrapped in {kind}: {advice[kind]}")


def names_of(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Every module of the model with all the names it is registered under, in the order of registration."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    return names


def replace(model: nn.Module, replacements: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """Put each new module in every place of the old one; returns the model, which is new where its root was replaced.

    Example:
        >>> act = nn.ReLU()
        >>> replace(nn.Sequential(act, act), {act: nn.SiLU()})
        Sequential(
          (0): SiLU()
          (1): SiLU()
        )
    """
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is not None and child in replacements:
                parent._modules[name] = replacements[child]
    return replacements.get(model, model)


def adopt_hooks(new: nn.Module, old: nn.Module) -> None:
    """Give `new` the hooks of `old`; handles that were handed out for them still remove them."""
    for name in _HOOKS:
        if name in old.__dict__:
            new.__dict__[name] = old.__dict__[name]


# --- forwards of single modules --------------------------------------------------------------------------------------

_MARK = "_micronorm_original"


def set_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Give this one module another forward; `forward(self, …)` must compute what the class's own does.

    A copy of the module has it too, bound to the copy. A pickle, and a replica of nn.DataParallel, computes with the
    class's own: a function made at run time cannot be pickled, and a replica would find it bound to the original.
    """
    setattr(forward, _MARK, type(module).forward)
    module.__dict__["forward"] = MethodType(forward, module)
    module.__dict__["_replicate_for_data_parallel"] = MethodType(_replicate_for_data_parallel, module)


def restore_forwards(model: nn.Module) -> int:
    """Take the forwards that `set_forward` gave from all modules of the model; returns how many there were.

    Example:
        >>> model = nn.Sequential(nn.ReLU())
        >>> set_forward(model, lambda self, x: self[0](x))
        >>> restore_forwards(model), "forward" in vars(model)
        (1, False)
    """
    count = 0
    for module in model.modules():
        if "forward" in vars(module) and not foreign_forward(module):
            count += hasattr(vars(module)["forward"], _MARK)
            _forget(module)
    return count


def is_rewritten(module: nn.Module) -> bool:
    """Whether the module runs a forward that `set_forward` gave it.

    Example:
        >>> is_rewritten(nn.ReLU())
        False
    """
    return hasattr(vars(module).get("forward"), _MARK)


def foreign_forward(module: nn.Module) -> bool:
    """Whether somebody else has put a forward on this one module.

    A pickled `set_forward` comes back as the class's own forward, bound to the module: that is nobody's.
    """
    forward = vars(module).get("forward")
    if forward is None:
        return False
    own = isinstance(forward, MethodType) and forward.__self__ is module and forward.__func__ is type(module).forward
    return not (own or hasattr(forward, _MARK))


def _forget(module: nn.Module) -> None:
    module.__dict__.pop("forward", None)
    module.__dict__.pop("_replicate_for_data_parallel", None)


def _replicate_for_data_parallel(self: Any) -> nn.Module:
    replica = type(self)._replicate_for_data_parallel(self)
    _forget(replica)
    return replica
