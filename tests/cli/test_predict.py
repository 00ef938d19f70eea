"""`micronorm predict`: what a trained network answers for image files."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from faster_coco_eval import mask as encoded
from PIL import Image
from typer.testing import CliRunner

import micronorm as mn
from micronorm import recipes
from micronorm.cli import app
from micronorm.cli.predict import _output_names, find_images
from micronorm.data.digits import open_digits
from micronorm.data.samples import IMAGENET, Standardizer
from micronorm.engine.settings import Execution
from micronorm.recipes.run import Variation, run_recipe
from micronorm.tasks import open_predictor
from tests.data.miniature import write_folders, write_label_maps
from tests.tasks.detectors import small_detector

HERE = Execution(device=torch.device("cpu"), steps=1)
CPU = ("--device", "cpu")


def predict(*arguments):
    return CliRunner().invoke(app, ["predict", *map(str, arguments)])


def write_image(path, size=(40, 60), seed=0):
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return pixels


def answers(folder):
    return json.loads((folder / "predictions.json").read_text())


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "digits"
    run_recipe(recipes.find("digits"), out=out, execution=HERE)
    return out


def test_a_picture_of_a_digit_is_answered_as_the_digit_itself(digits_run, tmp_path):
    (digit,), _ = next(open_digits()[1].load([(0, torch.tensor([5]))], seed=0))
    grey = ((8 * digit[0] + 8) * 255 / 16).round().to(torch.uint8).numpy()
    Image.fromarray(grey).save(tmp_path / "digit.png")
    found = predict(digits_run, tmp_path / "digit.png", "--out", tmp_path / "out", *CPU)
    assert found.exit_code == 0, found.output
    (answer,) = answers(tmp_path / "out")
    # A shade of grey is rounded to 1/255 on its way through the file.
    probability = mn.load(digits_run)(digit[None]).softmax(1)[0]
    assert answer["prediction"] == str(probability.argmax().item())
    assert answer["probability"][answer["prediction"]] == pytest.approx(probability.max().item(), abs=0.01)
    assert f"{answer['prediction']} {100 * answer['probability'][answer['prediction']]:.1f} %" in found.output


def test_a_broken_file_is_named_and_the_others_are_answered(digits_run, tmp_path):
    write_image(tmp_path / "images/a.png")
    write_image(tmp_path / "images/b.png")
    (tmp_path / "images/b.png").write_bytes(b"no image")
    (tmp_path / "images/._a.png").write_bytes(b"a hidden file of macOS, which is no image")
    found = predict(digits_run, tmp_path / "images", "--out", tmp_path / "out", *CPU)
    assert found.exit_code == 1
    assert "b.png is not a readable image" in found.output
    assert "._a.png" not in found.output
    assert [answer["file"] for answer in answers(tmp_path / "out")] == [str(tmp_path / "images/a.png")]
    alone = predict(digits_run, tmp_path / "images/b.png", "--out", tmp_path / "none", *CPU)
    assert alone.exit_code == 1
    assert "all answers" not in alone.output


def test_wrong_paths_are_refused_in_a_line(digits_run, tmp_path):
    for arguments, complaint in (
        ((digits_run, tmp_path / "none.png"), "no image or folder"),
        (
            (digits_run, digits_run / "run.json"),
            "must be an image (.jpg, .jpeg, .png, .bmp, .webp, .tif, .tiff) or a folder of images",
        ),
        ((tmp_path, tmp_path / "none.png"), "holds no run"),
    ):
        found = predict(*arguments, *CPU)
        assert found.exit_code == 2
        assert complaint in " ".join(found.output.split())


def test_a_run_on_volumes_is_named_as_the_reason_and_not_its_files(digits_run, tmp_path):
    shutil.copytree(digits_run, tmp_path / "run")
    known = json.loads((tmp_path / "run/run.json").read_text())
    (tmp_path / "run/run.json").write_text(json.dumps({**known, "recipe": "hippocampus/bcn-ws-fold0"}))
    (tmp_path / "volume.nii.gz").touch()
    found = predict(tmp_path / "run", tmp_path / "volume.nii.gz", *CPU)
    assert found.exit_code == 2
    assert "reads images, which are not the samples of hippocampus-fold0" in " ".join(found.output.split())


def test_images_are_found_once_and_in_order(tmp_path):
    for name in ("b.JPG", "a.png"):
        (tmp_path / name).touch()
    (tmp_path / "notes.txt").touch()
    assert [path.name for path in find_images([tmp_path, tmp_path / "a.png"])] == ["a.png", "b.JPG"]


def test_label_maps_are_written_with_the_labels_as_values_and_beside_an_overlay(tmp_path, monkeypatch):
    write_label_maps(tmp_path / "data")
    small = replace(recipes.find("label_maps"), network="shapes")
    monkeypatch.setattr("micronorm.recipes.load.find", lambda name: small)
    run_recipe(small, out=tmp_path / "run", data=tmp_path / "data", execution=HERE)
    pixels = write_image(tmp_path / "x/a.png")
    write_image(tmp_path / "y/a.png", size=(16, 24))  # another size, and the same name
    found = predict(tmp_path / "run", tmp_path / "x", tmp_path / "y", "--out", tmp_path / "out", *CPU)
    assert found.exit_code == 0, found.output
    names = [f"a-{k}-{kind}.png" for k in (1, 2) for kind in ("labels", "overlay")]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [*names, "predictions.json"]
    inputs = Standardizer(IMAGENET, torch.device("cpu"))(torch.from_numpy(pixels).permute(2, 0, 1)[None])
    labels = mn.load(tmp_path / "run")(inputs).argmax(1)[0].numpy()
    label_map = Image.open(tmp_path / "out/a-1-labels.png")
    assert label_map.mode == "P"
    assert np.array_equal(np.array(label_map), labels)
    shares = answers(tmp_path / "out")[0]["shares"]
    assert shares == {name: (labels == k).mean() for k, name in enumerate(("earth", "water", "air")) if k in labels}


def test_a_run_on_image_folders_of_ones_own_answers_with_their_names(tmp_path, monkeypatch):
    write_folders(tmp_path / "mine")
    small = replace(recipes.find("image_folders"), network="cifar-resnet20")
    monkeypatch.setattr("micronorm.recipes.load.find", lambda name: small)
    run_recipe(small, variation=Variation(size=32), out=tmp_path / "run", data=tmp_path / "mine", execution=HERE)
    write_image(tmp_path / "a.png")
    found = predict(tmp_path / "run", tmp_path / "a.png", "--out", tmp_path / "out", *CPU)
    assert found.exit_code == 0, found.output
    (answer,) = answers(tmp_path / "out")
    assert set(answer["probability"]) == {"ant", "bee", "cat"}
    assert sum(answer["probability"].values()) == pytest.approx(1)


def test_the_number_of_classes_of_data_of_ones_own_is_read_from_the_run(tmp_path, monkeypatch):
    write_folders(tmp_path / "mine")
    small = replace(recipes.find("image_folders"), network="cifar-resnet20")
    monkeypatch.setattr("micronorm.cli.targets.find", lambda name: small)
    run, alone, out = tmp_path / "run", tmp_path / "alone.safetensors", tmp_path / "out.safetensors"
    run_recipe(small, variation=Variation(size=32), out=run, data=tmp_path / "mine", execution=HERE)
    shutil.copy(run / "model.safetensors", alone)
    diagnose = ["diagnose", "recipe:image_folders", "--images", "2", "--size", "32", "--checkpoint"]
    fold = ["fold", "--model", "recipe:image_folders", "--out", str(out)]
    for command in (diagnose, fold):
        assert CliRunner().invoke(app, [*command, str(run)]).exit_code == 0
        result = CliRunner().invoke(app, [*command, str(alone)])
        assert result.exit_code == 2
        assert "the file does not say how many: give the run directory" in result.stderr


def test_objects_are_written_in_the_format_of_coco(tmp_path):
    write_image(tmp_path / "a.png", size=(48, 64))
    model = small_detector().eval()
    torch.nn.init.constant_(model.roi_heads.box_predictor.cls_score.bias, 0)
    model.roi_heads.box_predictor.cls_score.bias.data[2] = 9.0  # everything is a dog
    predictor = open_predictor("instances", "coco", names=("background", "cat", "dog"), size=800)
    prediction = predictor.predict(model, tmp_path / "a.png")
    objects = prediction.answer["objects"]
    assert objects
    assert json.loads(json.dumps(objects)) == objects
    assert prediction.words == f"{len(objects)} dog"
    for found in objects:
        assert (found["label"], found["category"]) == (2, "dog")
        left, top, width, height = found["bbox"]
        assert 0 <= left <= left + width <= 64
        assert 0 <= top <= top + height <= 48
        assert encoded.decode(found["segmentation"]).shape == (48, 64)
    assert prediction.pictures["-objects"].size == (64, 48)


@pytest.mark.parametrize(
    "facts, complaint",
    [
        ({"definition": {"network": "cifar-resnet20"}}, "has changed since the run"),
        ({"recipe": "own/mine"}, "is not one of micronorm's"),
        ({"variation": 7}, "a variation that micronorm train does not write"),
        ({"variation": {"size": 2**60}}, "a variation that micronorm train does not write"),
        ({"variation": {"size": "8"}}, "a variation that micronorm train does not write"),
        ({"data": {"names": ["a"] * 3}}, None),
        # The recipe says what was trained, and not these.
        ({"definition": None}, None),
        ({"definition": {"classes": 10, "task": "segmentation", "data": "camvid"}}, None),
        ({"data": {"name": "camvid"}}, None),
        ({"data": {"name": ["digits"]}}, None),
    ],
    ids=str,
)
def test_a_record_from_a_stranger_ends_in_one_line_or_changes_nothing(digits_run, tmp_path, facts, complaint):
    shutil.copytree(digits_run, tmp_path / "run")
    known = json.loads((tmp_path / "run/run.json").read_text())
    (tmp_path / "run/run.json").write_text(json.dumps({**known, **facts}))
    write_image(tmp_path / "a.png")
    found = predict(tmp_path / "run", tmp_path / "a.png", "--out", tmp_path / "out", *CPU)
    assert found.exit_code == (0 if complaint is None else 2), found.output
    assert found.stderr.count("\n") == (complaint is not None)
    assert (complaint or "") in found.stderr


def test_no_picture_is_written_over_another(tmp_path):
    names = _output_names([tmp_path / name for name in ("x/a.png", "y/a.png", "z/a-1.png", "z/a-2.png")])
    assert len(set(names.values())) == 4
