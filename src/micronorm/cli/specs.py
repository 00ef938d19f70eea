"""Specs from the words of a command line: `--norm bcn --groups 32 --weight ws`."""

from dataclasses import fields
from typing import Annotated, Any

import typer

from micronorm.cli.targets import TargetError, unknown
from micronorm.nn import SPECS
from micronorm.nn.spec import NormSpec, WeightSpec

Norm = Annotated[str, typer.Option(help="The normalization: bcn, gn, bn, sn, …; none keeps the model's.")]
Groups = Annotated[int | None, typer.Option(help="Channel groups; fewer where they do not divide the channels.")]
Weight = Annotated[str, typer.Option(help="The weight: ws, wn, cwn; none keeps the model's.")]
Statistics = Annotated[str | None, typer.Option(help="BCN's statistics: step, sequential or batch.")]


def norm_spec(name: str, **options: Any) -> NormSpec | None:
    """Return the norm spec of that name in any case, or None for "none". Options that are None keep their default."""
    return _spec(name, NormSpec, options)


def weight_spec(name: str) -> WeightSpec | None:
    """Return the weight spec of that name in any case, or None for "none"."""
    return _spec(name, WeightSpec, {})


def _spec(name: str, kind: type, options: dict[str, Any]) -> Any:
    known = {key.lower(): spec for key, spec in SPECS.items() if issubclass(spec, kind)}
    if name.lower() == "none":
        return None
    if name.lower() not in known:
        raise TargetError(unknown(f"no spec {name!r}", name.lower(), [*known, "none"]))
    spec = known[name.lower()]
    given = {key: value for key, value in options.items() if value is not None}
    foreign = sorted(given.keys() - {field.name for field in fields(spec)})
    if foreign:
        raise TargetError(f"{name} takes no --{', --'.join(foreign)}")
    return spec(**given)
