import collections
import hashlib
import itertools
import os
import pickle
import sys
import urllib.error

import numpy as np
import pytest
import torch

from micronorm.data import cifar
from micronorm.data.cifar import STANDARDIZATION, find_cifar, open_cifar, read_cifar
from tests.data.miniature import BINARY, FILES, PYTHON, python2_pickle, records, write_binary, write_python

WRITERS = {"binary": write_binary, "python": write_python}
BOTH = pytest.mark.parametrize("classes", [10, 100])
RELEASES = pytest.mark.parametrize("release", ["binary", "python"])


def make_official(monkeypatch, place, classes):
    """Let the miniature in `place` be the official release: its sums are the published ones."""
    releases = list(cifar._RELEASES[classes])
    number = next(k for k, release in enumerate(releases) if release.folder == place.name)
    algorithm = "sha1" if releases[number].kind == "binary" else "md5"
    sums = {file.name: hashlib.new(algorithm, file.read_bytes()).hexdigest() for file in place.iterdir()}
    train, test = ({name: sums[name] for name in files} for files in (releases[number].train, releases[number].test))
    releases[number] = releases[number]._replace(train=train, test=test)
    monkeypatch.setattr(cifar, "_RELEASES", {**cifar._RELEASES, classes: tuple(releases)})


@BOTH
@RELEASES
def test_a_release_is_read_in_the_official_order(tmp_path, classes, release):
    WRITERS[release](tmp_path, classes)
    train, test = read_cifar(tmp_path, classes=classes, verify=False)
    batches = len(FILES[classes][0])
    for part, files in ((train, range(batches)), (test, [batches])):
        pixels, labels = zip(*(records(classes, file, 3) for file in files), strict=True)
        assert torch.equal(part.images, torch.from_numpy(np.concatenate(pixels)).reshape(-1, 3, 32, 32))
        assert part.labels.tolist() == [*itertools.chain(*labels)]
        assert part.images.dtype == torch.uint8
        assert part.labels.dtype == torch.int64


@BOTH
@RELEASES
def test_a_verified_release_must_have_the_published_sums(tmp_path, monkeypatch, classes, release):
    place = WRITERS[release](tmp_path, classes)
    make_official(monkeypatch, place, classes)
    assert len(read_cifar(tmp_path, classes=classes).test.labels) == 3
    file = sorted(place.iterdir())[-1]
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1  # one bit of one pixel
    file.write_bytes(content)
    with pytest.raises(
        ValueError, match=r"(SHA1|MD5) of its [\d,]+ bytes is \w+, the published one \w+\. Delete it.*verify=False"
    ) as caught:
        read_cifar(tmp_path, classes=classes)
    assert str(file) in str(caught.value)
    read_cifar(tmp_path, classes=classes, verify=False)


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


@pytest.mark.parametrize(
    "entries, message",
    [
        ({"labels": [1, 10]}, "label 10 does not lie between 0 and 9"),
        ({"labels": [1, -1]}, "label -1 does not lie between 0 and 9"),
        ({"labels": [1]}, "2 images and 1 labels"),
        ({"labels": [1, 2.0]}, "lacks a list of whole numbers under 'labels'"),
        ({"labels": None}, "lacks a list of whole numbers under 'labels'"),
        ({"data": np.zeros((2, 3071), np.uint8)}, "lacks an N×3072 array of bytes under 'data'"),
        ({"data": np.zeros((0, 3072), np.uint8), "labels": []}, "lacks an N×3072 array"),
        ({"data": [1, 2]}, "lacks an N×3072 array"),
        ({"data": np.zeros((2, 3072))}, "lacks an N×3072 array"),
        ({"data": np.array([{}, []], dtype=object)}, "lacks an N×3072 array"),
    ],
)
def test_a_python_file_that_does_not_fit_together_is_damage(tmp_path, entries, message):
    file = write_python(tmp_path, 10) / "data_batch_2"
    fit = {"data": np.zeros((2, 3072), np.uint8), "labels": [1, 2]}
    file.write_bytes(pickle.dumps({**fit, **entries}, protocol=4))
    with pytest.raises(ValueError, match=f"data_batch_2 is damaged.*{message}"):
        read_cifar(tmp_path, classes=10, verify=False)


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_a_pickle_of_python_3_is_read_too(tmp_path, protocol):
    pixels, labels = records(10, 0, 3)
    file = write_python(tmp_path, 10) / "test_batch"
    file.write_bytes(pickle.dumps({"data": pixels, "labels": labels, "more": (None, True, 2.5)}, protocol=protocol))
    test = read_cifar(tmp_path, classes=10, verify=False).test
    assert torch.equal(test.images.flatten(1), torch.from_numpy(pixels))
    assert test.labels.tolist() == labels


class Brings:
    """A value whose pickle calls something."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    "call, name",
    [
        ((os.mkdir, "planted"), "posix.mkdir"),
        ((eval, "open('planted', 'w')"), "__builtin__.eval"),
        ((getattr, "planted", "upper"), "__builtin__.getattr"),
        ((collections.OrderedDict,), "collections.OrderedDict"),
        ((np.fromfile, "planted"), "numpy.*fromfile"),
    ],
)
def test_what_a_pickle_brings_is_named_and_not_executed(call, name, tmp_path, monkeypatch):
    file = write_python(tmp_path / "data", 10) / "test_batch"
    file.write_bytes(pickle.dumps({"data": Brings(*call)}, protocol=2))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ValueError, match=f"test_batch is damaged.*names {name}, which an array does not need; nothing was exec"
    ):
        read_cifar("data", classes=10, verify=False)
    assert [place.name for place in tmp_path.iterdir()] == ["data"]


WHOLE = python2_pickle(*records(10, 0, 4), "labels")


@pytest.mark.parametrize(
    "program",
    [
        *(WHOLE[:length] for length in (0, 1, 100, 12_000)),
        WHOLE.replace(b"J\x04\x00\x00\x00", b"J\x05\x00\x00\x00"),  # an array shorter than its shape
        # an array that is never filled
        b"\x80\x02}U\x04datacnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87Rs.",
        # BUILD sets attributes of whatever lies on the stack
        *(b"\x80\x02c" + name + b"\nN}(U\x08__call__Nu\x86b." for name in (b"numpy\ndtype", b"_codecs\nencode")),
        pickle.dumps([1, 2]),
    ],
)
def test_a_broken_pickle_is_refused_and_writes_nothing_into_the_reader(tmp_path, program):
    file = write_python(tmp_path, 10) / "data_batch_1"
    before = file.read_bytes()
    file.write_bytes(program)
    with pytest.raises(ValueError, match="data_batch_1 is damaged"):
        read_cifar(tmp_path, classes=10, verify=False)
    file.write_bytes(before)
    assert len(read_cifar(tmp_path, classes=10, verify=False).train.labels) == 15


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
    import torchvision.datasets.utils

    asked = []

    def fetch(url, root, *, filename, md5):
        asked.append((url, filename, md5))
        write_python(tmp_path, classes)

    monkeypatch.setattr(torchvision.datasets.utils, "download_and_extract_archive", fetch)
    for _ in range(2):
        read = read_cifar(tmp_path, classes=classes, verify=False, download=True)
        assert len(read.test.labels) == 3
    name = f"cifar-{classes}-python.tar.gz"
    md5 = {10: "c58f30108f718f92721af3b95e74349a", 100: "eb9058c3a382ffc7106e4002c42a8d85"}[classes]
    assert asked == [(f"https://www.cs.toronto.edu/~kriz/{name}", name, md5)]


@pytest.mark.parametrize("error", [urllib.error.URLError("no route"), RuntimeError("File not found or corrupted.")])
def test_a_download_that_fails_says_what_to_do(tmp_path, monkeypatch, error):
    import torchvision.datasets.utils

    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(torchvision.datasets.utils, "download_and_extract_archive", fail)
    with pytest.raises(OSError, match=r"fetching https://.*failed \(.*try again, or unpack an archive from https://"):
        read_cifar(tmp_path, classes=10, download=True)


def test_a_download_without_torchvision_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.setitem(sys.modules, "torchvision.datasets", None)
    with pytest.raises(ImportError, match=r"https://www\.cs\.toronto\.edu.*pip install torchvision"):
        read_cifar(tmp_path, classes=10, download=True)


def test_the_published_sums_are_those_of_torchvision():
    from torchvision.datasets import CIFAR10, CIFAR100

    for classes, theirs in ((10, CIFAR10), (100, CIFAR100)):
        ours = cifar._RELEASES[classes][1]
        assert ours.folder == theirs.base_folder
        assert [[*file] for file in ours.train.items()] == theirs.train_list
        assert [[*file] for file in ours.test.items()] == theirs.test_list


def test_only_training_images_are_augmented(tmp_path):
    write_binary(tmp_path, 10)
    read = read_cifar(tmp_path, classes=10, verify=False)
    train, test = open_cifar(tmp_path, classes=10, verify=False)
    mean, std = (torch.tensor(column).reshape(3, 1, 1) for column in STANDARDIZATION[10])
    (tested, _), (trained, _) = (next(part.load([(1, torch.arange(3))], seed=0)) for part in (test, train))
    assert torch.equal(tested, (read.test.images - mean) / std)
    assert not torch.equal(trained, (read.train.images[:3] - mean) / std)
    assert (len(train), len(test)) == (15, 3)
