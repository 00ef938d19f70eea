"""Broken data of detection end `micronorm train` with one line, before the training starts."""

import json

import pytest
from torch import nn
from typer.testing import CliRunner

from micronorm.cli import app
from micronorm.recipes.recipe import Recipe
from tests.data.miniature import coco_object, coco_objects, write_coco, write_nuclei

ANNOTATIONS = "instances_train.json"
PICTURE = "train/000000000020.jpg"


def _annotate(root, objects):
    content = json.loads((root / ANNOTATIONS).read_text())
    (root / ANNOTATIONS).write_text(json.dumps({**content, "annotations": objects}))


def _two_points(root):
    _annotate(root, [*coco_objects(), coco_object(7, 10, 1, outline=[[1.0, 2.0, 3.0, 4.0]])])


def _cut_short(root):
    (root / PICTURE).write_bytes((root / PICTURE).read_bytes()[:-40])


BREAKS = {
    "a missing image": (lambda root: (root / PICTURE).unlink(), PICTURE),
    "a truncated image": (_cut_short, PICTURE),
    "no annotations": (lambda root: _annotate(root, []), ANNOTATIONS),
    "an annotation without an outline": (
        lambda root: _annotate(root, [*coco_objects(), coco_object(7, 10, 1, outline=[])]),
        f"{ANNOTATIONS}, annotation 7",
    ),
    "a polygon of two points": (_two_points, f"{ANNOTATIONS}, annotation 7"),
    "a file that is no JSON": (lambda root: (root / ANNOTATIONS).write_text("{"), ANNOTATIONS),
}


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """A whole detector takes seconds to build, and no step is taken here."""
    monkeypatch.setattr(Recipe, "build", lambda self, seed: nn.Linear(1, 1))


def _train(recipe, root, *arguments):
    command = ["train", recipe, "--data", str(root), "--out", str(root / "run"), "--device", "cpu", *arguments]
    return CliRunner().invoke(app, command)


@pytest.mark.parametrize("kind", BREAKS)
def test_a_broken_file_ends_the_command_with_one_line_that_names_it(tmp_path, kind):
    write_coco(tmp_path, official=False)
    spoil, name = BREAKS[kind]
    spoil(tmp_path)
    done = _train("coco128", tmp_path)
    assert done.exit_code == 2, done.output
    assert done.output.startswith("micronorm train: ")
    assert done.output.count("\n") == 1
    assert f"{tmp_path}/{name}" in done.output
    assert not (tmp_path / "run").exists()


def test_broken_labels_of_nuclei_end_the_command_with_one_line_that_names_them(tmp_path):
    write_nuclei(tmp_path)
    (tmp_path / "labels/c.png").write_bytes(b"no picture")
    done = _train("nuclei", tmp_path)
    assert done.exit_code == 2, done.output
    assert done.output.count("\n") == 1
    assert "labels/c.png is not a readable image" in done.output
    assert not (tmp_path / "run").exists()
