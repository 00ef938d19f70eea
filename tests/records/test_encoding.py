import json
import math
from pathlib import Path

import pytest

from micronorm.records import read
from tests.records.rows import step_row


@pytest.mark.parametrize("value", [0.1, 1 / 3, 5e-324, -0.0, 1.7976931348623157e308, 2**0.5, math.inf, -math.inf])
def test_a_float_is_read_back_as_it_was(run, value):
    run.append_steps([{"step": 1, "loss": value}])
    found = read(run.path).steps[0]["loss"]
    assert type(found) is float
    assert found.hex() == value.hex()


def test_not_a_number_survives_in_rows_facts_and_outcome_as_valid_json(run):
    run.append_steps([{"step": 1, "deep": [{"loss": math.nan}]}])
    run.add_facts(worst=math.nan)
    run.finish({"loss": math.nan})
    record = read(run.path)
    assert math.isnan(record.steps[0]["deep"][0]["loss"])
    assert math.isnan(record.facts["worst"])
    assert record.outcome is not None
    assert math.isnan(record.outcome["loss"])

    def refuse(constant: str):
        raise AssertionError(f"{constant} is not JSON")

    for file in run.path.iterdir():
        for text in file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]:
            json.loads(text, parse_constant=refuse)


def test_text_of_any_kind_survives_and_stays_on_its_line(run):
    text = "line\nline\r\u2028\x00 ×σ² \udcff \U0001f40d"
    run.append_steps([{"step": 1, "note": text}, {"step": 2, "note": text}])
    assert [row["note"] for row in read(run.path).steps] == [text, text]


@pytest.mark.parametrize(
    "value, error, message",
    [
        (Path("weights"), TypeError, r"row\['loss'\]: a PosixPath is no JSON value"),
        ([{1: 2}], TypeError, r"row\['loss'\]\[0\]: keys must be str, got 1"),
        ({"float": "nan"}, ValueError, "would be read back as a float"),
    ],
)
def test_a_value_that_would_not_survive_is_refused_and_nothing_is_written(run, value, error, message):
    with pytest.raises(error, match=message):
        run.append_steps([step_row(1), {"step": 2, "loss": value}])
    assert read(run.path).steps == []


def test_a_mapping_that_only_resembles_a_coded_float_is_kept(run):
    rows = [{"step": 1, "a": {"float": "nano"}, "b": {"float": ["nan"]}, "c": {"float": "nan", "more": 1}}]
    run.append_steps(rows)
    assert read(run.path).steps == rows
