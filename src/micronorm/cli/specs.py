"""Specs from the words of a command line: `--norm bcn --groups 32 --weight ws`, `--norm my_norms:DyT`."""

from dataclasses import fields, replace
from typing import Annotated, Any

import typer
from torch import nn

from micronorm.cli.faults import TargetError
from micronorm.cli.targets import attempt, import_object, unknown
from micronorm.convert import convert
from micronorm.nn import SPECS
from micronorm.nn.spec import NormSpec, WeightSpec

_CHANNELS = 64  # of the layer that a spec of the user's code is tried on

Norm = Annotated[
    str, typer.Option(help="Convert the norms to bcn, gn, bn, sn, …, or module:Spec of your own; none keeps them.")
]
Groups = Annotated[
    int | None, typer.Option(help="Groups of channels; fewer in layers whose channels they do not divide.")
]
Weight = Annotated[
    str, typer.Option(help="Convert the weights to ws, wn, cwn, or module:Spec of your own; none keeps them.")
]
Statistics = Annotated[str | None, typer.Option(help="BCN's statistics: step, sequential or batch. Default: step.")]


def norm_spec(name: str, **options: Any) -> NormSpec | None:
    """Return the norm spec of that name in any case, or None for "none". Options that are None keep their default.

    `module:Spec` and `file.py:Spec` name a spec of the user's own code.
    """
    return _spec(name, NormSpec, options)


def weight_spec(name: str) -> WeightSpec | None:
    """Return the weight spec of that name, as `norm_spec` does."""
    return _spec(name, WeightSpec, {})


def converted(model: nn.Module, norm: str, groups: int | None, weight: str) -> nn.Module:
    """Convert a model as the options say; return it as it is if both are "none"."""
    wanted = norm_spec(norm, groups=groups), weight_spec(weight)
    return convert(model, *wanted) if any(spec is not None for spec in wanted) else model


def _spec(name: str, kind: type, options: dict[str, Any]) -> Any:
    given = {key: value for key, value in options.items() if value is not None}
    if name.lower() == "none":
        if given:
            raise TargetError(f"--{', --'.join(given)} needs another norm than none; name it with --norm")
        return None
    known: dict[str, Any] = {key.lower(): spec for key, spec in SPECS.items() if issubclass(spec, kind)}
    source, colon, attribute = name.rpartition(":")
    spec: Any
    if colon and source and attribute:
        spec = import_object(source, attribute)
        if not (isinstance(spec, kind) or (isinstance(spec, type) and issubclass(spec, kind))):
            raise TargetError(f"{name} must be a {kind.__name__} of micronorm.nn, a class or a value; got {spec!r}")
    elif name.lower() in known:
        spec = known[name.lower()]
    else:
        raise TargetError(unknown(f"no spec {name!r}", name.lower(), [*known, "none"]))
    foreign = sorted(given.keys() - {field.name for field in fields(spec)})
    if foreign:
        raise TargetError(f"{name} takes no --{', --'.join(foreign)}")
    own = colon and source and attribute
    return _build_own(name, spec, given) if own else spec(**given)


def _build_own(name: str, spec: Any, given: dict[str, Any]) -> Any:
    """Return a spec of the user's code, which may raise anything; build one layer to see it here and not later."""
    made = attempt(lambda: spec(**given) if isinstance(spec, type) else replace(spec, **given), f"{name} fails")
    sample: Any = _CHANNELS if isinstance(made, NormSpec) else nn.Conv2d(_CHANNELS, _CHANNELS, 3)
    layer = attempt(lambda: made(sample), f"{name} fails")
    if not isinstance(layer, nn.Module):
        raise TargetError(f"{name} must build an nn.Module, got {type(layer).__name__}")
    return made
