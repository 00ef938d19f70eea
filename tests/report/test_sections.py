import base64
import math
import re
from io import BytesIO

import pytest
from PIL import Image

from micronorm.records import read, write_predictions
from micronorm.report.charts import Chart, Line, line_chart, summarize
from micronorm.report.diagnostics import read_layer_history
from micronorm.report.page import sections_of
from micronorm.report.predictions import MOST_SCENES
from tests.report.build import EVIL, begin, full_run, look_row, prediction, scene
from tests.report.parsed import page, section, table_rows


def charts_of(runs) -> dict[str, Chart]:
    return {chart.name: chart for section in sections_of(runs) for chart in section.charts}


def hovers(chart: Chart) -> list[str]:
    """Everything that the chart says under the pointer, names of lines apart."""
    return [text for texts in chart.hover.values() for text in texts if ": " in text]


# --- the paper -------------------------------------------------------------------------------------------------------


def recipe(folder, name: str, *, level: float = 1.0, epochs: int = 6, seed: int = 0, **facts):
    settings = {"epochs": 6, "step_batch": 64, "seed": seed}
    definition = {"epochs": epochs, "step_batch": 64}
    full = {"recipe": name, "paper": {"top1": 3.0}, "definition": definition, "settings": settings, **facts}
    return full_run(folder, level=level, steps_per_epoch=2, looks=False, **full)


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


def test_a_run_without_the_papers_figure_has_no_row_among_those_with_one(tmp_path):
    runs = [recipe(tmp_path / "a", "cifar1/gn"), recipe(tmp_path / "b", "digits/gn", paper=None)]
    text, _ = page(tmp_path, runs)
    assert set(table_rows(section(text, "paper"))) == {"row", "gn"}


# --- looks -----------------------------------------------------------------------------------------------------------


def test_stat_diff_is_shown_by_layer_and_epoch_with_the_mean_and_deviation_over_layers(tmp_path):
    run = full_run(tmp_path / "a", epochs=3, layers=2)
    rows = [look_row(0, epoch, 3, layers=2, level=1.0)["layers"] for epoch in range(3)]
    values = [[row[f"layer1.{k}.bn"]["stat_diff"] for row in rows] for k in range(2)]
    charts = charts_of([run])
    assert hovers(charts["stat-diff-by-layer"]) == [f"digits, {k + 1}: {values[k][2]:.4g}" for k in range(2)]
    low, high = values[0][2], values[1][2]
    mean, deviation = (low + high) / 2, (high - low) / 2
    shown = f"{mean:.4g} ({mean - deviation:.3g} to {mean + deviation:.3g})"
    assert hovers(charts["stat-diff"])[2] == f"digits, 3: {shown}"


def test_observations_within_one_epoch_are_shown_by_step_and_several_of_an_epoch_are_averaged(tmp_path):
    run = begin(tmp_path / "a")
    for step, level in ((10, 1.0), (20, 3.0)):
        run.append_diagnostics(look_row(step, 0, 2, layers=1, level=level))
    assert hovers(charts_of([run.path])["stat-diff"]) == ["digits, 10: 0.15", "digits, 20: 0.45"]
    run.append_diagnostics(look_row(30, 1, 2, layers=1, level=2.0))
    history = read_layer_history(read(run.path), "norm", "stat_diff")
    assert history is not None
    assert (history.unit, history.times) == ("epoch", [1, 2])
    assert history.values[0]["layer1.0.bn"] == pytest.approx((0.3,))


def test_layers_without_all_figures_or_without_finite_ones_are_left_out(tmp_path):
    run = begin(tmp_path / "a")
    good = {"kind": "norm", "stat_diff": 0.5}
    layers = {"good": good, "nan": {**good, "stat_diff": math.nan}, "less": {"kind": "norm"}, "text": {}}
    run.append_diagnostics({"step": 1, "epoch": 0, "layers": layers})
    run.append_diagnostics({"step": 2, "epoch": 0})
    history = read_layer_history(read(run.path), "norm", "stat_diff")
    assert history is not None
    assert (history.layers, history.times) == (["good"], [1])
    assert read_layer_history(read(run.path), "weight", "rest") is None


def test_the_shares_are_stacked_to_their_sum_and_the_residual_is_told(tmp_path):
    run = full_run(tmp_path / "a", epochs=3, layers=4)
    shown = charts_of([run])["shares-1-digits"]
    found = dict(text.split(": ") for text in hovers(shown))
    assert list(found) == ["reaches W", "along Ŵ", "mean", "residual"]  # from the bottom up, as they lie
    assert sum(float(text.split("%")[0]) for text in list(found.values())[:3]) == pytest.approx(99.8, abs=0.15)
    assert shown.note == "they sum to 1 except for a residual of at most 0.002"


def test_the_residual_is_an_area_too(tmp_path):
    run = begin(tmp_path / "a")
    layer = {"kind": "weight", "along": 0.2, "mean": 0.3, "rest": 0.4}
    run.append_diagnostics({"step": 1, "epoch": 0, "layers": {"conv": layer}})
    assert hovers(charts_of([run.path])["shares-1-digits"])[-1] == "residual: 10.0% at first, 10.0% at the end"
    text, _ = page(tmp_path, [run.path])
    assert "residual, due to ε" in section(text, "shares")


def test_idle_channels_are_a_share_of_all(tmp_path):
    run = begin(tmp_path / "a")
    layers = {name: {"kind": "norm", "dead": dead, "rare": 2, "channels": 32, "stat_diff": 0.1}
              for name, dead in (("a", 0), ("b", 4))}  # fmt: skip
    run.append_diagnostics({"step": 1, "epoch": 0, "layers": layers})
    assert hovers(charts_of([run.path])["idle-channels"]) == ["digits, 1: 12.5"]


def test_runs_without_layer_statistics_are_named_where_others_have_them(tmp_path):
    runs = {"with": full_run(tmp_path / "a"), "without": full_run(tmp_path / "b", looks=False)}
    text, _ = page(tmp_path, runs)
    for key in ("stat-diff", "shares"):
        assert "Without layer statistics: without." in section(text, key)
        assert "without</li>" not in section(text, key)


# --- memory, speed, pictures -----------------------------------------------------------------------------------------


def test_speed_memory_and_a_micro_batch_that_changed_are_shown(tmp_path):
    run = begin(tmp_path / "a")
    rows = [(1, 0.5, 2**30, 64), (2, 0.25, 2**31, 32)]
    run.append_steps(
        {"step": k, "seconds": s, "samples": 100, "memory": m, "micro_batch": size} for k, s, m, size in rows
    )
    assert {name: hovers(chart) for name, chart in charts_of([run.path]).items()} == {
        "speed": ["digits, 1: 200", "digits, 2: 400"],
        "memory": ["digits, 1: 1", "digits, 2: 2"],
        "micro-batch": ["digits, 1: 64", "digits, 2: 32"],
    }
    text, _ = page(tmp_path, [full_run(tmp_path / "b", memory=False)])
    assert "Memory is recorded on GPUs only." in section(text, "resources")


def test_pictures_are_shown_as_they_were_and_wrong_answers_are_marked(tmp_path):
    text, _ = page(tmp_path, [full_run(tmp_path / "a")])
    shown = section(text, "predictions")
    assert "Wrong answers of 16" in shown
    assert shown.count('<li class="wrong">') == 4
    assert '0<span><br><i class="dot c0"></i>✗ 1 <small>50\N{NO-BREAK SPACE}%</small></span>' in shown
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


def test_label_maps_stand_beside_the_truth_with_a_column_per_run_and_a_legend(tmp_path):
    runs = {name: full_run(tmp_path / name, epochs=1) for name in ("first", "second")}
    for run, colour in zip(runs.values(), ("#80ff00", "#000080"), strict=True):
        write_predictions(run, [scene(k, colour, evil=EVIL) for k in range(10)])
    text, parsed = page(tmp_path, runs)
    shown = section(text, "predictions")
    assert parsed.count("img") == MOST_SCENES * 4
    assert shown.count("<tr>") == MOST_SCENES + 1
    files = re.findall('src="data:image/png;base64,(.*?)"', shown)
    assert files[:4] == [scene(0)["image"], scene(0)["truth"], scene(0)["answer"], scene(0, "#000080")["answer"]]
    assert 'fill="#000080"' in shown  # the legend
    assert "<small>0 % right" in shown
    assert "<script" not in shown
    assert "Wrong answers" not in shown


def test_a_learning_rate_that_falls_to_nothing_keeps_a_linear_scale(tmp_path):
    charts = charts_of([full_run(tmp_path / "a", epochs=60, steps_per_epoch=2, layers=1)])
    assert "logarithmic" not in charts["learning-rate"].note
    assert "logarithmic" in charts["test-top1"].note


# --- the pieces ------------------------------------------------------------------------------------------------------


def test_a_summary_keeps_the_least_and_the_largest_value_and_the_mean():
    values = [math.sin(k) for k in range(1000)]
    values[517], values[518] = 40.0, -40.0
    parts = summarize(list(enumerate(values)), 64)
    assert len(parts) <= 64
    assert sum(part.count for part in parts) == 1000
    assert (min(p.low for p in parts), max(p.high for p in parts)) == (-40.0, 40.0)
    assert math.fsum(p.mean * p.count for p in parts) == pytest.approx(math.fsum(values), abs=1e-9)


def test_values_that_are_not_finite_have_no_part_in_their_summary():
    (part,) = summarize([(0, 1.0), (1, math.inf), (2, math.nan), (3, 3.0)], 1)
    assert (part.low, part.mean, part.high, part.count) == (1.0, 2.0, 3.0, 4)
    assert math.isnan(summarize([(0, math.nan)], 1)[0].mean)


def test_a_long_line_has_a_band_and_says_so():
    found = line_chart("x", [Line("a", "c0", [(k, k % 2) for k in range(100)])], caption="x", x_label="step", limit=10)
    assert found is not None
    assert "means of up to 10 points" in found.note
    (band,) = found.figure.axes[0].collections
    assert band.get_datalim(found.figure.axes[0].transData).intervaly.tolist() == [0, 1]


def test_a_long_line_shows_its_least_and_largest_value_under_the_pointer():
    points = [(k, 50.0 if k == 333 else -50.0 if k == 555 else 1.0) for k in range(1000)]
    found = line_chart("x", [Line("a", "c0", points)], caption="x", x_label="step", limit=1000)
    assert found is not None
    assert {"a, 333: 50", "a, 555: -50"} < set(hovers(found))
    assert 40 <= len(hovers(found)) <= 42


def test_lines_that_end_early_or_begin_late_share_an_axis(tmp_path):
    short, late = begin(tmp_path / "a"), begin(tmp_path / "b")
    short.append_steps([{"step": 1, "loss": 1.0}])
    late.append_steps([{"step": k, "loss": 1.0} for k in range(50, 100)])
    chart = charts_of({"short": short.path, "late": late.path})["step-loss"]
    assert {"short, 1: 1", "late, 99: 1"} < set(hovers(chart))
    low, high = chart.figure.axes[0].get_xlim()
    assert low < 1 < 99 < high
