"""Find the flow by symbolic tracing with torch.fx, which needs no input and runs nothing."""

import inspect
import sys
from collections.abc import Callable

import torch.fx
from torch import nn

from micronorm.convert.flow.graph import FRESH, Flow, Node

_METADATA_CALLS = FRESH | {"size", "dim", "numel", "stride", "is_contiguous"}


def trace_symbolically(model: nn.Module, is_leaf: Callable[[nn.Module], bool], *, opaque: bool = False) -> Flow:
    """Trace with torch.fx. Errors that the model's forward raises on symbolic values are passed on.

    With `opaque`, the modules that timm excludes from tracing are one call each, even if they contain leaves.
    """
    # Arguments with a default keep it: a symbolic value would count as given where the forward asks `is not None`.
    defaults = {
        p.name: p.default for p in inspect.signature(model.forward).parameters.values() if p.default is not p.empty
    }
    graph = _LeafTracer(is_leaf, opaque).trace(model, concrete_args=defaults or None)
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
    """Trace with the layers of torch.nn, and what `is_leaf` or timm exclude from tracing, as one call each."""

    def __init__(self, is_leaf: Callable[[nn.Module], bool], opaque: bool) -> None:
        timm_fx = sys.modules.get("timm.layers._fx")
        functions = timm_fx.get_notrace_functions() if timm_fx is not None else ()
        super().__init__(autowrap_functions=tuple(f for f in functions if callable(f)))
        self._leaf_types = tuple(timm_fx.get_notrace_modules()) if timm_fx is not None else ()
        self._is_leaf, self._opaque = is_leaf, opaque

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if self._is_leaf(m) or super().is_leaf_module(m, module_qualified_name):
            return True
        return isinstance(m, self._leaf_types) and (self._opaque or not any(map(self._is_leaf, m.modules())))
