"""Three ways to learn a model's flow: symbolic tracing, a run on example inputs, and the order of registration."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from micronorm.flow.execution import record
from micronorm.flow.graph import Flow, Node
from micronorm.flow.symbolic import trace_symbolically


def trace_flow(
    model: nn.Module,
    is_leaf: Callable[[nn.Module], bool],
    *,
    example_inputs: Any = None,
    pairs: Callable[[nn.Module, nn.Module], bool],
) -> Flow:
    """The flow of `model`, by the first way that works.

    Args:
        model: any module; it is left as it was.
        is_leaf: which modules are one call each, beside the layers of torch.nn.
        example_inputs: what to run it on where symbolic tracing fails: a tuple of arguments, a dictionary of keyword
            arguments, or the one argument. None: guessed from the first convolution.
        pairs: whether two modules registered one after the other may be taken for a pair, where nothing else is known.
    """
    reasons = []
    try:
        return trace_symbolically(model, is_leaf)
    except Exception as fault:
        reasons.append(f"not traceable by torch.fx ({_first_line(fault)})")
    candidates = [("the given inputs", example_inputs)] if example_inputs is not None else list(_guesses(model))
    for label, inputs in candidates:
        try:
            nodes = record(model, is_leaf, *as_call(inputs))
        except Exception as fault:
            if example_inputs is not None:
                raise ValueError(f"the model does not run on example_inputs: {_first_line(fault)}") from fault
            reasons.append(f"not runnable on {label} ({_first_line(fault)})")
        else:
            return Flow(nodes, "execution", f"run on {label}; {reasons[0]}")
    return Flow(_by_order(model, pairs), "order", "; ".join(reasons) + "; pass example_inputs for the real data flow")


def _first_line(fault: Exception) -> str:
    text = str(fault).strip().splitlines()
    return f"{type(fault).__name__}: {text[0][:120]}" if text else type(fault).__name__


def as_call(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Example inputs as arguments and keyword arguments: a tuple, a dictionary, or the one argument."""
    if isinstance(inputs, tuple):
        return inputs, {}
    if isinstance(inputs, dict):
        return (), inputs
    return (inputs,), {}


def _guesses(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Inputs that the first convolution could take: an image, and a list of one as detectors want it."""
    convolution = next((m for m in model.modules() if isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d)), None)
    if convolution is None:
        return
    config = getattr(model, "pretrained_cfg", None)
    size = tuple(config["input_size"]) if isinstance(config, dict) and "input_size" in config else None
    if size is None:
        space = {1: (256,), 2: (224, 224), 3: (16, 112, 112)}[convolution.weight.ndim - 2]
        size = (convolution.in_channels * (convolution.groups if convolution.in_channels == 1 else 1), *space)
    like = convolution.weight
    required = [
        p
        for p in inspect.signature(model.forward).parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]

    def sample(*shape: int) -> Tensor:
        return torch.zeros(shape, device=like.device, dtype=like.dtype)

    count = max(1, len(required))
    text = "×".join(map(str, size))
    yield f"a guessed input 1×{text}", tuple(sample(1, *size) for _ in range(count))
    yield f"a guessed list of one {text} image", ([sample(*size)],)


def _by_order(model: nn.Module, pairs: Callable[[nn.Module, nn.Module], bool]) -> list[Node]:
    nodes: list[Node] = []
    last: Node | None = None
    for name, module in model.named_modules():
        if next(module.children(), None) is not None and not isinstance(module, nn.modules.batchnorm._NormBase):
            continue
        inputs = (last,) if last is not None and last.module is not None and pairs(last.module, module) else ()
        last = Node(name, module, inputs)
        nodes.append(last)
    return nodes
