import hashlib
import itertools
import os
import pickle
import sys
import urllib.error

import numpy as np
import pytest
import torch
from torchvision.datasets import CIFAR10, CIFAR100

from micronorm.data import cifar
from micronorm.data.cifar import CLASSES, STANDARDIZATION, find_cifar, open_cifar, read_cifar
from tests.data.miniature import BINARY, FILES, PYTHON, records, write_binary, write_python

WRITERS = {"binary": write_binary, "python": write_python}
BOTH = pytest.mark.parametrize("classes", [10, 100])
RELEASES = pytest.mark.parametrize("release", ["binary", "python"])


def make_official(monkeypatch, place, classes):
    """Let the miniature in `place` be the official release: its sums are the published ones."""
    release = cifar._RELEASES[classes]
    if place.name == release.folder:
        sums = {file.name: hashlib.sha1(file.read_bytes()).hexdigest() for file in place.iterdir()}
        train, test = ({name: sums[name] for name in files} for files in (release.train, release.test))
        changed = {**cifar._RELEASES, classes: release._replace(train=train, test=test)}
        monkeypatch.setattr(cifar, "_RELEASES", changed)
    else:
        sums = {file.name: hashlib.md5(file.read_bytes()).hexdigest() for file in place.iterdir()}
        theirs = CIFAR10 if classes == 10 else CIFAR100
        for part in ("train_list", "test_list"):
            monkeypatch.setattr(theirs, part, [[name, sums[name]] for name, _ in getattr(theirs, part)])
        monkeypatch.setattr(theirs, "meta", {**theirs.meta, "md5": sums[theirs.meta["filename"]]})


@BOTH
@RELEASES
def test_a_release_is_read_in_the_official_order(tmp_path, monkeypatch, classes, release):
    make_official(monkeypatch, WRITERS[release](tmp_path, classes), classes)
    train, test = read_cifar(tmp_path, classes=classes)
    batches = len(FILES[classes][0])
    for part, files in ((train, range(batches)), (test, [batches])):
        pixels, labels = zip(*(records(classes, file, 3) for file in files), strict=True)
        assert torch.equal(part.images, torch.from_numpy(np.concatenate(pixels)).reshape(-1, 3, 32, 32))
        assert part.labels.tolist() == [*itertools.chain(*labels)]
        assert part.images.dtype == torch.uint8
        assert part.labels.dtype == torch.int64


@BOTH
def test_a_verified_release_must_have_the_published_sums(tmp_path, monkeypatch, classes):
    place = write_binary(tmp_path, classes)
    make_official(monkeypatch, place, classes)
    assert len(read_cifar(tmp_path, classes=classes).test.labels) == 3
    file = sorted(place.iterdir())[-1]
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1  # one bit of one pixel
    file.write_bytes(content)
    with pytest.raises(
        ValueError, match=r"SHA1 of its [\d,]+ bytes is \w+, the published one \w+\. Delete it.*verify=False"
    ) as caught:
        read_cifar(tmp_path, classes=classes)
    assert str(file) in str(caught.value)
    read_cifar(tmp_path, classes=classes, verify=False)


@BOTH
@pytest.mark.parametrize("verify", [True, False])
def test_a_python_release_with_other_sums_is_refused_before_its_pickles_run(tmp_path, monkeypatch, classes, verify):
    place = write_python(tmp_path / "data", classes)
    make_official(monkeypatch, place, classes)
    assert len(read_cifar(place, classes=classes, verify=verify).test.labels) == 3
    (place / FILES[classes][1][0]).write_bytes(pickle.dumps(Brings(os.mkdir, str(tmp_path / "planted"))))
    with pytest.raises(ValueError, match=f"{place.name} is damaged or not the official Python release"):
        read_cifar(place, classes=classes, verify=verify)
    assert not (tmp_path / "planted").exists()


class Brings:
    """A value whose pickle calls something."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@BOTH
def test_a_miniature_is_told_from_the_official_files(tmp_path, classes):
    write_binary(tmp_path, classes)
    with pytest.raises(ValueError, match=r"SHA1 of its .* the published one .* miniature .* verify=False"):
        read_cifar(tmp_path, classes=classes)


@BOTH
@pytest.mark.parametrize("change", [-1, 1, -5000, None])
def test_a_binary_file_must_hold_whole_records(tmp_path, classes, change):
    file = write_binary(tmp_path, classes) / f"{FILES[classes][0][0]}.bin"
    content = file.read_bytes()
    file.write_bytes(b"" if change is None else content[:change] if change < 0 else content + b"\0")
    record = {10: "3,073", 100: "3,074"}[classes]
    with pytest.raises(ValueError, match=f"{file.name} is damaged.*not a whole number of records of {record} bytes"):
        read_cifar(tmp_path, classes=classes, verify=False)


@pytest.mark.parametrize("classes, offset, label, last", [(10, 0, 10, 9), (100, 1, 100, 99), (100, 0, 20, 19)])
def test_a_label_beyond_the_classes_is_damage(tmp_path, classes, offset, label, last):
    file = write_binary(tmp_path, classes) / f"{FILES[classes][1][0]}.bin"
    content = bytearray(file.read_bytes())
    content[offset] = label
    file.write_bytes(content)
    with pytest.raises(ValueError, match=f"{file.name} is damaged.*label {label} does not lie between 0 and {last}"):
        read_cifar(tmp_path, classes=classes, verify=False)


@BOTH
@pytest.mark.parametrize("below", ["", "cifar{}", "CIFAR{}", "cifar-{}", "CIFAR-{}"])
def test_a_set_is_found_in_the_folder_and_its_obvious_children(tmp_path, classes, below):
    place = write_binary(tmp_path / below.format(classes), classes)
    assert find_cifar(tmp_path, classes=classes) == place
    assert find_cifar(place, classes=classes) == place


def test_files_without_the_folder_of_the_archive_are_found(tmp_path):
    place = write_binary(tmp_path, 10).rename(tmp_path / "cifar10")
    assert find_cifar(tmp_path, classes=10) == place


def test_folders_named_as_the_files_of_cifar_100_are_not_taken_for_them(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "test").mkdir()
    with pytest.raises(FileNotFoundError):
        find_cifar(tmp_path, classes=100)


def test_the_binary_release_comes_first_and_a_complete_one_before_an_incomplete_one(tmp_path):
    write_python(tmp_path, 10)
    binary = write_binary(tmp_path, 10)
    assert find_cifar(tmp_path, classes=10) == binary
    (binary / "data_batch_3.bin").unlink()
    assert find_cifar(tmp_path, classes=10) == tmp_path / PYTHON[10]


@BOTH
def test_a_missing_set_says_where_it_was_looked_for_and_how_to_get_it(tmp_path, classes):
    with pytest.raises(FileNotFoundError) as caught:
        read_cifar(tmp_path, classes=classes)
    for part in (str(tmp_path), BINARY[classes], PYTHON[classes], cifar.PAGE, "download=True", f"cifar{classes}"):
        assert part in str(caught.value)


@BOTH
def test_a_download_goes_through_torchvision_and_only_where_nothing_is_found(tmp_path, monkeypatch, classes):
    import torchvision.datasets.cifar

    asked = []

    def fetch(url, root, *, filename, md5):
        asked.append((url, filename, md5))
        make_official(monkeypatch, write_python(tmp_path, classes), classes)

    monkeypatch.setattr(torchvision.datasets.cifar, "download_and_extract_archive", fetch)
    for _ in range(2):
        read = read_cifar(tmp_path, classes=classes, download=True)
        assert len(read.test.labels) == 3
    name = f"cifar-{classes}-python.tar.gz"
    md5 = {10: "c58f30108f718f92721af3b95e74349a", 100: "eb9058c3a382ffc7106e4002c42a8d85"}[classes]
    assert asked == [(f"https://www.cs.toronto.edu/~kriz/{name}", name, md5)]


@pytest.mark.parametrize("error", [urllib.error.URLError("no route"), RuntimeError("File not found or corrupted.")])
def test_a_download_that_fails_says_what_to_do(tmp_path, monkeypatch, error):
    import torchvision.datasets.cifar

    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(torchvision.datasets.cifar, "download_and_extract_archive", fail)
    with pytest.raises(OSError, match=r"fetching https://.*failed \(.*try again, or unpack an archive from https://"):
        read_cifar(tmp_path, classes=10, download=True)


def test_a_download_without_torchvision_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.setitem(sys.modules, "torchvision.datasets", None)
    with pytest.raises(ImportError, match=r"https://www\.cs\.toronto\.edu.*pip install torchvision"):
        read_cifar(tmp_path, classes=10, download=True)


def test_the_python_release_is_that_of_torchvision():
    for classes, theirs in ((10, CIFAR10), (100, CIFAR100)):
        assert cifar._RELEASES[classes].python == theirs.base_folder == PYTHON[classes]


def test_classes_have_their_names():
    assert (CLASSES[10][3], CLASSES[100][3]) == ("cat", "bear")
    assert [len(set(names)) for names in CLASSES.values()] == [10, 100]


def test_only_training_images_are_augmented(tmp_path):
    write_binary(tmp_path, 10)
    read = read_cifar(tmp_path, classes=10, verify=False)
    train, test = open_cifar(tmp_path, classes=10, verify=False)
    mean, std = (torch.tensor(column).reshape(3, 1, 1) for column in STANDARDIZATION[10])
    (tested, _), (trained, _) = (next(part.load([(1, torch.arange(3))], seed=0)) for part in (test, train))
    assert torch.equal(tested, (read.test.images - mean) / std)
    assert not torch.equal(trained, (read.train.images[:3] - mean) / std)
    assert (len(train), len(test)) == (15, 3)
