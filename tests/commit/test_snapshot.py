"""A restored model equals the saved one, bit for bit."""

import random

import numpy
import pytest
import torch
from torch import nn

import micronorm as mn
from micronorm.commit.snapshot import Snapshot, preserved
from tests.diagnostics.trained import images, network


def everything(model):
    """Return copies of everything that a measurement could change."""
    windows = [m._window for m in model.modules() if isinstance(m, mn.nn.BatchChannelNorm)]
    return {
        **{name: t.detach().clone() for name, t in (*model.named_parameters(), *model.named_buffers())},
        **{f"window {i} {key}": getattr(w, key).clone() for i, w in enumerate(windows) for key in ("sums", "lost")},
        **{f"forwards {i}": torch.tensor([w.forwards, len(w.scanned)]) for i, w in enumerate(windows)},
        "torch": torch.get_rng_state(),
        "numpy": torch.from_numpy(numpy.random.get_state()[1].astype("int64")),
        "python": torch.tensor(random.getstate()[1]),
    }


def assert_untouched(before, after):
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


def disturb(model):
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p))
    model(images()[0][:4] + 1)
    numpy.random.rand()
    random.random()


@pytest.mark.parametrize("statistics", ["step", "batch", "sequential"])
def test_parameters_buffers_windows_and_random_states_are_put_back(statistics):
    model = network(mn.WS())
    model.norm2 = mn.nn.BatchChannelNorm(6, 2, statistics=statistics, rate=0.1).double()
    model(images()[0][:4])  # a window with something in it
    before = everything(model)
    snapshot = Snapshot(model, parameters=True)
    for _ in range(2):
        disturb(model)
        changed = everything(model)
        assert not torch.equal(changed["norm3.running_mean"], before["norm3.running_mean"])
        assert not torch.equal(changed["forwards 0"], before["forwards 0"])
        snapshot.restore()
        assert_untouched(before, everything(model))


def test_an_error_in_the_block_puts_the_model_back_too():
    model = network()
    before = everything(model)

    def measure():
        with preserved(model):
            disturb(model)
            raise KeyError("from the user's loss")

    with pytest.raises(KeyError, match="from the user's loss"):
        measure()
    assert_untouched(before, everything(model))


class Counting(nn.Module):
    """Puts another tensor in its buffer's place, and makes one at its first forward."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count = self.count + 1
        self.register_buffer("seen", x.detach())
        return x


def test_a_buffer_that_a_forward_replaces_or_makes_is_put_back():
    model = Counting()
    count = model.count
    with preserved(model):
        model(torch.ones(2))
        assert model.count == 1
    assert model.count is count
    assert list(model._buffers) == ["count"]
