"""Specs from the words of a command line: `--norm bcn --groups 32 --weight ws`."""

import difflib
from dataclasses import fields
from typing import Any

import typer

from micronorm.nn import SPECS
from micronorm.nn.spec import NormSpec, WeightSpec


def norm_spec(name: str, **options: Any) -> NormSpec | None:
    """The norm spec of that name (any case), or None for "none". Options that are None are left to the spec."""
    return _spec(name, NormSpec, options)


def weight_spec(name: str) -> WeightSpec | None:
    """The weight spec of that name (any case), or None for "none"."""
    return _spec(name, WeightSpec, {})


def _spec(name: str, kind: type, options: dict[str, Any]) -> Any:
    known = {key.lower(): spec for key, spec in SPECS.items() if issubclass(spec, kind)}
    if name.lower() == "none":
        return None
    if name.lower() not in known:
        raise typer.BadParameter(unknown("spec", name.lower(), [*known, "none"]))
    spec = known[name.lower()]
    given = {key: value for key, value in options.items() if value is not None}
    foreign = sorted(given.keys() - {field.name for field in fields(spec)})
    if foreign:
        raise typer.BadParameter(f"{name} takes no {', '.join(foreign)}")
    try:
        return spec(**given)
    except (TypeError, ValueError) as fault:
        raise typer.BadParameter(str(fault)) from fault


def unknown(what: str, name: str, known: list[str]) -> str:
    """A message for a name that is not known, with the ones nearest to it."""
    near = difflib.get_close_matches(name, known, n=5, cutoff=0.5)
    hint = f"did you mean {', '.join(near)}?" if near else f"known are {', '.join(known[:20])}"
    return f"no {what} {name!r}; {hint}"
