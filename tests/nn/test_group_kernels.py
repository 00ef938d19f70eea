"""Group, layer and instance normalization by the kernels, against the equations and torch's own group_norm."""

import copy

import pytest
import torch
from torch import nn

import micronorm as mn
from micronorm.nn import BatchChannelNorm
from micronorm.nn.group import GroupNorm
from micronorm.ops.activation import check_activation
from micronorm.ops.bcn import group_norm_fused
from tests.devices import KERNEL_DEVICES, require_kernels
from tests.tolerances import assert_close_to_max, tolerance

F64 = torch.float64
# shape, groups: odd sizes, one position, one channel per group, one group, one sample, other ranks
SIZES = [
    ((2, 6, 5, 7), 2),
    ((3, 12, 1, 1), 4),
    ((2, 7, 3), 7),
    ((1, 10, 3, 3), 1),
    ((5, 9), 3),
    ((2, 4, 3, 2, 5), 2),
    ((1, 2, 130, 131), 1),  # more than a program holds
]
LAYOUTS = [torch.contiguous_format, torch.channels_last]


@pytest.fixture(params=KERNEL_DEVICES)
def device(request):
    return require_kernels(request.param)


def layer(groups, channels, device, dtype=F64, **options):
    made = GroupNorm(groups, channels, backend="triton", **options)
    for parameter in made.parameters():
        nn.init.normal_(parameter, 0.5)
    return made.to(device, dtype)


def gradients(y, x, *more):
    """Of a loss that looks at every element differently: those of x, of tensors beside it and of the parameters."""
    weights = torch.linspace(-1, 2, y.numel(), dtype=y.dtype, device=y.device).view(y.shape)
    inputs = [t for t in (x, *more) if t is not None]
    return torch.autograd.grad(y, inputs, weights)


def assert_same_gradients(y, expected, x, *more):
    for actual, wanted in zip(*(gradients(t, x, *more) for t in (y, expected)), strict=True):
        # That of a parameter is a sum over samples and space whose terms, of the size of one, have either sign.
        terms = x.numel() // x.shape[1] if wanted.ndim == 1 else 1
        assert_close_to_max(actual, wanted, tol=tolerance("gradient", F64), scale=terms + wanted.abs().max())


def exact(norm, x, residual=None, activation=None, slope=0.01):
    """The layer's function by the equations, in float64: the gradients of torch's own lose digits in small groups."""
    by_group = x.double().unflatten(1, (norm.num_groups, -1)).flatten(2)
    apart = by_group - by_group.mean(2, keepdim=True)
    y = (apart * (apart.square().mean(2, keepdim=True) + norm.eps).rsqrt()).reshape(x.shape)
    if norm.weight is not None:
        weight, bias = (p.double().view(-1, *[1] * (x.ndim - 2)) for p in (norm.weight, norm.bias))
        y = y * weight + bias
    return check_activation(activation, slope).apply(y if residual is None else y + residual.double())


@pytest.mark.parametrize("shape, groups", SIZES, ids=str)
@pytest.mark.parametrize("affine", [True, False])
def test_outputs_and_gradients_are_those_of_the_equations(device, shape, groups, affine):
    norm = layer(groups, shape[1], device, affine=affine)
    x = torch.randn(shape, dtype=F64, device=device, requires_grad=True)
    y, expected = norm(x), exact(norm, x)
    assert_close_to_max(y, expected, tol=tolerance("output", F64))
    theirs = torch.group_norm(x, groups, norm.weight, norm.bias, norm.eps)
    assert_close_to_max(y, theirs, tol=tolerance("output", F64))
    assert_same_gradients(y, expected, x, *norm.parameters())


@pytest.mark.parametrize("groups", [8, 2])
def test_volumes_in_channels_last_keep_their_layout_with_an_addition_and_a_leaky_relu(device, groups):
    norm = layer(groups, 8, device)
    x, residual = (
        torch.randn(2, 8, 3, 5, 4, dtype=F64, device=device).contiguous(memory_format=torch.channels_last_3d)
        for _ in range(2)
    )
    x.requires_grad_()
    y = norm(x, residual=residual, activation="leaky_relu", negative_slope=0.2)
    assert y.is_contiguous(memory_format=torch.channels_last_3d)
    expected = exact(norm, x, residual, "leaky_relu", 0.2)
    assert_close_to_max(y, expected, tol=tolerance("output", F64))
    assert_same_gradients(y, expected, x, *norm.parameters())


@pytest.mark.parametrize("activation", [None, "relu", "leaky_relu", "silu"])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("memory_format", LAYOUTS, ids=str)
def test_what_follows_is_taken_in_and_the_memory_format_stays(device, activation, residual, memory_format):
    norm = layer(2, 6, device)
    x, other = torch.randn(2, 2, 6, 4, 5, dtype=F64, device=device)
    x = x.contiguous(memory_format=memory_format).requires_grad_()
    other = other.clone().requires_grad_() if residual else None
    y = norm(x, residual=other, activation=activation, negative_slope=0.3)
    expected = exact(norm, x, other, activation, 0.3)
    assert y.is_contiguous(memory_format=memory_format)
    assert_close_to_max(y, expected, tol=tolerance("output", F64))
    assert_same_gradients(y, expected, x, other, *norm.parameters())


@pytest.mark.parametrize("shape", [(1, 4), (1, 4, 1, 1), (3, 4, 1)], ids=str)
def test_one_value_per_group_gives_the_bias(device, shape):
    norm = GroupNorm(4, 4, backend="triton").to(device)
    nn.init.normal_(norm.bias)
    x = torch.randn(shape, device=device, requires_grad=True)
    y = norm(x)
    assert torch.equal(y.flatten(1), norm.bias.expand(shape[0], 4))
    # Zero, but for the rounding of two terms as large as 1/sqrt(eps) times the gradient.
    grad = gradients(y, x)[0]
    assert grad.abs().max() <= 8 * torch.finfo(x.dtype).eps * norm.eps**-0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mean, std", [(0.0, 1.0), (100.0, 1.0), (1000.0, 0.5)])
@pytest.mark.parametrize(
    "shape, groups",
    [
        pytest.param((2, 8, 9, 9), 4, id="whole"),
        pytest.param((1, 2, 130, 131), 1, id="split", marks=pytest.mark.slow),
    ],
)
def test_the_error_is_no_larger_than_torchs(device, dtype, mean, std, shape, groups):
    norm = layer(groups, shape[1], device, dtype)
    x = (torch.randn(shape, device=device) * std + mean).to(dtype).requires_grad_()
    with torch.no_grad():
        theirs = torch.group_norm(x, groups, norm.weight, norm.bias, norm.eps)
    y, expected = norm(x), exact(norm, x)
    limit = max((theirs - expected).abs().max().item(), tolerance("output", dtype) * expected.abs().max().item())
    assert (y - expected).abs().max().item() <= limit
    ours, wanted = (gradients(t, x)[0] for t in (y, expected))
    assert_close_to_max(ours, wanted, tol=tolerance("gradient", dtype))


def test_channels_far_apart_in_one_group_keep_their_digits(device):
    """The shift is one of the group's: around each channel's own the means between channels would be lost."""
    norm = layer(1, 4, device, torch.float32, affine=False)
    x = torch.randn(2, 4, 8, 8, device=device) + torch.tensor([0.0, 1e3, -1e3, 10.0], device=device).view(4, 1, 1)
    assert_close_to_max(norm(x), exact(norm, x), tol=tolerance("output", torch.float32))


def test_half_inputs_take_float32_parameters_and_give_half(device):
    norm = layer(2, 8, device, torch.float32)
    x = torch.randn(2, 8, 4, 4, device=device).bfloat16().requires_grad_()
    y = norm(x)
    assert y.dtype == torch.bfloat16
    assert_close_to_max(y, exact(norm, x), tol=tolerance("output", torch.bfloat16))
    grads = gradients(y, x, *norm.parameters())
    assert [g.dtype for g in grads] == [torch.bfloat16, torch.float32, torch.float32]


@pytest.mark.parametrize("missing", ["weight", "bias"])
def test_one_half_of_the_affine_alone_is_that_half(device, missing):
    x = torch.randn(2, 6, 3, 3, dtype=F64, device=device)
    affine = {name: torch.randn(6, dtype=F64, device=device, requires_grad=True) for name in ("weight", "bias")}
    affine[missing] = None
    y, _ = group_norm_fused(x, **affine, groups=2)
    weight, bias = (0.0 if p is None else p.view(6, 1, 1) for p in affine.values())
    expected = torch.group_norm(x, 2) * (weight if missing == "bias" else 1.0) + bias
    assert_close_to_max(y, expected, tol=tolerance("output", F64))
    (kept,) = (p for p in affine.values() if p is not None)
    actual, wanted = (gradients(t, kept)[0] for t in (y, expected))
    assert_close_to_max(actual, wanted, tol=tolerance("gradient", F64))


@pytest.mark.parametrize(
    "activation, residual",
    [
        ("relu", True),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((None, False), ("silu", False), ("silu", True))),
    ],
)
def test_second_derivatives_agree_with_finite_differences(device, activation, residual):
    norm = layer(2, 4, device)
    x, other = torch.randn(2, 2, 4, 3, dtype=F64, device=device)
    inputs = [x.requires_grad_(), *([other.requires_grad_()] if residual else [])]

    def function(x, *rest):
        return norm(x, residual=rest[0] if rest else None, activation=activation)

    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


def test_second_derivatives_of_half_inputs_with_wide_parameters_exist(device):
    norm = layer(2, 4, device, torch.float32)
    x = torch.randn(2, 4, 3, device=device).bfloat16().requires_grad_()
    (dx,) = torch.autograd.grad(norm(x).float().square().sum(), x, create_graph=True)
    dx.float().square().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.bfloat16
    assert norm.weight.grad.isfinite().all()


def test_an_empty_batch_gives_what_torch_gives(device):
    norm = layer(2, 4, device)
    x = torch.empty(0, 4, 3, 3, dtype=F64, device=device, requires_grad=True)
    y = norm(x, residual=x, activation="relu")
    y.sum().backward()
    assert y.shape == x.shape
    assert not norm.weight.grad.any()


def test_compiled_training_gives_the_same_in_one_graph(device):
    norm = layer(2, 6, device)
    twin = copy.deepcopy(norm)
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 6, 3, 5, dtype=F64, device=device, requires_grad=True)
    results = []
    for function, one in ((norm, norm), (compiled, twin)):
        y = function(x, residual=x.square(), activation="relu")
        results.append([y, *gradients(y, x, *one.parameters())])
    for actual, wanted in zip(*results, strict=True):
        assert_close_to_max(actual, wanted, tol=tolerance("gradient", F64))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own, for jvp
def test_auto_takes_the_kernels_on_cuda_and_torch_under_transforms(monkeypatch):
    from micronorm.nn import group

    taken = []
    real = group.group_norm_fused
    monkeypatch.setattr(group, "group_norm_fused", lambda *a, **o: taken.append(True) or real(*a, **o))
    norm = GroupNorm(2, 4, device="cuda")
    x = torch.randn(2, 4, 3, 3, device="cuda")
    y = norm(x)
    assert taken == [True]
    theirs, slope = torch.func.jvp(norm, (x,), (x,))  # type: ignore[misc]
    assert taken == [True]
    assert_close_to_max(theirs, y, tol=tolerance("output", torch.float32))
    assert slope.isfinite().all()


@pytest.mark.parametrize("activation, residual", [("relu", False), ("relu", True), ("silu", False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [GroupNorm, BatchChannelNorm])
def test_recompute_spares_the_output_and_changes_no_bit(device, kind, activation, residual, dtype):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1)
            self.norm = kind(num_channels=4, num_groups=2, backend="triton")

        def forward(self, x):
            h = self.first(x)
            return self.last(self.norm(h, residual=h.tanh() if residual else None, activation=activation))

    model = Block().to(device, dtype)
    x = torch.randn(2, 3, 16, 16, device=device, dtype=dtype)

    def results():
        y = model(x)
        return [y, *torch.autograd.grad(y.square().sum(), list(model.parameters()))]

    kept = results()
    handle = mn.recompute(model)
    for before, again in zip(kept, results(), strict=True):
        assert torch.equal(before, again)
    assert handle.report().tensors >= 1


def test_a_kernel_that_cannot_take_the_tensor_says_so():
    norm = GroupNorm(2, 4, backend="triton", device="meta")
    with pytest.raises(ValueError, match=r'backend="triton" cannot compute this'):
        norm(torch.empty(1, 4, 3, device="meta"))
