import contextlib
from functools import partial
from pathlib import Path

import pytest

from micronorm.data.cifar import find_cifar
from micronorm.data.files import DEFAULT_FOLDERS, search_folders
from micronorm.data.folders import find_folders
from micronorm.tasks import open_task
from tests.data.miniature import write_binary, write_folders, write_python


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A working directory and a home without data."""
    (tmp_path / "work").mkdir()
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path


def find_data(folder=None):
    """The paths of three data sets below `folder`, or below the default folders."""
    found = {}
    for name, find in (("cifar10", partial(find_cifar, classes=10)), ("cifar100", partial(find_cifar, classes=100)),
                       ("imagenet", find_folders)):  # fmt: skip
        with contextlib.suppress(FileNotFoundError):
            found[name] = find(folder)
    return found


def test_a_given_folder_is_the_only_place_looked_at(elsewhere):
    write_binary(elsewhere / "work" / "data", 10)
    place = write_python(elsewhere / "given", 100)
    assert search_folders(elsewhere / "given") == (elsewhere / "given",)
    assert find_data(elsewhere / "given") == {"cifar100": place}


def test_without_one_it_is_data_here_and_then_data_at_home(elsewhere):
    assert list(DEFAULT_FOLDERS) == [Path("data"), Path("~/data")]
    assert search_folders() == (Path("data"), elsewhere / "home" / "data")
    assert find_data() == {}
    at_home = [write_binary(elsewhere / "home" / "data", classes) for classes in (10, 100)]
    here = write_binary(elsewhere / "work" / "data", 10)
    found = find_data()
    assert found["cifar10"].resolve() == here
    assert found["cifar100"] == at_home[1]


def test_a_tilde_is_the_home(elsewhere):
    place = write_binary(elsewhere / "home" / "sets", 10)
    assert find_data("~/sets") == {"cifar10": place}


def test_a_default_folder_is_imagenet_only_under_its_name(elsewhere):
    write_folders(elsewhere / "work" / "data", count=1)
    assert find_data() == {}
    assert find_data("data") == {"imagenet": Path("data")}
    write_folders(elsewhere / "work" / "data" / "imagenet", count=1)
    assert find_data() == {"imagenet": Path("data/imagenet")}


@pytest.mark.parametrize(
    "task, name",
    [
        ("classification", "cifar10"),
        ("classification", "imagenet"),
        ("classification", "tiny_imagenet20"),
        ("segmentation", "camvid"),
        ("instances", "nuclei"),
        ("video", "clips-0"),
        ("volumes", "hippocampus-fold0"),
    ],
)
def test_a_set_that_is_nowhere_is_said_to_be_missing_from_every_place(elsewhere, task, name):
    with pytest.raises(FileNotFoundError) as caught:
        open_task(task, name)
    for place in (elsewhere / "work" / "data", elsewhere / "home" / "data"):
        assert str(place) in str(caught.value)
    assert name.partition("-")[0].removeprefix("cifar") in str(caught.value).lower()
