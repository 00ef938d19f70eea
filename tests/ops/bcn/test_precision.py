"""What the kernels lose to rounding, against float64 and against torch's GroupNorm on the same input."""

import copy

import pytest
import torch
import torch.nn.functional as F

from micronorm.nn import BatchChannelNorm
from micronorm.ops.activation import check_activation
from micronorm.ops.bcn import group_norm_fused
from tests.ops.bcn.layers import Case, data, expected_of, layer_of, outcome, poison, set_scheme
from tests.tolerances import assert_close_to_max, tolerance


def outlier(g):
    """The first element of every map, which pivots start from, is far from all the others."""
    x = g.clone()
    x[..., 0, 0] = 1e4
    return x


INPUTS = {
    "mean 100, std 0.01": lambda g: 100 + 0.01 * g,
    "mean 10000, std 1": lambda g: 10000 + g,
    "40000 … 40003": lambda g: 40000 + (g.abs() * 2).clamp(max=3).round(),
    "first element an outlier": outlier,
}
SHAPE, GROUPS = (1, 4, 9, 7), 2
WAYS = [
    (form, dtype, layout, scheme)
    for form, layout, scheme in [
        ("BCN", "contiguous", "whole"),
        ("BCN", "channels_last", "pieces"),
        ("GN", "contiguous", "whole"),
    ]
    for dtype in (torch.float32, torch.bfloat16)
    if dtype == torch.float32 or form == "GN"
]
# Half an eps each, where results have the dtype of the computation: x − c, 1/S (two), its product with γ and a (three),
# the fused product and sum, and the mean that all of these start from. What is computed in float32 and stored in
# bfloat16 is rounded once, and cut off by triton's interpreter, which is a whole eps.
FLOOR = {torch.float32: 4 * torch.finfo(torch.float32).eps, torch.bfloat16: torch.finfo(torch.bfloat16).eps}


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    poison(monkeypatch)


@pytest.mark.parametrize(
    "case, scheme, dtype",
    [
        (Case((1, 12, 5, 5), 4, "step", "relu", "contiguous"), "whole", torch.float32),
        (Case((1, 12, 5, 5), 4, "step", "relu", "contiguous"), "whole", torch.bfloat16),
        (Case((1, 12, 5, 5), 2, "step", "silu", layout="channels_last", blend=0.5), "pieces", torch.float32),
        (Case((1, 12, 5, 5), 2, "step", "silu", layout="channels_last", blend=0.5), "pieces", torch.float16),
        (Case((1, 12, 5, 5), 4, "step", "relu", "contiguous"), "twice", torch.bfloat16),
        (Case((1, 8, 5, 5), 2, "step", "silu", layout="channels_last", blend=0.5), "twice", torch.float16),
        (Case((2, 6, 9), 2, "sequential", "leaky_relu", "contiguous"), "whole", torch.float32),
        (Case((2, 6, 9), 2, "sequential", "leaky_relu", "contiguous"), "pieces", torch.bfloat16),
        (Case((2, 8, 5, 5), 4, "batch", layout="channels_last"), "split", torch.float32),
        (Case((2, 8, 5, 5), 4, "batch", layout="channels_last"), "whole", torch.float16),
        (Case((1, 6, 7), 3, "step", form="eval"), "whole", torch.float16),
        (Case((1, 6, 7), 3, "step", form="eval"), "split", torch.bfloat16),
    ],
    ids=str,
)
def test_every_dtype_and_mode_errs_by_no_more_than_the_table_says(device, dtype, case, scheme, monkeypatch):
    set_scheme(monkeypatch, scheme)
    norm, inputs = layer_of(case, device, dtype), data(case, device, dtype)
    expected = expected_of(norm, *inputs)
    found = outcome(norm, *inputs)
    for name, value in expected.items():
        if name in ("sums", "mean", "var"):  # made in float64 from moments in float32
            kind, rounded = "gradient", torch.float32
        else:
            kind, rounded = "output" if name == "y" else "gradient", dtype
            assert found[name].dtype == dtype
        scale = max(1.0, value.abs().max().item())
        assert_close_to_max(found[name], value, tol=tolerance(kind, rounded), scale=scale)


def neutral(device):
    """BCN at its initial estimates, which are no statistics of the data: a group normalization but for the eps."""
    norm = BatchChannelNorm(SHAPE[1], GROUPS, backend="triton", device=device)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 1.5, SHAPE[1]))
    return norm


def by_torch(x):
    weight = torch.linspace(0.5, 1.5, SHAPE[1], dtype=x.dtype, device=x.device)
    return F.group_norm(x, GROUPS, weight)


def by_group_kernel(x):
    weight = torch.linspace(0.5, 1.5, SHAPE[1], device=x.device)
    return group_norm_fused(x, weight, torch.zeros_like(weight), groups=GROUPS)[0]


def error(function, exact, x, g):
    """The largest errors of y and dx, relative to the largest exact value."""
    results = []
    for f, source in ((function, x), (exact, x.double().cpu())):
        source = source.detach().requires_grad_()
        y = f(source)
        results.append((y.detach(), *torch.autograd.grad(y, source, g.to(y))))
    return [
        ((found.double().cpu() - right).abs().max() / right.abs().max()).item()
        for found, right in zip(*results, strict=True)
    ]


@pytest.mark.parametrize("form, dtype, layout, scheme", WAYS, ids=str)
@pytest.mark.parametrize("name", INPUTS)
def test_a_mean_far_above_the_spread_costs_no_more_than_in_torch(
    device, form, dtype, name, layout, scheme, monkeypatch
):
    set_scheme(monkeypatch, scheme)
    x = INPUTS[name](torch.randn(SHAPE, dtype=torch.float64)).to(device, dtype)
    g = torch.randn(SHAPE, dtype=torch.float64).to(device, dtype)
    theirs = error(by_torch, by_torch, x, g)
    x = x.contiguous(memory_format=torch.channels_last if layout == "channels_last" else torch.contiguous_format)
    if form == "BCN":
        norm = neutral(device).eval()
        exact = copy.deepcopy(norm).to("cpu", torch.float64)
        exact.backend = "reference"
        ours = error(norm, exact, x, g)
    else:
        ours = error(by_group_kernel, by_torch, x, g)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine <= max(other, FLOOR[dtype])


@pytest.mark.parametrize("scheme", ["whole", "twice", "pieces"])
def test_a_mean_that_float32_cannot_hold_costs_no_digits(device, scheme, monkeypatch):
    """Estimates near the mean, as after training: x − c is exact, and what rounding took from c is carried along."""
    set_scheme(monkeypatch, scheme)
    norm = neutral(device).eval()
    norm.running_mean.fill_(1e4)
    norm.running_var.fill_(1e-4)
    exact = copy.deepcopy(norm).to("cpu", torch.float64)
    exact.backend = "reference"
    x = (10000 + 0.01 * torch.randn(SHAPE, dtype=torch.float64)).to(device, torch.float32)
    y_error, dx_error = error(norm, exact, x, torch.randn(SHAPE).to(device))
    assert y_error <= tolerance("output", torch.float32)
    assert dx_error <= tolerance("gradient", torch.float32)


@pytest.mark.parametrize("scheme", ["twice", "split"])
def test_a_border_unlike_the_rest_of_an_image_costs_no_digits(device, scheme, monkeypatch):
    set_scheme(monkeypatch, scheme)
    x = 1 + 0.01 * torch.randn(1, 2, 64, 64, device=device)
    x[..., 0] = 5
    exact = torch.group_norm(x.double(), 1)
    assert_close_to_max(group_norm_fused(x, None, None, groups=1)[0], exact, tol=torch.finfo(torch.float32).eps * 8)


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")  # numpy, in the interpreter
@pytest.mark.parametrize(
    "statistics, scheme",
    [("step", "whole"), ("step", "twice"), ("step", "split"), ("sequential", "whole"), ("batch", "whole")],
)
def test_values_near_1e30_give_finite_outputs_and_leave_the_estimates(device, statistics, scheme, monkeypatch):
    set_scheme(monkeypatch, scheme)
    norm = BatchChannelNorm(4, 2, statistics=statistics, rate=0.5, backend="triton", device=device)
    optimizer = torch.optim.SGD(norm.parameters(), lr=0.1)
    y = norm((torch.randn(2, 4, 5, 5) * 1e30).to(device))
    assert torch.isfinite(y).all()
    optimizer.step()
    assert torch.equal(norm.running_mean.cpu(), torch.zeros(4))
    assert torch.equal(norm.running_var.cpu(), torch.ones(4))
    assert norm._window.lost.tolist() == [2, 0]


@pytest.mark.parametrize("scheme", ["whole", "twice", "split", "finish"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_a_gated_gradient_are_of_what_was_not_rounded(device, scheme, dtype, monkeypatch):
    set_scheme(monkeypatch, scheme)
    x, residual, g = (torch.randn(2, 8, 6, 6).to(dtype).to(device) for _ in range(3))
    x, residual = x.requires_grad_(), residual.requires_grad_()
    weight, bias = (torch.rand(8, device=device).requires_grad_() for _ in range(2))
    act = check_activation("leaky_relu", 0.2)  # of g·0.2 half a dtype keeps three digits
    y, _ = group_norm_fused(x, weight, bias, groups=2, activation=act, residual=residual)
    found = torch.autograd.grad(y, (weight, bias), g)
    # The signs of the output that was stored: rounding may have made zeros of small ones.
    gated = torch.where(y > 0, g.double(), 0.2 * g.double())
    wide = F.group_norm(x.detach().double(), 2)
    for grad, expected in zip(found, ((gated * wide).sum((0, 2, 3)), gated.sum((0, 2, 3))), strict=True):
        assert_close_to_max(grad.double(), expected, tol=x.numel() // 8 * torch.finfo(torch.float32).eps)
