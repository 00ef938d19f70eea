"""The tables of steps_gpu.py, ws_gpu.py and `micronorm bench` as pictures beside them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tables import read_csv

from micronorm.bench.cases import Case
from micronorm.bench.peers import METHODS
from micronorm.bench.plot import OURS, THEIRS, draw, load_pyplot
from micronorm.bench.rows import Row

RESULTS = Path(__file__).parent / "results"


def bars(axis: Any, labels: Sequence[str], values: Sequence[float], texts: Sequence[str]) -> None:
    colours = [OURS[0] if "BCN" in label or label.startswith("ours") else THEIRS[0] for label in labels]
    places = range(len(labels) - 1, -1, -1)
    axis.barh(list(places), values, color=colours, height=0.7)
    for place, value, text in zip(places, values, texts, strict=True):
        axis.text(value, place, f" {text}", va="center", fontsize=7)
    axis.set_yticks(list(places), labels, fontsize=7)
    axis.set_xlim(0, max(values) * 1.35)
    axis.tick_params(axis="x", labelsize=7)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def steps(pyplot: Any, table: str) -> Any:
    """Captured training steps: milliseconds, and the peak of memory as a multiple of BatchNorm's."""
    rows = [row for row in read_csv(RESULTS / table) if row["what"] == "step" and row["route"] == "graph" and row["ms"]]
    workloads = list(dict.fromkeys((row["network"], row["samples"], row["size"]) for row in rows))
    figure, axes = pyplot.subplots(len(workloads), 2, figsize=(9.5, 1.7 * len(workloads) + 0.6), layout="constrained")
    for (left, right), workload in zip(axes, workloads, strict=True):
        chosen = [row for row in rows if (row["network"], row["samples"], row["size"]) == workload]
        names, times = [row["method"] for row in chosen], [float(row["ms"]) for row in chosen]
        best = min(time for name, time in zip(names, times, strict=True) if name.startswith("BN"))
        bars(left, names, times, [f"{time:.2f} ms, {time / best:.2f}× BN's best here" for time in times])
        peaks = [float(row["peak_to_bn"]) for row in chosen]
        bars(right, [""] * len(names), peaks, [f"{peak:.2f}×" for peak in peaks])
        for patch, name in zip(right.patches, names, strict=True):
            patch.set_color(OURS[0] if "BCN" in name else THEIRS[0])
        left.set_title(f"{workload[0]}, {workload[1]}×{workload[2]}", loc="left", fontsize=9)
        right.set_title("peak memory to BN's", loc="left", fontsize=8)
    figure.suptitle(_origin("Training steps, CUDA graph, bfloat16, channels_last", rows[0]), fontsize=9)
    return figure


def weights(pyplot: Any, table: str) -> Any:
    """Standardized weights of a network, forward and backward."""
    rows = [row for row in read_csv(RESULTS / table) if row["layout"] == "channels_last"]
    networks = list(dict.fromkeys(row["weights"] for row in rows))
    figure, axes = pyplot.subplots(
        len(networks), 1, figsize=(7.5, 1.5 * len(networks) + 0.5), layout="constrained", squeeze=False
    )
    for axis, network in zip(axes[:, 0], networks, strict=True):
        chosen = [row for row in rows if row["weights"] == network]
        times = [float(row["ms"]) for row in chosen]
        bars(axis, [row["method"] for row in chosen], times, [f"{time:.2f} ms" for time in times])
        axis.set_title(network, loc="left", fontsize=9)
    figure.suptitle(_origin("Weight Standardization, CUDA graph", rows[0]), fontsize=9)
    return figure


def norms(table: str) -> None:
    """Norm + ReLU, as `micronorm bench --plot` draws it."""
    methods = {(method.name, method.mode): method for method in reversed(METHODS)}
    found = [row for row in read_csv(RESULTS / table) if row["to_bn_nhwc"]]
    rows = []
    for row in found:
        case = Case(tuple(map(int, row["shape"].split("x"))), "", row["group"])
        method = methods[row["method"], row["mode"]]
        ratios = {"to_bn_nhwc": float(row["to_bn_nhwc"])}
        rows.append(Row(case, row["layout"], row["route"], method, row["dtype"], 2, int(row["rounds"]), ratios=ratios))
    for path in draw(rows, RESULTS, caption=_where(found[0])):
        if path.suffix == ".svg":
            path.unlink()


def _origin(title: str, row: dict[str, str]) -> str:
    return f"{title}\n{_where(row)}"


def _where(row: dict[str, str]) -> str:
    return f"{row['gpu']}, torch {row['torch']}, {row['date'][:10]}"


def main() -> None:
    pyplot = load_pyplot()
    for table, figure_of in (("steps_gpu.csv", steps), ("ws_gpu.csv", weights)):
        figure = figure_of(pyplot, table)
        figure.savefig(RESULTS / table.replace(".csv", ".png"), dpi=130)
        pyplot.close(figure)
    norms("norm_relu_gpu.csv")


if __name__ == "__main__":
    main()
