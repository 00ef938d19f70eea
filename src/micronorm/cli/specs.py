"""Specs from the words of a command line: `--norm bcn --groups 32 --weight ws`, `--norm my_norms:DyT`."""

from dataclasses import fields, replace
from typing import Annotated, Any

import typer
from torch import nn

from micronorm.cli.targets import TargetError, import_object, unknown
from micronorm.nn import SPECS
from micronorm.nn.spec import NormSpec, WeightSpec

_CHANNELS = 64  # of the layer that a spec of the user's code is tried on

Norm = Annotated[
    str, typer.Option(help="bcn, gn, bn, sn, …, or module:Spec for your own; none keeps the model's norms.")
]
Groups = Annotated[int | None, typer.Option(help="Channel groups; fewer where they do not divide the channels.")]
Weight = Annotated[str, typer.Option(help="ws, wn, cwn, or module:Spec for your own; none keeps the model's weights.")]
Statistics = Annotated[str | None, typer.Option(help="BCN's statistics: step, sequential or batch.")]


def norm_spec(name: str, *, from_file: bool = False, **options: Any) -> NormSpec | None:
    """Return the norm spec of that name in any case, or None for "none". Options that are None keep their default.

    `module:Spec` and `file.py:Spec` name a spec of the user's own code, unless the name was read `from_file`.
    """
    return _spec(name, NormSpec, options, from_file=from_file)


def weight_spec(name: str, *, from_file: bool = False) -> WeightSpec | None:
    """Return the weight spec of that name in any case, or None for "none". `from_file`: as in `norm_spec`."""
    return _spec(name, WeightSpec, {}, from_file=from_file)


def _spec(name: str, kind: type, options: dict[str, Any], *, from_file: bool) -> Any:
    if name.lower() == "none":
        return None
    known: dict[str, Any] = {key.lower(): spec for key, spec in SPECS.items() if issubclass(spec, kind)}
    source, colon, attribute = name.rpartition(":")
    spec: Any
    if colon and source and attribute and not from_file:
        spec = import_object(source, attribute)
        if not (isinstance(spec, kind) or (isinstance(spec, type) and issubclass(spec, kind))):
            raise TargetError(f"{name} must be a {kind.__name__} of micronorm.nn, a class or a value; got {spec!r}")
    elif name.lower() in known:
        spec = known[name.lower()]
    else:
        raise TargetError(unknown(f"no spec {name!r}", name.lower(), [*known, "none"]))
    given = {key: value for key, value in options.items() if value is not None}
    foreign = sorted(given.keys() - {field.name for field in fields(spec)})
    if foreign:
        raise TargetError(f"{name} takes no --{', --'.join(foreign)}")
    own = colon and source and attribute
    return _build_own(name, spec, given) if own else spec(**given)


def _build_own(name: str, spec: Any, given: dict[str, Any]) -> Any:
    """Return a spec of the user's code, which may raise anything; build one layer to see it here and not later."""
    try:
        made = spec(**given) if isinstance(spec, type) else replace(spec, **given)
        layer = made(_CHANNELS) if isinstance(made, NormSpec) else made(nn.Conv2d(_CHANNELS, _CHANNELS, 3))
    except Exception as error:
        raise TargetError(f"{name} fails ({type(error).__name__}: {error})") from error
    if not isinstance(layer, nn.Module):
        raise TargetError(f"{name} must build an nn.Module, got {type(layer).__name__}")
    return made
