import contextlib
import gc
import os
import shutil
import signal
import sys
import weakref

import numpy as np
import pytest
import torch
from PIL import Image

from micronorm.data.folders import Box, crop_box, find_folders, open_folders
from micronorm.data.samples import IMAGENET, Standardization
from tests.data.miniature import write_folders

SIZE = 32
BYTES = Standardization((0.0,) * 3, (1.0,) * 3)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_folders(tmp_path_factory.mktemp("folders"))


def shares(*parts, epoch=0):
    return [(epoch, torch.tensor(part, dtype=torch.int64)) for part in parts]


def images_of(samples, indices, *, seed=0, epoch=0):
    return next(samples.load(shares(indices, epoch=epoch), seed=seed))[0]


def read(path):
    with Image.open(path) as image:
        return image.convert("RGB")


def uniform_draws(count: int) -> list[list[float]]:
    return torch.rand(count, 40, dtype=torch.float64).tolist()


@pytest.mark.parametrize("ending", ["left", "unreadable", "refused"])
def test_workers_of_an_unfinished_load_end_with_the_last_reference(root, tmp_path, ending):
    # In a circle of references they would wait for the collector, and the collector for them.
    shutil.copytree(root, tmp_path / "imagenet")
    (tmp_path / "imagenet" / "train" / "ant" / "ant_1.JPEG").write_bytes(b"")
    train = open_folders(tmp_path, size=SIZE, workers=1).train
    batches = train.load(shares(*[[0]] * 4, [1] if ending == "unreadable" else [99], *[[0]] * 4), seed=0)
    gc.disable()
    try:
        next(batches)
        if ending == "left":
            batches.close()
        else:
            with contextlib.suppress(ValueError, IndexError):
                list(batches)
                pytest.fail("the load should not have ended")
        gone = weakref.ref(train._idle[0][0]._iterator)
        assert gone() is not None
        del train, batches
        assert gone() is None
    finally:
        gc.enable()


def test_labels_follow_the_sorted_names_of_classes_and_files(root):
    opened = open_folders(root, size=SIZE)
    assert opened.names == ("ant", "bee", "cat")
    assert len(opened.train) == len(opened.test) == 12
    images, labels = next(opened.test.load(shares(range(12)), seed=0))
    assert labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert labels.dtype == torch.int64
    assert images.shape == (12, 3, SIZE, SIZE)
    assert images.dtype == torch.float32


def test_test_images_are_the_usual_central_crops(root):
    from torchvision.transforms import v2

    usual = v2.Compose(
        [
            v2.Resize(round(SIZE * 256 / 224)),
            v2.CenterCrop(SIZE),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )
    found = images_of(open_folders(root, size=SIZE).test, list(range(4)))
    for image, path in zip(found, sorted((root / "val" / "ant").iterdir()), strict=True):
        assert (image - usual(read(path))).abs().max() < 1e-5


def test_greyscale_images_become_three_equal_channels(root, monkeypatch):
    monkeypatch.setattr("micronorm.data.folders.IMAGENET", BYTES)
    opened = open_folders(root, size=SIZE)
    path = sorted((root / "val" / "ant").iterdir())[1]
    with Image.open(path) as image:
        assert image.mode == "L"
    grey = images_of(opened.test, [1])[0]
    assert torch.equal(grey[0], grey[1])
    assert torch.equal(grey[0], grey[2])


def test_a_training_image_is_the_resized_crop_of_its_box_or_its_mirror_image(root, monkeypatch):
    from torchvision.transforms.v2 import functional as transforms

    box = Box(3, 5, 20, 24)
    monkeypatch.setattr("micronorm.data.folders.crop_box", lambda draws, *, height, width: box)
    monkeypatch.setattr("micronorm.data.folders.IMAGENET", BYTES)
    opened = open_folders(root, size=SIZE)
    path = sorted((root / "train" / "ant").iterdir())[2]
    crop = transforms.resized_crop(read(path), *box, size=[SIZE, SIZE])
    expected = transforms.pil_to_tensor(crop).float()
    drawn = [images_of(opened.train, [2], epoch=epoch)[0] for epoch in range(40)]
    plain = sum(torch.equal(image, expected) for image in drawn)
    mirrored = sum(torch.equal(image, expected.flip(-1)) for image in drawn)
    assert plain + mirrored == 40
    assert 8 < plain < 32


def test_a_sample_does_not_depend_on_companions_order_or_workers(root):
    here = open_folders(root, size=SIZE).train
    whole = images_of(here, list(range(12)), seed=3, epoch=4)
    assert torch.equal(images_of(here, [7], seed=3, epoch=4)[0], whole[7])
    order = torch.randperm(12).tolist()
    assert torch.equal(images_of(here, order, seed=3, epoch=4), whole[order])
    elsewhere = open_folders(root, size=SIZE, workers=2).train
    parts = [[2], [5, 1, 0], [], [11, 3], [4], [6, 7, 8, 9, 10]]
    for _ in range(2):  # the second time with the workers of the first
        loaded = list(elsewhere.load(shares(*parts, epoch=4), seed=3))
        assert [len(labels) for _, labels in loaded] == [len(part) for part in parts]
        for (images, labels), part in zip(loaded, parts, strict=True):
            assert torch.equal(images, whole[part])
            assert labels.tolist() == [index // 4 for index in part]


def test_test_images_depend_on_neither_seed_nor_epoch(root):
    test = open_folders(root, size=SIZE).test
    assert torch.equal(images_of(test, [0, 5]), images_of(test, [0, 5], seed=8, epoch=9))


@pytest.mark.parametrize("workers, ahead", [(0, 0), (1, 2)])
def test_shares_are_read_a_few_ahead_at_most(root, workers, ahead):
    read = []

    def endless():
        while True:
            read.append(len(read))
            yield 0, torch.tensor([0])

    batches = open_folders(root, size=SIZE, workers=workers).train.load(endless(), seed=0)
    for taken in range(1, 4):
        next(batches)
        assert taken <= len(read) <= taken + ahead


def test_loads_may_be_left_unfinished_or_overlap(root):
    train = open_folders(root, size=SIZE, workers=1).train
    parts = shares([0], [1], [2], [3])
    expected = [images for images, _ in train.load(parts, seed=0)]
    left = train.load(parts, seed=0)
    next(left)
    left.close()
    one, other = train.load(parts, seed=0), train.load(parts, seed=0)
    for (first, _), (second, _), image in zip(one, other, expected, strict=True):
        assert torch.equal(first, image)
        assert torch.equal(second, image)


def test_an_interrupt_from_the_terminal_does_not_reach_the_workers(root):
    train = open_folders(root, size=SIZE, workers=1).train
    assert len(list(train.load(shares([0], [1]), seed=0))) == 2
    (worker,) = train._idle[0][0]._iterator._workers
    os.kill(worker.pid, signal.SIGINT)
    assert len(list(train.load(shares([0], [1]), seed=0))) == 2
    assert worker.is_alive()


@pytest.mark.parametrize("workers", [0, 1])
def test_loading_leaves_the_generator_of_torch_alone(root, workers):
    before = torch.get_rng_state()
    list(open_folders(root, size=SIZE, workers=workers).train.load(shares([0], [1]), seed=0))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("damage", ["truncated", "text", "empty"])
def test_an_unreadable_image_is_named(root, tmp_path, workers, damage):
    shutil.copytree(root, tmp_path / "imagenet")
    path = tmp_path / "imagenet" / "train" / "bee" / "bee_1.JPEG"
    content = path.read_bytes()
    path.write_bytes({"truncated": content[: len(content) // 2], "text": b"<html>404</html>", "empty": b""}[damage])
    train = open_folders(tmp_path, size=SIZE, workers=workers).train
    with pytest.raises(
        ValueError, match=r"train/bee/bee_1\.JPEG is not a readable image .*replace it or delete it"
    ) as it:
        list(train.load(shares([0], [5], [6]), seed=0))
    assert "Traceback" not in str(it.value)
    assert images_of(train, [6]).shape == (1, 3, SIZE, SIZE)  # the others can still be loaded


@pytest.mark.parametrize("target", [".", "..", "../ant", "../../.."])
def test_a_folder_that_links_to_itself_is_read_once(root, tmp_path, target):
    shutil.copytree(root, tmp_path / "imagenet")
    (tmp_path / "imagenet" / "train" / "ant" / "again").symlink_to(target)
    assert len(open_folders(tmp_path, size=SIZE).train) == 12


def test_links_to_folders_of_images_are_followed(root, tmp_path):
    shutil.copytree(root, tmp_path / "imagenet")
    shutil.copytree(root / "train" / "ant", tmp_path / "more")
    (tmp_path / "imagenet" / "train" / "ant" / "more").symlink_to(tmp_path / "more")
    assert len(open_folders(tmp_path, size=SIZE).train) == 12 + len(list((tmp_path / "more").iterdir()))


def test_what_is_not_an_image_or_a_class_is_passed_over(root, tmp_path):
    shutil.copytree(root, tmp_path / "imagenet")
    (tmp_path / "imagenet" / "train" / "bee" / "notes.txt").write_text("no image")
    (tmp_path / "imagenet" / "train" / "bee" / "._bee_1.JPEG").write_text("no image")
    (tmp_path / "imagenet" / "train" / ".cache").mkdir()
    (tmp_path / "imagenet" / "train" / "list.jpg").write_text("no class")
    opened = open_folders(tmp_path, size=SIZE)
    assert len(opened.train) == 12
    assert opened.names == ("ant", "bee", "cat")


@pytest.mark.parametrize("suffix", ["bmp", "webp", "tif", "TIFF", "jpeg"])
def test_images_of_the_usual_formats_are_read(root, tmp_path, suffix):
    shutil.copytree(root, tmp_path / "copy")
    place = next((tmp_path / "copy/train").iterdir())
    before = len(open_folders(tmp_path / "copy", name="imagenet", size=16).train)
    Image.new("RGB", (30, 20), (255, 0, 0)).save(place / f"more.{suffix}")
    assert len(open_folders(tmp_path / "copy", name="imagenet", size=16).train) == before + 1


def test_images_in_folders_below_a_class_belong_to_it(root, tmp_path):
    shutil.copytree(root, tmp_path / "imagenet")
    bee = tmp_path / "imagenet" / "train" / "bee"
    (bee / "images").mkdir()
    (bee / "bee_0.jpg").rename(bee / "images" / "bee_0.jpg")
    train = open_folders(tmp_path, size=SIZE).train
    labels = next(train.load(shares(range(12)), seed=0))[1]
    assert labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4


@pytest.mark.parametrize("name", ["imagenet", "ImageNet", "ilsvrc2012", "ILSVRC2012"])
def test_the_root_is_found_itself_or_under_its_usual_names(root, tmp_path, name):
    place = shutil.copytree(root, tmp_path / name)
    assert find_folders(place) == place
    assert find_folders(tmp_path) == place


def test_a_missing_set_says_where_it_was_looked_for_and_how_to_get_it(tmp_path):
    (tmp_path / "train").mkdir()  # without classes it is not one
    with pytest.raises(FileNotFoundError) as caught:
        open_folders(tmp_path)
    for part in (str(tmp_path), "train/CLASS/*.JPEG", "val/CLASS/*.JPEG", "ImageFolder", "https://image-net.org"):
        assert part in str(caught.value)


def test_the_two_parts_must_have_the_same_classes(root, tmp_path):
    shutil.copytree(root, tmp_path / "imagenet")
    shutil.rmtree(tmp_path / "imagenet" / "val" / "bee")
    with pytest.raises(ValueError, match="same class folders; only one of them has bee"):
        open_folders(tmp_path)


def test_a_class_without_images_is_named(root, tmp_path):
    shutil.copytree(root, tmp_path / "imagenet")
    for part in ("train", "val"):
        (tmp_path / "imagenet" / part / "dog").mkdir()
    with pytest.raises(ValueError, match="train/dog holds no image"):
        open_folders(tmp_path)


@pytest.mark.parametrize("bad", [{"size": 0}, {"workers": -1}])
def test_sizes_and_workers_must_make_sense(root, bad):
    with pytest.raises(ValueError, match=r"size must be positive|workers must not be negative"):
        open_folders(root, **bad)


def test_folders_without_torchvision_say_what_to_do(root, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.setitem(sys.modules, "torchvision.transforms", None)
    monkeypatch.setitem(sys.modules, "torchvision.transforms.v2", None)
    with pytest.raises(ImportError, match="pip install torchvision"):
        open_folders(root)


@pytest.mark.parametrize("height, width", [(50, 70), (400, 300), (30, 200), (200, 20), (1, 1), (1, 50)])
def test_a_box_lies_within_the_image(height, width):
    for draws in [*uniform_draws(200), [0.0] * 40, [1 - 2**-24] * 40]:
        top, left, h, w = crop_box(draws, height=height, width=width)
        assert 0 <= top <= top + h <= height
        assert 0 <= left <= left + w <= width
        assert h > 0
        assert w > 0


def test_boxes_are_distributed_as_those_of_torchvision():
    from torchvision.transforms import RandomResizedCrop

    height, width, count = 90, 120, 4000
    image, usual = torch.zeros(3, height, width, dtype=torch.uint8), RandomResizedCrop(SIZE)
    theirs = np.array([usual.get_params(image, list(usual.scale), list(usual.ratio)) for _ in range(count)])
    ours = np.array([crop_box(draws, height=height, width=width) for draws in uniform_draws(count)])
    # Kolmogorov's distance of two samples of 4,000: above 0.046 once in 3,000
    features = lambda box: (*box.T, box[:, 2] * box[:, 3], box[:, 3] / box[:, 2])  # noqa: E731
    for one, other in zip(features(ours), features(theirs), strict=True):
        values = np.union1d(one, other)
        distance = [np.searchsorted(np.sort(x), values, side="right") / count for x in (one, other)]
        assert np.abs(distance[0] - distance[1]).max() < 0.046


@pytest.mark.parametrize(
    "height, width, box",
    [(10, 1000, Box(0, 493, 10, 13)), (1000, 12, Box(492, 0, 16, 12)), (3, 4, Box(0, 0, 3, 4))],
)
def test_where_no_box_fits_it_is_the_largest_central_one(height, width, box):
    # Nearly 1 throughout asks for the whole area at a ratio of 4/3, which fits in none but the last.
    assert crop_box([1 - 2**-24] * 40, height=height, width=width) == box


def test_images_are_standardized_by_imagenets_figures(root, monkeypatch):
    opened = open_folders(root, size=SIZE)
    monkeypatch.setattr("micronorm.data.folders.IMAGENET", BYTES)
    raw = open_folders(root, size=SIZE)
    mean, std = (torch.tensor(column).reshape(3, 1, 1) for column in IMAGENET)
    assert torch.allclose(images_of(opened.test, [0]), (images_of(raw.test, [0]) - mean) / std)
