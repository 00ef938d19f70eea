"""One recipe of each table from its first step to its evaluation, through the command line, on miniature data."""

import math
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from micronorm import records
from micronorm.cli import app
from micronorm.engine.checkpoint import checkpoints
from micronorm.recipes import Recipe, find, find_table, tables
from micronorm.recipes.results import gather, read_runs
from micronorm.recipes.run import Variation
from micronorm.tasks import open_task
from micronorm.tasks.classification import open_classification
from tests.data.miniature import write_binary, write_camvid, write_decathlon, write_folders, write_voc

STEP_BATCH, SIZE = 4, 32
GENERATED = ("digits", "shapes")  # data without files
SIZED = ("imagenet", "voc", "camvid", "tiny_imagenet20")  # data whose crops have a size
# Tables of which other tests run a miniature: detection (test_rcnn.py), video (tests/tasks/test_video.py),
# own label maps (tests/tasks/test_segmentation.py), own image folders (tests/cli/test_predict.py).
ELSEWHERE = ("mask", "fast", "nuclei", "coco128", "tsm", "motion", "clips", "label_maps", "objects", "image_folders")

# One row of each table, and with them each data set. test_tables.py builds every row; tests/contract trains every norm.
QUICK = [
    "cifar1/c10-micro-bcn-ws",
    "cifar2/micro-sn",
    "quick/rn20-bcn-ws",
    "micro_batch/brn-2",
    "shapes/bcn-ws",
    "digits/gn",
    "rates/adamw-0.001-rate-corrected",
]
SLOW = [
    "imagenet/rn50-bcn-ws-step",
    "abl/in-ws",
    "imagenet_ws/rn50-bn",
    "resnext/rx50-gn-ws",
    "cwn/gn-cwn",
    "ind_abl/gn-mean",
    "cifar1/c10-bcn-ws",
    "cifar1/c100-bn",
    "voc/gn-ws",
    "camvid/bcn-ws",
    "hippocampus/bcn-ws-fold0",
    "tiny_imagenet/bcn-ws",
]


@pytest.fixture(scope="module")
def miniature(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with CIFAR-10 and CIFAR-100 of 15 training images, an ImageNet, a VOC and a CamVid of 12."""
    folder = tmp_path_factory.mktemp("data")
    write_binary(folder, 10)
    write_binary(folder, 100, 15)
    for name in ("imagenet", "tiny_imagenet20"):
        write_folders(folder / name)
    write_voc(folder / "VOCdevkit" / "VOC2012", augmented=12)
    write_camvid(folder / "camvid", train=12)
    write_decathlon(folder / "hippocampus", count=12)
    return folder


@pytest.fixture
def out(tmp_path: Path):
    """A run directory that is gone after the test: pytest keeps the last three, and a ResNet-50 leaves 500 MB."""
    yield tmp_path / "run"
    shutil.rmtree(tmp_path / "run", ignore_errors=True)


def where(recipe: Recipe, miniature: Path) -> list[str]:
    if recipe.data in GENERATED:
        return []
    options = ["--size", str(SIZE)] if recipe.data in SIZED else ["--unverified"] * recipe.data.startswith("cifar")
    return ["--data", str(miniature), *options]


def train(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["train", *arguments, "--device", "cpu"])
    assert result.exit_code == 0, result.output
    return result.output


def figures_of(recipe: Recipe, weights: Path, miniature: Path) -> dict[str, float]:
    """Those of the recipe's network as anybody would build it again, with the weights from the file."""
    model = recipe.build(seed=1)  # another seed: whatever the file lacks would differ
    model.load_state_dict(load_file(weights))
    task = open_task(
        recipe.task,
        recipe.data,
        None if recipe.data in GENERATED else miniature,
        size=SIZE if recipe.data in SIZED else None,
        verify=not recipe.data.startswith("cifar"),
        classes=recipe.classes,
    )
    batch = next(task.test.load([(0, torch.arange(len(task.test)))], seed=0))
    with torch.no_grad():
        return task.score(model.eval(), batch).figures()


def test_every_table_has_a_run():
    assert {find(name).table for name in (*QUICK, *SLOW)} == set(tables()) - set(ELSEWHERE)


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_recipe_starts_checkpoints_resumes_and_evaluates(name, miniature, out):
    recipe = find(name)
    # A rate at which nothing diverges in three steps of four images.
    told = train(
        *(name, "--steps", "2", "--step-batch", str(STEP_BATCH), "--lr", "0.001", "--out", str(out)),
        *where(recipe, miniature),
    )
    (hint,) = (line for line in told.splitlines() if line.startswith("to continue: micronorm train "))
    assert [path.name.split(".")[0] for path in checkpoints(out / "checkpoints")] == ["step-00000002"]
    started = load_file(out / "model.safetensors")

    train(*shlex.split(hint.removeprefix("to continue: micronorm train ")), "--steps", "3")
    record = records.read(out)
    assert [row["step"] for row in record.steps] == [1, 2, 3]
    assert all(row["samples"] <= STEP_BATCH for row in record.steps)
    assert record.facts["settings"]["step_batch"] == STEP_BATCH
    assert all(math.isfinite(row["loss"]) for row in record.steps)
    trained = load_file(out / "model.safetensors")
    assert trained.keys() == started.keys()
    assert any(not torch.equal(trained[key], started[key]) for key in trained)

    assert record.outcome is not None
    figures = record.outcome["figures"]
    assert all(map(math.isfinite, figures.values()))
    again = figures_of(recipe, out / "model.safetensors", miniature)
    assert again == pytest.approx(figures, rel=1e-4)

    (result,), damaged = read_runs(out)
    assert not damaged
    assert gather(recipe, [result]).counted == ()


def test_a_set_with_more_classes_than_the_recipe_has_outputs_is_refused(tmp_path):
    write_folders(tmp_path / "imagenet", classes=[f"n{i}" for i in range(11)], count=1)
    with pytest.raises(ValueError, match="has 11 classes, and a model of 10 outputs cannot name them"):
        open_classification("imagenet", tmp_path, classes=10)


def test_a_miniature_must_be_asked_for(miniature, out):
    result = CliRunner().invoke(app, ["train", "quick/rn20-gn", "--data", str(miniature), "--out", str(out)])
    assert result.exit_code == 2
    assert "data_batch_1.bin" in result.stderr
    assert not out.exists()


def test_a_row_that_nobody_can_run_says_why(miniature, out):
    result = CliRunner().invoke(app, ["train", "cifar2/dn", "--data", str(miniature), "--out", str(out)])
    assert result.exit_code == 2
    assert find("cifar2/dn").unavailable in result.stderr
    assert len(find_table("cifar2").rows) == 9


@pytest.mark.parametrize(
    "change", [{"dtype": False}, {"dtype": "float8"}, {"lr": "1"}, {"size": [8]}, {"weights": 7}], ids=str
)
def test_a_variation_that_no_run_has_is_named(change):
    with pytest.raises(ValueError, match=f"variation {next(iter(change))}=.* is not valid"):
        Variation(**change)
