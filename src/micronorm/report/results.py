"""The sections on results, one or two sentences and a table, and on what was run."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from micronorm.records import Record
from micronorm.report.html import Section, Table, count, format_duration, format_value, table_html
from micronorm.report.paper import departures
from micronorm.report.runs import (
    LOWER_IS_BETTER,
    PERCENT,
    NamedRun,
    epochs_done,
    is_recall,
    is_rounded,
    last_figures,
    last_step,
    main_figure,
    numbers,
    state_of,
    title_of,
    training_seconds,
)


def verdict(runs: Sequence[NamedRun]) -> str:
    """Return the page's results in a sentence or two."""
    key = main_figure(runs)
    figures = {run.name: value for run in runs if (value := last_figures(run.record).get(key)) is not None}
    finite = {name: value for name, value in figures.items() if math.isfinite(value)}
    if not figures:
        return "No evaluation yet."
    sentences = []
    if finite:
        sentences.append(_describe_one(runs[0], key) if len(runs) == 1 else _describe_several(runs, finite, key))
    diverged = [name for name in figures if name not in finite]
    if diverged:
        sentences.append(f"{', '.join(diverged)}: training diverged, the test figure is not finite.")
    unfinished = [run.name for run in runs if state_of(run.record) != "finished"]
    if finite and unfinished:
        sentences.append(f"Not finished: {', '.join(unfinished)}.")
    return " ".join(sentences)


def _format(value: float, key: str) -> str:
    return f"{value:.2f}" + " %" * (key in PERCENT) if is_rounded(key) else f"{value:.4g}"


def _figure_name(key: str) -> str:
    return f"test {title_of(key).removesuffix(' %')}"


def _describe_one(run: NamedRun, key: str) -> str:
    value = last_figures(run.record)[key]
    text = f"{_format(value, key)} {_figure_name(key)} after {count(last_step(run.record), 'step')}"
    seconds = training_seconds(run.record)
    text += "" if seconds is None else f" in {format_duration(seconds)}"
    paper = numbers(run.record.facts.get("paper")).get(key)
    if paper is None:
        return text + "."
    against = departures(run.record)
    remark = f", under other conditions: {'; '.join(against)}" if against else ""
    return f"{text}; the paper reports {_format(paper, key)}{remark}."


def _describe_several(runs: Sequence[NamedRun], finite: dict[str, float], key: str) -> str:
    # Figures that are printed with the same digits count as equal: readers could not tell which is lowest.
    by_value: dict[str, list[str]] = {}
    for name in sorted(finite, key=lambda name: finite[name]):
        by_value.setdefault(_format(finite[name], key), []).append(name)
    (low, lowest), (high, highest) = next(iter(by_value.items())), list(by_value.items())[-1]
    named = _figure_name(key)
    recipes = [run.record.facts["recipe"] for run in runs]
    tail = " One seed each." if len(set(recipes)) == len(recipes) else ""
    tail += _compare_lengths([run for run in runs if run.name in finite])
    if len(finite) == 1:
        return f"{lowest[0]}: {low} {named}."
    if len(by_value) == 1:
        return f"All {len(finite)} runs: {low} {named}.{tail}"
    ends = [("Lowest", _join(lowest), low), ("Highest", _join(highest), high)]
    (first, best, value), (last, worst, other) = ends if key in LOWER_IS_BETTER else reversed(ends)
    text = f"{first} {named} of {len(finite)} runs: {best} with {value}"
    return f"{text}; {last.lower()}: {worst} with {other}.{tail}"


def _join(names: Sequence[str]) -> str:
    return " and ".join(names) if len(names) < 3 else f"{len(names)} runs"


def _compare_lengths(runs: Sequence[NamedRun]) -> str:
    """Return a sentence if runs trained for different lengths, or for less than their recipes say."""
    planned = [_planned_epochs(run.record) for run in runs]
    done = [epochs_done(run.record) for run in runs]
    short = any(wanted is not None and 0 < epochs < wanted for epochs, wanted in zip(done, planned, strict=True))
    lengths: dict[str, list[str]] = {}
    for run, epochs, wanted in zip(runs, done, planned, strict=True):
        by_epochs = count(epochs, "epoch") if wanted is None else f"{epochs} of {wanted:g} epochs"
        lengths.setdefault(by_epochs if short else count(last_step(run.record), "step"), []).append(run.name)
    if len(lengths) > 1:
        texts = (f"{length} ({', '.join(names)})" for length, names in lengths.items())
        return f" The runs trained for different lengths: {'; '.join(texts)}."
    return f" No run completed its recipe: {next(iter(lengths))}." if short else ""


def _planned_epochs(record: Record) -> float | None:
    """Return the epochs of the recipe, or those of the run's settings."""
    definition = numbers(record.facts.get("definition"))
    return definition.get("epochs", numbers(record.facts["settings"]).get("epochs"))


def results(runs: Sequence[NamedRun], limit: int) -> Section:
    """Return the last figures of every run as a table."""
    figures = {run.name: last_figures(run.record) for run in runs}
    # The six recalls of COCO for boxes and for masks would push the rest off the page; they are in the record.
    keys = list(dict.fromkeys(key for found in figures.values() for key in found if not is_recall(key)))
    keys.sort(key=lambda key: key != main_figure(runs))
    header = ["run", *(f"test {title_of(key)}" for key in keys), "steps", "seconds", "seed", "state"]
    rows = [
        [
            run.name,
            *(_rounded(figures[run.name].get(key), key) for key in keys),
            last_step(run.record),
            None if (seconds := training_seconds(run.record)) is None else round(seconds, 1),
            run.record.facts["settings"].get("seed"),
            state_of(run.record),
        ]
        for run in runs
    ]
    colours = [run.colour for run in runs] if len(runs) > 1 else ()
    return Section("results", "Results", body=table_html(Table("Results", header, rows), colours=colours))


def _rounded(value: float | None, key: str) -> float | None:
    return round(value, 2) if value is not None and is_rounded(key) else value


# --- what was run ----------------------------------------------------------------------------------------------------

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
