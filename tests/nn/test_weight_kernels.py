"""Standardized layers by the kernel: forwards, autocast, and one launch for a whole model."""

import copy

import pytest
import torch
from torch import nn

import micronorm as mn
from micronorm.nn.per_step.shared_weights import SharedWeights
from micronorm.ops.weight import launch
from tests.devices import KERNEL_DEVICES, require_kernels
from tests.nn.per_step.test_shared_weights import assert_shared_is_the_same, gradients
from tests.tolerances import assert_close_to_max, tolerance


@pytest.fixture(params=KERNEL_DEVICES)
def device(request):
    return require_kernels(request.param)


@pytest.fixture
def launches(monkeypatch):
    """How many weights each launch took, forward and backward."""
    taken = []

    def counted(name, real):
        return lambda weights, *args, **kwargs: taken.append((name, len(weights))) or real(weights, *args, **kwargs)

    for name in ("forward", "backward"):
        monkeypatch.setattr(launch, name, counted(name, getattr(launch, name)))
    return taken


def by_kernel(model, device, dtype=torch.float32):
    for module in model.modules():
        if type(module).__name__.startswith("WS"):
            module.backend = "triton"
    return model.to(device, dtype)


def network(device, dtype=torch.float32):
    """Layers of one launch and of another, and some that no launch takes."""
    absorbed = mn.nn.WSConv2d(4, 4, 3)
    absorbed.absorb()
    model = nn.Sequential(
        mn.nn.WSConv2d(3, 6, 3),
        nn.Tanh(),
        mn.nn.WSConv2d(6, 4, 3, groups=2),
        nn.Tanh(),
        absorbed,
        mn.CWN()(nn.Conv2d(4, 4, 1)),
        mn.nn.WSConv2d(4, 4, 1, scale=False),
        nn.Tanh(),
        nn.Flatten(),
        mn.nn.WSLinear(16, 5),
    )
    return by_kernel(model, device, dtype)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_a_model_by_the_kernel_is_the_model_by_the_reference(device, memory_format):
    model = network(device, torch.float64).to(memory_format=memory_format)
    twin = copy.deepcopy(model)
    for module in twin.modules():
        if hasattr(module, "backend"):
            module.backend = "reference"
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64, device=device)
    ys = [net(x) for net in (model, twin)]
    for y in ys:
        y.square().sum().backward()
    assert_close_to_max(ys[0], ys[1], tol=1e-12)
    for actual, expected in zip(model.parameters(), twin.parameters(), strict=True):
        assert_close_to_max(actual.grad, expected.grad, tol=1e-12)
        if actual.ndim == 4:  # whose axes of one element may have any stride
            formats = (torch.contiguous_format, torch.channels_last)
            assert [actual.grad.is_contiguous(memory_format=f) for f in formats] == [
                actual.is_contiguous(memory_format=f) for f in formats
            ]


def test_autocast_gets_its_dtype_from_the_kernel_and_the_weight_its_own_gradient(device):
    conv = by_kernel(mn.nn.WSConv2d(3, 4, 3), device)
    x = torch.randn(1, 3, 8, 8, device=device)
    with torch.autocast(device, torch.bfloat16):
        used = conv.weight_in_use()
        y = conv(x)
        assert conv.effective_weight().dtype == torch.float32
    assert used.dtype == y.dtype == torch.bfloat16
    assert conv.weight_in_use().dtype == torch.float32
    y.float().sum().backward()
    assert conv.weight.grad.dtype == torch.float32
    wide = conv.effective_weight().detach()
    assert_close_to_max(used, wide, tol=tolerance("output", torch.bfloat16))
    if device == "cuda":  # the interpreter cuts bfloat16 off instead of rounding it
        assert torch.equal(used, wide.bfloat16())


def test_compiled_layers_take_the_kernel_without_a_break(device):
    conv = by_kernel(mn.nn.WSConv2d(3, 4, 3), device)
    twin = copy.deepcopy(conv)
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    x = torch.randn(1, 3, 8, 8, device=device)
    for layer in (conv, compiled):
        with torch.autocast(device, torch.bfloat16):
            layer(x).float().square().sum().backward()
    assert_close_to_max(twin.weight.grad, conv.weight.grad, tol=tolerance("gradient", torch.float32))


def test_a_backend_shows_in_the_repr_and_folding_does_without_it(device):
    model = nn.Sequential(mn.nn.WSConv2d(3, 4, 3), mn.nn.BatchChannelNorm(4, 2))
    model = by_kernel(model, device, torch.float64).eval()
    assert 'backend="triton"' in repr(model)
    folded = mn.fold(model)
    assert not hasattr(folded[0], "backend")
    x = torch.randn(1, 3, 8, 8, device=device).double()
    assert_close_to_max(folded(x), model(x), tol=tolerance("folded", torch.float64))


# --- shared weights --------------------------------------------------------------------------------------------------


def test_a_whole_model_is_one_launch_each_way_and_its_gradients_the_same(device, launches):
    model = network(device, torch.float64)
    assert SharedWeights(model).by_kernel
    assert not SharedWeights(nn.Sequential(mn.WN()(nn.Conv2d(3, 4, 3)))).by_kernel
    x = torch.randn(7, 3, 8, 8, device=device).double()
    assert_shared_is_the_same(model, x)
    launches.clear()
    gradients(model, x.split([1, 4, 2]), shared=True)
    # The absorbed layer is computed apart, the centred one has other options than the three that go together.
    assert sorted(launches) == [("backward", 1)] * 2 + [("backward", 3)] + [("forward", 1)] * 2 + [("forward", 3)]


def test_gradients_of_a_launch_become_those_of_the_weights_without_a_copy(device, monkeypatch):
    model = by_kernel(nn.Sequential(mn.nn.WSConv2d(3, 4, 3), mn.nn.WSConv2d(4, 4, 3)), device)
    places, real = [], launch.backward

    def noted(*args, **kwargs):
        gradients = real(*args, **kwargs)
        places.extend(gradient.data_ptr() for gradient in gradients)
        return gradients

    monkeypatch.setattr(launch, "backward", noted)
    with SharedWeights(model).shared():
        model(torch.randn(1, 3, 8, 8, device=device)).sum().backward()
    assert places == [conv.weight.grad.data_ptr() for conv in model]


def test_tied_frozen_and_unreached_layers_share_as_before(device):
    conv, other = mn.nn.WSConv2d(4, 4, 3, padding=1), mn.nn.WSConv2d(4, 4, 3, padding=1)
    other.weight = conv.weight
    frozen, unreached = mn.nn.WSConv2d(4, 4, 1).requires_grad_(False), mn.nn.WSConv2d(4, 4, 1)
    model = by_kernel(nn.ModuleList([conv, other, frozen, unreached]), device, torch.float64)

    def forward(net, x):
        return net[2](net[1](net[0](net[0](x).tanh()).tanh()))

    found = assert_shared_is_the_same(model, torch.randn(7, 4, 6, 6, device=device).double(), forward=forward)
    assert found["2.weight"] is None
    assert found["3.weight"] is None


def test_one_forward_under_autocast_shares_weights_in_its_dtype(device):
    model = network(device)
    weights = SharedWeights(model)
    x = torch.randn(2, 3, 8, 8, device=device)
    twin = copy.deepcopy(model)
    with weights.shared(dtype=torch.bfloat16), torch.autocast(device, torch.bfloat16):
        assert all(layer.shared_weight.dtype == torch.bfloat16 for layer in weights.layers)
        model(x).float().square().sum().backward()
    with torch.autocast(device, torch.bfloat16):
        twin(x).float().square().sum().backward()
    for actual, expected in zip(model.parameters(), twin.parameters(), strict=True):
        assert actual.grad.dtype == torch.float32
        assert_close_to_max(actual.grad, expected.grad, tol=tolerance("gradient", torch.bfloat16))


def test_leaves_stay_where_they_are_through_blocks_of_other_dtypes(device):
    model = network(device)
    weights = SharedWeights(model)
    places = []
    for dtype in (None, torch.bfloat16, None, torch.bfloat16):
        with weights.shared(dtype=dtype):
            places.append([layer.shared_weight.data_ptr() for layer in weights.layers])
    assert places[0] == places[2] != places[1] == places[3]


def test_a_weight_changed_while_it_is_shared_is_an_error(device):
    conv = by_kernel(mn.nn.WSConv2d(3, 4, 3), device)

    def step_too_early():
        with SharedWeights(conv).shared():
            conv(torch.randn(1, 3, 8, 8, device=device)).sum().backward()
            with torch.no_grad():
                conv.weight.add_(1)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step_too_early()
    assert conv.shared_weight is None


def test_a_graph_that_saw_last_blocks_weights_says_so(device):
    """The kernel writes behind autograd's back; the version that autograd goes by moves all the same."""
    model = by_kernel(nn.Sequential(mn.nn.WSConv2d(3, 4, 3), mn.nn.WSConv2d(4, 4, 3)), device)
    weights, x = SharedWeights(model), torch.randn(1, 3, 8, 8, device=device)
    with weights.shared():
        y = model(x)
    with weights.shared(), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
