"""Max-pooling beside converted norms: by the kernels where they can, as the layer says wherever it says more."""

import copy

import pytest
import torch
from torch import nn

import micronorm as mn
from micronorm.convert import fusion
from micronorm.nn.pool import max_pool
from tests.convert.fused import assert_same_bits, unfused


class Stem(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.pool = nn.MaxPool2d(3, 2, 1)

    def forward(self, x):
        return self.pool(self.norm(self.conv(x)).relu())


@pytest.fixture
def by_kernel(monkeypatch):
    """Conversions meanwhile take the kernels on a CPU too."""

    def pool(layer, x):
        return max_pool(layer, x, backend="triton")

    monkeypatch.setattr(fusion, "max_pool", pool)


def test_a_stem_computes_the_same_bits():
    assert_same_bits(mn.convert(Stem()), torch.randn(2, 3, 9, 9))


def test_the_layer_is_handed_to_the_kernels(by_kernel):
    model = mn.convert(Stem())
    x = torch.randn(1, 3, 7, 7)
    y = model(x)
    assert type(y.grad_fn).__name__ == "_MaxPoolBackward"
    plain = unfused(model)
    assert torch.equal(y, plain(x))
    for found, expected in zip(*(torch.autograd.grad(m(x).sum(), m.conv.weight) for m in (model, plain)), strict=True):
        torch.testing.assert_close(found, expected)


def test_a_plan_counts_them():
    plan = mn.plan(Stem())
    assert plan.totals["max-pooling layers by kernel on a GPU"] == 1
    assert "1 max-pooling layers by kernel on a GPU" in plan.summary()
    dilated = Stem()
    dilated.pool = nn.MaxPool2d(3, 2, 1, dilation=2)
    plans = [
        mn.plan(Stem(), fuse=False),
        mn.plan(Stem(), filter=lambda module, name: name != "pool"),
        mn.plan(dilated),  # for which there is no kernel
    ]
    for plan in plans:
        assert plan.totals["max-pooling layers by kernel on a GPU"] == 0
        assert "pooling" not in plan.summary()


def test_a_change_after_conversion_is_obeyed(by_kernel):
    model, x = mn.convert(Stem()), torch.randn(1, 3, 9, 9)
    seen = []
    model.pool.register_forward_hook(lambda *args: seen.append(1))
    model(x)
    assert seen == [1]
    for layer in (nn.MaxPool2d(2), nn.AvgPool2d(2), nn.Identity()):
        changed = copy.deepcopy(model)
        changed.pool = layer
        assert torch.equal(changed(x), unfused(changed)(x))


def test_a_row_of_layers_is_rewritten_too(by_kernel):
    model = mn.convert(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)))
    assert type(model(torch.randn(1, 3, 6, 6)).grad_fn).__name__ == "_MaxPoolBackward"
