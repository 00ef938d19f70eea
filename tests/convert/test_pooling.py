"""Max-pooling layers of a model: by the kernels where they can, by torch everywhere else."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import micronorm as mn
from micronorm.convert import known_blocks, pool_by_kernel
from micronorm.convert.surgery import restore_forwards
from tests.convert.fused import unfused
from tests.devices import KERNEL_DEVICES, require_kernels

TOTAL = "max-pooling layers by kernel on a GPU"


def stem(pool: nn.Module | None = None) -> Any:
    return nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), pool or nn.MaxPool2d(3, 2, 1))


@pytest.fixture(params=KERNEL_DEVICES)
def device(request):
    return require_kernels(request.param)


@pytest.fixture
def launches(monkeypatch):
    """How often the kernels were called; on a CPU too, where Triton's interpreter runs them."""
    calls = []

    def counted(x, window):
        calls.append(window)
        return kernel(x, window)

    kernel = known_blocks.max_pool2d
    monkeypatch.setattr(known_blocks, "max_pool2d", counted)
    monkeypatch.setattr(known_blocks, "resolve_backend", lambda backend, x: "triton")
    return calls


def test_a_converted_model_pools_by_the_kernels_and_computes_the_same(launches):
    model = mn.convert(stem())
    plain, x = unfused(model), torch.randn(1, 3, 7, 7)
    y = model(x)
    assert len(launches) == 1
    assert torch.equal(y, plain(x))
    grads = [torch.autograd.grad(m(x).sum(), m[0].weight)[0] for m in (model, plain)]
    torch.testing.assert_close(*grads)


def test_a_plan_counts_the_layers():
    plan = mn.plan(stem())
    assert plan.totals[TOTAL] == 1
    assert f"1 {TOTAL}" in plan.summary()
    others = [
        mn.plan(stem(), fuse=False),
        mn.plan(stem(), filter=lambda module, name: name != "3"),
        mn.plan(stem(nn.MaxPool2d(3, 2, 1, dilation=2))),
    ]
    for plan in others:
        assert plan.totals[TOTAL] == 0
        assert "pooling" not in plan.summary()


def test_a_network_that_is_not_converted_can_pool_by_the_kernels_too(launches):
    model = stem()
    assert pool_by_kernel(model) == 1
    model(torch.randn(1, 3, 7, 7))
    assert len(launches) == 1
    assert restore_forwards(model) == 1
    model(torch.randn(1, 3, 7, 7))
    assert len(launches) == 1


def test_hooks_and_changes_are_obeyed(launches):
    model, x = mn.convert(stem()), torch.randn(1, 3, 9, 9)
    seen = []
    model[3].register_forward_hook(lambda *args: seen.append(1))
    model(x)
    assert seen == [1]
    model[3].kernel_size, model[3].return_indices = 2, True
    assert len(model(x)) == 2
    assert len(launches) == 1


@pytest.mark.parametrize(
    "layer",
    [
        nn.MaxPool2d(3, 2, 1),
        nn.MaxPool2d(2),
        nn.MaxPool2d((3, 2), stride=(2, 1), padding=(1, 0), ceil_mode=True),
        nn.MaxPool2d((2,), stride=[], padding=(1,)),  # type: ignore[arg-type]
    ],
    ids=str,
)
def test_a_supported_layer_gives_the_bits_of_torch(device, launches, layer):
    x = torch.randn(2, 2, 5, 6, device=device)
    expected = layer(x)
    assert pool_by_kernel(layer) == 1
    assert torch.equal(layer(x), expected)
    assert len(launches) == 1


class Loud(nn.MaxPool2d):
    def forward(self, input: torch.Tensor) -> Any:
        return 2 * super().forward(input)


OTHERS = {
    "a subclass": Loud(2),
    "dilation": nn.MaxPool2d(2, dilation=2),
    "indices": nn.MaxPool2d(2, return_indices=True),
    "windows that would take long to compile": nn.MaxPool2d(8, padding=4),
    "windows far apart": nn.MaxPool2d(2, stride=8),
    "sizes that are not integers": nn.MaxPool2d(np.int64(2)),  # type: ignore[arg-type]
    "another kind": nn.AvgPool2d(2),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_layers_stay(name):
    assert pool_by_kernel(OTHERS[name]) == 0
    assert "forward" not in vars(OTHERS[name])


def test_other_inputs_go_to_torch(launches, monkeypatch):
    layer, plain = nn.MaxPool2d(2), nn.MaxPool2d(2)
    pool_by_kernel(layer)
    for x in (torch.randn(4, 9, 10), torch.randn(0, 4, 9, 10), torch.arange(32).view(1, 2, 4, 4)):
        assert torch.equal(layer(x), plain(x))
    monkeypatch.setattr(torch.jit, "is_tracing", lambda: True)
    layer(torch.randn(1, 2, 4, 4))
    assert not launches


def test_errors_are_torchs(launches):
    for layer in (nn.MaxPool2d(3, padding=2), nn.MaxPool2d(20, 1)):
        pool_by_kernel(layer)
        with pytest.raises(RuntimeError, match=r"pad|too small"):
            layer(torch.randn(1, 2, 9, 10))


def test_on_a_cpu_and_under_transforms_it_is_torchs():
    layer, plain, x = nn.MaxPool2d(2), nn.MaxPool2d(2), torch.randn(3, 1, 2, 6, 6)
    pool_by_kernel(layer)
    assert torch.equal(layer(x[0]), plain(x[0]))
    assert torch.equal(torch.func.vmap(layer)(x), torch.stack([plain(t) for t in x]))
