"""Norms that compute what follows them: which do, that no value changes, and that fused models stay usable."""

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

import micronorm as mn
from micronorm.convert import norm_act, register_block
from micronorm.convert.surgery import restore_forwards
from micronorm.convert.trace import trace_flow
from tests.convert.fused import IMAGE, Residual, assert_same_bits, calls, converted, unfused
from tests.tolerances import assert_close_to_max, tolerance

RELU, ADD, ADD_RELU = "with the ReLU after it", "with the add after it", "with the add and the ReLU after it"


def row(*after: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), *after)


class Listed(nn.Module):
    """Norms in a list, and a sum of two norms."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = F.leaky_relu(self.norms[0](x))
        return F.silu(self.norms[1](x) + self.norms[2](x))


def fused_listed(self: Any, x: Tensor) -> Tensor:
    x = norm_act(self.norms[0], x, F.leaky_relu)
    return norm_act(self.norms[1], x, F.silu, residual=self.norms[2](x))


register_block(Listed, fused_listed, fuses={"norms.0": "leaky_relu", "norms.1": "add silu"})

FUSED: dict[str, tuple[Any, dict[str, str]]] = {
    "a registered block": (Residual, {"bn1": RELU, "bn2": ADD_RELU}),
    "a row": (lambda: row(nn.SiLU()), {"1": "with the SiLU after it"}),
    "a row in a row": (lambda: nn.Sequential(row(nn.LeakyReLU(0.3))), {"0.1": "with the LeakyReLU after it"}),
    "norms in a list": (
        Listed,
        {
            "norms.0": "with the LeakyReLU after it",
            "norms.1": ADD,  # the derivative of SiLU needs the sum, which the norm does not keep
            "norms.2": "no activation or addition follows it directly in Listed",
        },
    ),
}


@pytest.mark.parametrize("name", FUSED)
def test_fusing_changes_no_bit(name):
    build, expected = FUSED[name]
    model, said = converted(build, weight=None)
    assert said == expected
    assert sum(map(bool, calls(model, IMAGE))) == sum(text.startswith("with ") for text in said.values())
    assert not any(calls(unfused(model), IMAGE))
    assert_same_bits(model, IMAGE)


# --- what stays unfused ----------------------------------------------------------------------------------------------


class Unknown(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bn1, self.relu = nn.BatchNorm2d(4), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.bn1(x))


class Overriding(Residual):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.bn2(self.bn1(x))


def hooked(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = Residual()
        model.get_submodule(name).register_forward_hook(lambda module, args, output: output * 2)
        return model

    return build


def with_another_activation() -> nn.Module:
    model = Residual()
    model.relu = nn.GELU()  # type: ignore[assignment]
    return model


def with_a_forward_on_the_instance() -> nn.Module:
    model = Residual()
    model.forward = lambda x: model.bn1(x) + 1  # type: ignore[method-assign, assignment]
    return model


UNFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "an unknown class": (Unknown, "Unknown is not a known block"),
    "a subclass with another forward": (Overriding, "Overriding overrides Residual.forward"),
    "a forward on the instance": (with_a_forward_on_the_instance, "Residual has its own forward on the instance"),
    "hooks on the norm": (hooked("bn1"), "it has hooks or its own forward"),
    "hooks on the activation": (hooked("relu"), "the ReLU after it has hooks"),
    "another activation": (with_another_activation, "GELU follows it, which norms do not compute"),
}


@pytest.mark.parametrize("name", UNFUSED)
def test_what_is_not_fused_says_why(name):
    build, why = UNFUSED[name]
    model, said = converted(build, weight=None, example_inputs=IMAGE)
    assert said["bn1"] == why
    assert "activation" not in calls(model, IMAGE)[0]


def test_a_subclass_with_the_same_forward_is_fused():
    _, said = converted(lambda: type("Renamed", (Residual,), {})())
    assert said == {"bn1": RELU, "bn2": ADD_RELU}


def test_the_reason_for_an_activation_in_the_layer_and_for_a_norm_alone():
    norm = mn.nn.BatchChannelNorm(4, 2, activation="silu")
    _, said = converted(lambda: nn.Sequential(nn.Conv2d(4, 4, 1), norm, nn.ReLU()))
    assert said == {"1": "it has an activation of its own"}
    plan = mn.plan(nn.BatchNorm2d(4))
    assert plan.decisions[0].unfused == ("no block calls it",)


# --- registration ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, error, text",
    [
        ((nn.ReLU(), fused_listed, {}), TypeError, "cls must be a class of torch.nn.Module"),
        ((Listed, "forward", {}), TypeError, "forward must be a function"),
        ((Listed, fused_listed, ["bn1"]), TypeError, "fuses must be a mapping"),
    ],
)
def test_a_registration_with_wrong_arguments_is_refused(arguments, error, text):
    cls, forward, fuses = arguments
    with pytest.raises(error, match=text):
        register_block(cls, forward, fuses=fuses)


def test_a_registration_with_unknown_names_is_refused():
    with pytest.raises(ValueError, match="Listed has no method 'missing'"):
        register_block(Listed, fused_listed, fuses={}, method="missing")

    class Mistaken(Unknown):
        def forward(self, x: Tensor) -> Tensor:
            return self.relu(self.bn1(x))

    register_block(Mistaken, fused_listed, fuses={"bn1": "add rule"})
    with pytest.raises(ValueError, match="Mistaken: 'add rule' names no attribute of the block"):
        mn.plan(Mistaken())


# --- changes after the conversion ------------------------------------------------------------------------------------


def set_to(name: str, value: Any) -> Callable[[Any], None]:
    return lambda model: setattr(model, name, value)


def hook_on(name: str) -> Callable[[Any], None]:
    return lambda model: getattr(model, name).register_forward_hook(lambda module, args, output: output * 3)


def replace_by_function(model: Any) -> None:
    del model.relu
    model.relu = F.softplus


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a number": set_to("scale", 3.0),
    "another activation": set_to("relu", nn.GELU()),
    "another norm": set_to("bn1", nn.GroupNorm(2, 4)),
    "a subclass of the norm": set_to("bn1", mn.nn.BatchChannelNormAct(4, 2, act_layer=nn.Tanh)),
    "a norm with its own activation": set_to("bn1", mn.nn.BatchChannelNorm(4, 2, activation="silu")),
    "an activation that becomes a function": replace_by_function,
    "a hook on the activation": hook_on("relu"),
    "a hook on a norm": hook_on("bn2"),
    "a gradient hook": lambda model: model.relu.register_full_backward_hook(lambda m, i, o: (i[0] * 2,)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_after_conversion_is_obeyed(name):
    model, _ = converted(Residual)
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
    model, _ = converted(Residual)
    handle = model.relu.register_forward_hook(lambda module, args, output: None)
    assert calls(model, IMAGE)[0] == {}
    handle.remove()
    assert calls(model, IMAGE)[0]["activation"] == "relu"
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: None)
    try:
        assert calls(model, IMAGE) == [{}, {}]
    finally:
        handle.remove()


def test_layers_added_to_and_cut_from_a_row_are_obeyed():
    model, _ = converted(lambda: row(nn.ReLU()))
    model.append(nn.Sigmoid())
    assert torch.equal(model(IMAGE), unfused(model)(IMAGE))
    assert model(IMAGE).max() <= 1 < model[:3](IMAGE).max()
    assert model[:2](IMAGE).min() < 0 == model[:3](IMAGE).min()


def test_arguments_and_signature_are_those_of_the_class():
    model, _ = converted(Residual)
    assert torch.equal(model(x=IMAGE), model(IMAGE))
    assert torch.equal(model(IMAGE, twice=True), 2 * model(IMAGE))
    assert str(inspect.signature(model.forward)) == str(inspect.signature(unfused(model).forward))


# --- copies and files ------------------------------------------------------------------------------------------------


def small(**options: Any) -> Any:
    return torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=4, **options)


def test_a_deep_copy_is_fused_and_has_its_own_layers():
    model, _ = converted(Residual)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.bn2.group_weight.fill_(7)
    assert all(calls(twin, IMAGE))
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
        assert restore_forwards(again) == 0  # a pickle leaves the class's own method in the dictionary
        assert not any({"forward", "_forward_impl"} & vars(module).keys() for module in again.modules())


def test_state_dicts_and_types_are_those_of_the_unfused_model():
    model, plain = (mn.convert(small(), fuse=fuse) for fuse in (True, False))
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
    assert str(model) == str(plain)
    plain.load_state_dict(model.state_dict())


def test_a_replica_of_data_parallel_uses_its_own_layers():
    model, _ = converted(Residual)
    replica = model._replicate_for_data_parallel()
    assert "forward" not in vars(replica)
    assert replica.forward.__self__ is replica


# --- other tools -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False])
def test_a_fused_network_compiles_as_one_graph(training):
    model = nn.Sequential(converted(Residual)[0], converted(lambda: row(nn.ReLU()))[0]).train(training)
    graphs: list[list[str]] = []

    def backend(graph: Any, example: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    assert_close_to_max(compiled(IMAGE), unfused(model)(IMAGE), tol=tolerance("output", torch.float32))
    compiled(IMAGE)
    assert len(graphs) == 1


@pytest.mark.slow
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


@pytest.mark.skipif(torch.__version__ < "2.7", reason="torch 2.6 exports no free batch size")
def test_a_fused_network_exports():
    model = converted(Residual)[0].eval()
    program = torch.export.export(model, (IMAGE,), dynamic_shapes=({0: torch.export.Dim("n", min=1, max=16)},))
    x = torch.randn(5, 4, 6, 6)
    assert_close_to_max(program.module()(x), model(x), tol=tolerance("output", torch.float32))


def test_a_fused_network_folds_to_what_the_unfused_one_folds_to():
    model, _ = converted(small)
    folded, expected = mn.fold(model), mn.fold(unfused(model))
    assert not any({"forward", "_forward_impl"} & vars(module).keys() for module in folded.modules())
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


class ValueBranch(nn.Module):
    """What torch.fx cannot trace."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


@pytest.mark.parametrize("method", ["fx", "execution"])
def test_the_flow_of_a_fused_network_is_that_of_the_unfused_one(method):
    model, _ = converted(small)
    if method == "execution":
        model.fc = nn.Sequential(ValueBranch(), model.fc)
    flows = [
        trace_flow(one, lambda m: isinstance(m, mn.nn.BatchChannelNorm | nn.Conv2d)) for one in (model, unfused(model))
    ]
    assert flows[0].method == flows[1].method == method
    assert [(n.name, len(n.inputs)) for n in flows[0].nodes] == [(n.name, len(n.inputs)) for n in flows[1].nodes]
    assert sum("relu" in n.name for n in flows[0].nodes) == 9


# --- conversion of models that have our norms already ----------------------------------------------------------------


def test_a_fused_network_leaves_nothing_to_convert():
    model, _ = converted(small)
    for options in ({}, {"fuse": False}, {"filter": lambda module, name: False}):
        with pytest.raises(ValueError, match="nothing to convert"):
            mn.plan(model, **options)
        if options:
            with pytest.raises(ValueError, match="nothing to convert"):
                mn.plan(unfused(model), **options)


@pytest.mark.parametrize(
    "build, options",
    [
        (lambda: pickle.loads(pickle.dumps(converted(small)[0])), {}),
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
    totals = [plan.totals[name] for name in ("norms converted", "convolutions converted", "norms fused")]
    assert totals == [0, 0, 9]
    assert plan.apply() is model
    assert sum(map(bool, calls(model, x))) == 9
    assert torch.equal(model(x), expected)
    assert list(model.state_dict()) == keys
    with pytest.raises(ValueError, match="nothing to convert"):
        mn.convert(model, **options)


def test_a_norm_that_is_replaced_by_one_that_fuses_nothing_is_not_called_fused():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), mn.GN()(8), nn.ReLU())
    plan = mn.plan(model, mn.SN())
    assert plan.totals["norms converted"] == 1
    assert plan.totals["norms fused"] == 0


# --- the plan --------------------------------------------------------------------------------------------------------


def test_a_plan_says_what_is_fused_and_why_the_rest_is_not():
    plan = mn.plan(small())
    assert plan.totals["norms fused"] == 9
    text = str(plan)
    assert "affine carried over; with the add and the ReLU after it\n" in text
    why = "no activation or addition follows it directly in Sequential"
    assert f"not fused: 3 ({why})" in text
    rows = {row["name"]: row for row in plan.to_dict()["decisions"]}
    assert rows["bn1"]["fused"] == (RELU,)
    assert rows["layer2.0.downsample.1"]["unfused"] == (why,)
    assert rows["conv1"]["fused"] == rows["conv1"]["unfused"] == ()


@pytest.mark.parametrize("norm", [mn.BCN(), mn.GN()], ids=["BCN", "GN"])
def test_a_plan_says_which_activations_are_inside_the_layers(norm):
    layers = timm.layers
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
    assert rows["2"]["unfused"] == ("norms do not compute the GELU inside its layer",)
    assert rows["4"]["unfused"] == ("Dropout stands between it and its activation",)
    assert ", 1 norms with the activation inside the layer\n" in str(plan)
    bare = mn.plan(model, norm, fuse=False)  # the layers fuse without it
    assert bare.totals["norms with the activation inside the layer"] == 1
    assert "not fused:" not in str(bare)
    made = plan.apply().children()
    assert sum(type(layer) is mn.nn.BatchChannelNormAct for layer in made) == (4 if norm == mn.BCN() else 0)


def test_norms_with_an_activation_of_ours_are_counted_where_they_stay():
    plan = mn.plan(nn.Sequential(nn.Conv2d(3, 8, 3), mn.nn.BatchChannelNormAct(8)))
    assert {d.name: d.reason for d in plan.decisions}[
        "1"
    ] == "already converted: it is the requested norm; with the ReLU inside the layer"


def test_without_fuse_and_for_other_norms_no_forward_is_changed():
    for options in ({"fuse": False}, {"norm": mn.SN()}, {"norm": None}):
        plan = mn.plan(small(), **options)
        assert plan.totals["norms fused"] == 0
        assert "fused:" not in str(plan)
        changed = [type(module) for module in plan.apply().modules() if "forward" in vars(module)]
        assert changed == ([] if options == {"fuse": False} else [nn.MaxPool2d])


def test_a_failed_conversion_leaves_every_forward():
    model = small()
    plan = mn.plan(model)

    def fail() -> nn.Module:
        raise MemoryError

    object.__setattr__(plan.decisions[-1], "make", fail)
    with pytest.raises(MemoryError):
        plan.apply()
    assert not any("forward" in vars(module) for module in model.modules())


# --- group, layer and instance normalization -------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [mn.GN(groups=2, min_channels_per_group=1), mn.LN(), mn.IN()], ids=repr)
def test_group_norms_compute_what_follows_them_as_bcn_does(spec):
    for build in (Residual, Listed):
        model, said = converted(build, norm=spec, weight=None)
        assert said == converted(build, weight=None)[1]
        assert_same_bits(model, IMAGE)


def test_a_fused_group_norm_is_called_with_the_activation_and_the_residual(monkeypatch):
    model, _ = converted(Residual, norm=mn.GN())
    seen = []
    forward = mn.nn.GroupNorm.forward
    monkeypatch.setattr(
        mn.nn.GroupNorm, "forward", lambda self, x, **options: seen.append(options) or forward(self, x, **options)
    )
    model(IMAGE)
    assert [options["activation"] for options in seen] == ["relu", "relu"]
    assert torch.equal(seen[1]["residual"], IMAGE)
