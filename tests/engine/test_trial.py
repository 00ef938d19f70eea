"""Before its first step a run says where its loss is not a sum."""

import pytest
import torch
from torch import nn

import micronorm as mn
from micronorm.engine.loop import train
from micronorm.engine.settings import Execution
from tests.engine.tasks import Dropping, Sum, Toy, settings
from tests.networks import SmallResNet

CPU = torch.device("cpu")


class Mean(Toy):
    def loss(self, model, batch):
        loss = super().loss(model, batch)
        return Sum(loss.sum / loss.count, loss.count, loss.counts)


class Messages:
    def __init__(self):
        self.heard = []

    def on_message(self, text):
        self.heard.append(text)

    def __getattr__(self, name):
        return lambda *args: None


def heard(model, task, **changes):
    messages = Messages()
    outcome = train(model, task, settings(epochs=1, **changes), Execution(device=CPU), listener=messages)
    return messages.heard, outcome.digest


def test_a_loss_that_is_a_mean_is_told():
    (message,), _ = heard(SmallResNet(), Mean())
    assert "depends on the micro-batch" in message
    assert "not a mean" in message


def test_statistics_over_a_batch_that_the_settings_do_not_know_of_are_told():
    (message,), _ = heard(SmallResNet(mn.BN()), Toy())
    assert "mn.check_cuts" in message


@pytest.mark.parametrize(
    "norm", [mn.GN(groups=4), mn.BCN(groups=4), mn.BCN(groups=4, statistics="sequential")], ids=repr
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_sum_over_samples_is_not_accused(norm, dtype):
    assert heard(SmallResNet(norm, mn.WS()), Toy(), dtype=dtype)[0] == []


def test_a_batch_norm_whose_samples_stay_together_is_not_accused():
    assert heard(SmallResNet(mn.BN()), Toy(), unit=16, largest=16)[0] == []


@pytest.mark.parametrize("make", [Dropping, lambda: SmallResNet(mn.BN()), SmallResNet], ids=["dropout", "BN", "BCN"])
def test_the_look_leaves_no_trace(make, monkeypatch):
    torch.manual_seed(0)
    model: nn.Module = make()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    _, looked = heard(model, Toy())
    torch.manual_seed(0)
    other: nn.Module = make()
    other.load_state_dict(state)
    monkeypatch.setattr("micronorm.engine.loop.check_loss_is_a_sum", lambda step, inputs: None)
    assert heard(other, Toy())[1] == looked
