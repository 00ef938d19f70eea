"""Which max-pooling layers the kernels compute, and that the others are called."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from micronorm.nn import pool as pooling
from micronorm.nn.pool import max_pool
from tests.devices import KERNEL_DEVICES, require_kernels


@pytest.fixture(params=KERNEL_DEVICES)
def device(request):
    return require_kernels(request.param)


@pytest.fixture
def launched(monkeypatch):
    """How often the kernels were asked."""
    calls = []

    def counted(x, window):
        calls.append(window)
        return kernel(x, window)

    kernel = pooling.max_pool2d
    monkeypatch.setattr(pooling, "max_pool2d", counted)
    return calls


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
def test_a_plain_layer_is_computed_by_the_kernels(device, launched, layer):
    x = torch.randn(2, 2, 5, 6, device=device)
    assert torch.equal(max_pool(layer, x, backend="triton"), layer(x))
    assert len(launched) == 1


class Loud(nn.MaxPool2d):
    def forward(self, input: torch.Tensor) -> Any:
        return 2 * super().forward(input)


def hooked():
    layer = nn.MaxPool2d(2)
    layer.register_forward_hook(lambda module, args, output: output + 1)
    return layer


OTHERS = {
    "a subclass": Loud(2),
    "hooks": hooked(),
    "dilation": nn.MaxPool2d(2, dilation=2),
    "windows that would take long to compile": nn.MaxPool2d(8, padding=4),
    "windows far apart": nn.MaxPool2d(2, stride=8),
    "numbers of another kind": nn.MaxPool2d(np.int64(2)),  # type: ignore[arg-type]
    "another kind": nn.AvgPool2d(2),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_layers_are_called(device, launched, name):
    x = torch.randn(2, 2, 5, 6, device=device)
    assert torch.equal(max_pool(OTHERS[name], x, backend="triton"), OTHERS[name](x))
    assert not launched


def test_other_inputs_go_to_torch(device, launched):
    layer = nn.MaxPool2d(2)
    for x in (torch.randn(4, 9, 10, device=device), torch.randn(0, 4, 9, 10, device=device)):
        assert torch.equal(max_pool(layer, x, backend="triton"), layer(x))
    y, places = max_pool(nn.MaxPool2d(2, return_indices=True), torch.randn(1, 2, 4, 4, device=device), backend="triton")
    assert y.shape == places.shape
    assert not launched


@pytest.mark.parametrize("layer", [nn.MaxPool2d(3, padding=2), nn.MaxPool2d(20)], ids=["padding", "size"])
def test_errors_are_torchs(device, layer):
    with pytest.raises(RuntimeError, match=r"pad|too small"):
        max_pool(layer, torch.randn(1, 2, 9, 10, device=device), backend="triton")


def test_integers_and_tracers_go_to_torch(launched, monkeypatch):
    layer, whole = nn.MaxPool2d(2), torch.arange(32).view(1, 2, 4, 4)
    assert torch.equal(max_pool(layer, whole, backend="triton"), layer(whole))
    x = torch.randn(1, 2, 4, 4)
    monkeypatch.setattr(torch.jit, "is_tracing", lambda: True)
    assert torch.equal(max_pool(layer, x, backend="triton"), layer(x))
    assert not launched


def test_on_a_cpu_it_is_torchs(launched):
    x = torch.randn(1, 2, 6, 6)
    assert torch.equal(max_pool(nn.MaxPool2d(2), x), nn.MaxPool2d(2)(x))
    assert not launched


def test_under_transforms_it_is_torchs(device, launched):
    layer, x = nn.MaxPool2d(2), torch.randn(3, 1, 2, 6, 6, device=device)
    assert torch.equal(torch.func.vmap(lambda t: max_pool(layer, t))(x), torch.stack([layer(t) for t in x]))
    assert not launched
