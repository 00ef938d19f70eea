"""Something-Something V1 and Jester in their official layout, and what is wrong with a broken tree."""

import shutil

import pytest
import torch

from micronorm.data.frame_folders import open_frame_folders
from tests.data.miniature import write_frame_folders


def load(samples, *indices, seed=0, epoch=0):
    return next(samples.load([(epoch, torch.tensor(indices))], seed=seed))


@pytest.fixture
def tree(tmp_path):
    return write_frame_folders(tmp_path / "something-something-v1")


def test_the_official_layout_is_read(tree):
    for place in (tree, tree.parent):
        train, test, classes = open_frame_folders(place, name="something", size=16)
        assert (len(train), len(test)) == (4, 2)
        assert classes[1] == "Pushing something from right to left"
        clips, labels = load(test, 0, 1)
        assert clips.shape == (2, 8, 3, 16, 16)
        assert labels.tolist() == [0, 1]


def test_jester_has_the_same_layout_with_other_names(tmp_path):
    write_frame_folders(tmp_path, prefix="jester-v1", train=3)
    train, _, _ = open_frame_folders(tmp_path, name="jester", size=16)
    assert len(train) == 3


def broken(tree, name):
    frames = tree / "20bn-something-something-v1"
    if name == "folder":
        shutil.rmtree(frames / "104")
    elif name == "frame":
        (frames / "101/00003.jpg").unlink()
    elif name == "cut":
        last = sorted((frames / "102").iterdir())[-1]
        last.write_bytes(last.read_bytes()[:-40])
    elif name == "empty":
        for frame in (frames / "100").iterdir():
            frame.unlink()
    elif name == "list":
        (tree / "something-something-v1-train.csv").unlink()
    elif name == "class":
        (tree / "something-something-v1-train.csv").write_text("100;Pushing something\n")
    elif name == "labels":
        (tree / "something-something-v1-labels.csv").unlink()
    elif name == "twice":
        (tree / "something-something-v1-labels.csv").write_text("a\na\n")


@pytest.mark.parametrize(
    "name, message",
    [
        ("folder", r"no folder .*20bn-something-something-v1/104 with the frames of a video"),
        ("frame", r"v1/101 must have the frames 00001.jpg, 00002.jpg, …; it has 6 and lacks 00003.jpg"),
        ("cut", r"v1/102/00008.jpg ends before its image does"),
        ("empty", r"v1/100 must have the frames .* it has 0 and lacks 00001.jpg"),
        ("list", r"no list .*something-something-v1-train.csv"),
        ("class", r"train.csv, line 1: an ID, a semicolon and a class were expected, got '100;Pushing something'"),
        (
            "labels",
            r"cannot find something-something-v1 in .*; expected a folder with something-something-v1-labels.csv",
        ),
        ("twice", r"something-something-v1-labels.csv has a class twice"),
    ],
)
def test_a_broken_tree_is_refused_with_the_name_of_the_file(tree, name, message):
    broken(tree, name)
    with pytest.raises((FileNotFoundError, ValueError), match=message):
        open_frame_folders(tree, name="something")
