"""What the runs came to: a sentence, and a table or, of a single run, its main figures."""

import math
import statistics
from collections.abc import Sequence
from html import escape

from micronorm.records import Record
from micronorm.report.runs import (
    LOWER_IS_BETTER,
    Detail,
    NamedRun,
    by_step,
    epochs_done,
    last_figures,
    last_step,
    main_figure,
    numbers,
    seconds_of,
    state_of,
    title_of,
)
from micronorm.report.sections.paper import departures
from micronorm.report.text import Section, Table, count, duration, is_number, size, table_html

_PERCENT = ("top1", "top5")  # shown to a hundredth


def verdict(runs: Sequence[NamedRun]) -> str:
    """The page in a sentence or two, from the figures alone."""
    key = main_figure(runs)
    figures = {run.name: value for run in runs if (value := last_figures(run.record).get(key)) is not None}
    finite = {name: value for name, value in figures.items() if math.isfinite(value)}
    if not figures:
        return "No evaluation yet."
    if len(figures) > len(finite):
        broken = [name for name in figures if name not in finite]
        diverged = f" {', '.join(broken)}: no finite figure, training has diverged."
    else:
        diverged = ""
    if not finite:
        return diverged.strip()
    text = _of_one(runs[0], key) if len(runs) == 1 else _of_several(runs, finite, key)
    open_runs = [run.name for run in runs if state_of(run.record) != "finished"]
    unfinished = f" Not finished: {', '.join(open_runs)}." if open_runs else ""
    return text + diverged + unfinished


def _value(value: float, key: str) -> str:
    return f"{value:.2f} %" if key in _PERCENT else f"{value:.4g}"


def _figure_name(key: str) -> str:
    return f"test {title_of(key).removesuffix(' %')}"


def _of_one(run: NamedRun, key: str) -> str:
    value = last_figures(run.record)[key]
    text = f"{_value(value, key)} {_figure_name(key)} after {count(last_step(run.record), 'step')}"
    seconds = seconds_of(run.record)
    text += "" if seconds is None else f" in {duration(seconds)}"
    theirs = numbers(run.record.facts.get("paper")).get(key)
    if theirs is None:
        return text + "."
    against = departures(run.record)
    apart = f"the paper gives {_value(theirs, key)}"
    return f"{text}; {apart}" + (f", but not of the same: {'; '.join(against)}." if against else ".")


def _of_several(runs: Sequence[NamedRun], finite: dict[str, float], key: str) -> str:
    # Figures that read alike are alike: no reader could tell which of them is the lowest.
    by_value: dict[str, list[str]] = {}
    for name in sorted(finite, key=lambda name: finite[name]):
        by_value.setdefault(_value(finite[name], key), []).append(name)
    (low, lowest), (high, highest) = next(iter(by_value.items())), list(by_value.items())[-1]
    named = _figure_name(key)
    recipes = [run.record.facts["recipe"] for run in runs]
    tail = " One seed each." if len(set(recipes)) == len(recipes) else ""
    tail += _unequal([run for run in runs if run.name in finite])
    if len(finite) == 1:
        return f"{lowest[0]}: {low} {named}."
    if len(by_value) == 1:
        return f"All {len(finite)} runs: {low} {named}.{tail}"
    first, last = ("Lowest", "highest") if key in LOWER_IS_BETTER else ("Least", "largest")
    return (
        f"{first} {named} of {len(finite)} runs: {_some(lowest)} with {low}; "
        f"{last}: {_some(highest)} with {high}.{tail}"
    )


def _some(names: Sequence[str]) -> str:
    return " and ".join(names) if len(names) < 3 else f"{len(names)} runs"


def _unequal(runs: Sequence[NamedRun]) -> str:
    """A sentence where the runs did not train for as long as one another, or not as long as their recipes say."""
    by_length: dict[str, list[str]] = {}
    short = False
    for run in runs:
        done, planned = epochs_done(run.record), _planned_epochs(run.record)
        short |= planned is not None and 0 < done < planned
        length = count(done, "epoch") if planned is None else f"{done} of {planned:g} epochs"
        by_length.setdefault(length, []).append(run.name)
    reached = {epochs_done(run.record) for run in runs}
    if 0 in reached or (len(reached) == 1 and not short):  # loops of other people need not count epochs
        by_length = {}
        for run in runs:
            by_length.setdefault(count(last_step(run.record), "step"), []).append(run.name)
        if len(by_length) == 1:
            return ""
    lengths = "; ".join(f"{length} ({', '.join(names)})" for length, names in by_length.items())
    if len(by_length) == 1:
        return f" None did all epochs of its recipe: {next(iter(by_length))}."
    return f" Not of equal training: {lengths}."


def _planned_epochs(record: Record) -> float | None:
    """Of the recipe, else of the run's settings."""
    definition = numbers(record.facts.get("definition"))
    return definition.get("epochs", numbers(record.facts["settings"]).get("epochs"))


def results(runs: Sequence[NamedRun], detail: Detail) -> Section:
    """The last figures of every run."""
    body = _table(runs) if len(runs) > 1 else _tiles(runs[0], main_figure(runs)) + _table(runs)
    return Section("results", "Results", body=body)


def _table(runs: Sequence[NamedRun]) -> str:
    figures = {run.name: last_figures(run.record) for run in runs}
    keys = list(dict.fromkeys(key for found in figures.values() for key in found))
    keys.sort(key=lambda key: key != main_figure(runs))  # what the page is about stands first
    header = ["run", *(f"test {title_of(key)}" for key in keys), "steps", "seconds", "seed", "state"]
    rows = [
        [
            run.name,
            *(_rounded(figures[run.name].get(key), key) for key in keys),
            last_step(run.record),
            None if (seconds := seconds_of(run.record)) is None else round(seconds, 1),
            run.record.facts["settings"].get("seed"),
            state_of(run.record),
        ]
        for run in runs
    ]
    return table_html(Table("Results", header, rows), colours=[run.colour for run in runs] if len(runs) > 1 else ())


def _rounded(value: float | None, key: str) -> float | None:
    return round(value, 2) if value is not None and key in _PERCENT else value


def _tiles(run: NamedRun, key: str) -> str:
    tiles = []
    figure = last_figures(run.record).get(key)
    if figure is not None:
        tiles.append((_figure_name(key), _value(figure, key)))
    tiles += [(name, text) for name, text in _costs(run.record) if text]
    items = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in tiles)
    return f'<dl class="tiles">{items}</dl>' if items else ""


def _costs(record: Record) -> list[tuple[str, str]]:
    speeds = [
        row["samples"] / row["seconds"]
        for row in record.steps
        if is_number(row.get("samples")) and is_number(row.get("seconds")) and row["seconds"] > 0
    ]
    memory = [value for _, value in by_step(record, "memory")]
    seconds = seconds_of(record)
    return [
        ("training time", "" if seconds is None else duration(seconds)),
        ("samples per second", _speed(statistics.median(speeds)) if speeds else ""),
        ("peak memory", size(max(memory)) if memory else ""),
    ]


def _speed(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
