"""`conv_and_input`: where a convolution takes the other branch's gradient, and that it is simply called elsewhere."""

import copy

import pytest
import torch
from torch import Tensor, nn

from micronorm.nn import CWNConv2d, WNConv2d, WSConv2d
from micronorm.nn.branch import conv_and_input, is_pointwise
from micronorm.nn.passive_hook import PassiveHook
from micronorm.nn.per_step.shared_weights import SharedWeights
from micronorm.nn.weight import WSConv2dSame
from tests.devices import require_kernels
from tests.tolerances import assert_close_to_max, tolerance

HALF = torch.bfloat16


@pytest.fixture(autouse=True)
def interpreter():
    require_kernels("cpu")


def layer(kind=WSConv2d, *, backend="triton", dtype=HALF, **options):
    conv = kind(8, 4, 1, **options).to(dtype)
    conv.backend = backend  # for those without a choice, too: the interpreter is for who asks for it
    return conv


def image(dtype=HALF, **options):
    return torch.randn(2, 8, 3, 5).to(dtype, memory_format=torch.channels_last).requires_grad_(**options)


def joins(conv, x) -> bool:
    y, again = conv_and_input(conv, x)
    assert torch.equal(again, x)
    assert torch.equal(y, conv(x))
    assert (again is x) == ("ConvAndInput" not in str(y.grad_fn))
    return again is not x


@pytest.mark.parametrize("kind", [nn.Conv2d, WSConv2d, WNConv2d, CWNConv2d, WSConv2dSame])
@pytest.mark.parametrize("bias", [True, False])
def test_half_precision_in_channels_last_is_joined(kind, bias):
    assert joins(layer(kind, bias=bias), image())
    assert joins(layer(kind, bias=bias, dtype=torch.float16), image(torch.float16))


@pytest.mark.parametrize("padding", [0, "valid", "same"])
def test_no_padding_has_several_names(padding):
    assert joins(layer(padding=padding), image())


def test_autocast_decides_for_a_float32_layer():
    conv, x = layer(dtype=torch.float32), image()
    with torch.autocast("cpu", dtype=HALF):
        assert joins(conv, x)
        assert joins(layer(nn.Conv2d, dtype=torch.float32), x)
        assert not joins(conv, image(torch.float32))
    with torch.autocast("cpu", dtype=torch.float16):
        assert not joins(conv, x)


def test_what_torch_refuses_stays_refused():
    conv, x = layer(nn.Conv2d, dtype=torch.float64), image()
    with torch.autocast("cpu", dtype=HALF):  # which casts no float64
        for call in (conv, lambda t: conv_and_input(conv, t)):
            with pytest.raises(RuntimeError):
                call(x)


def test_a_layout_is_judged_without_the_batch():
    whole = torch.randn(4, 16, 1, 1).to(HALF, memory_format=torch.channels_last)
    conv = layer()
    assert {joins(conv, whole[:n, :8].requires_grad_()) for n in (1, 2, 4)} == {False}


class Own(WSConv2d):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def watched(hook) -> nn.Module:
    conv = layer()
    getattr(conv, hook)(lambda *args: None)
    return conv


def onlooked() -> nn.Module:
    conv = layer()

    conv.register_forward_hook(PassiveHook(lambda *args: None))
    return conv


def bound() -> nn.Module:
    conv = layer()
    conv.forward = lambda x: 3 * type(conv).forward(conv, x)  # type: ignore[method-assign]
    return conv


CALLED = {
    "not asked for on a CPU": lambda: (layer(backend="auto"), image()),
    "reference": lambda: (layer(backend="reference"), image()),
    "float32": lambda: (layer(dtype=torch.float32), image(torch.float32)),
    "no gradient": lambda: (layer(), image(requires_grad=False)),
    "contiguous": lambda: (layer(), image().detach().contiguous().requires_grad_()),
    "one sample without its axis": lambda: (layer(), image()[0]),
    "empty": lambda: (layer(), image()[:0]),
    "3×3": lambda: (WSConv2d(8, 4, 3, padding=1).to(HALF), image()),
    "strided": lambda: (layer(stride=2), image()),
    "padded": lambda: (layer(padding=1), image()),
    "grouped": lambda: (layer(groups=2), image()),
    "a subclass": lambda: (layer(Own), image()),
    "a forward of its own": lambda: (bound(), image()),
    "a forward hook": lambda: (watched("register_forward_hook"), image()),
    "a hook before": lambda: (watched("register_forward_pre_hook"), image()),
    "a gradient hook": lambda: (watched("register_full_backward_hook"), image()),
    "an onlooker": lambda: (onlooked(), image()),
}


@pytest.mark.parametrize("name", CALLED)
def test_all_others_are_called(name):
    conv, x = CALLED[name]()
    assert not joins(conv, x)


def test_without_grad_mode_and_under_transforms_the_layer_is_called(monkeypatch):
    conv, x = layer(), image()
    with monkeypatch.context() as context:
        context.setattr(torch.jit, "is_tracing", lambda: True)
        assert not joins(conv, x)
    with torch.no_grad():
        assert not joins(conv, x)
    # Asked of what runs on this CPU, and of a layer whose weight torch.func can go through.
    conv = layer(nn.Conv2d)
    assert joins(conv, x)
    seen = []
    torch.func.grad(lambda t: (seen.append(joins(conv, t)), conv_and_input(conv, t)[0].sum())[1])(x.detach())
    assert seen == [False]


def gradients(conv, x, *, joined: bool):
    conv, x = copy.deepcopy(conv), x.detach().requires_grad_()
    y, again = conv_and_input(conv, x) if joined else (conv(x), x)
    y.backward(torch.linspace(-1, 1, y.numel()).to(y).view_as(y), retain_graph=True)
    (y.square().sum() + (3 * again).square().sum()).backward()
    return [x.grad, *(p.grad for p in conv.parameters())]


@pytest.mark.parametrize("kind", [nn.Conv2d, WSConv2d, WNConv2d])
@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_are_those_of_the_layer_called(kind, autocast):
    conv, x = layer(kind, dtype=torch.float32 if autocast else HALF), image()
    with torch.autocast("cpu", dtype=HALF, enabled=autocast):
        results = [gradients(conv, x, joined=joined) for joined in (True, False)]
    for actual, expected in zip(*results, strict=True):
        assert actual.dtype == expected.dtype
        assert_close_to_max(actual, expected, tol=tolerance("gradient", HALF))


def test_shared_weights_are_used_and_get_their_gradients():
    conv, x = layer(), image()
    expected = gradients(conv, x, joined=True)
    weights = SharedWeights(conv)
    with weights.shared():
        y, again = conv_and_input(conv, x)
        assert "ConvAndInput" in str(y.grad_fn)
        y.backward(torch.linspace(-1, 1, y.numel()).to(y).view_as(y), retain_graph=True)
        (y.square().sum() + (3 * again).square().sum()).backward()
    for actual, wanted in zip([x.grad, *(p.grad for p in conv.parameters())], expected, strict=True):
        assert_close_to_max(actual, wanted, tol=tolerance("gradient", HALF))


def test_those_who_look_at_weights_see_them_once():
    conv, seen = layer(), []
    conv.weight_observers = (PassiveHook(seen.append),)
    conv_and_input(conv, image())
    assert len(seen) == 1


def test_it_compiles_as_one_graph():
    conv, x = layer(nn.Conv2d), image()
    compiled = torch.compile(conv_and_input, fullgraph=True, backend="eager")
    y, again = compiled(conv, x)
    assert torch.equal(y, conv(x))
    assert torch.equal(again, x)
    assert "ConvAndInput" not in str(y.grad_fn)


def test_what_is_pointwise():
    assert is_pointwise(nn.Conv2d(8, 4, 1, dilation=2))
    assert not any(map(is_pointwise, [nn.Conv2d(8, 4, (1, 3)), nn.Conv2d(8, 4, 1, stride=(1, 2))]))
