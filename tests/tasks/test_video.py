"""Video classification: a sample is a clip; a miniature Something-Something trains through the command line."""

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from micronorm import recipes, records
from micronorm.cli import app
from micronorm.data.motion import CLASSES
from micronorm.engine.settings import Execution
from micronorm.engine.task import Task
from micronorm.engine.weights import load_weights
from micronorm.recipes.networks import NETWORKS, SmallImageResNet, build_network
from micronorm.recipes.run import Variation, run_recipe
from micronorm.recipes.temporal_shift import ClipNetwork, temporal_shift
from micronorm.tasks import open_task
from tests.data.miniature import write_frame_folders, write_videos


@pytest.fixture(scope="module")
def motion() -> Task:  # the annotation is the test: pyright checks the protocol
    return open_task("video", "motion")


def classifier(classes=10):
    return ClipNetwork(nn.Sequential(nn.Flatten(), nn.Linear(24 * 24, classes)), frames=8)


def test_loss_and_score_count_clips(motion):
    batch = next(motion.test.load([(0, torch.arange(6))], seed=0))
    model = classifier()
    loss, score = motion.loss(model, batch), motion.score(model, batch)
    assert loss.count == score.sums["count"] == 6
    parts = [motion.loss(model, tuple(column[part] for column in batch)) for part in (slice(2), slice(2, 6))]
    assert sum(part.sum.item() for part in parts) == pytest.approx(loss.sum.item())
    assert motion.sample == "clip"


def test_examples_show_four_frames_and_the_names_of_classes(motion):
    found = motion.examples(classifier(), count=3)
    assert [(one["height"], one["width"]) for one in found] == [(24, 96)] * 3
    assert found[0]["label"] == "right"
    assert {one["prediction"] for one in found} <= set(CLASSES)


def test_a_miniature_something_something_trains_through_the_command_line(tmp_path, monkeypatch):
    """The recipe is a row of table tsm, but for its network: a ResNet-50 would take a minute."""

    def build(classes):
        return temporal_shift(SmallImageResNet(widths=(8, 16), blocks=(1, 1), classes=classes))

    monkeypatch.setitem(NETWORKS, "tiny-tsm", build)
    write_frame_folders(tmp_path / "data")
    (tmp_path / "mine.py").write_text(
        "from dataclasses import replace\n"
        "from micronorm import recipes\n"
        "recipe = replace(recipes.find('tsm/bn-ws'), network='tiny-tsm', classes=2, start=None)\n"
    )
    out = tmp_path / "run"
    options = ["--data", str(tmp_path / "data"), "--out", str(out), "--size", "16", "--step-batch", "4"]
    options += ["--epochs", "2", "--device", "cpu"]
    result = CliRunner().invoke(app, ["train", f"{tmp_path / 'mine.py'}:recipe", *options])
    assert result.exit_code == 0, result.output
    record = records.read(out)
    facts = {"name": "something", "train": 4, "test": 2, "sample": "clip"}
    assert record.facts["data"].items() >= facts.items()
    assert len(record.steps) == 2
    assert record.predictions[0]["label"].startswith("Pushing something")


@pytest.mark.parametrize("row", ["shift-fold0", "no-shift-fold3"])
def test_folders_of_videos_train(tmp_path, row):
    pytest.importorskip("av")
    write_videos(tmp_path / "clips", count=5)
    recipe = recipes.find(f"clips/{row}")
    execution = Execution(device=torch.device("cpu"), steps=1)
    outcome = run_recipe(recipe, out=None, data=tmp_path, execution=execution)
    assert outcome.figures.keys() == {"loss", "top1"}


def test_imagenet_weights_start_the_network_of_table_tsm():
    source = build_network("resnet50", classes=1000)
    model = build_network("tsm-resnet50", classes=174)
    found = load_weights(model, source.state_dict())
    assert found.other_shape == ("network.fc.bias", "network.fc.weight")
    assert not found.missing
    assert torch.equal(model.network.layer4[2].conv1.weight, source.layer4[2].conv1.weight)


@pytest.mark.slow
def test_the_shift_tells_a_clip_from_the_same_clip_played_backwards():
    """Four epochs. A model that is blind to the order of the frames has an error of 50 % at least."""
    execution = Execution(device=torch.device("cpu"), evaluate_epochs=4)
    outcome = run_recipe(recipes.find("motion/bcn-ws"), out=None, variation=Variation(epochs=4), execution=execution)
    assert outcome.figures["top1"] < 40
