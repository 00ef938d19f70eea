"""Warn of layers whose estimates or parameters never change although their network is trained.

A layer that runs in training mode is idle at an optimizer step if that optimizer does not commit it. After the second
such step, search this process for an optimizer that could commit the layer. Without one, warn and give the reason.
"""

import gc
import warnings
from collections.abc import Iterable
from typing import Any, TypeVar

from torch import nn
from torch.optim import Optimizer

from micronorm.nn.bcn import BatchChannelNorm
from micronorm.nn.window import Window, list_names
from micronorm.ops.runtime import capturing

Kind = TypeVar("Kind")

_PATIENCE = 2
_TEACHER = (
    "A teacher or momentum encoder belongs in eval mode, and the loop must average its buffers together with its "
    "parameters"
)
_FROZEN = (
    "its weight does not require grad, so the layer gathers nothing, and its estimates are still (0, 1). " + _TEACHER
)
_PARTLY_HELD = (
    "an optimizer holds other parameters of the layer, but not its weight. Was the weight left out, or replaced after "
    "the optimizer was made? Build the optimizer from model.parameters()"
)
_NOT_HELD = (
    "no optimizer holds its weight. Was it left out, or replaced after the optimizer was made? Build the optimizer "
    "from model.parameters(), or call mn.attach(model, rate=...) and handle.commit() after each update. " + _TEACHER
)


def count_idle_steps(alive: Iterable[tuple[Window, BatchChannelNorm]], committed: set[int]) -> None:
    """Count this optimizer step for the layers that ran and were not committed, given by the ids of their windows."""
    late = []
    for window, layer in alive:
        if window.ran and id(window) not in committed:
            window.ran = False
            window.idle_steps += 1
            if window.idle_steps >= _PATIENCE and not window.checked and not capturing(window.device):
                window.checked = True
                late.append((window, layer))
    if late:
        _warn(late)


def warn_of_group_affine_left_out(layers: Iterable[tuple[Window, BatchChannelNorm]], optimizer: Optimizer) -> None:
    """Warn if an optimizer holds weight and bias of layers, and no optimizer in this process holds their group affine.

    This happens if a model is converted after its optimizer was made: conversion adds the group affine.
    """
    held = _held_parameters([optimizer])
    affected = [(window, layer) for window, layer in layers if _leaves_out_group_affine(layer, held)]
    if affected:
        elsewhere = _held_parameters(find_objects(Optimizer))
        affected = [(window, layer) for window, layer in affected if _leaves_out_group_affine(layer, held | elsewhere)]
    if affected:
        names = [_short_name(window, layer, k) for k, (window, layer) in enumerate(affected)]
        warnings.warn(
            f"{list_names(names)}: {type(optimizer).__name__} holds weight and bias, but no optimizer holds "
            "group_weight and group_bias, which mn.convert adds. They are not trained. Create the optimizer after the "
            "conversion.",
            UserWarning,
            stacklevel=2,
        )


def _leaves_out_group_affine(layer: BatchChannelNorm, held: set[int]) -> bool:
    """Return whether weight and bias are held, and the trainable group_weight and group_bias are not."""
    own, group = (layer.weight, layer.bias), (layer.group_weight, layer.group_bias)
    return all(id(p) in held for p in own) and all(p.requires_grad and id(p) not in held for p in group)


def _held_parameters(optimizers: Iterable[Optimizer]) -> set[int]:
    """Return the ids of the parameters that the optimizers hold."""
    return {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}


def _short_name(window: Window, layer: BatchChannelNorm, count: int) -> str:
    """Return the layer's name for a message that has `count` names. It shows four, and finding one takes a while."""
    found = _find_name(layer) if count < 4 and not window.control.name else ""
    return found or window.describe()


def _warn(late: list[tuple[Window, BatchChannelNorm]]) -> None:
    held = _held_parameters(find_objects(Optimizer))
    names: dict[str, list[str]] = {}
    for window, layer in late:
        reason = _reason(layer, held)
        if reason is not None:
            affected = names.setdefault(reason, [])
            affected.append(_short_name(window, layer, len(affected)))
    for reason, affected in names.items():
        warnings.warn(
            f"{list_names(affected)}: the running estimates do not move, although {_PATIENCE} optimizer steps followed "
            f"forwards in training mode: {reason}.",
            UserWarning,
            stacklevel=2,
        )


def _reason(layer: BatchChannelNorm, held: set[int]) -> str | None:
    """Return why no commit reaches the layer, or None if it is frozen on purpose or an optimizer may still step."""
    if not layer.is_trainable():
        untouched = not layer.running_mean.any() and bool((layer.running_var == 1).all())
        return _FROZEN if untouched else None
    if any(id(p) in held for p in layer.weight_parameters()):
        return None
    return _PARTLY_HELD if any(id(p) in held for p in layer.parameters()) else _NOT_HELD


# Find objects by the references to them, not by gc.get_objects. Its list also refers to tuples that other threads are
# building, and building a tuple fails if anything else refers to it.


def find_objects(kind: type[Kind]) -> list[Kind]:
    """Return the instances of a class with few subclasses. Takes about 0.1 s, so call it rarely."""
    classes: list[type] = [kind]
    for found in classes:  # grows meanwhile
        classes.extend(found.__subclasses__())
    # isinstance would run the code of proxies
    return [found for found in gc.get_referrers(*classes) if issubclass(type(found), kind)]


def _find_name(layer: nn.Module) -> str:
    """Return the layer's name in the largest module that contains it, or "" if it stands alone."""
    names: list[str] = []
    parent = _find_parent(layer)
    while parent is not None and len(names) < 100:  # the limit is for modules that contain themselves
        names.insert(0, parent[0])
        parent = _find_parent(parent[1])
    return ".".join(names)


def _find_parent(child: nn.Module) -> tuple[str, nn.Module] | None:
    """Return a module that contains another one, after the name of the child in it."""
    for children in gc.get_referrers(child):
        if type(children) is not dict:
            continue
        for attributes in gc.get_referrers(children):
            is_table = type(attributes) is dict and attributes.get("_modules") is children
            owners: list[Any] = gc.get_referrers(attributes) if is_table else [attributes]
            for owner in owners:
                if issubclass(type(owner), nn.Module) and owner._modules is children:
                    return next(name for name, module in children.items() if module is child), owner
    return None
