"""`check_start`: a loss that jumps in the first steps is found, and the model is not changed."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import micronorm as mn
from micronorm.check import check_start
from tests.networks import SmallResNet, assert_same_state, samples


def loss(model: nn.Module, part: tuple) -> tuple[Tensor, int]:
    images, labels = part
    return F.cross_entropy(model(images), labels, reduction="sum"), len(labels)


@pytest.mark.parametrize("spec", [mn.BCN(groups=4), mn.BCN(groups=4, statistics="sequential"), mn.GN(groups=4)])
def test_a_learning_rate_at_which_the_loss_jumps_is_named_with_the_way_out(spec):
    torch.manual_seed(0)
    model = SmallResNet(spec, mn.WS())
    before = copy.deepcopy(model.state_dict())
    batch = samples(torch.float32)
    assert check_start(model, batch, loss, lr=0.01) is None
    warning = check_start(model, batch, loss, lr=5.0)
    assert warning is not None
    assert warning.startswith("at lr 5 the loss rose from")
    assert "zero_init_residual=True" in warning
    assert_same_state(model.state_dict(), before, tol=0)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_loss_that_is_no_longer_finite_is_a_jump():
    def exploding(model: Any, part: tuple) -> Tensor:
        return model(part[0]).pow(6).sum()

    warning = check_start(nn.Linear(4, 4), (torch.randn(8, 4),), exploding, lr=100.0)
    assert warning is not None
    assert "to nan" in warning or "to inf" in warning


@pytest.mark.parametrize("lr", [0, -1, float("nan"), True, "0.1"])
def test_a_learning_rate_must_be_a_positive_number(lr):
    with pytest.raises(ValueError, match="lr must be a number above 0"):
        check_start(nn.Linear(4, 4), (torch.randn(8, 4),), loss, lr=lr)
