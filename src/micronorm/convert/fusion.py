"""Fuse norms with the addition and the activation that follow them, in blocks whose forward is known.

A block is a module that calls norms: an nn.Sequential, or a class for which a fused forward was written by hand. The
fused forward computes what the class's own forward does, but calls `norm_act` where a norm is followed by an addition
or an activation. `known_blocks` holds the table of these; `register_block` adds others.
"""

import functools
import hashlib
import inspect
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn

from micronorm.convert.known_blocks import BLOCKS, MAX_POOL, Block, Forward, Fuses, can_pool, does_nothing
from micronorm.convert.surgery import has_own_forward, set_forward
from micronorm.nn.norm_act import ACTIVATION_FUNCTIONS, ACTIVATION_LAYERS, fusible_activation, has_hooks
from micronorm.ops.activation import Activation

_FUNCTIONS = {kind.value: function for kind, function in ACTIVATION_FUNCTIONS.items()}


def register_block(
    cls: type[nn.Module],
    forward: Forward,
    *,
    fuses: Fuses | Callable[[Any], Fuses],
    method: str = "forward",
) -> None:
    """Tell conversion how to fuse the norms in modules of class `cls`.

    `mn.convert` then replaces `method` of every such module by `forward`. Subclasses are included if they do not
    override the method. State dicts, names and types stay the same.

    Args:
        cls: the class of the block.
        forward: forward(self, …) with the arguments of the class's own method. It must compute the same, with calls of
            `norm_act(norm, x, act, residual=…)` in place of separate layers.
        fuses: for each norm, by its name in the module, what `norm_act` computes with it: the name of the activation
            (the attribute that holds it, or "relu" for the function), "add", or "add" and the activation ("add act2").
            "act1 without drop" holds for modules whose optional layer `drop` is None or nn.Identity. The plan reports
            it. If it depends on the module in another way, give a function of the module that returns it.
        method: the method to replace, if the norms are called in another one than `forward`.

    Example:
        >>> from micronorm.convert import norm_act
        >>> class Residual(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        ...
        ...     def forward(self, x):
        ...         return nn.functional.relu(self.norm(self.conv(x)) + x)
        >>> def fused(self, x):
        ...     return norm_act(self.norm, self.conv(x), nn.functional.relu, residual=x)
        >>> register_block(Residual, fused, fuses={"norm": "add relu"})
    """
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise TypeError(f"cls must be a class of torch.nn.Module, got {cls!r}")
    if not callable(getattr(cls, method, None)):
        raise ValueError(f"{cls.__name__} has no method {method!r} to replace")
    if not callable(forward):
        raise TypeError(f"forward must be a function of the module and its inputs, got {forward!r}")
    if not isinstance(fuses, Mapping) and not callable(fuses):
        raise TypeError(f'fuses must be a mapping such as {{"norm1": "relu", "norm2": "add relu"}}, got {fuses!r}')
    BLOCKS[cls] = Block(forward, fuses, method)


def pool_by_kernel(model: nn.Module) -> int:
    """Let the kernels compute every max-pooling layer of the model that they can; return the number of these layers.

    Each such nn.MaxPool2d gets another forward, whose outputs equal torch's to the bit. It keeps one byte per output
    for the backward pass, and not the input. Inputs on other devices still go to torch. `mn.convert` does this unless
    `fuse=False`; benchmarks call it for the networks they compare with.

    Example:
        >>> pool_by_kernel(nn.Sequential(nn.Conv2d(3, 8, 3), nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(2)))
        1
    """
    layers = [module for module in model.modules() if can_pool(module)]
    for layer in layers:
        set_forward(layer, MAX_POOL.forward)
    return len(layers)


def find_block(module: nn.Module) -> Block | str:
    """Return the entry of the table for a module, or the reason why it has none."""
    name = type(module).__name__
    if has_own_forward(module):
        return f"{name} has its own forward on the instance"
    for base in type(module).__mro__:
        block = BLOCKS.get(base) or BLOCKS.get(f"{base.__module__}.{base.__qualname__}")
        if block is None:
            continue
        if getattr(type(module), block.method, None) is not getattr(base, block.method, None):
            return f"{name} overrides {base.__name__}.{block.method}"
        if block.source is not None and source_digest(base, block.method) not in block.source.split():
            return f"the source of {base.__name__}.{block.method} is not the one that the fused form was written for"
        return block
    return f"{name} is not a known block"


@functools.cache
def source_digest(cls: type, method: str) -> str | None:
    """Return a short digest of a method's source, or None if there is no source to read."""
    try:
        source = inspect.getsource(getattr(cls, method))
    except (AttributeError, OSError, TypeError):
        return None
    return hashlib.sha256(textwrap.dedent(source).encode()).hexdigest()[:12]


# --- what a plan says ------------------------------------------------------------------------------------------------


@dataclass
class Fusions:
    """What fusing changes in a model.

    `blocks` holds the modules that get a fused forward. `fused` and `unfused` hold, for each norm, what it computes or
    why it computes nothing more, one entry for each block that calls it.
    """

    blocks: dict[nn.Module, Block] = field(default_factory=dict)
    fused: dict[nn.Module, list[str]] = field(default_factory=dict)
    unfused: dict[nn.Module, list[str]] = field(default_factory=dict)


class _Tail(NamedTuple):
    """What follows a norm: an addition, an activation, or both."""

    add: bool
    act: Callable[..., Any] | None


def find_fusions(model: nn.Module, norms: Collection[nn.Module]) -> Fusions:
    """Return what fusing would change in the model, where `norms` can compute what follows them once converted."""
    found = Fusions()
    for module in model.modules():
        if _only_holds_modules(module):
            continue
        block = find_block(module)
        tails = _tails(module, block) if isinstance(block, Block) else {}
        # A known block may also fuse norms that are further down.
        for norm in [member for member in dict.fromkeys((*_members(module), *tails)) if member in norms]:
            reason = block if isinstance(block, str) else _why_unfused(norm, tails.get(norm), type(module).__name__)
            if reason:
                found.unfused.setdefault(norm, []).append(reason)
            elif isinstance(block, Block):
                found.fused.setdefault(norm, []).append(_describe(tails[norm]))
                found.blocks[module] = block
    for norm in norms:
        if norm not in found.fused and norm not in found.unfused:
            found.unfused[norm] = ["no block calls it"]
    return found


def activation_name(activation: Activation) -> str:
    """Return the name of torch's layer for an activation."""
    return ACTIVATION_LAYERS[activation.kind].__name__


def _members(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the children of a module, and those in its lists and dictionaries of modules."""
    for child in module.children():
        yield child
        if _only_holds_modules(child):
            yield from _members(child)


def _only_holds_modules(module: nn.Module) -> bool:
    """Return whether a module has no forward, like nn.ModuleList and nn.ModuleDict."""
    return getattr(type(module).forward, "__name__", "") == "_forward_unimplemented"


def _tails(module: nn.Module, block: Block) -> dict[nn.Module, _Tail]:
    """Return what follows each norm of a module, as its block declares it."""
    fuses = block.fuses(module) if callable(block.fuses) else block.fuses
    modules = dict(module.named_modules())
    tails = {}
    for name, text in fuses.items():
        following, _, absent = text.partition(" without ")
        if not all(does_nothing(getattr(module, layer)) for layer in absent.split()):
            continue
        words = following.split()
        add = words[0] == "add"
        act = " ".join(words[1:] if add else words)
        found = modules.get(act) or getattr(module, act, None) or _FUNCTIONS.get(act) if act else None
        if act and found is None:
            raise ValueError(
                f"{type(module).__name__}: {following!r} names no attribute of the block and none of {list(_FUNCTIONS)}"
            )
        if name in modules:
            tails[modules[name]] = _Tail(add, found)
    return tails


def _why_unfused(norm: nn.Module, tail: _Tail | None, caller: str) -> str:
    """Return why a norm computes nothing more than itself; an empty string if it does."""
    if tail is None:
        return f"no activation or addition follows it directly in {caller}"
    if has_hooks(norm) or "forward" in vars(norm):
        return "it has hooks or its own forward"
    if getattr(norm, "activation", None) is not None:
        return "it has an activation of its own"
    if tail.add or fusible_activation(tail.act) is not None:
        return ""
    if not isinstance(tail.act, nn.Module):
        return f"{getattr(tail.act, '__name__', tail.act)} follows it, which norms do not compute"
    act, hooked = type(tail.act).__name__, has_hooks(tail.act)
    return f"the {act} after it has hooks" if hooked else f"{act} follows it, which norms do not compute"


def _describe(tail: _Tail) -> str:
    parts = ["the add"] if tail.add else []
    activation = fusible_activation(tail.act)
    if tail.act is not None and activation is not None and (activation.keeps_sign or not tail.add):
        parts.append(f"the {activation_name(activation)}")
    return f"with {' and '.join(parts)} after it"
