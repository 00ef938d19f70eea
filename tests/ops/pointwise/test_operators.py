"""A 1×1 convolution that hands on its input: its gradients are those of the two branches added, whoever adds them."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from micronorm.ops.pointwise import kernel_runs, operators, pointwise_conv_and_input
from micronorm.ops.pointwise.operators import data_gradient_and
from tests.devices import KERNEL_DEVICES, require_kernels
from tests.poison import poison_memory
from tests.tolerances import assert_close_to_max, tolerance

# N, C, K, H, W: no multiple of any tile, one of all, fewer than a step of the depth, one position, one channel.
SHAPES = [
    (2, 5, 3, 3, 5),
    (1, 130, 70, 2, 3),
    (2, 128, 64, 8, 8),
    (3, 64, 192, 1, 1),
    (5, 1, 1, 2, 2),
    (131, 17, 9, 1, 1),
]
DTYPES = [torch.bfloat16, torch.float16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(params=KERNEL_DEVICES)
def device(request):
    return require_kernels(request.param)


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    poison_memory(monkeypatch, [operators])


def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return F.conv2d(x, weight, bias), x


def tensors(shape, dtype, device="cpu"):
    """x, weight, bias, dy and the other branch's gradient, activations in channels_last."""
    n, c, k, h, w = shape
    sizes = [(n, c, h, w), (k, c, 1, 1), (k,), (n, k, h, w), (n, c, h, w)]
    made = [torch.randn(size).to(device, dtype) for size in sizes]
    return [t.contiguous(memory_format=torch.channels_last) if t.ndim == 4 else t for t in made]


def exact(dy, weight, other):
    """The data gradient in float64 on the CPU."""
    dy, weight, other = (t.to("cpu", torch.float64) for t in (dy, weight, other))
    return torch.einsum("nkhw,kc->nchw", dy, weight.flatten(1)) + other


def assert_right(dx, dy, weight, other):
    assert dx.shape == other.shape
    assert dx.dtype == dy.dtype
    assert_close_to_max(dx, exact(dy, weight, other), tol=tolerance("output", dx.dtype))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@dtypes
def test_the_kernel_adds_the_product_and_the_other_gradient(device, shape, dtype):
    _, weight, _, dy, other = tensors(shape, dtype, device)
    assert_right(data_gradient_and(dy, weight, other), dy, weight, other)


def sliced(t: Tensor) -> Tensor:
    wide = t.new_full((t.shape[0], t.shape[1] + 3, *(2 * s for s in t.shape[2:])), torch.nan)
    return wide[:, 1:-2, ::2, ::2].copy_(t)


LAYOUTS = {
    "contiguous": lambda t: t.contiguous(),
    "expanded": lambda t: t[:1, :, :1, :1].expand_as(t),
    "sliced": sliced,
    "turned": lambda t: t.transpose(2, 3).contiguous().transpose(2, 3),
    "negated": lambda t: torch._neg_view(-t),
    "at an odd address": lambda t: (
        F.pad(t.permute(0, 2, 3, 1).flatten(), (1, 0))[1:]
        .view(t.shape[0], *t.shape[2:], t.shape[1])
        .permute(0, 3, 1, 2)
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("shape", [(2, 6, 5, 3, 4), (3, 6, 5, 1, 1)], ids=str)
def test_gradients_may_lie_in_memory_as_they_like(device, name, shape):
    _, weight, _, dy, other = tensors(shape, torch.bfloat16, device)
    for pair in ((LAYOUTS[name](dy), other), (dy, LAYOUTS[name](other))):
        assert_right(data_gradient_and(pair[0], weight, pair[1]), pair[0], weight, pair[1])


def test_weights_may_lie_in_memory_as_they_like(device):
    _, weight, _, dy, other = tensors((2, 6, 5, 3, 4), torch.bfloat16, device)
    strange = weight.transpose(0, 1).contiguous().transpose(0, 1)
    for one in (weight.contiguous(), strange, torch._neg_view(-weight), sliced(weight)):
        assert_right(data_gradient_and(dy, one, other), dy, one, other)


@dtypes
def test_a_samples_gradient_does_not_depend_on_its_companions(device, dtype, monkeypatch):
    _, weight, _, dy, other = tensors((9, 66, 130, 5, 7), dtype, device)
    whole = data_gradient_and(dy, weight, other)
    for parts in ((slice(0, 4), slice(4, 9)), [slice(i, i + 1) for i in range(9)]):
        assert torch.equal(whole, torch.cat([data_gradient_and(dy[part], weight, other[part]) for part in parts]))
    monkeypatch.setattr(operators, "_MANY_ROWS", 1)  # the tiles that larger batches take
    assert torch.equal(whole, data_gradient_and(dy, weight, other))
    assert torch.equal(whole[3:4], data_gradient_and(dy[3:4], weight, other[3:4]))


# --- with autograd ---------------------------------------------------------------------------------------------------

USES = {
    "both": lambda y, x: weighed(y) + weighed(3 * x),
    "the convolution alone": lambda y, x: weighed(y),
    "the input alone": lambda y, x: weighed(x),
    "the input thrice": lambda y, x: weighed(y) + weighed(x) + weighed(2 * x),
    "a sum, whose gradient is expanded": lambda y, x: y.sum() + x.sum(),
}


def weighed(t: Tensor) -> Tensor:
    """A loss whose gradient is the same, to the bit, for every dtype of t."""
    return (t * torch.linspace(-1, 1, t.numel()).bfloat16().to(t).view_as(t)).sum()


FROZEN = {"nothing": (), "the weight": (1,), "the input": (0,), "the parameters": (1, 2)}


@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("use", USES)
def test_the_gradients_are_those_of_plain_operations(device, use, frozen):
    made = tensors((2, 6, 5, 3, 4), torch.bfloat16, device)[:3]
    results = []
    for function, dtype, place in (
        (pointwise_conv_and_input, torch.bfloat16, device),
        (reference, torch.float64, "cpu"),
    ):
        leaves = [t.detach().to(place, dtype).requires_grad_(i not in FROZEN[frozen]) for i, t in enumerate(made)]
        loss = USES[use](*function(*leaves))
        if loss.requires_grad:
            loss.backward()
        results.append([leaf.grad for leaf in leaves])
    for actual, expected in zip(*results, strict=True):
        assert (actual is None) == (expected is None)
        if actual is not None:
            assert_close_to_max(actual, expected, tol=tolerance("gradient", torch.bfloat16))


def test_the_input_comes_back_in_its_own_memory_and_may_not_be_written_to(device):
    x, weight, *_ = tensors((2, 6, 5, 3, 4), torch.bfloat16, device)
    x.requires_grad_()
    source = x * 1
    y, again = pointwise_conv_and_input(source, weight.requires_grad_())
    assert again.data_ptr() == source.data_ptr()
    assert again.stride() == source.stride()
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        again.add_(1)
    with torch.no_grad():
        source.add_(1)
    assert again._version == source._version == 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("count", [2, 3], ids=["without a bias", "with a bias"])
def test_it_can_be_differentiated_twice(count):
    inputs = [t.double().requires_grad_() for t in tensors((2, 3, 4, 2, 1), torch.float32)[:count]]
    assert gradcheck(pointwise_conv_and_input, inputs)
    assert gradgradcheck(pointwise_conv_and_input, inputs)


def test_second_derivatives_in_half_precision_are_those_of_plain_operations(device):
    made = tensors((2, 6, 5, 3, 4), torch.bfloat16, device)[:3]
    results = []
    for function in (pointwise_conv_and_input, reference):
        leaves = [t.clone().requires_grad_() for t in made]
        y, again = function(*leaves)
        first = torch.autograd.grad(weighed(y * y) + weighed(again * again), leaves, create_graph=True)
        sum(map(weighed, first)).backward()  # type: ignore[union-attr]
        results.append([leaf.grad for leaf in leaves])
    for actual, expected in zip(*results, strict=True):
        assert_close_to_max(actual, expected, tol=tolerance("gradient", torch.bfloat16))


def test_many_gradients_at_once_are_those_one_after_the_other(device):
    x, weight, *_ = tensors((2, 6, 5, 3, 4), torch.bfloat16, device)
    outputs = pointwise_conv_and_input(x.requires_grad_(), weight)
    grads = [torch.randn(3, *y.shape).to(y) for y in outputs]
    (together,) = torch.autograd.grad(outputs, x, grads, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(outputs, x, [g[i] for g in grads], retain_graph=True)[0] for i in range(3)]
    assert_close_to_max(together, torch.stack(each), tol=tolerance("gradient", torch.bfloat16))


def test_an_empty_batch_has_empty_gradients(device):
    x, weight, *_ = tensors((2, 6, 5, 3, 4), torch.bfloat16, device)
    x = x[:0].clone().requires_grad_()
    y, again = pointwise_conv_and_input(x, weight.requires_grad_())
    (y.sum() + again.sum()).backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
    assert not weight.grad.any()


def test_other_kernels_are_refused():
    with pytest.raises(ValueError, match=r"K×C×1×1 weight is needed, got one of shape \(4, 8, 3, 3\)"):
        pointwise_conv_and_input(torch.ones(1, 8, 4, 4), torch.ones(4, 8, 3, 3))


def test_float32_is_left_to_torch(device):
    assert kernel_runs(torch.ones(1, dtype=torch.float16, device=device))
    assert not kernel_runs(torch.ones(1, device=device))


# --- on a device only ------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("samples", [1, 64])
def test_a_large_layer_agrees_and_its_samples_stand_alone(samples):
    _, weight, _, dy, other = tensors((samples, 256, 64, 56, 56), torch.bfloat16, "cuda")
    whole = data_gradient_and(dy, weight, other)
    wide = torch.einsum("nkhw,kc->nchw", dy.double(), weight.double().flatten(1)) + other
    assert_close_to_max(whole, wide, tol=tolerance("output", torch.bfloat16))
    assert torch.equal(whole[-1:], data_gradient_and(dy[-1:], weight, other[-1:]))


@pytest.mark.gpu
def test_more_elements_than_32_bits_count():
    if torch.cuda.get_device_properties(0).total_memory < 24 * 2**30:
        pytest.skip("needs 14 GB of device memory")
    _, weight, _, dy, other = tensors((1, 2048, 16, 256, 256), torch.bfloat16)
    weight, dy, other = (t.cuda() for t in (weight, dy, other))
    many = [t.expand(17, -1, -1, -1).contiguous(memory_format=torch.channels_last) for t in (dy, other)]
    assert many[1].numel() > 2**31
    assert torch.equal(data_gradient_and(many[0], weight, many[1])[-1:], data_gradient_and(dy, weight, other))


@pytest.mark.gpu
def test_a_step_is_captured_in_a_cuda_graph():
    x, weight, _, *grads = tensors((4, 64, 32, 14, 14), torch.bfloat16, "cuda")
    x.requires_grad_()

    def step() -> Tensor:
        (dx,) = torch.autograd.grad(pointwise_conv_and_input(x, weight), x, grads)
        return dx

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        before = step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for grad in grads:
        grad.mul_(3)
    graph.replay()
    assert torch.equal(captured, step())
    assert not torch.equal(captured, before)
