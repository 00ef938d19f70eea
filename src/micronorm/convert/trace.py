"""Find a model's data flow by symbolic tracing with torch.fx, or by a run on example inputs."""

import copy
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from micronorm.convert.flow import FRESH, Flow, Node
from micronorm.convert.surgery import eval_mode, restore_forwards
from micronorm.nn.bcn import BatchChannelNorm
from micronorm.nn.reparameterized import Reparameterized
from micronorm.ops.private_api import tree_leaves

IsLeaf = Callable[[nn.Module], bool]

_LARGE = 16  # how much longer than usual the sides of the input are whose shapes are learned


def trace_flow(model: nn.Module, is_leaf: IsLeaf, *, example_inputs: Any = None) -> Flow:
    """Return the flow of `model`, by the first method that works; a flow without calls ("order") if none does.

    Args:
        model: any module; it is not changed.
        is_leaf: which modules are one call each, beside the layers of torch.nn.
        example_inputs: the inputs to run it on, for the shapes and if symbolic tracing fails: a tuple of arguments, a
            dictionary of keyword arguments, or the one argument. None guesses them from the first convolution.
    """
    stand_in, originals = _stand_in(model)

    def leaf(module: nn.Module) -> bool:
        return is_leaf(originals.get(module, module))

    flow = _trace(stand_in, leaf, example_inputs)
    if flow.method == "fx" and example_inputs is None and stand_in is not model:
        _guess_shapes(flow, stand_in, leaf)
    for node in flow.nodes:
        node.module = originals.get(node.module, node.module) if node.module is not None else None
    return replace(flow)  # a new one: its tables are by module


def _trace(model: nn.Module, is_leaf: IsLeaf, example_inputs: Any) -> Flow:
    flow, reasons = None, []
    try:
        flow = trace_symbolically(model, is_leaf)
    except Exception as fault:
        reasons.append(f"not traceable by torch.fx ({_first_line(fault)})")
    if example_inputs is not None:
        try:
            executed = record(model, is_leaf, *as_call(example_inputs))
        except Exception as fault:
            raise ValueError(f"the model does not run on example_inputs: {_first_line(fault)}") from fault
        if flow is None:
            return replace(executed, detail=f"run on the given inputs; {reasons[0]}")
        _learn_shapes(flow, executed)
    if flow is not None:
        return flow
    for label, inputs in guesses(model):
        try:
            return replace(record(model, is_leaf, *as_call(inputs)), detail=f"run on {label}; {reasons[0]}")
        except Exception as fault:
            reasons.append(f"not runnable on {label} ({_first_line(fault)})")
    return Flow([], "order", f"{'; '.join(reasons)}; pass example_inputs for the real data flow")


def _learn_shapes(flow: Flow, executed: Flow) -> None:
    """Copy the shapes of each layer's inputs from a run to the symbolic flow, if the layer's calls match."""
    for module, calls in flow.calls.items():
        ran = executed.calls.get(module, [])
        if len(ran) == len(calls):
            for call, seen in zip(calls, ran, strict=True):
                call.shape = seen.shape
                if len(call.inputs) == len(seen.inputs) == 1:
                    call.inputs[0].shape = seen.inputs[0].shape


def _guess_shapes(flow: Flow, stand_in: nn.Module, is_leaf: IsLeaf) -> None:
    """Find shapes from a guessed input on the meta device, which computes nothing. Keep the shapes of a run that fails.

    Begin with a large input: with a small one, the last maps of a network may have one element by chance.
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


def _skip_equations(stand_in: nn.Module, is_leaf: IsLeaf) -> None:
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


# --- symbolic tracing -------------------------------------------------------------------------------------------------

_ONE_AT_A_TIME = threading.RLock()
"""torch.fx replaces `nn.Module.__call__` while it traces. Two threads would not put it back in the right order."""

_METADATA_CALLS = FRESH | {"size", "dim", "numel", "stride", "is_contiguous"}


def trace_symbolically(model: nn.Module, is_leaf: IsLeaf) -> Flow:
    """Trace with torch.fx. Errors that the model's forward raises on symbolic values are passed on."""
    # Arguments with a default keep it: a symbolic value would count as given where the forward asks `is not None`.
    defaults = {
        p.name: p.default for p in inspect.signature(model.forward).parameters.values() if p.default is not p.empty
    }
    with _ONE_AT_A_TIME:
        graph = _LeafTracer(is_leaf).trace(model, concrete_args=defaults or None)
    modules = dict(model.named_modules(remove_duplicate=False))
    made: dict[torch.fx.Node, Node] = {}
    metadata: set[torch.fx.Node] = set()
    for entry in graph.nodes:
        # Parameters and sizes do not count as inputs: the flow holds what is computed from the model's input.
        inputs = tuple(
            made[source] for source in entry.all_input_nodes if source not in metadata and source.op != "get_attr"
        )
        if _is_metadata(entry, metadata):
            metadata.add(entry)
            inputs = ()
        if entry.op == "call_module":
            node = Node(str(entry.target), modules[str(entry.target)], inputs)
        else:
            target = entry.target
            name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
            node = Node(name, None, inputs)
        if entry not in metadata:
            node.reads = tuple(str(source.target) for source in entry.all_input_nodes if source.op == "get_attr")
        made[entry] = node
    return Flow(list(made.values()), "fx")


def _is_metadata(entry: torch.fx.Node, known: set[torch.fx.Node]) -> bool:
    """Return whether a value is a size or attribute of a tensor, or computed from such values alone."""
    if entry.op not in ("call_function", "call_method"):
        return False
    name = entry.target if isinstance(entry.target, str) else getattr(entry.target, "__name__", "")
    if name == "getattr":
        return entry.args[1] in ("shape", "device", "dtype", "ndim", "requires_grad", "is_cuda")
    sources = entry.all_input_nodes
    return name in _METADATA_CALLS or (bool(sources) and all(s in known for s in sources))


class _LeafTracer(torch.fx.Tracer):
    """Trace with the layers of torch.nn, and what `is_leaf` or timm exclude from tracing, as one call each.

    Modules that run in other threads meanwhile are not traced.
    """

    def __init__(self, is_leaf: IsLeaf) -> None:
        timm_fx = sys.modules.get("timm.layers._fx")
        functions = timm_fx.get_notrace_functions() if timm_fx is not None else ()
        super().__init__(autowrap_functions=tuple(f for f in functions if callable(f)))
        self._leaf_types = tuple(timm_fx.get_notrace_modules()) if timm_fx is not None else ()
        self._is_leaf = is_leaf
        self._thread = threading.get_ident()

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if self._is_leaf(m) or super().is_leaf_module(m, module_qualified_name):
            return True
        return isinstance(m, self._leaf_types) and not any(map(self._is_leaf, m.modules()))


# --- a run on example inputs ------------------------------------------------------------------------------------------


def record(
    model: nn.Module,
    is_leaf: IsLeaf,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    nodes: list[Node] | None = None,
) -> Flow:
    """Run the model in eval mode without gradients and return its calls; restore modes and random state afterwards.

    A list given as `nodes` receives the calls one by one, so that it has those before an error, too.
    """
    recorder = _Recorder(model, (args, kwargs), [] if nodes is None else nodes)
    with torch.no_grad(), torch.random.fork_rng(), eval_mode(model), ExitStack() as hooks:
        for name, module in model.named_modules():
            if is_leaf(module) or (
                type(module).__module__.startswith("torch.nn") and next(module.children(), None) is None
            ):
                before, after = recorder.around(name)
                hooks.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
                hooks.callback(module.register_forward_hook(after, with_kwargs=True, always_call=True).remove)
        with recorder:
            recorder.finish(model(*args, **kwargs))
    return Flow(recorder.nodes, "execution", complete=recorder.complete)


class _Recorder(TorchFunctionMode):
    """Record calls, and map each living tensor to the call that made it."""

    def __init__(self, model: nn.Module, arguments: Any, nodes: list[Node]) -> None:
        super().__init__()
        self.nodes = nodes
        self.complete = True
        self._made_by = WeakTensorKeyDictionary()
        self._depth = 0  # of leaf modules that are running: calls inside them are not recorded
        self._held = {id(t): name for name, t in (*model.named_parameters(), *model.named_buffers())}
        self._expected = self._held.keys() | {id(t) for t in tensors_in(arguments)}

    def around(self, name: str) -> tuple[Callable[..., None], Callable[..., None]]:
        """Return the hooks that record the calls of one leaf module."""

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._depth += 1

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self._depth -= 1
            if self._depth == 0:
                node = Node(name, module, self._sources((args, kwargs)), reads=self._reads((args, kwargs)))
                self._add(node, output)

        return before, after

    def finish(self, output: Any) -> None:
        """Record the model's output as one more consumer."""
        plain = (Tensor, int, float, complex, str, bytes, type(None))
        self.complete &= all(isinstance(leaf, plain) for leaf in tree_leaves(output))  # other objects may hold tensors
        self.nodes.append(Node("output", None, self._sources(output)))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        if self._depth == 0 and (name == "__setitem__" or tensors_in(output)):
            node = Node(name, None, () if name in FRESH else self._sources((args, kwargs)))
            node.reads = () if name == "__get__" else self._reads((args, kwargs))
            self._add(node, args[0] if name == "__setitem__" else output)
        return output

    def _add(self, node: Node, output: Any) -> None:
        tensors = tensors_in(output)
        if tensors:
            node.shape = tuple(tensors[0].shape)
        self.nodes.append(node)
        for tensor in tensors:
            self._made_by[tensor] = node

    def _sources(self, values: Any) -> tuple[Node, ...]:
        data = (tensor for tensor in tensors_in(values) if not isinstance(tensor, nn.Parameter))
        return tuple(dict.fromkeys(map(self._source, data)))

    def _reads(self, values: Any) -> tuple[str, ...]:
        return tuple(self._held[id(t)] for t in tensors_in(values) if id(t) in self._held)

    def _source(self, tensor: Tensor) -> Node:
        node = self._made_by.get(tensor)
        if node is None:
            # It is neither an input nor a parameter: an unrecorded call made it, perhaps from recorded tensors.
            self.complete &= id(tensor) in self._expected
            node = Node("input", shape=tuple(tensor.shape))
            self.nodes.append(node)
            self._made_by[tensor] = node
        return node


def tensors_in(values: Any) -> list[Tensor]:
    """Return the tensors in nested lists, tuples and dictionaries."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
