"""The data file of a figure."""

import json

import pytest
import torch

from micronorm.recipes.figures.figure import FigureData, read

FACTS = {"figure": "fig:dist", "settings": {"epochs": 2}}


def test_a_finished_file_says_where_its_numbers_come_from(tmp_path):
    data = FigureData(tmp_path / "a" / "dist.json", {**FACTS, "command": "micronorm reproduce fig:dist"})
    data.numbers["x"] = [1 / 3, float("nan")]
    data.finish()
    found = json.loads((tmp_path / "a" / "dist.json").read_text())
    assert found["numbers"] == {"x": [0.333333, None]}
    assert found["command"] == "micronorm reproduce fig:dist"
    assert found["complete"] is True
    assert found["environment"]["torch"] == torch.__version__
    assert found["date"]
    assert read(tmp_path / "a" / "dist.json") == found == read(tmp_path / "a" / "dist.json", FACTS["settings"])
    assert read(tmp_path / "a" / "dist.json", {"epochs": 3}) is None


def test_a_list_of_numbers_is_on_one_line_and_text_is_unchanged(tmp_path):
    data = FigureData(tmp_path / "dist.json", FACTS)
    data.numbers |= {"x": [1, -2.5, 1e-9, None, 3e20], "text": "[\n 1,\n 2\n]", "nested": [[1, 2], [3, 4]], "none": []}
    assert data.finish()["numbers"] == data.numbers
    assert '"x": [1, -2.5, 1e-09, null, 3e+20]' in (tmp_path / "dist.json").read_text()


def test_an_unfinished_measurement_continues_if_its_settings_are_the_same(tmp_path):
    data = FigureData(tmp_path / "dist.json", FACTS)
    data.numbers["x"] = [1]
    data.save_progress()
    assert read(tmp_path / "dist.json") is None
    assert FigureData(tmp_path / "dist.json", {**FACTS, "settings": {"epochs": 3}}).numbers == {}
    again = FigureData(tmp_path / "dist.json", FACTS)
    assert again.numbers == {"x": [1]}
    again.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["dist.json"]


@pytest.mark.parametrize("text, message", [("{", "not JSON"), ("[]", "not the data file"), ("{}", "lacks figure")])
def test_another_file_is_refused(tmp_path, text, message):
    (tmp_path / "dist.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        read(tmp_path / "dist.json")
