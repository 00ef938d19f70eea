"""Find the flow by running the model on example inputs and recording which tensors go from call to call."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from micronorm.convert.flow.graph import FRESH, Flow, Node
from micronorm.convert.surgery import eval_mode
from micronorm.ops.private_api import tree_leaves


def record(
    model: nn.Module,
    is_leaf: Callable[[nn.Module], bool],
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
