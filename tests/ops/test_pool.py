"""Max-pooling by the kernels against torch's: by Triton's interpreter here, on a GPU under `gpu`."""

import pytest
import torch
import torch.nn.functional as F

from micronorm.ops.pool import PoolWindow, max_pool2d, operators
from tests.devices import KERNEL_DEVICES, require_kernels
from tests.poison import poison_memory
from tests.tolerances import assert_close_to_max, tolerance

# Overlapping windows, disjoint ones, windows with gaps between them, planes that no window ends with, and one number.
WINDOWS = [
    PoolWindow((3, 3), (2, 2), (1, 1)),
    PoolWindow((2, 2), (2, 2), (0, 0)),
    PoolWindow((3, 3), (2, 2), (0, 0), ceil_mode=True),
    PoolWindow((3, 2), (1, 3), (1, 0), ceil_mode=True),
    PoolWindow((4, 3), (1, 1), (2, 1)),
    PoolWindow((2, 2), (3, 3), (1, 1), ceil_mode=True),
    PoolWindow((1, 1), (2, 1), (0, 0)),
]
LARGEST = PoolWindow((7, 7), (5, 7), (3, 2))
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
LAYOUTS = [torch.contiguous_format, torch.channels_last]

layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=str)


@pytest.fixture(params=KERNEL_DEVICES)
def device(request):
    return require_kernels(request.param)


@pytest.fixture
def poison(monkeypatch):
    poison_memory(monkeypatch, (operators,))


def plane(shape=(2, 2, 7, 5), dtype=torch.float64, device="cpu", layout=torch.contiguous_format):
    """Few values, so that windows have several largest elements."""
    return torch.randint(-3, 4, shape).to(device, dtype).contiguous(memory_format=layout)


def torchs(x, window):
    return F.max_pool2d(x, window.kernel, window.stride, window.padding, ceil_mode=window.ceil_mode)


def both(x, window):
    """y and dx by the kernels; y by torch in x's dtype and dx in float64, on the CPU."""
    ours, theirs = x.detach().requires_grad_(), x.detach().cpu().requires_grad_()
    y = max_pool2d(ours, window)
    g = torch.randn_like(y)
    exact = torchs(theirs.double(), window)
    return (
        y,
        torchs(theirs, window),
        *torch.autograd.grad(y, ours, g),
        torch.autograd.grad(exact, theirs, g.cpu().double())[0],
    )


CASES = [
    *(pytest.param(window, torch.float32, marks=[pytest.mark.slow] * (i > 2)) for i, window in enumerate(WINDOWS)),
    *((WINDOWS[0], dtype) for dtype in DTYPES[::2] + DTYPES[3:]),
]


@layouts
@pytest.mark.parametrize("window, dtype", CASES, ids=str)
def test_values_are_torchs_to_the_bit_and_gradients_theirs_rounded_once(device, poison, window, dtype, layout):
    x = plane(dtype=dtype, device=device, layout=layout)
    y, expected, dx, expected_dx = both(x, window)
    assert torch.equal(y.cpu(), expected)
    assert y.stride() == x.new_empty(y.shape).contiguous(memory_format=layout).stride()
    assert dx.stride() == x.stride()
    assert_close_to_max(dx.cpu(), expected_dx, tol=tolerance("output", dtype))


@layouts
def test_infinities_and_what_is_no_number_go_torchs_way(device, poison, layout):
    x = plane(dtype=torch.float32, device=device, layout=layout)
    x[0, :, :5] = -torch.inf
    x[1, 0, 3, 3:5] = torch.nan
    x[1, 1, 6] = torch.inf
    x[1, 1, :3, 1:] = torch.tensor([-0.0, 0.0], device=device).repeat(2)
    for window in (WINDOWS[0], WINDOWS[2]):
        y, expected, dx, expected_dx = both(x, window)
        assert torch.equal(y.cpu().nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))
        assert torch.equal(y.cpu().signbit(), expected.signbit())
        assert_close_to_max(dx.cpu(), expected_dx, tol=tolerance("output", torch.float32))


@pytest.mark.slow
def test_the_largest_windows(device, poison):
    x = plane((1, 2, 9, 11), torch.float32, device, torch.channels_last)
    y, expected, dx, expected_dx = both(x, LARGEST)
    assert torch.equal(y.cpu(), expected)
    assert_close_to_max(dx.cpu(), expected_dx, tol=tolerance("output", torch.float32))


@pytest.mark.slow
def test_any_layout_of_input_and_gradient_is_right(device):
    window = WINDOWS[0]
    turned = torch.randn(2, 5, 6, 3, device=device, dtype=torch.float64).permute(0, 3, 2, 1)
    sliced = torch.randn(2, 3, 5, 8, device=device, dtype=torch.float64)[..., ::2]
    for x in (sliced, torch._neg_view(turned), turned[:1].expand(2, -1, -1, -1), turned[:, :, :1, :1]):
        a, b = (x.detach().requires_grad_() for _ in range(2))
        y, expected = max_pool2d(a, window), torchs(b, window)
        assert torch.equal(y, expected)
        (dx,), (expected_dx,) = (torch.autograd.grad(out.sum(), t) for out, t in ((y, a), (expected, b)))  # stride 0
        assert_close_to_max(dx, expected_dx, tol=tolerance("output", x.dtype))


def test_a_gradient_is_read_with_its_strides_and_its_sign(device):
    x = torch.randn(1, 3, 5, 6, device=device, dtype=torch.float64, requires_grad=True)
    y, expected = max_pool2d(x, WINDOWS[0]), torchs(x, WINDOWS[0])
    for g in (torch._neg_view(torch.randn_like(y)), torch.randn_like(y.mT).mT):
        (dx,), (expected_dx,) = (torch.autograd.grad(out, x, g, retain_graph=True) for out in (y, expected))
        assert_close_to_max(dx, expected_dx, tol=tolerance("output", x.dtype))


def test_a_sample_pools_alike_in_any_company(device):
    x = torch.randn(5, 6, 7, 8, device=device).contiguous(memory_format=torch.channels_last)
    window = WINDOWS[0]
    pooled, grads = [], []
    for part in (x, x[3:4]):
        part = part.clone(memory_format=torch.channels_last).requires_grad_()
        y = max_pool2d(part, window)
        g = torch.linspace(-1, 1, y[0].numel(), device=device).view(1, *y.shape[1:]).expand_as(y)
        pooled.append(y.detach())
        grads.append(torch.autograd.grad(y, part, g)[0])
    assert torch.equal(pooled[0][3:4], pooled[1])
    assert torch.equal(grads[0][3:4], grads[1])


@pytest.mark.parametrize("window", [WINDOWS[0], WINDOWS[3]], ids=str)
def test_it_can_be_differentiated_twice(device, window):
    x = torch.randn(1, 2, 5, 4, device=device, dtype=torch.float64)
    found = []
    for pool in (max_pool2d, torchs):
        leaf = x.clone().requires_grad_()
        (dx,) = torch.autograd.grad((pool(leaf, window) ** 3).sum(), leaf, create_graph=True)
        found.append((dx.detach(), *torch.autograd.grad((dx**2).sum(), leaf)))
    for ours, theirs in zip(*found, strict=True):
        assert_close_to_max(ours, theirs, tol=tolerance("gradient", torch.float64))


def test_under_create_graph_sums_are_rounded_once_too(device):
    x = torch.randn(1, 2, 5, 4, device=device).to(torch.bfloat16).requires_grad_()
    y = max_pool2d(x, WINDOWS[4])
    g = torch.rand_like(y)
    plain = torch.autograd.grad(y, x, g, retain_graph=True)[0]
    (again,) = torch.autograd.grad(y, x, g, create_graph=True)
    assert_close_to_max(again, plain.double(), tol=torch.finfo(torch.bfloat16).eps)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own, for jvp
def test_batched_and_dual_gradients_go_by_operations_of_torch(device):
    x = torch.randn(1, 2, 5, 4, device=device, dtype=torch.float64, requires_grad=True)
    y, expected = max_pool2d(x, WINDOWS[0]), torchs(x, WINDOWS[0])
    g = torch.randn(3, *y.shape, device=device, dtype=torch.float64)
    batched = [torch.autograd.grad(out, x, g, is_grads_batched=True, retain_graph=True)[0] for out in (y, expected)]
    assert_close_to_max(*batched, tol=tolerance("output", torch.float64))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(g[0], g[1])
        found = torch.autograd.grad(y, x, dual)[0]
        tangent = torch.autograd.forward_ad.unpack_dual(found).tangent
    assert tangent is not None
    assert_close_to_max(tangent, batched[0][1], tol=tolerance("output", torch.float64))


@pytest.mark.slow
@layouts
def test_the_operators_pass_opcheck(device, layout):
    x = plane((1, 2, 4, 5), torch.float32, device, layout).requires_grad_()
    numbers = WINDOWS[0].numbers()
    torch.library.opcheck(torch.ops.micronorm.max_pool2d.default, (x, numbers))
    y, places = operators.pool(x, numbers)
    args = (torch.randn_like(y), places, numbers, [4, 5], layout is torch.channels_last)
    torch.library.opcheck(torch.ops.micronorm.max_pool2d_backward.default, args)


@pytest.mark.slow
@layouts
def test_compiled_code_gets_the_same(device, layout):
    x = plane((1, 2, 4, 5), torch.float32, device, layout)
    a, b = (x.clone(memory_format=torch.preserve_format).requires_grad_() for _ in range(2))
    pooled = [max_pool2d(a, WINDOWS[0]), torch.compile(lambda t: max_pool2d(t, WINDOWS[0]), fullgraph=True)(b)]
    assert torch.equal(*pooled)
    g = torch.randn_like(pooled[0])
    assert torch.equal(*(torch.autograd.grad(y, t, g)[0] for y, t in zip(pooled, (a, b), strict=True)))


@layouts
def test_the_gradient_lies_as_the_input_does_where_one_number_is_left(device, layout):
    x = plane((2, 3, 3, 3), torch.float32, device, layout).requires_grad_()
    (dx,) = torch.autograd.grad(max_pool2d(x, PoolWindow((3, 3), (3, 3), (0, 0))).sum(), x)
    assert dx.stride() == x.stride()


@pytest.mark.gpu
@layouts
def test_large_planes_on_a_gpu(layout):
    x = torch.randn(8, 64, 112, 112, device="cuda", dtype=torch.bfloat16).relu_().contiguous(memory_format=layout)
    y, expected, dx, expected_dx = both(x, WINDOWS[0])
    assert torch.equal(y.cpu(), expected)
    assert_close_to_max(dx.cpu(), expected_dx, tol=tolerance("output", torch.bfloat16))
    again = [both_grads(x, y.detach()) for _ in range(2)]
    assert torch.equal(*again)


def both_grads(x, g):
    leaf = x.detach().requires_grad_()
    return torch.autograd.grad(max_pool2d(leaf, WINDOWS[0]), leaf, g)[0]
