"""Plots of the results: ratios to BatchNorm, one figure per group of cases and route."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from micronorm.bench.cases import LAYOUTS
from micronorm.bench.methods import BN_COMPILED, BN_GN, BN_GN_COMPILED, GN, NormMethod
from micronorm.bench.results import BenchResult
from micronorm.report.plots import COLOURS, QUIET, TEXT, apply_style, save_figure, subplots

OURS = tuple(COLOURS[k] for k in (0, 5, 2, 3))
OTHERS = tuple(COLOURS[k] for k in (1, 6, 4, 7))
"""Colours of our methods and of the others. Beyond four methods of a kind the colours repeat, hatched."""
COMPARED = (BN_COMPILED, GN, BN_GN, BN_GN_COMPILED)  # drawn beside ours; BN itself is the line at 1
RATIO = "to_bn_nhwc"


def draw(results: Sequence[BenchResult], folder: Path, *, caption: str = "") -> list[Path]:
    """Write the figure of each group and route as SVG and PNG into `folder`, and return the files.

    Args:
        results: those of a run, with their ratios.
        folder: is made if it does not exist.
        caption: says where the figures come from.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    shown = [r for r in results if RATIO in r.ratios and (r.method.is_ours or r.method in COMPARED)]
    for group, route in dict.fromkeys((result.case.group, result.route) for result in shown):
        chosen = [result for result in shown if (result.case.group, result.route) == (group, route)]
        written += save_figure(_figure(chosen, route, caption), folder / f"bench_{group}_{route}")
    return written


def _figure(results: Sequence[BenchResult], route: str, caption: str) -> Any:
    layouts = [layout for layout in LAYOUTS if any(result.layout == layout for result in results)]
    shapes = list(dict.fromkeys(result.case.name for result in results))
    styles = bar_styles(list(dict.fromkeys(result.method for result in results)))
    ratios = [result.ratios[RATIO] for result in results]
    limits = min(0.9, *ratios) / 1.5, max(1.1, *ratios) * 1.35
    width = min(18.0, max(7.0, 1.2 + len(shapes) * (0.45 + 0.16 * len(styles))))
    size = (width, 1.4 + 2.5 * len(layouts))
    figure, grid = subplots(len(layouts), 1, figsize=size, layout="constrained", squeeze=False, sharex=True)
    for axes, layout in zip(grid[:, 0], layouts, strict=True):
        values = {(r.method, r.case.name): r.ratios[RATIO] for r in results if r.layout == layout}
        _draw_bars(axes, values, shapes, styles)
        axes.set_yscale("log")
        axes.set_ylim(*limits)
        ticks = [t for t in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100) if limits[0] <= t <= limits[1]]
        axes.set_yticks(ticks, labels=[f"{t:g}" for t in ticks])
        axes.minorticks_off()
        axes.axhline(1, color=TEXT, linewidth=0.9, zorder=3)
        title = "channels_last (nhwc)" if layout == "nhwc" else "contiguous (nchw)"
        axes.set_title(title, loc="left", fontsize=9, color=QUIET)
        axes.set_ylabel("time ÷ BN nhwc")
        apply_style(axes, grid="y")
    grid[-1, 0].set_xticks(range(len(shapes)), labels=[name.replace("x", "×") for name in shapes], fontsize=8)
    mode = "CUDA graph" if route == "graph" else "eager"
    title = f"Norm + ReLU, forward + backward, {results[0].dtype}, {mode}; below 1 is faster than BatchNorm"
    figure.suptitle(f"{title}\n{caption}".rstrip(), fontsize=10)
    handles, labels = grid[0, 0].get_legend_handles_labels()
    columns = min(len(labels), max(3, int(width / 2.2)))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)
    return figure


def bar_styles(methods: Sequence[NormMethod]) -> dict[NormMethod, dict[str, str]]:
    """Return colour and hatch of each method; no two are alike."""
    styles = {}
    for colours, is_ours in ((OURS, True), (OTHERS, False)):
        for index, method in enumerate(method for method in methods if method.is_ours == is_ours):
            repeated, colour = divmod(index, len(colours))
            styles[method] = {"color": colours[colour], "hatch": "////" * repeated}
    return {method: styles[method] for method in methods}


def _draw_bars(
    axes: Any,
    values: Mapping[tuple[NormMethod, str], float],
    shapes: Sequence[str],
    styles: Mapping[NormMethod, Mapping[str, str]],
) -> None:
    """Draw bars up or down from 1 on a logarithmic axis: half the time is as far from 1 as twice the time."""
    width = 0.84 / len(styles)
    for index, (method, style) in enumerate(styles.items()):
        offset = (index - (len(styles) - 1) / 2) * width
        known = [(k + offset, values[method, name]) for k, name in enumerate(shapes) if (method, name) in values]
        places, heights = [place for place, _ in known], [value - 1 for _, value in known]
        options = {"bottom": 1, "label": method.label, "zorder": 2, "edgecolor": "white", "linewidth": 0}
        bars = axes.bar(places, heights, 0.92 * width, **options, **style)
        texts = [f"{value:.2f}" if value < 9.95 else f"{value:.0f}" for _, value in known]
        axes.bar_label(bars, texts, padding=2, fontsize=5.5, rotation=90, color=TEXT, zorder=4)
    axes.set_xlim(-0.6, len(shapes) - 0.4)
