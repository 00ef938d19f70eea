"""Replace a model's dropout by layers whose masks depend on the sample alone."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from micronorm.convert.surgery import adopt_hooks, names_of, replace
from micronorm.nn.per_step.keyed_dropout import KeyedDropout, KeyedDropPath
from micronorm.ops.private_api import DropoutNd

_DIMS: Mapping[type[nn.Module], int] = {nn.Dropout: 0, nn.Dropout1d: 1, nn.Dropout2d: 2, nn.Dropout3d: 3}
_ALWAYS_RANDOM = (nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)


def key_dropout(model: nn.Module) -> list[str]:
    """Replace dropout and drop-path by layers that draw their masks from sample keys, and name what cannot be replaced.

    Replaces nn.Dropout, nn.Dropout1d/2d/3d, timm's DropPath and torchvision's StochasticDepth(mode="row"), and keeps
    their rate, hooks and mode. Layers with rate 0 stay. State-dict keys and the distribution of masks do not change.
    `micronorm.nn.per_step.keyed_dropout.dropout_keys` then sets the keys of each micro-batch.

    Args:
        model: changed in place; not yet wrapped by DDP, FSDP or torch.compile.

    Returns:
        Names of the modules whose random numbers cannot be keyed: nn.AlphaDropout and FeatureAlphaDropout, nn.RReLU,
        fractional pooling, StochasticDepth(mode="batch"), the dropout inside nn.MultiheadAttention and of recurrent
        layers, and any module with a positive float in an attribute with "drop" in its name, since it may pass that to
        F.dropout. Unless the list is empty, a step is independent of its cut in distribution only. A call of F.dropout
        with a constant rate is not found here; `mn.check_cuts` finds it.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.Dropout(0.0), nn.AlphaDropout(0.1))
        >>> key_dropout(model)
        ['3']
        >>> model[1], model[2]
        (KeyedDropout(p=0.1, inplace=False, dims=0, stream=0), Dropout(p=0.0, inplace=False))
    """
    names = names_of(model)
    stream = 1 + max((m.stream for m in names if isinstance(m, KeyedDropout | KeyedDropPath)), default=-1)
    replacements: dict[nn.Module, nn.Module] = {}
    left = []
    for module, (name, *_) in names.items():
        if isinstance(module, KeyedDropout | KeyedDropPath):
            continue
        build = _keyed(module) if module is not model else None
        if build is not None:
            new = build(stream + len(replacements)).train(module.training)
            adopt_hooks(new, module)
            replacements[module] = new
        elif _is_random(module):
            left.append(name or type(module).__name__)
    replace(model, replacements)
    return left


def _keyed(module: Any) -> Callable[[int], nn.Module] | None:
    """Return a function from stream to the keyed layer for `module`; None if its kind is unknown or its rate is 0."""
    kind: type[nn.Module] = type(module)
    if kind in _DIMS and module.p:  # not subclasses, which may compute something else
        return lambda stream: KeyedDropout(module.p, _DIMS[kind], module.inplace, stream=stream)
    if _comes_from(kind, "timm", "DropPath") and module.drop_prob:
        return lambda stream: KeyedDropPath(module.drop_prob, module.scale_by_keep, stream=stream)
    if _comes_from(kind, "torchvision", "StochasticDepth") and module.p and module.mode == "row":
        return lambda stream: KeyedDropPath(module.p, stream=stream)
    return None


def _comes_from(kind: type[nn.Module], package: str, name: str) -> bool:
    # Compare names, so that neither library has to be installed or imported.
    return kind.__name__ == name and kind.__module__.partition(".")[0] == package


def _is_random(module: Any) -> bool:
    if isinstance(module, _ALWAYS_RANDOM):
        return True
    if isinstance(module, DropoutNd) or _comes_from(type(module), "torchvision", "StochasticDepth"):
        return bool(module.p)
    if isinstance(module, nn.RNNBase) and module.num_layers == 1:  # dropout is between layers
        return False
    return any(isinstance(value, float) and value > 0 for name, value in vars(module).items() if "drop" in name.lower())


def describe_randomness(model: nn.Module, unkeyed: list[str]) -> str | None:
    """Return the message of a run whose randomness cannot be keyed by sample; None if `unkeyed` is empty."""
    if not unkeyed:
        return None
    shown = ", ".join(unkeyed[:4]) + (f" and {len(unkeyed) - 4} more" if len(unkeyed) > 4 else "")
    return f"invariant in distribution only: {shown} of {type(model).__name__} draw from the global generator"
