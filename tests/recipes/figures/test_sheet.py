"""The data file of a figure."""

import json

import pytest
import torch

from micronorm.recipes.figures import sheet as sheets
from micronorm.recipes.figures.sheet import Sheet

FACTS = {"figure": "fig:dist", "settings": {"epochs": 2}}


def test_a_finished_file_says_where_its_numbers_come_from(tmp_path):
    sheet = Sheet(tmp_path / "a" / "dist.json", {**FACTS, "command": "micronorm reproduce fig:dist"})
    sheet.numbers["x"] = [1 / 3, float("nan")]
    sheet.finish()
    found = json.loads((tmp_path / "a" / "dist.json").read_text())
    assert found["numbers"] == {"x": [0.333333, None]}
    assert found["command"] == "micronorm reproduce fig:dist"
    assert found["complete"] is True
    assert found["environment"]["torch"] == torch.__version__
    assert found["date"]
    assert sheets.read(tmp_path / "a" / "dist.json") == found


def test_a_list_of_numbers_stands_on_one_line_and_text_is_left_alone(tmp_path):
    sheet = Sheet(tmp_path / "dist.json", FACTS)
    sheet.numbers |= {"x": [1, -2.5, 1e-9, None, 3e20], "text": "[\n 1,\n 2\n]", "nested": [[1, 2], [3, 4]], "none": []}
    found = sheet.finish()
    assert found["numbers"] == sheet.numbers
    assert '"x": [1, -2.5, 1e-09, null, 3e+20]' in (tmp_path / "dist.json").read_text()


def test_what_was_kept_is_gone_on_with(tmp_path):
    sheet = Sheet(tmp_path / "dist.json", FACTS)
    sheet.numbers["x"] = [1]
    sheet.keep({"weight": torch.arange(3.0)})
    assert sheets.read(tmp_path / "dist.json") is None
    again = Sheet(tmp_path / "dist.json", FACTS)
    assert again.numbers == {"x": [1]}
    assert torch.equal(again.state["weight"], torch.arange(3.0))
    again.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["dist.json"]


def test_what_was_kept_with_other_settings_is_not(tmp_path):
    sheet = Sheet(tmp_path / "dist.json", FACTS)
    sheet.numbers["x"] = [1]
    sheet.keep({})
    other = Sheet(tmp_path / "dist.json", {**FACTS, "settings": {"epochs": 3}})
    assert other.numbers == {}
    assert other.state is None


@pytest.mark.parametrize("text, message", [("{", "not JSON"), ("[]", "not the data file"), ("{}", "lacks figure")])
def test_another_file_is_refused(tmp_path, text, message):
    (tmp_path / "dist.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        sheets.read(tmp_path / "dist.json")
