"""Validate the arguments of `check_cuts`, convert them to float64, and cut the batch into samples."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from micronorm.convert.surgery import refuse_wrappers
from micronorm.ops.private_api import tree_map


def check_model(model: Any) -> None:
    """Raise unless the model is a plain module in training mode with parameters to train."""
    refuse_wrappers(model)
    for name, p in model.named_parameters():
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise ValueError(f"parameters must have shapes, {name} is lazy; run one forward first")
        if type(p).__name__ == "DTensor":
            raise TypeError(f"parameters must be plain tensors, {name} is a DTensor; pass the model before sharding it")
        if p.device.type in ("meta", "mps"):
            raise ValueError(
                f"the check runs in float64, which {p.device.type} tensors do not support ({name}); use model.cpu()"
            )
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError("the model has no parameter that requires grad; unfreeze the layers you train")
    if not model.training:
        raise ValueError("the check runs a training step, but the model is in eval mode; call model.train() first")


def check_batch(batch: Any) -> int:
    """Return the number of samples. Raise unless the batch is a tuple of tensors and lists of one length."""
    if not isinstance(batch, tuple):
        raise TypeError(
            f"batch must be a tuple of tensors or lists indexed by sample, got {type(batch).__name__}; "
            "for one tensor write (images,)"
        )
    if not batch:
        raise ValueError("batch must hold at least one tensor or list, got an empty tuple")
    lengths = []
    for i, item in enumerate(batch):
        if not isinstance(item, (Tensor, list)):
            raise TypeError(
                f"batch must hold tensors or lists indexed by sample, batch[{i}] is a {type(item).__name__}; "
                "use torch.as_tensor(...) or list(...)"
            )
        if isinstance(item, Tensor) and item.ndim == 0:
            raise ValueError(
                f"batch[{i}] must be indexed by sample, but it is a tensor without axes; put constants into the loss"
            )
        lengths.append(len(item))
    if len(set(lengths)) > 1:
        raise ValueError(f"all of batch must have the same length, the number of samples, got lengths {lengths}")
    if lengths[0] < 2:
        raise ValueError(
            f"a cut needs at least 2 samples, got {lengths[0]}; use six, so that halves differ from single samples"
        )
    return lengths[0]


def to_float64(value: Any) -> Any:
    """Return a copy with every floating-point tensor in float64, also inside lists, tuples and dictionaries."""

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return copy.deepcopy(leaf)
        return leaf.detach().to(torch.float64 if leaf.is_floating_point() else leaf.dtype, copy=True)

    return tree_map(convert, value)


def select(batch: tuple, indices: Sequence[int]) -> tuple:
    """Return copies of these samples, because a loss may write into its part."""
    return tuple(
        item[torch.as_tensor(indices, device=item.device)]
        if isinstance(item, Tensor)
        else to_float64([item[i] for i in indices])
        for item in batch
    )


def read_loss(result: Any) -> tuple[Tensor, float | None]:
    """Return the sum and its count. The count is None if the loss returned one tensor."""
    total, count = result, None
    if isinstance(result, (tuple, list)):
        if len(result) != 2:
            raise ValueError(f"loss must return (sum, count) or one tensor, got {len(result)} values")
        total, count = result
        if isinstance(count, Tensor) and count.numel() == 1:
            count = count.item()
        if isinstance(count, bool) or not isinstance(count, (int, float)):
            raise TypeError(
                f"loss must return (sum, count) with a number as count, got {type(count).__name__}; "
                "add several terms into one sum"
            )
    if not isinstance(total, Tensor):
        raise TypeError(
            f"loss must return (sum, count) or one tensor, got {type(total).__name__}; return the loss itself"
        )
    if total.numel() != 1:
        raise ValueError(
            f"loss must return one number, a sum over the part, got shape {tuple(total.shape)}; use .sum()"
        )
    if not total.requires_grad:
        raise ValueError("the loss must depend on the model's parameters, but it has no gradient; is it detached?")
    return total.reshape(()), None if count is None else float(count)


def owner_of(loss: Callable) -> nn.Module | None:
    """Return the module that the loss is, or whose method it is; otherwise None."""
    owner = loss if isinstance(loss, nn.Module) else getattr(loss, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None


def copy_together(model: nn.Module, loss: Callable) -> tuple[nn.Module, Callable]:
    """Return float64 copies of the model and of a loss that is a module or its method. Shared parts stay shared."""
    try:
        twin, loss_twin = copy.deepcopy((model, loss if owner_of(loss) is not None else None))
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"the check needs a deep copy, and {type(model).__name__} cannot be copied: {error}. The usual reason is a "
            "tensor kept from an earlier forward; detach or delete it"
        ) from error
    loss_twin = loss if loss_twin is None else loss_twin
    for old, new in zip(model.parameters(), twin.parameters(), strict=True):
        _copy_gradient_hooks(old, new)
    for module in (twin, owner_of(loss_twin)):
        if module is not None:
            module.double().zero_grad()
    return twin, loss_twin


def _copy_gradient_hooks(old: Tensor, new: Tensor) -> None:
    """Copy the hooks of a parameter, which deepcopy does not: a hook that clips makes a step depend on its cut."""
    for hook in (old._backward_hooks or {}).values():
        new.register_hook(hook)
    for hook in (getattr(old, "_post_accumulate_grad_hooks", None) or {}).values():
        new.register_post_accumulate_grad_hook(hook)


def named_members(model: nn.Module, loss: Callable) -> dict[nn.Module, str]:
    """Return every module with its name in reports: "model" for the model, "loss.…" for parts of the loss."""
    names: dict[nn.Module, str] = {}
    for name, module in model.named_modules():
        names.setdefault(module, name or "model")
    owner = owner_of(loss)
    for name, module in owner.named_modules() if owner is not None else ():
        if module is not owner:  # a call of the owner is the loss itself
            names.setdefault(module, f"loss.{name}")
    return names
