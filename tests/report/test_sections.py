import base64
import math
import re
from io import BytesIO

import pytest
from PIL import Image

from micronorm.records import read, write_predictions
from micronorm.report.drawing import Circle, Path
from micronorm.report.heat import Table, heat_plot, scale_top
from micronorm.report.lines import Series, line_plot
from micronorm.report.looks import read_looks
from micronorm.report.page import plots_of
from micronorm.report.thin import thin
from tests.report.build import begin, full_run, look_row, prediction
from tests.report.parsed import page, section, table_rows


def plot(runs, name: str):
    return next(found for found in plots_of(runs) if found.name == name)


def hovers(drawing) -> dict[str, list[tuple[str, str]]]:
    lines = [item.hover for item in drawing.items if isinstance(item, Path) and item.hover]
    return {hover.name: list(zip(hover.xs, hover.ys, strict=True)) for hover in lines}


# --- the paper -------------------------------------------------------------------------------------------------------


def recipe(folder, name: str, *, level: float = 1.0, epochs: int = 6, seed: int = 0, **facts):
    settings = {"epochs": 6, "step_batch": 64, "seed": seed}
    definition = {"epochs": epochs, "step_batch": 64}
    full = {"recipe": name, "paper": {"top1": 3.0}, "definition": definition, "settings": settings, **facts}
    return full_run(folder, level=level, **full)


def test_runs_of_one_recipe_are_averaged_over_seeds_beside_the_papers_figure(tmp_path):
    ours = [40 / 7**1.3, 80 / 7**1.3]
    runs = [recipe(tmp_path / str(k), "cifar1/gn", level=k + 1.0, seed=k) for k in range(2)]
    text, _ = page(tmp_path, runs)
    mean = sum(ours) / 2
    row = table_rows(section(text, "paper"))["gn"]
    assert row == ["error %", "3", f"{mean:.2f}", "± 2.25", "2", f"{mean - 3:.2f}", "as the recipe says"]
    assert "Table cifar1" in section(text, "paper")


@pytest.mark.parametrize(
    "facts, remark",
    [
        ({"epochs": 200}, "epochs 6 where the recipe has 200"),
        ({"variation": {"lr": 0.2, "seed": 3, "size": None}}, "lr set to 0.2"),
        ({"variation": {"unverified": True}}, "data not verified"),
        ({"finished": False}, "the run has not ended"),
    ],
)
def test_a_run_that_departs_from_its_recipe_is_shown_with_the_reason(tmp_path, facts, remark):
    text, _ = page(tmp_path, [recipe(tmp_path / "a", "cifar1/gn", **facts)])
    assert table_rows(section(text, "paper"))["gn"][-1] == remark
    assert "gn (departs)" in text


def test_a_run_without_the_papers_figure_has_no_row_among_those_with_one(tmp_path):
    runs = [recipe(tmp_path / "a", "cifar1/gn"), recipe(tmp_path / "b", "digits/gn", paper=None)]
    text, _ = page(tmp_path, runs)
    assert set(table_rows(section(text, "paper"))) == {"row", "gn"}


# --- looks -----------------------------------------------------------------------------------------------------------


def test_stat_diff_is_shown_by_layer_and_epoch_with_the_mean_and_deviation_over_layers(tmp_path):
    run = full_run(tmp_path / "a", epochs=3, layers=2)
    rows = [look_row(0, epoch, 3, layers=2, level=1.0)["layers"] for epoch in range(3)]
    values = [[row[f"layer1.{k}.bn"]["stat_diff"] for row in rows] for k in range(2)]
    grid = plot([run], "stat-diff-1-digits").drawing.grid
    assert (grid.rows, grid.columns) == (["layer1.0.bn", "layer1.1.bn"], ["1", "2", "3"])
    assert grid.values == [f"{value:.3g}" for row in values for value in row]
    ((_, points),) = hovers(plot([run], "stat-diff").drawing).items()
    low, high = values[0][2], values[1][2]
    mean, deviation = (low + high) / 2, (high - low) / 2
    assert points[2] == ("3", f"{mean:.4g} ({mean - deviation:.3g} to {mean + deviation:.3g})")


def test_looks_within_one_epoch_are_shown_by_step_and_several_of_an_epoch_are_averaged(tmp_path):
    run = begin(tmp_path / "a")
    for step, level in ((10, 1.0), (20, 3.0)):
        run.append_diagnostics(look_row(step, 0, 2, layers=1, level=level))
    record = plots_of([run.path])
    assert hovers(next(p for p in record if p.name == "stat-diff").drawing) == {
        "digits": [("10", "0.15"), ("20", "0.45")]
    }
    run.append_diagnostics(look_row(30, 1, 2, layers=1, level=2.0))
    grid = plot([run.path], "stat-diff-1-digits").drawing.grid
    assert (grid.columns, grid.values[0]) == (["1", "2"], "0.3")


def test_layers_without_all_figures_or_without_finite_ones_are_left_out(tmp_path):
    run = begin(tmp_path / "a")
    good = {"kind": "norm", "stat_diff": 0.5}
    layers = {"good": good, "nan": {**good, "stat_diff": math.nan}, "less": {"kind": "norm"}, "text": {}}
    run.append_diagnostics({"step": 1, "epoch": 0, "layers": layers})
    run.append_diagnostics({"step": 2, "epoch": 0})
    looks = read_looks(read(run.path), "norm", "stat_diff")
    assert looks is not None
    assert (looks.layers, looks.xs) == (["good"], [1])
    assert read_looks(read(run.path), "weight", "rest") is None


def test_the_shares_are_stacked_to_their_sum_and_the_residual_is_told(tmp_path):
    run = full_run(tmp_path / "a", epochs=3, layers=4)
    shown = plot([run], "shares-1-digits")
    found = hovers(shown.drawing)
    assert list(found) == ["mean", "along Ŵ", "reaches W"]  # from the top down, as they lie
    assert sum(float(values[1][1].rstrip("%")) for values in found.values()) == pytest.approx(99.8, abs=0.15)
    assert shown.note == "they sum to 1 but for a residual of 0.002 at most"
    assert "Shares, by layer, at epoch 3" in [p.caption for p in plots_of([run])]


def test_a_residual_that_can_be_seen_is_an_area_of_its_own(tmp_path):
    run = begin(tmp_path / "a")
    layer = {"kind": "weight", "along": 0.2, "mean": 0.3, "rest": 0.4}
    run.append_diagnostics({"step": 1, "epoch": 0, "layers": {"conv": layer}})
    assert next(iter(hovers(plot([run.path], "shares-1-digits").drawing))) == "residual"
    text, _ = page(tmp_path, [run.path])
    assert "residual, by ε" in section(text, "shares")


def shares_of(folder, **weights):
    run = begin(folder)
    layers = {name: {"kind": "weight", "weight": weight, "along": 0.2, "mean": 0.3, "rest": 0.5}
              for name, weight in weights.items()}  # fmt: skip
    run.append_diagnostics({"step": 1, "epoch": 0, "layers": layers})
    return run.path


def test_of_plain_layers_the_shares_are_what_standardization_would_take(tmp_path):
    runs = {
        "ws": shares_of(tmp_path / "a", conv="WS"),
        "plain": shares_of(tmp_path / "b", conv="none"),
        "mixed": shares_of(tmp_path / "c", conv="WS", fc="none"),
    }
    text, _ = page(tmp_path, runs)
    shown = section(text, "shares")
    assert ">Shares, mean over layers: ws<" in shown
    assert ">Shares that standardization would take, mean over layers: plain<" in shown
    assert "Shares, mean over layers: mixed <" in shown
    assert shown.count("1 of 2 layers plain: what it would take of them") == 1
    assert "were its weights standardized" in shown
    text, _ = page(tmp_path, [runs["ws"]])
    assert "would take" not in section(text, "shares")


def test_the_plane_goes_from_the_first_look_to_the_last(tmp_path):
    run = full_run(tmp_path / "a", epochs=5, layers=3)
    circles = [item for item in plot([run], "singularities").drawing.items if isinstance(item, Circle)]
    ends = [look_row(0, epoch, 5, layers=3, level=1.0)["layers"] for epoch in (0, 4)]
    for role, row, words in (("ring", ends[0], ", at first"), ("mark", ends[1], "")):
        expected = {
            f"{name}{words}: {layer['sigma_mean']:.3g}, {layer['sigma_std']:.3g}"
            for name, layer in row.items()
            if layer["kind"] == "norm"
        }
        assert {circle.title for circle in circles if circle.role == role} == expected


def test_idle_channels_are_a_share_of_all(tmp_path):
    run = begin(tmp_path / "a")
    layers = {name: {"kind": "norm", "dead": dead, "rare": 2, "channels": 32, "sigma_mean": 0.1, "sigma_std": 0.1}
              for name, dead in (("a", 0), ("b", 4))}  # fmt: skip
    run.append_diagnostics({"step": 1, "epoch": 0, "layers": layers})
    assert hovers(plot([run.path], "idle-channels").drawing) == {"digits": [("1", "12.5")]}


def test_runs_without_looks_are_named_where_others_have_them(tmp_path):
    runs = {"with": full_run(tmp_path / "a"), "without": full_run(tmp_path / "b", looks=False)}
    text, _ = page(tmp_path, runs)
    for key in ("stat-diff", "singularities", "shares"):
        assert "No looks are recorded of without." in section(text, key)
        assert "without</li>" not in section(text, key)


# --- memory, speed, pictures -----------------------------------------------------------------------------------------


def test_speed_memory_and_a_micro_batch_that_changed_are_shown(tmp_path):
    run = begin(tmp_path / "a")
    rows = [(1, 0.5, 2**30, 64), (2, 0.25, 2**31, 32)]
    run.append_steps(
        {"step": k, "seconds": s, "samples": 100, "memory": m, "micro_batch": size} for k, s, m, size in rows
    )
    found = {p.name: hovers(p.drawing)["digits"] for p in plots_of([run.path])}
    assert found == {
        "speed": [("1", "200"), ("2", "400")],
        "memory": [("1", "1"), ("2", "2")],
        "micro-batch": [("1", "64"), ("2", "32")],
    }
    text, _ = page(tmp_path, [full_run(tmp_path / "b", memory=False)])
    assert "Memory is recorded on GPUs only." in section(text, "resources")


def test_pictures_are_shown_as_they_were_and_wrong_answers_are_marked(tmp_path):
    text, _ = page(tmp_path, [full_run(tmp_path / "a")])
    shown = section(text, "predictions")
    assert "4 of 16 wrong" in shown
    assert shown.count('<li class="wrong">') == 4
    assert "✗ 1 <small>50\N{NO-BREAK SPACE}%</small><br><small>is 0</small>" in shown
    files = re.findall('src="data:image/png;base64,(.*?)"', shown)
    for k, file in enumerate(files):
        image = Image.open(BytesIO(base64.b64decode(file)))
        assert image.mode == ("L" if k % 2 else "RGB")
        assert image.tobytes() == base64.b64decode(prediction(k)["pixels"])
    assert len(files) == 16


def test_pictures_that_several_runs_were_shown_stand_once_with_the_answers_that_were_wrong(tmp_path):
    runs = {name: full_run(tmp_path / name, epochs=1) for name in ("first", "second")}
    right = [{**prediction(k), "prediction": str(k % 10)} for k in range(16)]
    write_predictions(runs["second"], right)
    text, parsed = page(tmp_path, runs)
    shown = section(text, "predictions")
    assert parsed.count("img") == 16
    assert re.findall(r"</i>(\w+: \d+)</li>", shown) == ["first: 4", "second: 0"]
    assert shown.count('<i class="dot c0"></i>✗') == 4
    assert '<i class="dot c1"></i>✗' not in shown


def test_a_learning_rate_that_falls_to_nothing_keeps_a_linear_scale(tmp_path):
    assert "logarithmic" not in plot([full_run(tmp_path / "a")], "learning-rate").note
    assert "logarithmic" in plot([full_run(tmp_path / "b", epochs=60, steps_per_epoch=2)], "test-top1").note


# --- the pieces ------------------------------------------------------------------------------------------------------


def test_thinning_keeps_the_least_and_the_largest_value_and_the_mean():
    values = [math.sin(k) for k in range(1000)]
    values[517], values[518] = 40.0, -40.0
    pieces = thin(list(enumerate(values)), 64)
    assert len(pieces) <= 64
    assert sum(piece.count for piece in pieces) == 1000
    assert (min(p.low for p in pieces), max(p.high for p in pieces)) == (-40.0, 40.0)
    assert math.fsum(p.mean * p.count for p in pieces) == pytest.approx(math.fsum(values), abs=1e-9)


def test_values_that_are_not_finite_have_no_part_in_their_piece():
    (piece,) = thin([(0, 1.0), (1, math.inf), (2, math.nan), (3, 3.0)], 1)
    assert (piece.low, piece.mean, piece.high, piece.count) == (1.0, 2.0, 3.0, 4)
    assert math.isnan(thin([(0, math.nan)], 1)[0].mean)


def test_a_thinned_line_has_a_band_and_says_so():
    found = line_plot("x", [Series("a", "c0", [(k, k % 2) for k in range(100)])], caption="x", below="step", limit=10)
    assert found is not None
    assert "means of up to 10 points" in found.note
    (band,) = (item for item in found.drawing.items if item.role == "band")
    assert len(band.pieces[0]) == 20


def test_a_few_cells_far_out_do_not_leave_one_colour_for_the_others():
    values = [[0.1 * (k + 1) / 100 for k in range(99)] + [50.0]]
    table = Table(["layer"], [str(k) for k in range(100)], values)
    assert scale_top([table]) < 1
    plot = heat_plot("x", table, top=scale_top([table]), caption="x", below="epoch")
    levels = {item.colour for item in plot.drawing.items if item.role == "cell" and len(item.pieces) > 1}
    assert len(levels) > 10
    assert "above: darkest" in [item.text for item in plot.drawing.items if item.role == "label"]


@pytest.mark.parametrize("top, texts", [(0.93, ["0", "0.5", "0.93"]), (2.0, ["0", "0.5", "1", "1.5", "2"])])
def test_the_scale_of_a_heat_map_says_where_it_ends(top, texts):
    drawing = heat_plot("x", Table(["layer"], ["7"], [[top]]), top=top, caption="x", below="epoch").drawing
    labels = [item for item in drawing.items if item.role == "label"]
    figures = [item for item in labels if item.y == max(label.y for label in labels)]
    assert [item.text for item in figures] == texts
    assert figures[-1].x == pytest.approx(408)  # the right edge of the scale


def test_a_heat_map_of_nothing_finite_or_of_zeros_has_a_scale():
    for value in (math.nan, 0.0):
        table = Table(["layer"], ["1"], [[value]])
        assert scale_top([table]) == 1.0
        assert heat_plot("x", table, top=1.0, caption="x", below="epoch").drawing.height > 0


def test_series_that_end_early_or_begin_late_share_an_axis(tmp_path):
    short, late = begin(tmp_path / "a"), begin(tmp_path / "b")
    short.append_steps([{"step": 1, "loss": 1.0}])
    late.append_steps([{"step": k, "loss": 1.0} for k in range(50, 100)])
    found = hovers(plot({"short": short.path, "late": late.path}, "step-loss").drawing)
    assert (found["short"][0][0], found["late"][-1][0]) == ("1", "99")
