"""A fused model in use: whatever is done to it, it computes what the forwards of its classes compute."""

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

import micronorm as mn
from micronorm.convert.flow import trace_flow
from micronorm.convert.surgery import restore_forwards
from tests.convert.fused import calls, converted, unfused
from tests.convert.test_fusion import IMAGE, Block, Residual
from tests.tolerances import assert_close_to_max, tolerance


class Flagged(Block):
    """Looks up much: a flag, a function, a method, children that may be missing or the same."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.act, self.names = 2.0, torch.tanh, ["a"]
        self.relu = self.relu2 = nn.ReLU()  # not in place: hooks want none of that
        self.extra = None
        self.shift = nn.Parameter(torch.ones(1))

    def tail(self, x: Tensor) -> Tensor:
        return self.act(x) * self.scale

    def forward(self, x: Tensor, *, twice: bool = False) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu2(self.bn2(self.conv2(y)) + x)
        if self.flag or "b" in self.names:
            y = y + 1
        if self.extra is not None:
            y = self.extra(y)
        if self.shift is not None:
            y = y + self.shift
        return self.tail(y) * (2 if twice else 1)


def block() -> Any:
    model, said = converted(Flagged)
    assert all(text.startswith("with ") for text in said.values())
    assert len(calls(model, IMAGE)[1]) == 3
    return model


def small(**options: Any) -> Any:
    return torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=4, **options)


def set_to(name: str, value: Any) -> Callable[[Any], None]:
    return lambda model: setattr(model, name, value)


def hook_on(name: str) -> Callable[[Any], None]:
    return lambda model: getattr(model, name).register_forward_hook(lambda module, args, output: output * 3)


def drop_child(model: Any) -> None:
    del model.relu
    model.relu = F.softplus


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a flag": set_to("flag", True),
    "a number": set_to("scale", 3.0),
    "a tensor in a number's place": set_to("scale", torch.tensor([2.0] * 5 + [3.0])),
    "a function": set_to("act", torch.sigmoid),
    "a list in place": lambda model: model.names.append("b"),
    "a method on the instance": set_to("tail", lambda x: x),
    "a child that was missing": set_to("extra", nn.Sigmoid()),
    "a parameter that goes": set_to("shift", None),
    "one of two names of a module": set_to("relu2", nn.Sigmoid()),
    "another activation": set_to("relu", nn.GELU()),
    "another norm": set_to("bn1", nn.GroupNorm(2, 4)),
    "a subclass of the norm": set_to("bn1", mn.nn.BatchChannelNormAct(4, 2, act_layer=nn.Tanh)),
    "a norm with its own activation": set_to("bn1", mn.nn.BatchChannelNorm(4, 2, activation="silu")),
    "a child that becomes a function": drop_child,
    "a hook on the activation": hook_on("relu"),
    "a hook on a norm": hook_on("bn2"),
    "a gradient hook": lambda model: model.relu.register_full_backward_hook(lambda m, i, o: (i[0] * 2,)),
    "another forward of the class": lambda model: setattr(model, "__class__", type("Other", (Other,), {})),
}


class Other(Flagged):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.bn1(x)


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_after_conversion_is_obeyed(name):
    model = block()
    plain = unfused(model)
    before = model(IMAGE)
    results = []
    for one in (model, plain):
        torch.manual_seed(0)
        CHANGES[name](one)
        x = IMAGE.clone().requires_grad_()
        y = one(x)
        y.square().sum().backward()
        results.append((y, x.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert name == "a gradient hook" or not torch.equal(results[0][0], before)


def test_a_removed_hook_lets_the_norm_fuse_again():
    model = block()
    handle = model.relu.register_forward_hook(lambda module, args, output: None)
    assert calls(model, IMAGE) == [{}, {}]
    handle.remove()
    assert calls(model, IMAGE)[0]["activation"] == "relu"
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: None)
    try:
        assert calls(model, IMAGE) == [{}, {}]
    finally:
        handle.remove()


def test_what_only_one_mode_looks_up_is_obeyed_too():
    class Modal(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = self.relu(self.bn1(self.conv1(x)))
            return y * 2 if not self.training and self.flag else y

    model, said = converted(Modal)
    assert said["bn1"] == "with the ReLU after it"
    before = model.eval()(IMAGE)
    model.flag = True
    assert torch.equal(model(IMAGE), 2 * before)


def test_of_two_equal_blocks_each_has_its_own_say():
    first, second = Residual(), Residual()
    second.forward = lambda x: x + 1  # type: ignore[method-assign]
    third = Residual()
    third.relu = nn.GELU()  # type: ignore[assignment]
    model, said = converted(lambda: nn.ModuleList([first, second, third]), example_inputs=None)
    assert said["0.bn1"] == "with the ReLU after it"
    assert said["1.bn1"] == "Residual has a forward of its own on the instance"
    assert said["2.bn1"] == "it is followed by GELU"
    for block in model:
        assert torch.equal(block(IMAGE), (block if block is model[1] else unfused(block))(IMAGE))
    assert torch.equal(model[1](IMAGE), IMAGE + 1)


def test_layers_added_to_a_row_are_called():
    model, _ = converted(lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU()))
    model.append(nn.Sigmoid())
    assert torch.equal(model(IMAGE), unfused(model)(IMAGE))
    assert model(IMAGE).max() <= 1 < unfused(model)[:3](IMAGE).max()


def test_other_arguments_go_to_the_forward_of_the_class():
    model = block()
    assert torch.equal(model(x=IMAGE), model(IMAGE))
    assert torch.equal(model(IMAGE, twice=True), 2 * model(IMAGE))
    assert str(inspect.signature(model.forward)) == str(inspect.signature(unfused(model).forward))
    with pytest.raises(TypeError, match="unexpected keyword argument 'thrice'"):
        model(IMAGE, thrice=True)


class Adds(nn.Module):
    """An addition of whatever it is given, in place or not."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.conv, self.norm, self.in_place = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), in_place

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        y = self.norm(self.conv(x))
        if self.in_place:
            y += other
        else:
            y = other + y
        return F.relu(y)


OTHERS = {
    "one of its kind": torch.randn(2, 4, 6, 6),
    "a row": torch.randn(6),
    "one per channel": torch.randn(1, 4, 1, 1),
    "wider": torch.randn(2, 4, 6, 6, dtype=torch.float64),
    "integers": torch.arange(6),
}


@pytest.mark.parametrize("in_place", [False, True], ids=["sum", "in place"])
@pytest.mark.parametrize("name", OTHERS)
def test_an_addition_broadcasts_and_promotes_as_it_did(name, in_place):
    model, said = converted(lambda: Adds(in_place))
    assert said == {"norm": "with the add and the ReLU after it"}
    expected = unfused(model)(IMAGE, OTHERS[name])
    actual = model(IMAGE, OTHERS[name])
    assert torch.equal(actual, expected)
    assert actual.dtype == expected.dtype == (torch.float64 if name == "wider" and not in_place else torch.float32)
    assert ("residual" in calls(model, IMAGE, OTHERS[name])[0]) == (name == "one of its kind")


# --- copies and files ------------------------------------------------------------------------------------------------


def test_a_deep_copy_is_fused_and_has_layers_of_its_own():
    model = block()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.bn2.group_weight.fill_(7)
    assert len(calls(twin, IMAGE)[1]) == 3
    assert torch.equal(twin(IMAGE), unfused(twin)(IMAGE))
    assert not torch.equal(twin(IMAGE), model(IMAGE))


def test_a_pickle_and_a_saved_model_compute_the_same_unfused(tmp_path):
    model, _ = converted(small)
    model.eval()
    x = torch.randn(1, 3, 32, 32)
    torch.save(model, tmp_path / "model.pt")
    for loaded in (pickle.loads(pickle.dumps(model)), torch.load(tmp_path / "model.pt", weights_only=False)):
        assert torch.equal(loaded(x), model(x))
        assert not any(calls(loaded, x))
        again = copy.deepcopy(loaded)
        with torch.no_grad():
            again.layer1[0].bn1.group_weight.fill_(7)
        assert torch.equal(loaded(x), model(x))
        assert not torch.equal(again(x), model(x))
        assert restore_forwards(again) == 0  # nobody's: what a pickle leaves is the class's own
        assert not any("forward" in vars(module) for module in again.modules())


def test_state_dicts_and_types_do_not_know_of_fusion():
    model, plain = (mn.convert(small(), fuse=fuse) for fuse in (True, False))
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
    assert str(model) == str(plain)
    plain.load_state_dict(model.state_dict())


def test_a_replica_of_data_parallel_uses_its_own_layers():
    model = block()
    replica = model._replicate_for_data_parallel()
    assert "forward" not in vars(replica)
    assert replica.forward.__self__ is replica


# --- other tools -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
def test_a_fused_network_compiles_as_one_graph(training):
    model = nn.Sequential(converted(Residual)[0], nn.AdaptiveAvgPool2d(1)).train(training)
    graphs: list[list[str]] = []

    def backend(graph: Any, example: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    assert_close_to_max(compiled(IMAGE), unfused(model)(IMAGE), tol=tolerance("output", torch.float32))
    assert len(graphs) == 1
    model[0].flag = True  # not looked up by this one
    compiled(IMAGE)
    assert len(graphs) == 1
    model[0].relu.register_forward_hook(lambda module, args, output: output * 2)
    torch._dynamo.reset()  # compiled code does not ask for hooks again, whoever wrote the forward
    assert_close_to_max(compiled(IMAGE), unfused(model)(IMAGE), tol=tolerance("output", torch.float32))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own derivatives call it
def test_transforms_of_torch_func_follow_a_converted_network_in_eval():
    model = mn.convert(small()).double().eval()
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (x,)).pow(2).sum()

    found = torch.func.grad(loss)(parameters, x)
    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x[:, None])
    model(x).pow(2).sum().backward()
    largest = max(parameter.grad.abs().max().item() for parameter in model.parameters())
    for name, parameter in model.named_parameters():  # some gradients cancel: a shift that changes no output
        for actual in (found[name], each[name].sum(0)):
            assert_close_to_max(actual, parameter.grad, tol=tolerance("folded", torch.float64), scale=largest)


def test_a_fused_network_exports():
    model = converted(Residual)[0].eval()
    program = torch.export.export(model, (IMAGE,), dynamic_shapes=({0: torch.export.Dim("n", min=1, max=16)},))
    x = torch.randn(5, 4, 6, 6)
    assert_close_to_max(program.module()(x), model(x), tol=tolerance("output", torch.float32))


def test_a_fused_network_folds_to_what_the_unfused_one_folds_to():
    model, _ = converted(small)
    folded, expected = mn.fold(model), mn.fold(unfused(model))
    assert not any("forward" in vars(module) for module in folded.modules())
    for (name, a), (other, b) in zip(folded.state_dict().items(), expected.state_dict().items(), strict=True):
        assert name == other
        assert torch.equal(a, b)
    assert "forward" in vars(model.layer1[0])
    x = torch.randn(1, 3, 32, 32)
    assert torch.equal(folded(x), expected(x))


def test_calibration_of_a_fused_network_finds_the_same_statistics():
    model, _ = converted(small)
    plain = unfused(model)
    batches = [torch.randn(2, 3, 32, 32) for _ in range(2)]
    for one in (model, plain):
        mn.calibrate(one, batches)
    for (name, a), b in zip(model.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(a, b), name
    assert any(calls(model.eval(), batches[0]))  # its hooks are gone


def test_a_fused_network_passes_the_check_of_cuts():
    model, _ = converted(Residual)
    report = mn.check_cuts(model, (torch.randn(4, 4, 6, 6),), lambda m, part: (m(part[0]).square().sum(), len(part[0])))
    assert report.ok


def test_a_fused_network_leaves_nothing_to_convert():
    model, _ = converted(small)
    for options in ({}, {"fuse": False}, {"filter": lambda module, name: False}):
        with pytest.raises(ValueError, match="nothing to convert"):
            mn.plan(model, **options)


def unpickled() -> Any:
    model, _ = converted(small)
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize(
    "build, options",
    [
        (unpickled, {}),
        (lambda: unfused(converted(small)[0]), {}),
        (lambda: small(norm_layer=mn.BCN()), {"weight": None}),
    ],
    ids=["unpickled", "restored", "built with our norms"],
)
def test_fusion_alone_is_something_to_convert(build, options):
    model = build().eval()
    x = torch.randn(1, 3, 32, 32)
    expected, keys = model(x), list(model.state_dict())
    assert not any(calls(model, x))
    plan = mn.plan(model, **options)
    assert {name: plan.totals[name] for name in ("norms converted", "convolutions converted", "norms fused")} == {
        "norms converted": 0,
        "convolutions converted": 0,
        "norms fused": 9,
    }
    assert plan.apply() is model
    assert sum(map(bool, calls(model, x))) == 9
    assert torch.equal(model(x), expected)
    assert list(model.state_dict()) == keys
    with pytest.raises(ValueError, match="nothing to convert"):
        mn.convert(model, **options)


@pytest.mark.parametrize(
    "options", [{"fuse": False}, {"filter": lambda module, name: False}], ids=["turned off", "filtered out"]
)
def test_where_fusion_is_not_wanted_it_is_nothing_to_convert(options):
    model, _ = converted(small)
    with pytest.raises(ValueError, match="nothing to convert"):
        mn.plan(unfused(model), **options)


def test_a_norm_that_is_replaced_by_one_that_fuses_nothing_is_not_called_fused():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), mn.GN()(8), nn.ReLU())
    plan = mn.plan(model, mn.SN())
    assert plan.totals["norms converted"] == 1
    assert plan.totals["norms fused"] == 0


@pytest.mark.parametrize("method", ["fx", "execution"])
def test_the_flow_of_a_fused_network_is_that_of_the_unfused_one(method):
    model, _ = converted(small)
    if method == "execution":
        model.fc = nn.Sequential(ValueBranch(), model.fc)
    flows = [
        trace_flow(one, lambda m: isinstance(m, mn.nn.BatchChannelNorm | nn.Conv2d), pairs=lambda a, b: False)
        for one in (model, unfused(model))
    ]
    assert flows[0].method == flows[1].method == method
    assert [(n.name, len(n.inputs)) for n in flows[0].nodes] == [(n.name, len(n.inputs)) for n in flows[1].nodes]
    assert sum("relu" in n.name for n in flows[0].nodes) == 9


class ValueBranch(nn.Module):
    """What torch.fx cannot trace."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


def test_a_network_built_with_our_norms_is_fused_when_its_convolutions_are_converted():
    model, said = converted(lambda: torchvision.models.resnet18(norm_layer=mn.BCN(), num_classes=4))
    assert said["layer1.0.bn2"] == "with the add and the ReLU after it"
    assert len(said) == 20
    assert any(calls(model.eval(), torch.randn(1, 3, 32, 32)))


# --- the plan --------------------------------------------------------------------------------------------------------


def test_a_plan_says_what_is_fused_and_why_the_rest_is_not():
    plan = mn.plan(small())
    assert plan.totals["norms fused"] == 9
    text = str(plan)
    assert "affine carried over; with the add and the ReLU after it\n" in text
    assert "not fused: 3 (its module returns its output)" in text
    rows = {row["name"]: row for row in plan.to_dict()["decisions"]}
    assert rows["bn1"]["fused"] == ("with the ReLU after it",)
    assert rows["layer2.0.downsample.1"]["unfused"] == ("its module returns its output",)
    assert rows["conv1"]["fused"] == rows["conv1"]["unfused"] == ()


@pytest.mark.parametrize("norm", [mn.BCN(), mn.GN()], ids=["BCN", "GN"])
def test_a_plan_says_which_activations_are_inside_the_layers(norm):
    layers = pytest.importorskip("timm.layers")
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        layers.BatchNormAct2d(8, act_layer=nn.SiLU),
        layers.BatchNormAct2d(8, act_layer=nn.GELU),
        layers.BatchNormAct2d(8, apply_act=False),
        layers.BatchNormAct2d(8, drop_layer=nn.Dropout),
    )
    plan = mn.plan(model, norm)
    assert plan.totals["norms with the activation inside the layer"] == 1
    assert plan.totals["norms fused"] == 0
    rows = {row["name"]: row for row in plan.to_dict()["decisions"]}
    assert [rows[name]["inside"] for name in "1234"] == ["SiLU", None, None, None]
    assert rows["1"]["reason"].endswith("; with the SiLU inside the layer")
    assert rows["2"]["unfused"] == ("no norm computes the GELU inside its layer",)
    assert rows["4"]["unfused"] == ("Dropout stands between it and its activation",)
    assert ", 1 norms with the activation inside the layer\n" in str(plan)
    bare = mn.plan(model, norm, fuse=False)  # the layers do it all the same
    assert bare.totals["norms with the activation inside the layer"] == 1
    assert "not fused:" not in str(bare)
    made = plan.apply().children()
    assert sum(type(layer) is mn.nn.norm_act.BatchChannelNormAct for layer in made) == (4 if norm == mn.BCN() else 0)


def test_norms_with_an_activation_of_ours_are_counted_where_they_stay():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), mn.nn.norm_act.BatchChannelNormAct(8))
    plan = mn.plan(model)
    assert {d.name: d.reason for d in plan.decisions}["1"] == "is what was asked for; with the ReLU inside the layer"


def test_without_fuse_and_for_other_norms_no_forward_is_touched():
    for options in ({"fuse": False}, {"norm": mn.SN()}, {"norm": None}):
        plan = mn.plan(small(), **options)
        assert plan.totals["norms fused"] == 0
        assert "fused:" not in str(plan)
        assert not any("forward" in vars(module) for module in plan.apply().modules())


def test_a_failed_conversion_leaves_every_forward():
    model = small()
    plan = mn.plan(model)

    def fail() -> nn.Module:
        raise MemoryError

    object.__setattr__(plan.decisions[-1], "make", fail)
    with pytest.raises(MemoryError):
        plan.apply()
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_norm_called_twice_says_how_many_of_its_calls_are_fused():
    class Twice(Block):
        def forward(self, x: Tensor) -> Tensor:
            return self.bn1(self.relu(self.bn1(self.conv1(x)))) + self.relu(self.bn2(self.conv2(x)))

    plan = mn.plan(Twice())
    reasons = {d.name: d.reason for d in plan.decisions}
    assert reasons["bn1"].endswith("; with the ReLU after it; 1 of 2 calls alone")
    assert plan.totals["norms fused"] == 2
