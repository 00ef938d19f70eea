"""The section on what was run and on what: the facts of the records, once if they are equal in all runs."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from micronorm.report.html import Section, format_value
from micronorm.report.runs import NamedRun

_SHOWN_ELSEWHERE = ("format", "name")


def facts(runs: Sequence[NamedRun], limit: int) -> Section:
    """Return the facts that all runs share, then those of each run."""
    flat = {
        run.name: _flatten({key: value for key, value in run.record.facts.items() if key not in _SHOWN_ELSEWHERE})
        for run in runs
    }
    first, *others = flat.values()
    common = {key: value for key, value in first.items() if all(key in o and o[key] == value for o in others)}
    heading = f"<p>The same in all {len(flat)} runs:</p>" if others and common else ""
    own = "".join(
        f"<details><summary>{escape(name)}</summary>{_definitions(rest)}</details>"
        for name, facts in flat.items()
        if (rest := {key: value for key, value in facts.items() if key not in common})
    )
    return Section("facts", "What was run, and on what", body=f"{heading}{_definitions(common)}{own}")


def _flatten(facts: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    found: dict[tuple[str, ...], Any] = {}
    for key, value in facts.items():
        found |= _flatten(value, (*prefix, key)) if isinstance(value, dict) and value else {(*prefix, key): value}
    return found


def _definitions(facts: Mapping[tuple[str, ...], Any]) -> str:
    """Return the facts as HTML with a line for each group: settings: epochs 15 · seed 0."""
    grouped: dict[str, list[str]] = {}
    for (group, *path), value in facts.items():
        text = escape(format_value(value))
        text = f"<code>{text}</code>" if group in ("command", "revision") and value is not None else text
        name = escape(" ".join(path).replace("_", " "))
        grouped.setdefault(group, []).append(f'<span class="name">{name}</span> {text}' if name else text)
    items = "".join(f"<dt>{escape(group)}</dt><dd>{' · '.join(parts)}</dd>" for group, parts in grouped.items())
    return f'<dl class="facts">{items}</dl>' if items else ""
