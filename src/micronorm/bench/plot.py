"""The tables as plots: ratios to BatchNorm, a figure per group of cases and route. Needs matplotlib."""

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from micronorm.bench.cases import LAYOUTS, TARGETS
from micronorm.bench.rows import Row

# The colours of the library's pages: the cool ones for ours, the warm ones for peers. Beyond four of a kind the colours
# come again, hatched.
OURS = ("#0b62b8", "#0a7f91", "#0b7f55", "#6a4fc4")
THEIRS = ("#c2540a", "#8a6d00", "#b0297c", "#59626c")
_TEXT, _QUIET, _RULE = "#1b1f24", "#5b6570", "#dde1e6"
_SHOWN = ("bn-compiled", "gn", "sync-bn", "bn-gn", "bn-gn-compiled")  # peers; BN itself is the line at 1


def load_pyplot() -> Any:
    """matplotlib's pyplot, drawing into files.

    Raises:
        ImportError: matplotlib is not installed, with the command that installs it.
    """
    try:
        matplotlib: Any = importlib.import_module("matplotlib")
    except ImportError as error:
        raise ImportError("plots need matplotlib, which is not installed: pip install 'micronorm[plot]'") from error
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "micronorm"  # the same figure gives the same file
    return importlib.import_module("matplotlib.pyplot")


def draw(rows: Sequence[Row], folder: Path, *, caption: str = "") -> list[Path]:
    """Write each group's figure by each route, as SVG and PNG, into `folder`; returns the files.

    Args:
        rows: those of a run, with their ratios.
        folder: made where it is not there.
        caption: what the figures say below of the run.
    """
    pyplot = load_pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for group, route in dict.fromkeys((row.case.group, row.route) for row in rows):
        chosen = [r for r in rows if (r.case.group, r.route) == (group, route) and "to_bn_nhwc" in r.ratios]
        if not any(_is_shown(row) for row in chosen):
            continue
        figure = _figure(pyplot, chosen, group, route, caption)
        for suffix in ("svg", "png"):
            path = folder / f"bench_{group}_{route}.{suffix}"
            figure.savefig(path, dpi=130, metadata={"Date": None} if suffix == "svg" else None)
            written.append(path)
        pyplot.close(figure)
    return written


def _is_shown(row: Row) -> bool:
    return row.method.is_ours or row.method.key in _SHOWN


def _figure(pyplot: Any, rows: Sequence[Row], group: str, route: str, caption: str) -> Any:
    layouts = [layout for layout in LAYOUTS if any(row.layout == layout for row in rows)]
    names = list(dict.fromkeys(row.case.name for row in rows))
    labels = list(dict.fromkeys(row.method.label for row in rows if _is_shown(row)))
    looks = _looks(rows, labels)
    ratios = [row.ratios["to_bn_nhwc"] for row in rows if _is_shown(row)]
    targets = TARGETS.get(group)
    target = None if targets is None else targets.graph_to_bn if route == "graph" else targets.eager_to_bn
    limits = min([0.9, *ratios, target or 1]) / 1.5, max([1.1, *ratios, target or 1]) * 1.35
    width = min(18.0, max(7.0, 1.2 + len(names) * (0.45 + 0.16 * len(labels))))
    figure, axes = pyplot.subplots(
        len(layouts), 1, figsize=(width, 1.4 + 2.5 * len(layouts)), layout="constrained", squeeze=False, sharex=True
    )
    for axis, layout in zip(axes[:, 0], layouts, strict=True):
        at = {(r.method.label, r.case.name): r.ratios["to_bn_nhwc"] for r in rows if r.layout == layout}
        _bars(axis, at, names, looks)
        _frame(axis, limits, target)
        title = "channels_last (nhwc)" if layout == "nhwc" else "contiguous (nchw)"
        axis.set_title(title, loc="left", fontsize=9, color=_QUIET)
        axis.set_ylabel("time ÷ BN nhwc", fontsize=9, color=_QUIET)
    axes[-1, 0].set_xticks(range(len(names)), labels=[name.replace("x", "×") for name in names], fontsize=8)
    dtype = rows[0].dtype
    by = "CUDA graph" if route == "graph" else "eager"
    title = f"Norm + ReLU, forward + backward, {dtype}, {by}; below 1 is faster than BatchNorm"
    figure.suptitle(f"{title}\n{caption}".rstrip(), fontsize=10)
    handles, found = axes[0, 0].get_legend_handles_labels()
    columns = min(len(found), max(3, int(width / 2.2)))
    figure.legend(handles, found, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)
    return figure


def _looks(rows: Sequence[Row], labels: Sequence[str]) -> dict[str, dict[str, str]]:
    """Colour and hatch of each label."""
    ours = {row.method.label for row in rows if row.method.is_ours}
    looks = {}
    for colours, members in (
        (OURS, [label for label in labels if label in ours]),
        (THEIRS, [label for label in labels if label not in ours]),
    ):
        for index, label in enumerate(members):
            again = index // len(colours) > 0
            looks[label] = {"color": colours[index % len(colours)], "hatch": "////" if again else ""}
    return {label: looks[label] for label in labels}


def _bars(
    axis: Any,
    at: Mapping[tuple[str, str], float],
    names: Sequence[str],
    looks: Mapping[str, Mapping[str, str]],
) -> None:
    """From the line at 1 up or down, on a scale of ratios: half the time is as far from it as twice the time."""
    width = 0.84 / len(looks)
    for index, (label, look) in enumerate(looks.items()):
        offset = (index - (len(looks) - 1) / 2) * width
        known = [(k, at[label, name]) for k, name in enumerate(names) if (label, name) in at]
        places = [k + offset for k, _ in known]
        heights = [value - 1 for _, value in known]
        bars = axis.bar(
            places, heights, 0.92 * width, bottom=1, label=label, zorder=2, edgecolor="white", linewidth=0, **look
        )
        for bar, (_, value) in zip(bars, known, strict=True):
            above = value >= 1
            axis.annotate(
                f"{value:.2f}" if value < 9.95 else f"{value:.0f}",
                (bar.get_x() + bar.get_width() / 2, value),
                xytext=(0, 2 if above else -2),
                textcoords="offset points",
                ha="center",
                va="bottom" if above else "top",
                fontsize=5.5,
                rotation=90,
                color=_TEXT,
                zorder=4,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.4},  # readable across the target's line
            )
    axis.set_xlim(-0.6, len(names) - 0.4)


def _frame(axis: Any, limits: tuple[float, float], target: float | None) -> None:
    axis.set_yscale("log")
    axis.set_ylim(*limits)
    ticks = [t for t in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100) if limits[0] <= t <= limits[1]]
    axis.set_yticks(ticks, labels=[f"{t:g}" for t in ticks], fontsize=8)
    axis.minorticks_off()
    axis.grid(axis="y", color=_RULE, zorder=0)
    axis.axhline(1, color=_TEXT, linewidth=0.9, zorder=3)
    if target is not None and target != 1:
        axis.axhline(target, color=_TEXT, linewidth=0.9, linestyle="--", zorder=3, label=f"target, {target:g}")
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axis.spines[side].set_color(_RULE)
    axis.tick_params(colors=_QUIET, length=0)
