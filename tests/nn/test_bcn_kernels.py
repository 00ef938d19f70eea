"""Layers by the kernels keep the laws: the window, commits, checkpoints, copies, recomputation."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import micronorm as mn
from tests.devices import KERNEL_DEVICES, require_kernels
from tests.networks import assert_same_state, pieces
from tests.tolerances import assert_close_to_max, tolerance

TOL = tolerance("one_step", torch.float64)


@pytest.fixture(params=KERNEL_DEVICES)
def device(request):
    return require_kernels(request.param)


def norm(channels=4, groups=2, **options):
    options = {"rate": 0.3, "backend": "triton"} | options
    return mn.nn.BatchChannelNorm(channels, groups, **options)


def network(device, dtype=torch.float64, **options):
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        norm(activation="relu", **options),
        nn.Conv2d(4, 4, 3),
        norm(**options),
        nn.Flatten(),
        nn.Linear(16, 3),
    )
    return model.to(device, dtype)


def images(device, count=4, dtype=torch.float64):
    return (torch.randn(count, 2, 4, 4, dtype=torch.float64) + 0.5).to(device, dtype)


def twin_of(model, backend="reference"):
    twin = copy.deepcopy(model)
    for module in twin.modules():
        if isinstance(module, mn.nn.BatchChannelNorm):
            module.backend = backend
    return twin


def step(model, x, cut):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for part in pieces(cut):
        loss = F.cross_entropy(model(x[part]), torch.arange(4, device=x.device)[part] % 3, reduction="sum") / 4
        loss.backward()
    optimizer.step()
    return model.state_dict()


def test_a_step_does_not_depend_on_its_cut(device):
    model, x = network(device), images(device)
    whole, *others = (step(copy.deepcopy(model), x, cut) for cut in ([4], [1] * 4, [1, 3]))
    for state in (*others, step(twin_of(model), x, [4])):
        assert_same_state(state, whole, tol=TOL)


def test_a_sequential_step_is_the_same_in_pieces_of_whole_micro_batches(device):
    model, x = network(device, statistics="sequential", micro_batch=2), images(device)
    whole, halves = (step(copy.deepcopy(model), x, cut) for cut in ([4], [2, 2]))
    assert_same_state(halves, whole, tol=TOL)


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")  # numpy, in the interpreter
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_sample_that_is_not_finite_is_left_out_and_counted(device, bad):
    layer = norm().to(device, torch.float64)
    twin = twin_of(layer)
    x = torch.randn(2, 4, 3, 3, dtype=torch.float64, device=device)
    spoilt = x.clone()
    spoilt[1, 3, 2, 1] = bad
    for model in (layer, twin):
        model(x)
    y, expected = layer(spoilt), twin(spoilt)
    assert layer._window.lost.tolist() == twin._window.lost.tolist() == [1, 0]
    assert_close_to_max(layer._window.sums, twin._window.sums, tol=TOL)
    assert torch.equal(y.isfinite(), expected.isfinite())
    clean = expected.isfinite()
    assert 0 < clean.sum() < clean.numel()  # one group of one sample is lost
    assert_close_to_max(y[clean], expected[clean], tol=TOL)


@pytest.mark.parametrize("statistics", ["step", "sequential", "batch"])
def test_a_commit_between_forward_and_backward_changes_no_gradient(device, statistics):
    layer = norm(statistics=statistics, rate=0.9).to(device, torch.float64)
    layer.warm(3)
    layer.blend.fill_(0.5)
    x = torch.randn(2, 4, 3, 3, dtype=torch.float64, device=device, requires_grad=True)
    g = torch.randn_like(x)
    y = layer(x)
    expected = torch.autograd.grad(y, (x, layer.weight), g, retain_graph=True)
    mn.attach(layer).commit()
    if statistics == "step":
        assert layer.running_mean.any()
    assert all(map(torch.equal, torch.autograd.grad(y, (x, layer.weight), g), expected))


def test_an_optimizer_step_between_forward_and_backward_is_refused(device):
    layer = norm().to(device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    x = torch.randn(2, 4, 3, 3, device=device)
    y = layer(x)
    layer(x).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("statistics", ["step", "sequential", "batch"])
def test_activation_checkpointing_gathers_once_and_changes_nothing(device, statistics):
    model = network(device, statistics=statistics)
    twin, x = copy.deepcopy(model), images(device, 2)
    model(x).square().sum().backward()
    checkpoint(twin, x, use_reentrant=False).square().sum().backward()
    for a, b in zip(twin.parameters(), model.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    for k in (1, 3):
        assert torch.equal(twin[k]._window.sums, model[k]._window.sums)
        assert torch.equal(twin[k].running_mean, model[k].running_mean)


def test_recompute_keeps_less_and_gives_the_same_bits(device):
    model = network(device, torch.float32)
    sparing, x = copy.deepcopy(model), images(device, 2, torch.float32)
    handle = mn.recompute(sparing)
    for _ in range(2):
        for net in (model, sparing):
            net.zero_grad()
            net(x).square().sum().backward()
            torch.optim.SGD(net.parameters(), lr=0.01).step()
    assert handle.report().tensors > 0
    for a, b in zip(sparing.parameters(), model.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    assert_same_state(sparing.state_dict(), model.state_dict(), tol=0.0)


def test_a_layer_may_be_used_twice_in_one_graph(device):
    layer = norm(activation="leaky_relu").to(device, torch.float64)
    twin = twin_of(layer)
    x = torch.randn(2, 4, 3, 3, dtype=torch.float64, device=device, requires_grad=True)
    g = torch.randn_like(x)
    results = []
    for model in (layer, twin):
        y = model(model(x))
        results.append((y, *torch.autograd.grad(y, (x, *model.parameters()), g), model._window.sums))
    for a, b in zip(*results, strict=True):
        assert_close_to_max(a, b, tol=TOL, scale=max(1.0, b.abs().max().item()))


def test_a_copy_gathers_for_itself(device):
    layer = norm().to(device)
    layer(torch.randn(2, 4, 3, 3, device=device))
    twin = copy.deepcopy(layer)
    assert twin._window.forwards == 0
    twin(torch.randn(1, 4, 3, 3, device=device))
    assert (layer._window.sums[0], twin._window.sums[0]) == (18, 9)


def test_a_layer_can_be_made_of_fake_tensors():
    with FakeTensorMode():
        assert norm()._window.sums.shape == (9,)


def test_paused_forwards_and_empty_batches_gather_nothing(device):
    layer = norm().to(device)
    handle = mn.attach(layer)
    x = torch.randn(2, 4, 3, 3, device=device)
    with handle.paused():
        layer(x)
    assert layer(x[:0]).shape == (0, 4, 3, 3)
    assert not layer._window.sums.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_gives_its_dtype_and_parameters_their_own_gradients(device, dtype):
    model = nn.Sequential(nn.Conv2d(2, 4, 1), norm(activation="relu")).to(device)
    x = images(device, 2, torch.float32)
    with torch.autocast(device, dtype):
        inner = model[0](x)
        y = model[1](inner)
    assert inner.dtype == y.dtype == dtype
    y.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
    expected = twin_of(model[1]).double()(inner.detach().double())
    assert_close_to_max(y, expected, tol=tolerance("output", dtype))


def test_a_residual_of_another_shape_is_refused(device):
    x = torch.randn(2, 4, 3, 3, device=device)
    with pytest.raises(ValueError, match=r"must have the shape of the input, \(2, 4, 3, 3\), got \(2, 4, 1, 1\)"):
        norm().to(device)(x, residual=x[..., :1, :1])
    with pytest.raises(TypeError, match=r"residual must be a tensor of the input's shape, or None, got 1; add"):
        norm().to(device)(x, residual=1)


def test_the_estimates_may_be_of_another_dtype_than_the_input(device):
    layer = norm().to(device, torch.bfloat16)
    assert layer.running_mean.dtype == torch.float32
    x = torch.randn(2, 4, 3, 3, device=device)
    expected = twin_of(layer).double()(x.double())
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        y = layer(x.to(dtype))
        assert y.dtype == dtype
    assert_close_to_max(y, expected, tol=tolerance("output", torch.float32))


def test_few_elements_per_group_warn_once(device):
    layer = norm(6, 3).to(device)
    with pytest.warns(UserWarning, match="groups of 2 elements"):
        layer(torch.randn(2, 6, device=device))
    assert layer(torch.randn(2, 6, device=device)).shape == (2, 6)  # a second warning would be an error


def test_parameters_may_lie_in_memory_in_any_way(device):
    """A column of a matrix, or one number for all: what the kernels read is numbers side by side."""
    layer = norm().to(device, torch.float64)
    twin = twin_of(layer)
    table = torch.randn(4, 3, dtype=torch.float64, device=device)
    x = torch.randn(2, 4, 3, 3, dtype=torch.float64, device=device, requires_grad=True)
    g = torch.randn_like(x)
    results = []
    for model in (layer, twin):
        model.weight, model.bias = nn.Parameter(table[:, 1]), nn.Parameter(table[:, 0])
        model.group_weight = nn.Parameter(table[:1, 2].expand(2))
        model.running_mean = table[:, 2]
        y = model(x)
        results.append((y, *torch.autograd.grad(y, (x, *model.parameters()), g), model._window.sums))
    assert not layer.weight.is_contiguous()
    for a, b in zip(*results, strict=True):
        assert_close_to_max(a, b, tol=TOL, scale=max(1.0, b.abs().max().item()))


def test_a_parameter_that_is_computed_from_another_is_the_one_in_force(device):
    layer, doubled = norm(activation="relu").to(device), norm(activation="relu").to(device)
    nn.init.constant_(doubled.weight, 2)
    x = torch.randn(2, 4, 3, 3, device=device)
    expected = doubled(x)
    assert torch.equal(torch.func.functional_call(layer, {"weight": 2 * layer.weight}, (x,)), expected)
    nn.utils.parametrize.register_parametrization(layer, "weight", nn.Hardtanh(2, 3))
    assert "weight" not in layer._parameters
    assert torch.equal(layer(x), expected)


def test_recompute_gives_the_same_bits_where_the_activation_is_not_the_kernels(device):
    """SiLU behind a sum is torch's: the sum and it round as torch does, which no kernel repeats."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.skip, self.norm, self.last = (
                nn.Conv2d(2, 4, 1),
                nn.Conv2d(2, 4, 1),
                norm(),
                nn.Conv2d(4, 4, 1),
            )
            self.skip_norm = norm()

        def forward(self, x):
            residual = self.skip_norm(self.skip(x))
            return self.last(self.norm(self.conv(x), residual=residual, activation="silu")) + self.last(residual)

    model = Block().to(device, torch.bfloat16)
    sparing, x = copy.deepcopy(model), images(device, 2, torch.bfloat16)
    handle = mn.recompute(sparing)
    for net in (model, sparing):
        net(x).float().square().sum().backward()
    assert handle.report().tensors > 0
    for a, b in zip(sparing.parameters(), model.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_a_model_that_has_gathered_can_be_copied_with_its_handle(device):
    model = nn.Sequential(norm()).to(device).train()
    handle = mn.attach(model, rate=0.1)
    x = torch.randn(2, 4, 3, 3, device=device)
    model(x)
    copied = copy.deepcopy((model, handle))[0]
    model(x)
    assert [net[0]._window.counter[0].item() for net in (model, copied)] == [2, 0]


def test_parameters_on_another_device_than_the_input_are_refused(device):
    x = torch.randn(2, 4, 3, 3, device=device)
    norm().to(device).eval()(x)  # a layer like it, whose kernels are ready to be called by addresses
    layer = norm().to(device).eval()
    layer.group_weight = nn.Parameter(torch.ones(2, device="meta"))
    with pytest.raises(ValueError, match="must be on the device of its input"):
        layer(x)


@pytest.mark.parametrize("make", [norm, lambda: mn.nn.GroupNorm(2, 4, backend="triton")], ids=["BCN", "GN"])
def test_a_residual_of_a_wider_dtype_is_added_in_that_dtype(device, make):
    layer = make().to(device).eval()
    x, residual = (torch.randn(2, 4, 3, 3, device=device) for _ in range(2))
    y = layer(x.bfloat16(), residual=residual, activation="relu")
    assert y.dtype == torch.float32
    assert torch.equal(y, torch.relu(layer(x.bfloat16()) + residual))


def test_estimates_wider_than_the_input_cost_its_gradients_no_digits(device):
    x = (torch.randn(2, 4, 5, 5, dtype=torch.float64, device=device) / 8 + 10_000).float()
    g = torch.randn_like(x)
    found = []
    for backend, source in (("triton", x), ("reference", x.double())):
        layer = norm(backend=backend, device=device, dtype=torch.float64)
        layer.running_mean.fill_(10_000 + 1 / 3)  # which float32 rounds by 3e-4
        y = layer(source)
        found.append(torch.autograd.grad(y, list(layer.parameters()), g.to(y.dtype)))
    for ours, expected in zip(*found, strict=True):
        assert_close_to_max(ours, expected, tol=tolerance("gradient", torch.float32))
