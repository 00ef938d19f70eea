"""What a task gives is refused where a sample would be lost or a sum misread, with the value and the way out."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from micronorm.engine.loop import train
from micronorm.engine.optimization import SGD, Constant
from micronorm.engine.settings import Execution, Settings
from tests.engine.tasks import CPU, Images, Toy, settings
from tests.networks import SmallResNet

HERE = Execution(device=CPU, steps=1)


def refused(task, kind, message, execution=HERE, model=None):
    with pytest.raises(kind, match=message):
        train(model or SmallResNet(), task, settings(step_batch=8), execution)


class Giving(Toy):
    """The toy task with a loss changed on its way."""

    def __init__(self, change):
        super().__init__(train=16)
        self.change = change

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        return self.change(SimpleNamespace(sum=loss.sum, count=loss.count, counts=dict(loss.counts)))


def with_(**values):
    return lambda loss: SimpleNamespace(**{**vars(loss), **values})


@pytest.mark.parametrize(
    "change, kind, message",
    [
        (lambda loss: loss.sum, TypeError, "an object with `sum`, `count` and `counts`.*got Tensor"),
        (lambda loss: (loss.sum, loss.count), TypeError, "got tuple"),
        (with_(counts=None), TypeError, "counts of type NoneType"),
        (with_(sum=3.0), TypeError, "must be a tensor with a gradient, got float"),
        (lambda loss: with_(sum=loss.sum.expand(8))(loss), ValueError, r'got shape \(8,\); use reduction="sum"'),
        (lambda loss: with_(sum=loss.sum.detach())(loss), ValueError, "has no gradient"),
        (with_(count="8"), TypeError, "the count of a loss must be a number.*got '8'"),
        (with_(count=torch.ones(1)), TypeError, r"the count .*got shape \(1,\)"),
        (with_(count=-1), ValueError, "must be 0 or more, got -1"),
        (with_(counts={"wrong": [1]}), TypeError, r"the wrong of a loss must be a number.*got \[1\]"),
        (with_(counts={"count": torch.tensor(1)}), ValueError, "must not be named count"),
    ],
)
def test_a_loss_that_cannot_be_added_up_is_refused(change, kind, message):
    refused(Giving(change), kind, message)


class Loading(Images):
    """Images whose batches are changed on their way."""

    def __init__(self, change):
        super().__init__(16)
        self.change = change

    def load(self, shares, *, seed):
        for batch in super().load(shares, seed=seed):
            yield from self.change(batch)


@pytest.mark.parametrize(
    "change, kind, message",
    [
        (lambda batch: [(batch[0][:-1], batch[1][:-1])], ValueError, r"the 8 samples .* got \[7, 7\]"),
        (lambda batch: [(batch[0], batch[1].tolist()[:-1])], ValueError, r"the 8 samples .* got \[8, 7\]"),
        (lambda batch: [batch[0]], TypeError, "a batch must be a tuple of tensors or lists.*got Tensor"),
        (lambda batch: [{"images": batch[0]}], TypeError, "got dict"),
        (lambda batch: [], ValueError, "load ended after 0 of 1 steps"),
        (lambda batch: [batch, batch], ValueError, "more batches than shares"),
    ],
)
def test_a_batch_that_is_not_its_share_is_refused(change, kind, message):
    task = Toy()
    task.train = Loading(change)
    refused(task, kind, message)


@pytest.mark.parametrize("score", [1.0, {"loss": torch.ones(())}])
def test_scores_that_cannot_be_merged_are_refused(score):
    task = Toy(train=8)
    task.score = lambda model, batch: score
    refused(task, TypeError, f"a score with merge, .*got {type(score).__name__}")


def test_a_task_that_lacks_a_part_is_refused_by_name():
    task = SimpleNamespace(train=Images(8), test=Images(8), sample="image", loss=None, figures=None, score=None)
    refused(task, TypeError, "lacks evaluation_batch, new_score, examples")


def test_samples_that_cannot_be_asked_for_by_index_are_refused():
    task = Toy()
    task.test = torch.utils.data.TensorDataset(torch.zeros(3))
    refused(task, TypeError, "task.test must have a length and `load.*got TensorDataset")


def test_a_run_without_training_samples_is_refused():
    refused(Toy(train=0), ValueError, "task.train is empty")


def test_a_built_optimizer_and_a_device_by_name_are_refused_with_what_to_write():
    built = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"a spec such as micronorm.engine.SGD\(0.1\), got SGD"):
        Settings(epochs=1, step_batch=1, optimizer=built, schedule=Constant())  # type: ignore[arg-type]
    assert Settings(epochs=1, step_batch=1, optimizer=SGD(0.1), schedule=Constant()).optimizer.lr == 0.1
    with pytest.raises(TypeError, match=r"write torch.device\('cpu'\)"):
        Execution(device="cpu")  # type: ignore[arg-type]


def test_the_run_directory_may_be_a_string(tmp_path):
    train(SmallResNet(), Toy(train=8), settings(step_batch=8), HERE, out=str(tmp_path / "run"))
    assert (tmp_path / "run" / "model.safetensors").exists()
