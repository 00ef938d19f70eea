"""Which activation a tensor meets first, by whichever way it is called."""

import gc
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from micronorm.diagnostics.activations import ActivationTracker

ONES = torch.ones(3, 4)


def meets(function: Callable[[Tensor], Tensor]) -> tuple[list[tuple[str, bool, list[int]]], list[int]]:
    """What was reported of a 3×4 tensor, and the positives of what the function made of it."""
    seen = []
    with torch.no_grad(), ActivationTracker() as tracker:
        y = torch.randn(3, 4)
        tracker.track(y, 1, lambda kind, added, counts: seen.append((kind, added, counts.tolist())))
        result = function(y)
    return seen, (result > 0).reshape(3, 4).sum(0).tolist()


@pytest.mark.parametrize(
    "function, kind, added",
    [
        (F.relu, "relu", False),
        (torch.relu, "relu", False),
        (nn.ReLU(inplace=True), "relu", False),
        (lambda y: y.clamp(min=0), "relu", False),
        (lambda y: y.clamp_min(0), "relu", False),
        (F.relu6, "relu6", False),
        (nn.ReLU6(inplace=True), "relu6", False),
        (F.silu, "silu", False),
        (F.gelu, "gelu", False),
        (F.leaky_relu, "leaky_relu", False),
        (nn.PReLU(), "prelu", False),
        (F.hardswish, "hardswish", False),
        (lambda y: F.relu(y + ONES), "relu", True),
        (lambda y: F.relu(ONES + y), "relu", True),
        (lambda y: F.relu(y.add_(ONES)), "relu", True),
        (lambda y: F.relu(ONES.clone().add_(y)), "relu", True),
        (lambda y: F.relu(ONES + nn.Identity()(F.dropout(y, training=False))), "relu", True),
    ],
)
def test_an_activation_is_seen(function, kind, added):
    seen, positive = meets(function)
    assert seen == [(kind, added, positive)]


@pytest.mark.parametrize(
    "function",
    [
        lambda y: F.relu(2 * y),
        lambda y: F.relu(y.T.contiguous()),
        lambda y: F.relu(y + ONES[None].expand(1, 3, 4)).squeeze(0),
        lambda y: y.clamp(min=-1),
        lambda y: F.hardtanh(y),
        lambda y: F.linear(y, torch.eye(4)),
    ],
    ids=["product", "transposed", "broadcast", "another bound", "hardtanh", "linear"],
)
def test_what_is_not_the_tensor_s_activation_is_not_taken_for_it(function):
    assert meets(function)[0] == []


def test_only_the_first_activation_counts():
    seen, _ = meets(lambda y: F.silu(y) + F.relu(y))
    assert [kind for kind, *_ in seen] == ["silu"]


def test_both_summands_are_told_of_the_activation_after_their_sum():
    seen = []
    with torch.no_grad(), ActivationTracker() as tracker:
        a, b = torch.randn(2, 3), torch.randn(2, 3)
        for name, tensor in (("a", a), ("b", b)):
            tracker.track(tensor, 1, lambda kind, added, _, name=name: seen.append((name, kind, added)))
        F.relu(a + b)
    assert seen == [("a", "relu", True), ("b", "relu", True)]


def test_nothing_is_seen_while_it_is_paused_and_no_tensor_is_kept():
    seen = []
    with torch.no_grad(), ActivationTracker() as tracker:
        y = torch.randn(2, 3)
        tracker.track(y, 1, lambda *what: seen.append(what))
        with tracker.paused():
            F.relu(y)
        del y
        gc.collect()
        assert not tracker._known
    assert seen == []
