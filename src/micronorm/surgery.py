"""Find and replace modules in a model; a module registered under several names stays one module."""

from collections.abc import Mapping
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
