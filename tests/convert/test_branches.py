"""Convolutions that hand on their input: which do, that nothing else changes, and what it is worth to the backward."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import micronorm as mn
from micronorm.convert.flow import trace_flow
from micronorm.nn import branch
from micronorm.nn.per_step.shared_weights import SharedWeights
from micronorm.ops.pointwise import operators
from tests.convert.fused import assert_same_bits, unfused
from tests.devices import require_kernels
from tests.tolerances import assert_close_to_max, tolerance

HALF = torch.bfloat16
REMARK = "adds the other branch's gradient in its own product"
TOTAL = "convolutions that add another branch's gradient"
IMAGE = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(2))


class Block(nn.Module):
    """Two 1×1 convolutions of four channels with norms; a subclass says what it does with them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.inner = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))


class Shortcut(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.gelu(self.norm(self.a(x)))) + x


class Chain(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.a(x) + self.b(x)) + x


class Modules(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.a(x))
        return self.inner(x) + self.b(y) + y


class Before(Block):
    """Others take the input first: there is nobody to hand it on to."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x) + x
        return self.norm(self.a(x)) + y


class Returned(Block):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.norm(self.a(x)), x


class Asked(Block):
    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(self.norm(self.a(x)), x.shape[2:]) + x.size(1)


class Written(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 1
        return self.norm(self.a(y).detach()) + y.mul_(2)


class Twice(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.a(x)) + x
        return self.a(y) * 2


class Activated(Block):
    """A layer that may write to what it is given: only an addition and a convolution are known not to."""

    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = x * 1
        return self.norm(self.a(y).detach()) + self.relu(y)


class Added(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 1
        z = self.norm(self.a(y).detach())
        y += z
        return y * 2


class Heads(Block):
    """Two results, which may be differentiated one after the other."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.norm(self.a(x)), self.inner(x)


class Sized(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.a(x)) * x.dim() + x.detach() * 2


class Kept(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.a(x)) + x
        x.retain_grad()
        return y


FOUND: dict[type[Block], set[str]] = {
    Shortcut: {"a"},
    Chain: {"a", "b"},
    Modules: {"a", "b"},
    Before: set(),
    Returned: set(),
    Asked: set(),
    Written: set(),
    Activated: set(),
    Added: set(),
    Heads: set(),
    Sized: set(),
    Kept: set(),
    Twice: {"a"},
}


@pytest.mark.parametrize("kind", FOUND, ids=lambda kind: kind.__name__)
def test_a_convolution_hands_its_input_to_those_who_take_it_later(kind):
    plan = mn.plan(kind())
    assert {d.name for d in plan.decisions if d.joins} == FOUND[kind]
    assert all(d.joins == d.reason.endswith(REMARK) for d in plan.decisions)
    assert plan.totals[TOTAL] == len(FOUND[kind])
    assert (TOTAL in plan.summary()) == bool(FOUND[kind])
    assert_same_bits(plan.apply(), IMAGE)


def test_what_a_module_returns_stays_the_tensor_it_was():
    class Both(Block):
        def forward(self, x: Tensor) -> Any:
            y = x * 1
            return self.norm(self.a(y)) + y, y

    model = mn.convert(Both())
    assert "forward" in vars(model)
    assert_same_bits(model, IMAGE)


@pytest.mark.parametrize(
    "change",
    [{"kernel_size": 3, "padding": 1}, {"groups": 2}, {"padding": 1, "bias": False}, {"stride": 1, "padding": "same"}],
    ids=str,
)
def test_other_convolutions_do_not(change):
    model = Shortcut()
    model.a = nn.Conv2d(4, 4, **{"kernel_size": 1, **change})
    plan = mn.plan(model, example_inputs=None)
    assert plan.totals[TOTAL] == ("same" in change.values())


def test_the_filter_and_the_switch_are_obeyed():
    for options in ({"fuse": False}, {"filter": lambda module, name: name != "a"}):
        plan = mn.plan(Shortcut(), **options)
        assert plan.totals[TOTAL] == 0
        assert not any("forward" in vars(module) for module in plan.apply().modules())


def test_branches_alone_are_nothing_to_convert():
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Conv2d(4, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + x

    with pytest.raises(ValueError, match="nothing to convert"):
        mn.plan(Bare())


def test_every_block_of_a_resnet_50_does():
    plan = mn.plan(torchvision.models.resnet50())
    names = [d.name for d in plan.decisions if d.joins]
    assert names == [f"layer{i + 1}.{j}.conv1" for i, depth in enumerate((3, 4, 6, 3)) for j in range(depth)]
    assert "49 norms fused, 16 convolutions that add another branch's gradient, " in plan.summary()
    assert {row["name"] for row in plan.to_dict()["decisions"] if row["joins"]} == set(names)


# --- in use ----------------------------------------------------------------------------------------------------------


def bottlenecks() -> Any:
    """A small network of torchvision's bottlenecks, converted, its entrances joined; one with a 1×1 shortcut."""
    torch.manual_seed(0)
    kind = torchvision.models.resnet.Bottleneck
    shortcut = nn.Sequential(nn.Conv2d(6, 8, 1, bias=False), nn.BatchNorm2d(8))
    model = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), kind(6, 2, downsample=shortcut), kind(8, 2))
    plan = mn.plan(model)
    assert plan.totals[TOTAL] == 2
    return plan.apply()


def asked(model: Any, backend: str = "triton") -> Any:
    for module in model.modules():
        if isinstance(module, mn.nn.WSConv2d):
            module.backend = backend
    return model


def images(count: int = 2) -> Tensor:
    return torch.randn(count, 3, 5, 7).to(memory_format=torch.channels_last)


def step(model: Any, x: Tensor, dtype: torch.dtype | None = HALF) -> list[Tensor]:
    """The gradients of x and of all parameters."""
    x = x.detach().requires_grad_()
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        y = model(x)
    (y.float() * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    assert x.grad is not None
    return [x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the gradients that the kernel computed."""
    require_kernels("cpu")
    seen: list[tuple[int, ...]] = []
    original = operators.data_gradient_and

    def counted(dy: Tensor, weight: Tensor, other: Tensor) -> Tensor:
        seen.append(tuple(other.shape))
        return original(dy, weight, other)

    monkeypatch.setattr(operators, "data_gradient_and", counted)
    return seen


def assert_close(results: list[list[Tensor]]) -> None:
    """Each against its own largest element, but no less than a twentieth of them all: shifts have what cancels."""
    least = max(float(expected.abs().max()) for expected in results[1]) / 20
    for actual, expected in zip(*results, strict=True):
        scale = max(float(expected.abs().max()), least)
        assert_close_to_max(actual, expected, tol=tolerance("gradient", HALF), scale=scale)


def test_the_gradients_of_a_network_are_those_of_the_forwards_of_its_classes(launches):
    model, x = asked(bottlenecks().to(memory_format=torch.channels_last)), images()
    plain = unfused(model)
    results = [step(model, x)]
    assert launches == [(2, 8, 5, 7), (2, 6, 5, 7)]
    assert_close([results[0], step(plain, x)])
    assert len(launches) == 2


def test_in_float32_the_bits_are_the_same(launches):
    model, x = asked(bottlenecks().to(memory_format=torch.channels_last)), images()
    for actual, expected in zip(*[step(one, x, dtype=None) for one in (unfused(model), model)], strict=True):
        assert torch.equal(actual, expected)
    assert not launches


def swap(model: Any) -> None:
    model[1].conv1 = nn.Conv2d(6, 2, 1, bias=False)


CHANGES: dict[str, tuple[Callable[[Any], Any], int]] = {
    "another layer": (swap, 1),
    "a hook": (lambda model: model[1].conv1.register_forward_hook(lambda module, args, y: 2 * y), 1),
    "eval mode": (lambda model: model.eval(), 2),
    "a frozen weight": (lambda model: model[1].conv1.weight.requires_grad_(False), 2),
    "a frozen stem": (lambda model: model[0].requires_grad_(False), 2),
    "the reference": (lambda model: asked(model, "reference"), 0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_after_conversion_is_obeyed(name, launches):
    change, expected = CHANGES[name]
    model = asked(bottlenecks().to(memory_format=torch.channels_last))
    plain, x = unfused(model), images()
    for one in (model, plain):
        torch.manual_seed(1)
        change(one)
    results = [step(model, x)]
    assert len(launches) == expected
    assert_close([*results, step(plain, x)])


def test_copies_join_and_pickles_are_plain(launches):
    model, x = asked(bottlenecks().to(memory_format=torch.channels_last)), images()
    expected = step(copy.deepcopy(model), x)
    assert len(launches) == 2
    loaded = pickle.loads(pickle.dumps(model))
    assert_close([step(loaded, x), expected])
    assert len(launches) == 2
    assert mn.plan(loaded).totals[TOTAL] == 2
    loaded.zero_grad()
    assert_close([step(mn.convert(loaded), x), expected])
    assert len(launches) == 4


def test_no_activation_more_is_kept_under_recompute(launches):
    model, x = asked(bottlenecks().to(memory_format=torch.channels_last)), images()
    results, reports = [], []
    for joins in (True, False):
        one = copy.deepcopy(model)
        with pytest.MonkeyPatch.context() as context, mn.recompute(one) as handle:
            if not joins:
                context.setattr(branch, "_joins", lambda conv, x: False)
            results.append(step(one, x))
            reports.append(handle.report())
    assert_close(results)
    assert reports[0] == reports[1]
    assert reports[0].tensors > 0
    assert len(launches) == 2


def test_shared_weights_and_checkpoints_are_right(launches):
    model, x = asked(bottlenecks().to(memory_format=torch.channels_last)), images()
    expected = step(copy.deepcopy(model), x)
    shared = copy.deepcopy(model)
    with SharedWeights(shared).shared(dtype=HALF):
        found = step(shared, x)[0]
    assert_close([[found, *(p.grad for p in shared.parameters() if p.grad is not None)], expected])
    model.zero_grad()
    found = step(_Checkpointed(model), x)
    for actual, wanted in zip(found, expected, strict=True):
        assert torch.equal(actual, wanted)
    assert len(launches) == 6


class _Checkpointed(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.model, x, use_reentrant=False)


# --- other tools -----------------------------------------------------------------------------------------------------


def test_a_joined_network_compiles_as_one_graph_and_exports():
    model = mn.convert(Chain()).eval()
    expected = unfused(model)(IMAGE)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert_close_to_max(compiled(IMAGE), expected, tol=tolerance("output", torch.float32))
    program = torch.export.export(model, (IMAGE,), dynamic_shapes=({0: torch.export.Dim("n", min=1, max=16)},))
    assert_close_to_max(program.module()(IMAGE), expected, tol=tolerance("output", torch.float32))
    leaves = (nn.Conv2d, mn.nn.BatchChannelNorm)
    flow = trace_flow(model, lambda m: isinstance(m, leaves), pairs=lambda a, b: False)
    assert flow.method == "fx"
    assert [node.name for node in flow.nodes if node.module is not None] == ["a", "b", "norm"]


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [True, False])
def test_a_bottleneck_network_trains_as_before_on_cuda(autocast, monkeypatch):
    model = bottlenecks().cuda().to(None if autocast else HALF, memory_format=torch.channels_last)
    seen = []
    original = operators.data_gradient_and
    monkeypatch.setattr(operators, "data_gradient_and", lambda *args: (seen.append(1), original(*args))[1])
    results = []
    for joins in (True, False):  # the same norms in both: those without what follows them round once more
        one = copy.deepcopy(model)
        torch.manual_seed(1)
        x = images().cuda().to(torch.float32 if autocast else HALF).requires_grad_()
        with pytest.MonkeyPatch.context() as context, torch.autocast("cuda", dtype=HALF, enabled=autocast):
            if not joins:
                context.setattr(branch, "_joins", lambda conv, x: False)
            y = one(x)
        (y.float() * torch.linspace(-1, 1, y.numel(), device="cuda").view_as(y)).sum().backward()
        results.append([x.grad, *(p.grad for p in one.parameters() if p.grad is not None)])
    assert len(seen) == 2
    assert_close(results)
