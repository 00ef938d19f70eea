import json

import pytest

from micronorm import records
from micronorm.records import read


def sample(**changes) -> dict:
    whole = {"height": 2, "width": 1, "channels": 3, "pixels": "AAECAwQF", "label": "3", "prediction": "5"}
    return {**whole, "probability": 0.5, **changes}


PNG = "iVBORw0KGgo="


def scene(**changes) -> dict:
    return {"image": PNG, "truth": PNG, "answer": "/9j/4A==", "label": "sky", "prediction": "sky", **changes}


def test_pictures_of_label_maps_are_read_back_and_not_mixed_with_others(run):
    kept = [scene(note="90 % right", colours={"sky": "#80ff00"})]
    records.write_predictions(run.path, kept)
    assert read(run.path).predictions == kept
    with pytest.raises(ValueError, match="sample 1: either all samples or none have an image"):
        records.write_predictions(run.path, [scene(), sample()])


def test_predictions_are_read_back_and_go_when_the_run_goes_on(run):
    records.write_predictions(run.path, [sample(), sample(label="<b>")])
    assert read(run.path).predictions == [sample(), sample(label="<b>")]
    assert read(run.path, rows=False).predictions == []
    run.rewind(0)
    assert read(run.path).predictions == []


@pytest.mark.parametrize(
    "bad, complaint",
    [
        (sample(height=0), "sample 0: height and width from 1 on"),
        (sample(channels=4), "1 or 3 channels"),
        (sample(label=3), "label must be str, got int"),
        (sample(pixels="AAEC"), "3 bytes of pixels where its size gives 6"),
        (sample(pixels="<svg onload=x>"), "no base64"),
        ("text", "sample 0: an object was expected"),
        (scene(image="AAEC"), "image must be base64 of a PNG or JPEG file"),
        (scene(answer="<svg onload=x>"), "answer is no base64"),
        (scene(truth=None), "truth must be str, got NoneType"),
        (scene(note=3), "note must be str, got int"),
        (scene(colours={"sky": "red;x:y"}), "colours must be an object of classes and colours"),
        (scene(colours=[]), "colours must be an object of classes and colours"),
    ],
)
def test_pictures_that_are_none_are_refused_in_writing_and_in_reading(run, bad, complaint):
    if isinstance(bad, dict):
        with pytest.raises(ValueError, match=complaint):
            records.write_predictions(run.path, [bad])
    (run.path / records.PREDICTIONS).write_text(json.dumps({"samples": [bad]}))
    with pytest.raises(ValueError, match=complaint):
        read(run.path)


def test_predictions_without_a_run_or_without_a_list_are_refused(run, tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no run"):
        records.write_predictions(tmp_path, [])
    (run.path / records.PREDICTIONS).write_text("{}")
    with pytest.raises(ValueError, match="a list of samples was expected"):
        read(run.path)
