import base64
import math
import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from micronorm.engine.task import Samples, Task
from micronorm.tasks.classification import DATA_SETS, Classification, open_classification
from tests.data.miniature import write_binary, write_folders, write_python
from tests.tolerances import tolerance


class Given(nn.Module):
    """Returns what it was given, whatever the images."""

    def __init__(self, output):
        super().__init__()
        self.output = output

    def forward(self, images):
        return self.output


class Nothing:
    """Samples that nobody asks for."""

    def __len__(self):
        return 0

    def load(self, shares, *, seed):
        yield from ()


def task(classes: int) -> Classification:
    return Classification(Nothing(), Nothing(), classes=classes)


def batch(labels: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(len(labels), 1), torch.tensor(labels, dtype=torch.int64)


def scores(logits: list[list[float]], labels: list[int]) -> dict[str, float]:
    found = task(len(logits[0])).score(Given(torch.tensor(logits)), batch(labels))
    return {name: value.item() for name, value in found.sums.items()}


def test_the_loss_is_the_summed_cross_entropy():
    logits = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    labels = [3, 0, 1, 1, 2, 0]
    loss = task(4).loss(Given(logits), batch(labels))
    rows = zip(logits.tolist(), labels, strict=True)
    expected = sum(math.log(sum(map(math.exp, row))) - row[label] for row, label in rows)
    assert loss.sum.item() == pytest.approx(expected, rel=1e-12)
    assert loss.count == 6
    loss.sum.backward()
    assert logits.grad.abs().sum() > 0


def test_the_loss_of_parts_adds_up_to_that_of_the_whole():
    logits, labels = torch.randn(10, 7, dtype=torch.float64), torch.randint(7, (10,)).tolist()
    whole = task(7).loss(Given(logits), batch(labels))
    parts = [task(7).loss(Given(logits[cut]), batch(labels[cut])) for cut in (slice(3), slice(3, 10))]
    assert sum(part.sum.item() for part in parts) == pytest.approx(whole.sum.item(), rel=1e-12)
    assert sum(part.count for part in parts) == whole.count == 10
    assert sum(part.counts["wrong"].item() for part in parts) == whole.counts["wrong"].item()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_loss_is_computed_in_float32_at_least(dtype):
    logits, labels = torch.randn(64, 10).to(dtype), torch.randint(10, (64,)).tolist()
    found = [
        task(10).loss(Given(logits), batch(labels)).sum,
        task(10).score(Given(logits), batch(labels)).sums["loss"],
    ]
    exact = F.cross_entropy(logits.double(), torch.tensor(labels), reduction="sum")
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert found[0].dtype == wide
    assert found[1].dtype == torch.float64  # sums are added in float64
    for loss in found:
        assert abs(loss.item() - exact.item()) <= tolerance("output", wide) * exact.item()


def test_answers_are_wrong_by_rank():
    logits, labels = torch.randn(200, 8), torch.randint(8, (200,)).tolist()
    found = scores(logits.tolist(), labels)
    ranks = [sorted(row, reverse=True).index(row[label]) for row, label in zip(logits.tolist(), labels, strict=True)]
    assert found["wrong"] == sum(rank >= 1 for rank in ranks)
    assert found["wrong5"] == sum(rank >= 5 for rank in ranks)
    assert found["count"] == 200
    assert task(8).loss(Given(logits), batch(labels)).counts["wrong"] == found["wrong"]


def test_of_equal_logits_the_first_class_is_the_answer():
    constant = [[0.0] * 6] * 6
    found = scores(constant, [0, 1, 2, 3, 4, 5])
    assert found["wrong"] == 5
    assert found["wrong5"] == 1


@pytest.mark.parametrize("row", [[math.nan] * 6, [math.nan, 9.0, 0.0, 0.0, 0.0, 0.0]])
def test_a_model_that_gives_what_is_not_a_number_is_never_right(row):
    assert scores([row] * 6, [0, 1, 2, 3, 4, 5])["wrong"] == 6


@pytest.mark.parametrize("classes, counted", [(2, False), (5, False), (6, True)])
def test_the_five_best_are_scored_where_there_are_more_classes(classes, counted):
    found = scores([[0.0] * classes], [0])
    assert ("wrong5" in found) is counted
    assert ("top5" in task(classes).figures(found)) is counted


def test_scores_are_tensors_without_axes_that_add_up():
    logits, labels = torch.randn(9, 6), [0, 1, 2, 3, 4, 5, 0, 1, 2]
    cuts = (slice(9), slice(4), slice(4, 4), slice(4, 9))
    whole, *parts = (task(6).score(Given(logits[cut]), batch(labels[cut])).sums for cut in cuts)
    for name, value in whole.items():
        assert value.shape == ()
        assert sum(part[name].item() for part in parts) == pytest.approx(value.item(), rel=1e-6)


def test_figures_are_means_and_errors_in_per_cent():
    sums = {"loss": 6.0, "wrong": 3.0, "wrong5": 1.0, "count": 8.0}
    assert task(10).figures(sums) == {"loss": 0.75, "top1": 37.5, "top5": 12.5}
    del sums["wrong5"]  # as training counts it
    assert task(10).figures(sums) == {"loss": 0.75, "top1": 37.5}


def test_there_are_no_figures_of_nothing():
    with pytest.raises(ValueError, match="0 samples"):
        task(10).figures({"loss": 0.0, "wrong": 0.0, "count": 0})


@pytest.mark.parametrize("output", [(torch.zeros(2, 4),), {"out": torch.zeros(2, 4)}])
@pytest.mark.parametrize("method", ["loss", "score"])
def test_a_model_that_gives_no_tensor_is_refused(output, method):
    with pytest.raises(TypeError, match=f"gives a {type(output).__name__}.*N×4 logits.*wrap it"):
        getattr(task(4), method)(Given(output), batch([0, 1]))


@pytest.mark.parametrize("shape", [(2, 5), (2,), (2, 4, 1), (3, 4)])
def test_a_model_with_another_number_of_logits_is_refused(shape):
    with pytest.raises(ValueError, match="2 images of 4 classes; build it with 4 outputs"):
        task(4).loss(Given(torch.zeros(shape)), batch([0, 1]))


def test_a_task_of_one_class_is_refused():
    with pytest.raises(ValueError, match="at least 2 classes, got 1"):
        task(1)


def opened(name, folder, **options) -> Task:  # the annotation is the test: pyright holds the task to the protocol
    if name == "digits":
        return open_classification(name, **options)
    if name in ("imagenet", "tiny_imagenet20", "image_folders"):
        return open_classification(name, write_folders(folder), size=32, **options)
    write_binary(folder, int(name.removeprefix("cifar")))
    return open_classification(name, folder, verify=False, **options)


@pytest.mark.parametrize("name", DATA_SETS)
def test_every_set_known_by_name_opens_and_scores(tmp_path, name):
    classes = {"cifar100": 100, "imagenet": 3, "tiny_imagenet20": 3, "image_folders": 3}.get(name, 10)
    problem = opened(name, tmp_path)
    samples: Samples = problem.train
    images, labels = next(iter(samples.load([(0, torch.tensor([2, 0]))], seed=0)))
    side = {"digits": 8}.get(name, 32)
    assert images.shape == (2, 1 if name == "digits" else 3, side, side)
    model = nn.Sequential(nn.Flatten(), nn.Linear(images[0].numel(), classes))
    loss = problem.loss(model, (images, labels))
    assert loss.count == 2
    assert loss.sum.isfinite()
    tested = next(iter(problem.test.load([(0, torch.arange(2))], seed=0)))
    assert problem.score(model, tested).sums["count"] == 2


def test_a_folder_in_the_working_directory_is_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_binary(tmp_path / "data", 10)
    assert len(open_classification("cifar10", verify=False).test) == 3


def test_a_set_that_is_missing_from_every_place_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("cifar10", "imagenet"):
        with pytest.raises(FileNotFoundError, match=f"{tmp_path / 'data'} and {tmp_path / 'home' / 'data'}"):
            open_classification(name)


def test_a_download_goes_into_the_first_place_looked_at(tmp_path, monkeypatch):
    import torchvision.datasets.cifar

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    fetch = lambda url, root, **rest: write_python(tmp_path / root, 100)  # noqa: E731
    monkeypatch.setattr(torchvision.datasets.cifar, "download_and_extract_archive", fetch)
    monkeypatch.setattr(torchvision.datasets.cifar, "check_integrity", lambda path, md5: os.path.isfile(path))
    assert len(open_classification("cifar100", download=True, verify=False).train) == 3
    assert (tmp_path / "data" / "cifar-100-python" / "train").exists()


@pytest.mark.gpu
def test_batches_appear_on_the_device(tmp_path):
    for name in ("digits", "cifar10", "cifar100"):  # the images of files stay on the CPU
        problem = opened(name, tmp_path / name, device="cuda")
        images, labels = next(iter(problem.train.load([(0, torch.arange(2))], seed=0)))
        assert images.is_cuda
        assert labels.is_cuda


def test_examples_are_taken_evenly_say_what_the_model_says_and_leave_it_as_it_was():
    of_digits = open_classification("digits")
    model = nn.Sequential(nn.Dropout(0.5), nn.Flatten(), nn.Linear(64, 10)).train()
    found = of_digits.examples(model, count=5)
    assert model.training
    batches = list(of_digits.test.load([(0, torch.tensor([0, 125, 250, 374, 499]))], seed=0))
    images, labels = batches[0]
    with torch.no_grad():
        probability, said = model.eval()(images).softmax(1).max(1)
    assert [sample["label"] for sample in found] == [str(label) for label in labels.tolist()]
    assert [sample["prediction"] for sample in found] == [str(label) for label in said.tolist()]
    assert [sample["probability"] for sample in found] == pytest.approx(probability.tolist(), rel=1e-5)
    for sample, image in zip(found, images, strict=True):
        pixels = torch.tensor(list(base64.b64decode(sample["pixels"]))).reshape(8, 8)
        expected = (image[0] - image.min()) / (image.max() - image.min()) * 255
        assert (pixels - expected).abs().max() <= 0.5


def test_large_examples_are_shrunk_and_a_flat_or_broken_one_is_black():
    class Large:
        def __len__(self):
            return 3

        def load(self, shares, *, seed):
            for k, _ in enumerate(shares):
                images = torch.rand(1, 3, 100, 130) if k == 0 else torch.full((1, 3, 4, 4), (0.0, math.nan)[k - 1])
                yield images, torch.tensor([1])

    model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2))
    large, flat, broken = Classification(Nothing(), Large(), classes=2).examples(model)
    assert (large["height"], large["width"], large["channels"]) == (34, 44, 3)
    assert base64.b64decode(flat["pixels"]) == base64.b64decode(broken["pixels"]) == bytes(48)
