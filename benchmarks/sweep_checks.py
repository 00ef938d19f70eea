"""Checks of a converted model that do not use the plan: layers by class, tensors by identity, shapes."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import micronorm as mn
from micronorm.convert import Decision, Plan
from micronorm.convert.trace import as_call, guesses
from micronorm.nn.inputs import check_input

CONVOLUTIONS = nn.modules.conv._ConvNd
NORMS = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm, nn.modules.instancenorm._InstanceNorm)
COUNTER = "num_batches_tracked"  # BatchNorm's own count of batches, for which BCN has no use


@dataclass
class Forward:
    """A model before its conversion: its state, and what one forward showed where it could be run."""

    keys: set[str]
    parameters: int
    affine: dict[nn.Module, int]  # how many parameters each norm has
    inputs: Any = None
    shapes: list[tuple[int, ...]] | None = None
    into_norm: set[nn.Module] = field(default_factory=set)  # convolutions whose output is the input of a norm
    given: dict[nn.Module, list[tuple[int, ...]]] = field(default_factory=dict)  # the inputs' shapes of each norm

    def one_element(self, norm: nn.Module) -> bool:
        """Return whether every input of the norm had one element per sample and channel."""
        return all(math.prod(shape[2:]) == 1 for shape in self.given[norm])


def is_batchnorm(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._BatchNorm) or (
        "BatchNorm" in type(module).__name__ and isinstance(getattr(module, "running_var", None), Tensor)
    )


def has_batchnorm(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if is_batchnorm(module)]


def holds_norm_after_convolution(model: nn.Module) -> bool:
    """Return whether the model has something to convert."""
    norms = [m for m in model.modules() if is_batchnorm(m) or isinstance(m, NORMS)]
    return bool(norms) and any(isinstance(m, CONVOLUTIONS) for m in model.modules())


def record_forward(model: nn.Module) -> Forward:
    """Return the state of a model before its conversion, and what one forward in eval mode shows."""
    norms = [m for m in model.modules() if is_batchnorm(m) or isinstance(m, NORMS)]
    affine = {m: sum(p.numel() for p in m.parameters(recurse=False)) for m in norms}
    seen = Forward(set(model.state_dict()), _parameters(model), affine)
    for _, inputs in guesses(model):
        try:
            output, seen.into_norm, seen.given = _run_watched(model, inputs)
        except Exception:  # the next guess may do; the pairing says what it ran on
            continue
        seen.inputs, seen.shapes = inputs, shapes(output)
        break
    return seen


def check_converted(model: nn.Module, before: Forward, made: Plan) -> list[str]:
    """Return what is wrong with the converted model."""
    found = []
    if made.totals["norms converted"] == 0:
        found.append("no norm converted")
    lost = {key for key in before.keys - set(model.state_dict()) if not key.endswith(COUNTER)}
    if lost:
        found.append(f"{len(lost)} state-dict keys lost, {sorted(lost)[0]} first")
    # 2 G of the group affine, and 2 C where the old layer had no affine, or no bias
    made_of = sum(p.numel() for m in _bcn(model) for p in m.parameters(recurse=False))
    expected = before.parameters + made_of - sum(before.affine[d.module] for d in made.decisions if _is_new_norm(d))
    if _parameters(model) != expected:
        found.append(f"{_parameters(model) - expected} parameters more than the group affines explain")
    remaining = set(model.modules())
    stuck = [d.name for d in made.decisions if d.becomes is not None and d.module in remaining]
    if stuck:
        found.append(f"{len(stuck)} layers of the plan are still there, {stuck[0]} first")
    if before.shapes is None:
        return [*found, "not run: no guessed input fits"]
    for decision in made.decisions:
        if decision.role == "norm" and decision.becomes is not None and decision.module in before.given:
            taken, true = "one element per channel" in decision.reason, before.one_element(decision.module)
            if taken != true:
                found.append(f"{decision.name} is {'' if taken else 'not '}taken for one element per channel")
    try:
        with _shapes_only(model):
            after = shapes(_run_eval(model, before.inputs))
    except Exception as fault:
        return [*found, f"does not run: {type(fault).__name__}: {str(fault).splitlines()[0][:200]}"]
    if after != before.shapes:
        found.append(f"gives {after[:1]} where it gave {before.shapes[:1]}")
    return found


def shapes(output: Any) -> list[tuple[int, ...]]:
    """Return the shape of every tensor without the batch axis, because the number of a detector's boxes varies."""
    return [tuple(leaf.shape[1:]) for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


def _is_new_norm(decision: Decision) -> bool:
    return decision.role == "norm" and decision.becomes is not None


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _bcn(model: nn.Module) -> Iterator[Any]:
    return (m for m in model.modules() if isinstance(m, mn.nn.BatchChannelNorm))


def _run_eval(model: nn.Module, inputs: Any) -> Any:
    args, kwargs = as_call(inputs)
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            return model(*args, **kwargs)
    finally:
        model.train(training)


@contextmanager
def _shapes_only(model: nn.Module) -> Iterator[None]:
    """On the meta device, let our layers check their input and multiply once: all their arithmetic would be slow."""
    layers = [m for m in model.modules() if hasattr(m, "effective_weight") or isinstance(m, mn.nn.BatchChannelNorm)]
    layers = [m for m in layers if m.weight.is_meta]
    for layer in layers:
        name = "_normalize" if isinstance(layer, mn.nn.BatchChannelNorm) else "effective_weight"
        layer.__dict__[name] = partial(_scaled if name == "_normalize" else _raw, layer)
    try:
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("_normalize", None)
            layer.__dict__.pop("effective_weight", None)


def _scaled(layer: Any, x: Tensor, activation: Any, residual: Tensor | None = None) -> Tensor:
    check_input(x, layer.num_channels, type(layer).__name__)
    x = x if residual is None else x + residual
    return x * (layer.weight * layer.running_var).view(-1, *[1] * (x.ndim - 2))


def _raw(layer: Any, dtype: Any = None) -> Tensor:
    return layer.weight


def _run_watched(model: nn.Module, inputs: Any) -> tuple[Any, set[nn.Module], dict[nn.Module, list[Any]]]:
    made: dict[int, tuple[Tensor, nn.Module]] = {}  # tensors are kept, so that no address is used twice
    into_norm: set[nn.Module] = set()
    given: dict[nn.Module, list[Any]] = {}

    def after_convolution(module: nn.Module, args: Any, output: Tensor) -> None:
        made[id(output)] = output, module

    def before_norm(module: nn.Module, args: Any) -> None:
        given.setdefault(module, []).append(tuple(args[0].shape))
        if id(args[0]) in made:
            into_norm.add(made[id(args[0])][1])

    handles = [m.register_forward_hook(after_convolution) for m in model.modules() if isinstance(m, CONVOLUTIONS)]
    handles += [
        m.register_forward_pre_hook(before_norm) for m in model.modules() if is_batchnorm(m) or isinstance(m, NORMS)
    ]
    try:
        return _run_eval(model, inputs), into_norm, given
    finally:
        for handle in handles:
            handle.remove()
