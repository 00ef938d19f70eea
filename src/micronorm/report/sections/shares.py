"""The gradient's shares: what standardization takes away of it and what reaches the weights."""

from collections.abc import Sequence

from micronorm.records import Record
from micronorm.report.areas import Layer, area_plot
from micronorm.report.drawing import Key, Path, Plot
from micronorm.report.looks import HOW, Looks, missing, read_looks
from micronorm.report.runs import Detail, NamedRun
from micronorm.report.text import Section

_HEADING = "Shares of the gradient"
_ABOUT = (
    "How the squared gradient of the standardized weights Ŵ divides, mean over layers: what reaches the weights W, and "
    "the two parts that standardization takes away, by which it lowers the Lipschitz constant of the loss."
)
_PLAIN = (
    "A plain layer has no such parts: of it is drawn what standardization would take, were its weights standardized, "
    "and what would be left."
)
_KEYS = (
    Key("reaches W: σ²‖∇W‖²", "s0", "cell"),
    Key("along Ŵ, by the division: ⟨Ŵ, ∇Ŵ⟩²/I", "s1", "cell"),
    Key("mean, by the centering: ⟨1, ∇Ŵ⟩²/I", "s2", "cell"),
    Key("residual, by ε", "s3", "cell"),
)
_NAMES = ("reaches W", "along Ŵ", "mean")
_VISIBLE = 0.005  # of the whole, from which on the residual is an area of its own


def shares(runs: Sequence[NamedRun], detail: Detail) -> Section:
    """Areas by epoch for each run; of a single run also by layer, at the last look."""
    found = [(r, looks) for r in runs if (looks := read_looks(r.record, "weight", "rest", "along", "mean")) is not None]
    if not found:
        return Section("shares", _HEADING, absent=f"No look into the gradient is recorded. {HOW}")
    plots = []
    plain = {run.name: _plain_layers(run.record) & {*looks.layers} for run, looks in found}
    for run, looks in found:
        xs, columns, note = _over_layers(run, looks, detail.points)
        words, some = _what(plain[run.name], looks)
        caption = f"{words}, mean over layers" + (f": {run.name}" if len(runs) > 1 else "")
        note = "; ".join(filter(None, (some, note)))
        plots.append(
            area_plot(f"shares-{run.slug}", xs, _stack(columns), caption=caption, below=looks.below, note=note)
        )
    if len(runs) == 1:
        run, looks = found[0]
        plots.append(_by_layer(run, looks, *_what(plain[run.name], looks)))
    drawn = {item.colour for plot in plots for item in plot.drawing.items if isinstance(item, Path)}
    keys = [key for key in _KEYS if key.colour in drawn]
    about = f"{_ABOUT} {_PLAIN}" if any(plain.values()) else _ABOUT
    return Section("shares", _HEADING, about, plots, keys, missing([run for run, _ in found], runs))


def _plain_layers(record: Record) -> set[str]:
    """The layers whose weights are used as they are."""
    found = (item for row in record.diagnostics for item in row.get("layers", {}).items())
    return {name for name, layer in found if layer.get("kind") == "weight" and layer.get("weight") == "none"}


def _what(plain: set[str], looks: Looks) -> tuple[str, str]:
    """What a plot of these layers shows, and a remark where only some of them are plain."""
    if len(plain) == len(looks.layers):
        return "Shares that standardization would take", ""
    some = f"{len(plain)} of {len(looks.layers)} layers plain: what it would take of them"
    return "Shares", some if plain else ""


def _over_layers(run: NamedRun, looks: Looks, limit: int) -> tuple[list[int], list[list[float]], str]:
    every = -(-len(looks.xs) // limit)
    kept = range(0, len(looks.xs), every)
    columns = [[_mean_over(looks, k, figure) for k in kept] for figure in range(3)]
    return [looks.xs[k] for k in kept], columns, _note(columns, every, looks.below)


def _mean_over(looks: Looks, k: int, figure: int) -> float:
    values = [layer[figure] for layer in looks.values[k].values()]
    return sum(values) / len(values)


def _by_layer(run: NamedRun, looks: Looks, words: str, some: str) -> Plot:
    last = looks.values[-1]
    layers = [name for name in looks.layers if name in last]
    columns = [[last[name][figure] for name in layers] for figure in range(3)]
    return area_plot(
        f"shares-by-layer-{run.slug}",
        list(range(1, len(layers) + 1)),
        _stack(columns),
        caption=f"{words}, by layer, at {looks.below} {looks.xs[-1]}",
        below="layer, in the order of the network",
        note="; ".join(filter(None, (some, _note(columns, 1, "")))),
    )


def _stack(columns: Sequence[Sequence[float]]) -> list[Layer]:
    found = [
        Layer(name, f"s{k}", [max(0.0, value) for value in column])
        for k, (name, column) in enumerate(zip(_NAMES, columns, strict=True))
    ]
    rest = [1 - sum(column) for column in zip(*columns, strict=True)]
    if max(rest) > _VISIBLE:
        found.append(Layer("residual", "s3", [max(0.0, value) for value in rest]))
    return found


def _note(columns: Sequence[Sequence[float]], every: int, below: str) -> str:
    rest = [1 - sum(column) for column in zip(*columns, strict=True)]
    largest = max(rest, key=abs)
    notes = [f"one {below} in {every} shown"] * (every > 1)
    notes += [f"they sum to 1 but for a residual of {largest:.1g} at most"] * (abs(largest) >= 1e-4)
    return "; ".join(notes)
