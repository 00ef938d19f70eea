"""The flow of a model, learned in three ways, and what it says of its calls."""

import threading

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn

import micronorm as mn
from micronorm.convert.flow import Flow, one_element_per_channel, passes_scale
from micronorm.convert.plan import Plan
from micronorm.convert.trace import trace_flow
from micronorm.nn import BatchChannelNorm, WSConv2d, WSConvTranspose2d


def is_leaf(module: nn.Module) -> bool:
    return isinstance(module, nn.Conv2d | nn.BatchNorm2d)


def flow_of(model: nn.Module, example_inputs: object = None) -> Flow:
    return trace_flow(model, is_leaf, example_inputs=example_inputs)


class Branching(nn.Module):
    """A shared convolution, a residual sum, a size that is read, and a head; `dynamic` keeps torch.fx out."""

    def __init__(self, *, dynamic: bool) -> None:
        super().__init__()
        self.dynamic = dynamic
        self.conv, self.norm, self.skip = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1)
        self.head = nn.Conv2d(3, 2, 1)
        self.seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.dynamic and x.sum() > 1e9:  # a branch on values
            return x
        self.seen = x
        y = self.skip(x)
        y = F.interpolate(y, size=y.shape[-2:])
        y = y + self.norm(self.conv(x))
        return self.head(F.relu(y))


@pytest.mark.parametrize("dynamic, method", [(False, "fx"), (True, "execution")])
def test_both_tracers_see_the_same_flow(dynamic, method):
    model = Branching(dynamic=dynamic).train()
    flow = flow_of(model)
    assert flow.method == method
    called = [node.name for node in flow.nodes if node.module is not None]
    assert called == ["skip", "conv", "norm", "head"]
    (norm,) = flow.calls[model.norm]
    source = flow.sole_source(norm)
    assert source is not None
    assert source.module is model.conv
    (skip,) = flow.calls[model.skip]
    assert [node.name for node in flow.downstream(skip, passes_scale)] == ["head"]


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_trace_leaves_the_model_as_it_was(dynamic):
    model = Branching(dynamic=dynamic).train()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    flow_of(model)
    assert torch.equal(torch.rand(1), expected)
    assert "seen" in vars(model)
    assert vars(model)["seen"] is None
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_what_cannot_run_is_paired_by_order_and_says_why():
    class Broken(nn.Sequential):
        def forward(self, input: Tensor) -> Tensor:
            raise RuntimeError("needs a lidar")

    model = Broken(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1))
    flow = flow_of(model)
    assert flow.method == "order"
    assert "needs a lidar" in flow.detail
    assert "example_inputs" in flow.detail
    assert flow.nodes == []
    plan = mn.plan(model)
    assert plan.pairing == "order"
    assert [decision.becomes is not None for decision in plan.decisions] == [True, True, False]


def test_inputs_that_do_not_fit_are_an_error_not_a_fallback():
    with pytest.raises(ValueError, match="does not run on example_inputs"):
        flow_of(Branching(dynamic=True), torch.zeros(1, 5, 8, 8))


@pytest.mark.parametrize(
    "example_inputs", [torch.ones(1, 3, 8, 8), (torch.ones(1, 3, 8, 8),), {"x": torch.ones(1, 3, 8, 8)}]
)
def test_example_inputs_are_an_argument_a_tuple_or_keywords(example_inputs):
    flow = flow_of(Branching(dynamic=True), example_inputs)
    assert (flow.method, flow.detail.split(";")[0]) == ("execution", "run on the given inputs")


def test_an_output_used_twice_is_nobodys_sole_source():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            return self.norm(y) + y

    model = Twice()
    flow = flow_of(model)
    assert flow.sole_source(flow.calls[model.norm][0]) is None


def test_in_place_operations_stand_between_a_convolution_and_its_norm():
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            y += 1
            y[:, :1] = 0  # torch.fx refuses item assignment; only a run sees it
            return self.norm(y)

    model = InPlace()
    flow = flow_of(model)
    assert flow.method == "execution"
    source = flow.sole_source(flow.calls[model.norm][0])
    assert source is not None
    assert source.name == "__setitem__"


POOLED = {
    "adaptive pooling": nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)),
    "adaptive pooling to a pair": nn.Sequential(nn.Conv2d(3, 3, 1), nn.AdaptiveAvgPool2d((1, 1)), nn.BatchNorm2d(3)),
    "flattened rows": nn.Sequential(nn.Conv2d(3, 3, 224), nn.Flatten(), nn.BatchNorm1d(3)),
}
NOT_POOLED = {
    "a convolution": nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3)),
    "a pooling to 2×2": nn.Sequential(nn.Conv2d(3, 3, 1), nn.AdaptiveAvgPool2d(2), nn.BatchNorm2d(3)),
    "a map spread again": nn.Sequential(
        nn.Conv2d(3, 3, 1), nn.AdaptiveAvgPool2d(1), nn.Upsample(scale_factor=4), nn.BatchNorm2d(3)
    ),
    "an unknown shape": nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(3)),
}


@pytest.mark.parametrize("name", [*POOLED, *NOT_POOLED])
def test_one_element_per_channel_is_seen_behind_a_global_pooling_and_nowhere_else(name):
    model = (POOLED | NOT_POOLED)[name]
    flow = flow_of(model)
    (norm,) = flow.calls[model[-1]]
    assert one_element_per_channel(norm.inputs[0], flat=False) == (name in POOLED)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_shapes_are_learned_from_a_guess_as_far_as_it_runs_and_nothing_is_computed(dims):
    class Fixed(nn.Module):
        """A network for inputs of four positions."""

        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = getattr(nn, f"Conv{dims}d")(3, 5, 1), getattr(nn, f"BatchNorm{dims}d")(5)
            self.end, self.after = nn.Linear(5 * 4**dims, 2), nn.BatchNorm1d(2)

        def forward(self, x: Tensor) -> Tensor:
            assert not isinstance(x, Tensor) or x.is_meta
            return self.after(self.end(self.norm(self.conv(x)).flatten(1)))

    model = Fixed()
    flow = flow_of(model)
    assert flow.method == "fx"
    assert len(flow.calls[model.norm][0].shape or ()) == dims + 2
    assert flow.calls[model.after][0].shape is None
    assert not model.conv.weight.is_meta


def test_shapes_behind_our_layers_are_learned_without_their_equations(monkeypatch):
    def compute(*_):
        raise AssertionError("shapes follow without it")

    layers = WSConv2d(3, 4, 3, padding=1), BatchChannelNorm(4, 2), WSConvTranspose2d(4, 5, 2, stride=2)
    model = nn.Sequential(*layers)
    for kind, name in zip(map(type, layers), ("effective_weight", "forward", "effective_weight"), strict=True):
        monkeypatch.setattr(kind, name, compute)
    flow = trace_flow(model, lambda module: module in layers)
    assert flow.method == "fx"
    shapes = [flow.calls[layer][0].shape for layer in layers]
    side = (shapes[0] or (0,))[-1]
    assert shapes == [(1, 4, side, side), (1, 4, side, side), (1, 5, 2 * side, 2 * side)]
    assert "forward" not in vars(layers[1])


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_a_network_that_halves_its_map_many_times_is_not_taken_for_one_with_a_pooling(dims):
    conv = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dims]
    norm = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[dims](8)
    halves = [conv(8, 8, 3, stride=2, padding=1) for _ in range(8)]
    flow = flow_of(nn.Sequential(conv(3, 8, 3, padding=1), *halves, norm))
    assert not one_element_per_channel(flow.calls[norm][0].inputs[0], flat=False)


def test_a_gate_of_one_element_does_not_make_the_gated_map_one():
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_norm, self.norm = nn.BatchNorm2d(3), nn.BatchNorm2d(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x * self.gate_norm(x.mean((2, 3), keepdim=True)).sigmoid())

    model = Gated()
    flow = flow_of(model, example_inputs=torch.zeros(1, 3, 4, 4))
    for norm, expected in ((model.gate_norm, True), (model.norm, False)):
        assert one_element_per_channel(flow.calls[norm][0].inputs[0], flat=False) is expected


# --- networks of timm and torchvision, each law by the smallest model -------------------------------------------------


@register_notrace_module
class Untraced(nn.Module):
    """What timm asks torch.fx not to look into, because its forward depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if x.numel() else x


class WithBlock(nn.Module):
    """A convolution, a block that torch.fx cannot trace, and a norm; with `size`, for that input size alone."""

    def __init__(self, size: int | None = None) -> None:
        super().__init__()
        self.stem, self.block, self.norm, self.size = nn.Conv2d(3, 4, 1), Untraced(), nn.BatchNorm2d(4), size

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        if self.size is not None:
            x = x.view(-1, 4, self.size, self.size)
        return self.norm(self.block(x))


class Chain(nn.Module):
    """Layers one after the other, then what `between` does, then a norm."""

    def __init__(self, layers: list[nn.Module], channels: int = 4) -> None:
        super().__init__()
        self.layers, self.norm = nn.Sequential(*layers), nn.BatchNorm2d(channels)
        self.gamma = nn.Parameter(torch.ones(channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.between(self.layers(x)))

    def between(self, x: Tensor) -> Tensor:
        return x * self.gamma


def test_a_block_that_timm_wants_untraced_is_looked_into_where_it_holds_layers():
    model = WithBlock()
    flow = flow_of(model)
    assert flow.method == "execution"
    [norm] = flow.calls[model.norm]
    assert flow.sole_source(norm).module is model.block.inner


def test_a_model_that_neither_traces_nor_runs_needs_inputs():
    model = WithBlock(size=17)
    flow = flow_of(model)
    assert (flow.method, flow.nodes) == ("order", [])
    assert "example_inputs" in flow.detail
    given = flow_of(model, example_inputs=torch.zeros(1, 3, 17, 17))
    assert model.block.inner in given.calls


@pytest.mark.parametrize("name", ["mobilevitv2_050", "tiny_vit_5m_224"])
def test_every_convolution_of_a_network_with_untraced_blocks_is_in_the_flow(name):
    with torch.device("meta"):
        model = timm.create_model(name)
    flow = flow_of(model)
    assert {m for m in model.modules() if isinstance(m, nn.Conv2d)} <= flow.calls.keys()


class Dropping(Chain):
    def between(self, x: Tensor) -> Tensor:
        keep = x.new_empty((x.shape[0], 1, 1, 1)).bernoulli_(0.5)
        return x * keep + torch.zeros_like(x)


class DroppingByValue(Dropping):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() == 0 else x


@pytest.mark.parametrize("kind, method", [(Dropping, "fx"), (DroppingByValue, "execution")])
def test_a_fresh_tensor_of_another_ones_shape_carries_none_of_its_signal(kind, method):
    model = kind([nn.Conv2d(3, 4, 1)])
    flow = flow_of(model)
    assert flow.method == method
    [convolution] = flow.calls[model.layers[0]]
    assert [node.name.strip("_") for node in flow.consumers[convolution]] == ["mul"]


def test_a_parameter_does_not_spread_what_was_pooled():
    model = Chain([nn.Conv2d(3, 4, 1), nn.AdaptiveAvgPool2d(1)])
    flow = flow_of(model)
    [source] = flow.calls[model.norm][0].inputs
    assert one_element_per_channel(source, flat=False)


@pytest.mark.parametrize("first, pooled", [(nn.AdaptiveAvgPool2d(1), True), (nn.Identity(), False)])
def test_a_network_may_be_deeper_than_the_stack(first, pooled):
    model = Chain([first, *(nn.Conv2d(4, 4, 1) for _ in range(1500))])
    [source] = flow_of(model).calls[model.norm][0].inputs
    assert one_element_per_channel(source, flat=False) is pooled


class Untraceable(nn.Module):
    def __init__(self, convolution: nn.Module, least: int) -> None:
        super().__init__()
        self.convolution, self.least = convolution, least

    def forward(self, x: Tensor) -> Tensor:
        if min(x.shape[-2:]) < self.least:
            raise ValueError("too small")
        return self.convolution(x)


def test_a_video_network_may_want_larger_frames():
    flow = flow_of(Untraceable(nn.Conv3d(3, 4, 3, stride=8), least=200))
    assert (flow.method, flow.detail.split(";")[0]) == ("execution", "run on a guessed input 1×3×16×224×224")


def test_a_guess_has_the_channels_of_the_first_convolution():
    model = Untraceable(nn.Conv2d(1, 4, 3), least=1)
    model.pretrained_cfg = {"input_size": (3, 32, 32)}  # type: ignore[assignment]
    flow = flow_of(model)
    assert (flow.method, flow.detail.split(";")[0]) == ("execution", "run on a guessed input 1×1×32×32")


# --- other threads ----------------------------------------------------------------------------------------------------


def test_a_model_runs_in_another_thread_while_one_is_planned():
    tracing, ran = threading.Event(), threading.Event()
    results: list[object] = []

    class Waits(nn.Sequential):
        def forward(self, input: Tensor) -> Tensor:
            tracing.set()
            ran.wait(30)
            return super().forward(input)

    def run():
        tracing.wait(30)
        try:
            results.append(nn.Sequential(nn.Conv2d(3, 4, 1), nn.GroupNorm(2, 4))(torch.zeros(1, 3, 2, 2)).shape)
        except BaseException as error:
            results.append(error)
        ran.set()

    thread = threading.Thread(target=run)
    thread.start()
    plan = mn.plan(Waits(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))
    thread.join()
    assert results == [(1, 4, 2, 2)]
    assert plan.pairing == "fx"


def test_plans_of_two_threads_leave_torch_as_it_was():
    first, second, over = threading.Event(), threading.Event(), threading.Event()
    before = nn.Module.__call__, nn.Module.__getattr__

    class First(nn.Sequential):
        def forward(self, input: Tensor) -> Tensor:
            first.set()
            second.wait(0.2)  # the other plan begins before this one ends, if it can
            return super().forward(input)

    class Second(nn.Sequential):
        def forward(self, input: Tensor) -> Tensor:
            second.set()
            over.wait(30)
            return super().forward(input)

    def plan_second():
        first.wait(30)
        plans.append(mn.plan(Second(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))))

    plans: list[Plan] = []
    thread = threading.Thread(target=plan_second)
    thread.start()
    plans.append(mn.plan(First(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))))
    over.set()
    thread.join()
    assert [plan.pairing for plan in plans] == ["fx", "fx"]
    assert (nn.Module.__call__, nn.Module.__getattr__) == before
