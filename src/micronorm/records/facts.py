"""`run.json`: the facts of a run, and which of them there must be."""

from collections.abc import Mapping
from pathlib import Path

from micronorm.records.encoding import Row, parse
from micronorm.records.folder import FACTS

FORMAT = 1

_KINDS: Mapping[str, tuple[type, ...]] = {
    "format": (int,),
    "recipe": (str,),
    "settings": (dict,),
    "execution": (dict,),
    "data": (dict,),
    "environment": (dict,),
    "revision": (str, type(None)),
    "command": (str,),
    "date": (str,),
}


def read_facts(folder: Path) -> Row:
    """The facts of the run in `folder`. FileNotFoundError: there is no run; ValueError: they are damaged or newer."""
    file = folder / FACTS
    if not file.exists():
        raise FileNotFoundError(f"{folder} holds no run: there is no {FACTS}")
    facts = parse(file.read_bytes(), str(file))
    check_facts(facts, file)
    return facts


def check_facts(facts: Row, file: Path) -> None:
    """Refuse facts of another format, and such as lack one or have one of the wrong kind."""
    if facts.get("format") != FORMAT:
        raise ValueError(
            f"{file}: format {facts.get('format')!r}; this version of micronorm knows format {FORMAT} only"
        )
    for name, kinds in _KINDS.items():
        if not isinstance(facts.get(name, ...), kinds):
            wanted = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
            got = type(facts[name]).__name__ if name in facts else "nothing"
            raise ValueError(f"{file}: the fact {name!r} must be {wanted}, got {got}")
