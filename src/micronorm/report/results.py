"""The sections on results, what was run, the paper's figures beside ours, training curves, and memory and speed."""

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from html import escape
from typing import Any

from micronorm.records import Record, is_number
from micronorm.report.charts import Line, line_chart
from micronorm.report.html import Section, count, format_duration, format_value, slug, table_html
from micronorm.report.runs import (
    LOWER_IS_BETTER,
    PERCENT,
    NamedRun,
    by_epoch,
    by_step,
    detail_of,
    is_recall,
    is_rounded,
    last_figures,
    last_step,
    legend_of,
    main_figure,
    numbers,
    speed_by_step,
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
    lower = key in LOWER_IS_BETTER
    value = _format((min if lower else max)(finite.values()), key)
    # Figures that are printed with the same digits count as equal: readers could not tell which is better.
    best = [name for name in finite if _format(finite[name], key) == value]
    text = f"{'Lowest' if lower else 'Highest'} {_figure_name(key)} of {count(len(finite), 'run')}: "
    text += f"{' and '.join(best)} with {value}."
    recipes = [run.record.facts["recipe"] for run in runs]
    text += " One seed each." if len(set(recipes)) == len(recipes) else ""
    steps = sorted(last_step(run.record) for run in runs if run.name in finite)
    return text + (f" The runs took {steps[0]:,} to {steps[-1]:,} steps." if steps[0] < steps[-1] else "")


def results(runs: Sequence[NamedRun]) -> Section:
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
    return Section("results", "Results", body=table_html(header, rows, colours=colours))


def _rounded(value: float | None, key: str) -> float | None:
    return round(value, 2) if value is not None and is_rounded(key) else value


# --- what was run ----------------------------------------------------------------------------------------------------

_SHOWN_ELSEWHERE = ("format", "name")


def facts(runs: Sequence[NamedRun]) -> Section:
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


# --- the paper's figures beside ours ----------------------------------------------------------------------------------

_ABSENT = (
    "No run here has a figure in the paper. micronorm reproduce lists the paper's tables; "
    "micronorm train cifar1/c10-bcn-ws trains a row of one."
)
_AS_RECIPE = "as the recipe says"
_HEADER = ["row", "figure", "paper", "ours", "over seeds", "runs", "ours − paper", "remark"]


def paper(runs: Sequence[NamedRun]) -> Section:
    """Return a table for each of the paper's tables. Runs that differ from their recipe in the same way share a row."""
    groups: dict[tuple[str, str], list[NamedRun]] = {}
    for run in runs:
        if numbers(run.record.facts.get("paper")):
            remark = "; ".join(departures(run.record))
            groups.setdefault((run.record.facts["recipe"], remark), []).append(run)
    if not groups:
        return Section("paper", "The paper and our runs", absent=_ABSENT)
    tables: dict[str, list[list[Any]]] = {}
    for (recipe, remark), members in groups.items():
        table, _, row = recipe.partition("/")
        figures = [last_figures(run.record) for run in members]
        for name, theirs in numbers(members[0].record.facts["paper"]).items():
            ours = [found[name] for found in figures if name in found]
            tables.setdefault(table, []).append([row or recipe, *_compare(name, theirs, ours), remark or _AS_RECIPE])
    parts = [f"<h3>{escape(f'Table {table}')}</h3>{table_html(_HEADER, rows)}" for table, rows in tables.items()]
    return Section("paper", "The paper and our runs", body="".join(parts))


def _compare(name: str, theirs: float, ours: Sequence[float]) -> list[Any]:
    mean = math.fsum(ours) / len(ours) if ours else None
    spread = f"± {statistics.stdev(ours):.2f}" if len(ours) > 1 and all(map(math.isfinite, ours)) else None
    rounded, difference = (None, None) if mean is None else (round(mean, 2), round(mean - theirs, 2))
    return [title_of(name), float(theirs), rounded, spread, len(ours), difference]


def departures(record: Record) -> list[str]:
    """Return how the run differs from its recipe, in words."""
    recipe, varied = _object(record, "definition"), _object(record, "variation")
    settings = record.facts["settings"]
    found = (
        [] if state_of(record) == "finished" else [f"the run {state_of(record)}".replace("not ended", "has not ended")]
    )
    for name in ("epochs", "step_batch") if recipe else ():
        mine, theirs = settings.get(name), recipe.get(name)
        if mine != theirs:
            found.append(f"{name.replace('_', ' ')} {format_value(mine)} where the recipe has {format_value(theirs)}")
    for name in ("lr", "size", "unverified"):
        if varied.get(name) is not None:
            found.append("data not verified" if name == "unverified" else f"{name} set to {format_value(varied[name])}")
    return found


def _object(record: Record, name: str) -> dict[str, Any]:
    """Return a fact that is a JSON object, or an empty dict: older records lack some of them."""
    found = record.facts.get(name)
    return found if isinstance(found, dict) else {}


# --- training curves, memory and speed --------------------------------------------------------------------------------

Points = list[tuple[float, float]]


def training(runs: Sequence[NamedRun]) -> Section:
    """Return loss and main figure by epoch, loss and learning rate by step."""
    key = main_figure(runs)
    records = [run.record for run in runs]
    curves = {
        ("training-loss", "Training loss", "epoch"): [loss_by_epoch(record) for record in records],
        (f"test-{slug(key)}", f"Test {title_of(key)}", "epoch"): [by_epoch(r, "test", key) for r in records],
        ("step-loss", "Training loss of each step", "step"): [by_step(record, "loss") for record in records],
        ("learning-rate", "Learning rate", "step"): [by_step(record, "lr") for record in records],
    }
    absent = "No step or epoch is recorded yet. micronorm train RECIPE records them while it trains."
    # On a logarithmic scale, values near 0 would take most of the height: the last steps of a cosine schedule, and the
    # first evaluations of a figure that grows.
    linear = {"learning-rate"} | (set() if key in LOWER_IS_BETTER else {f"test-{slug(key)}"})
    return _curves_section("training", "Training", curves, runs, absent=absent, linear=linear)


def resources(runs: Sequence[NamedRun]) -> Section:
    """Return samples per second, memory if the device reports it, and the micro-batch size if it changed."""
    memory = [[(x, y / 2**30) for x, y in by_step(run.record, "memory")] for run in runs]
    sizes = [by_step(run.record, "micro_batch") for run in runs]
    changed = any(len({size for _, size in points}) > 1 for points in sizes)
    curves = {
        ("speed", "Samples per second", "step"): [speed_by_step(run.record) for run in runs],
        ("memory", "Peak memory so far, GiB", "step"): memory,
        ("micro-batch", "Samples per micro-batch", "step"): sizes if changed else [[] for _ in runs],
    }
    absent = "No step recorded its seconds. micronorm train records them."
    about = "" if any(memory) else "Memory is recorded on GPUs only."
    return _curves_section("resources", "Memory and speed", curves, runs, about=about, absent=absent)


def _curves_section(
    key: str,
    heading: str,
    curves: dict[tuple[str, str, str], list[Points]],
    runs: Sequence[NamedRun],
    *,
    about: str = "",
    absent: str,
    linear: Collection[str] = (),
) -> Section:
    """Return a section with a chart for each of `curves`: (name, caption, x label) and the points of each run.

    Charts named in `linear` never have a logarithmic scale.
    """
    charts, empty = [], []
    for (name, caption, x_label), found in curves.items():
        if not any(found):
            continue
        lines = [Line(run.name, run.colour, points, run.style) for run, points in zip(runs, found, strict=True)]
        log = False if name in linear else None
        chart = line_chart(name, lines, caption=caption, x_label=x_label, limit=detail_of(runs), log=log)
        if chart is None:
            empty.append(caption)
        else:
            charts.append(chart)
    if not charts and not empty:
        return Section(key, heading, absent=absent)
    about = f"No finite values: {', '.join(empty)}." if empty else about
    return Section(key, heading, about, charts, legend_of(runs, runs))


def loss_by_epoch(record: Record) -> Points:
    """Return the recorded loss of each epoch, or else the mean over the samples of its steps."""
    if recorded := by_epoch(record, "train", "loss"):
        return recorded
    sums: dict[float, tuple[float, float]] = {}
    for row in record.steps:
        if is_number(row.get("loss")) and is_number(row.get("epoch")):
            total, samples = sums.get(row["epoch"] + 1, (0.0, 0.0))
            weight = row.get("samples", 1)
            sums[row["epoch"] + 1] = total + weight * row["loss"], samples + weight
    return [(epoch, total / samples) for epoch, (total, samples) in sorted(sums.items()) if samples]
