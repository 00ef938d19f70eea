"""Find a model's flow by symbolic tracing, a run on example inputs, or the order of registration."""

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from micronorm.convert.flow.execution import record
from micronorm.convert.flow.graph import Flow, Node
from micronorm.convert.flow.symbolic import trace_symbolically
from micronorm.convert.surgery import restore_forwards
from micronorm.nn.bcn import BatchChannelNorm
from micronorm.nn.reparameterized import Reparameterized

_LARGE = 16  # how much longer than usual the sides of the input are whose shapes are learned


def trace_flow(
    model: nn.Module,
    is_leaf: Callable[[nn.Module], bool],
    *,
    example_inputs: Any = None,
    pairs: Callable[[nn.Module, nn.Module], bool],
) -> Flow:
    """Return the flow of `model`, by the first method that works.

    Args:
        model: any module; it is not changed.
        is_leaf: which modules are one call each, beside the layers of torch.nn.
        example_inputs: the inputs to run it on, for the shapes and if symbolic tracing fails: a tuple of arguments, a
            dictionary of keyword arguments, or the one argument. None guesses them from the first convolution.
        pairs: whether two modules that are registered one after the other may be a pair, if both methods fail.
    """
    stand_in, originals = _stand_in(model)

    def leaf(module: nn.Module) -> bool:
        return is_leaf(originals.get(module, module))

    flow = _trace(stand_in, leaf, example_inputs)
    if flow.method == "order":
        return Flow(by_order(model, is_leaf, pairs), "order", flow.detail)
    if flow.method == "fx" and example_inputs is None and stand_in is not model:
        _guess_shapes(flow, stand_in, leaf)
    for node in flow.nodes:
        node.module = originals.get(node.module, node.module) if node.module is not None else None
    return Flow(flow.nodes, flow.method, flow.detail, flow.complete)  # a new one: its tables are by module


def _trace(model: nn.Module, is_leaf: Callable[[nn.Module], bool], example_inputs: Any) -> Flow:
    reasons = []
    try:
        flow = trace_symbolically(model, is_leaf)
        if example_inputs is not None:
            _learn_shapes(flow, _run(model, is_leaf, example_inputs))
        return flow
    except _DoesNotRun:
        raise
    except Exception as fault:
        reasons.append(f"not traceable by torch.fx ({_first_line(fault)})")
    if example_inputs is not None:
        flow = _run(model, is_leaf, example_inputs)
        flow.detail = f"run on the given inputs; {reasons[0]}"
        return flow
    for label, inputs in guesses(model):
        try:
            flow = _run(model, is_leaf, inputs)
        except _DoesNotRun as fault:
            reasons.append(f"not runnable on {label} ({_first_line(fault.__cause__)})")
        else:
            flow.detail = f"run on {label}; {reasons[0]}"
            return flow
    with suppress(Exception):
        flow = trace_symbolically(model, is_leaf, opaque=True)
        flow.detail = f"some blocks as a whole: {'; '.join(reasons)}; pass example_inputs to see into them"
        return flow
    return Flow([], "order", "; ".join(reasons) + "; pass example_inputs for the real data flow")


class _DoesNotRun(ValueError):
    """The model raised an error on its inputs."""


def _run(model: nn.Module, is_leaf: Callable[[nn.Module], bool], inputs: Any) -> Flow:
    try:
        return record(model, is_leaf, *as_call(inputs))
    except Exception as fault:
        raise _DoesNotRun(f"the model does not run on example_inputs: {_first_line(fault)}") from fault


def _learn_shapes(flow: Flow, executed: Flow) -> None:
    """Copy the shapes of each layer's inputs from a run to the symbolic flow, if the layer's calls match."""
    for module, calls in flow.calls.items():
        ran = executed.calls.get(module, [])
        if len(ran) == len(calls):
            for call, seen in zip(calls, ran, strict=True):
                call.shape = seen.shape
                if len(call.inputs) == len(seen.inputs) == 1:
                    call.inputs[0].shape = seen.inputs[0].shape


def _guess_shapes(flow: Flow, stand_in: nn.Module, is_leaf: Callable[[nn.Module], bool]) -> None:
    """Learn shapes from a guessed input on the meta device, where nothing is computed; keep what a failed run gives.

    Begin with a large input: in a small one the last maps of a network may have one element by chance.
    """
    for module in stand_in.modules():  # hooks of the user must not see this run
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    runs: list[list[Node]] = [[]]
    with suppress(Exception), torch.device("meta"):
        stand_in.to("meta")
        _skip_equations(stand_in, is_leaf)
        for _, inputs in chain(guesses(stand_in, scale=_LARGE), guesses(stand_in)):
            runs.append([])
            with suppress(Exception):
                record(stand_in, is_leaf, *as_call(inputs), nodes=runs[-1])
                break
    _learn_shapes(flow, Flow(max(runs, key=len), "execution"))


def _skip_equations(stand_in: nn.Module, is_leaf: Callable[[nn.Module], bool]) -> None:
    """Let our layers return a tensor of the right shape only: even on the meta device their equations take long."""
    for module in stand_in.modules():
        if isinstance(module, BatchChannelNorm) and is_leaf(module):
            module.forward = torch.empty_like  # type: ignore[method-assign]
        elif isinstance(module, Reparameterized):
            module.shared_weight = module.weight.detach()


def _stand_in(model: nn.Module) -> tuple[nn.Module, dict[nn.Module, nn.Module]]:
    """Return a copy to trace, because a forward may change its module, and the original of each of its modules.

    The copy's parameters share their storage with the originals, so it needs no memory.
    """
    memo: dict[int, Any] = {}
    try:
        for parameter in model.parameters():
            memo[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
        twin = copy.deepcopy(model, memo)
        restore_forwards(twin)  # the flow is that of the classes' own forwards
        return twin, {memo[id(module)]: module for module in model.modules()}
    except Exception:  # a model that cannot be copied is traced itself
        return model, {}


def _first_line(fault: BaseException | None) -> str:
    text = str(fault).strip().splitlines()
    return f"{type(fault).__name__}: {text[0].split('. ')[0][:120]}" if text else type(fault).__name__


def as_call(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword arguments: from a tuple, a dictionary, or any other value as the one argument."""
    if isinstance(inputs, tuple):
        return inputs, {}
    if isinstance(inputs, dict):
        return (), inputs
    return (inputs,), {}


def guesses(model: nn.Module, *, scale: int = 1) -> Iterator[tuple[str, Any]]:
    """Yield inputs that fit the first convolution: images of usual sizes, and a list of one image, for detectors.

    Each side of an image is `scale` times as long as usual.
    """
    convolution = next((m for m in model.modules() if isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d)), None)
    if convolution is None:
        return
    spaces: dict[int, tuple[tuple[int, ...], ...]] = {
        1: ((256,),),
        2: ((224, 224),),
        3: ((16, 112, 112), (16, 224, 224)),
    }
    sizes = [(convolution.in_channels, *space) for space in spaces[convolution.weight.ndim - 2]]
    config = getattr(model, "pretrained_cfg", None)
    if isinstance(config, dict) and "input_size" in config:  # timm's; in_chans= may have changed the channels
        named = tuple(config["input_size"])
        sizes = list(dict.fromkeys([(convolution.in_channels, *named[1:]), named]))
    sizes = [(channels, *(scale * side for side in space)) for channels, *space in sizes]
    like = convolution.weight
    required = [
        p
        for p in inspect.signature(model.forward).parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]

    def sample(*shape: int) -> Tensor:
        return torch.zeros(shape, device=like.device, dtype=like.dtype)

    count = max(1, len(required))
    for size in sizes:
        text = "×".join(map(str, size))
        yield f"a guessed input 1×{text}", tuple(sample(1, *size) for _ in range(count))
    text = "×".join(map(str, sizes[0]))
    yield f"a guessed list of one {text} image", ([sample(*sizes[0])],)


def by_order(
    model: nn.Module, is_leaf: Callable[[nn.Module], bool], pairs: Callable[[nn.Module, nn.Module], bool]
) -> list[Node]:
    """Return the layers in the order of registration; a layer's input is the one before it if the two may pair."""
    nodes: list[Node] = []
    last: Node | None = None
    for name, module in model.named_modules():
        if next(module.children(), None) is not None and not is_leaf(module):
            continue
        inputs = (last,) if last is not None and last.module is not None and pairs(last.module, module) else ()
        last = Node(name, module, inputs)
        nodes.append(last)
    return nodes
