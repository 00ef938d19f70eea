"""Plans: a decision with its reason for every convolution and normalization."""

import copy
import json
import re

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import micronorm as mn
from micronorm.convert.plan import Plan
from tests.networks import SmallResNet


def small(*, bias: bool = True) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, bias=bias),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 1),
        nn.GELU(),
        nn.Conv2d(16, 4, 1),
    )


def becomes(plan: Plan) -> dict[str, str | None]:
    return {decision.name: decision.becomes for decision in plan.decisions}


def test_a_plan_changes_nothing_until_it_is_applied():
    model = small()
    before = [type(module) for module in model.modules()]
    plan = mn.plan(model)
    assert [type(module) for module in model.modules()] == before
    assert plan.apply() is model
    assert isinstance(model[0], mn.nn.WSConv2d)
    assert isinstance(model[1], mn.nn.BatchChannelNorm)


def test_convolutions_that_meet_no_converted_norm_stay_plain_and_say_what_they_meet():
    plan = mn.plan(small())
    assert becomes(plan) == {"0": "WSConv2d", "1": "BatchChannelNorm(16/4)", "3": None, "5": None}
    reasons = {d.name: d.reason for d in plan.decisions}
    assert "BatchNorm2d '1'" in reasons["0"]
    assert "GELU '4'" in reasons["3"]
    assert "the model's output" in reasons["5"]


def test_a_plan_prints_every_decision_and_turns_into_json():
    plan = mn.plan(small())
    text = str(plan)
    for decision in plan.decisions:
        assert re.search(rf"^{re.escape(decision.name)} .*{re.escape(decision.reason)}$", text, re.MULTILINE)
    record = json.loads(json.dumps(plan.to_dict()))
    assert record["totals"] == {
        "norms converted": 1,
        "norms left": 0,
        "convolutions converted": 1,
        "convolutions left": 2,
        "norms fused": 1,
        "norms with the activation inside the layer": 0,
        "max-pooling layers by kernel on a GPU": 0,
        "residual branches that start at zero": 0,
    }
    assert record["pairing"] == "fx"
    assert [d["name"] for d in record["decisions"]] == ["0", "1", "3", "5"]


@pytest.mark.parametrize("name", ["fuse", "layer_norm"])
@pytest.mark.parametrize("value", ["relu", 1, None])
def test_switches_are_true_or_false(name, value):
    with pytest.raises(TypeError, match=f"{name} must be True or False, got {value!r}"):
        mn.convert(small(), **{name: value})


def test_a_plan_that_would_change_nothing_says_what_it_looked_at():
    with pytest.raises(ValueError, match="no convolution and no normalization among Linear, ReLU, Sequential"):
        mn.plan(nn.Sequential(nn.Linear(3, 4), nn.ReLU()))
    with pytest.raises(ValueError, match=r"Looked at 0 \(Conv2d\): its output reaches no converted norm.* has no norm"):
        mn.plan(nn.Sequential(nn.Conv2d(3, 4, 3)))
    with pytest.raises(ValueError, match="left out by the filter"):
        mn.convert(small(), filter=lambda module, name: False)


def test_a_plan_is_applied_once_and_only_to_the_model_it_was_made_for():
    model = small()
    plan = mn.plan(model)
    model[1] = nn.Identity()
    with pytest.raises(RuntimeError, match=r"changed since the plan was made, at \['1'\]"):
        plan.apply()
    assert type(model[0]) is nn.Conv2d
    plan = mn.plan(small())
    plan.apply()
    with pytest.raises(RuntimeError, match="has been applied"):
        plan.apply()


def test_a_failing_conversion_leaves_the_model_as_it_was(monkeypatch):
    model = small()
    nn.init.zeros_(model[1].weight)  # the rule for zeros writes values, if anything does
    state = copy.deepcopy(model.state_dict())
    plan = mn.plan(model)
    last = [d for d in plan.decisions if d.make is not None][-1]

    def fail() -> nn.Module:
        last.make()  # type: ignore[misc]
        raise MemoryError

    plan.decisions.append(copy.copy(last))
    object.__setattr__(plan.decisions[-1], "make", fail)
    with pytest.raises(MemoryError):
        plan.apply()
    assert type(model[0]) is nn.Conv2d
    assert type(model[1]) is nn.BatchNorm2d
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name


@pytest.mark.parametrize("wrong", [lambda name: True, "layer1"])
def test_a_filter_that_does_not_take_a_module_and_a_name_is_refused(wrong):
    with pytest.raises(TypeError, match=r"filter is called as filter\(module, name\), got"):
        mn.plan(SmallResNet(norm=mn.BN()), filter=wrong)


def test_the_filter_keeps_layers_out_and_their_convolutions_follow():
    model = torchvision.models.resnet18()
    plan = mn.plan(model, filter=lambda module, name: not name.startswith("layer4"))
    for decision in plan.decisions:
        left = decision.name.startswith("layer4")
        assert (decision.becomes is None) == left
        assert (decision.reason == "left out by the filter") == left


def test_predictors_and_squeeze_gates_stay_plain():
    plan = mn.plan(timm.create_model("efficientnet_b0"))
    left = [d.name for d in plan.decisions if d.becomes is None]
    assert left
    assert all(".se." in name for name in left)
    detector = torchvision.models.detection.fasterrcnn_mobilenet_v3_large_320_fpn(weights=None, weights_backbone=None)
    with torch.no_grad():
        plan = mn.plan(detector, example_inputs=([torch.zeros(3, 64, 64)],))
    assert plan.pairing == "execution"
    for decision in plan.decisions:
        if decision.name.startswith(("rpn.", "roi_heads.", "backbone.fpn.")):
            assert decision.becomes is None, decision
    converted = [d for d in plan.decisions if d.role == "norm"]
    assert converted
    assert all(d.becomes is not None for d in converted)


def test_every_batch_norm_is_converted_also_without_a_convolution_before_it():
    model = mn.convert(timm.create_model("repvgg_a0"))
    assert not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    identity = [module for name, module in model.named_modules() if name.endswith(".identity")]
    assert identity
    assert all(isinstance(module, mn.nn.BatchChannelNorm) for module in identity)


def test_a_norm_of_pooled_features_gets_groups_of_at_least_sixteen_channels():
    model = torchvision.models.segmentation.deeplabv3_resnet50(weights=None, weights_backbone=None)
    plan = mn.plan(model)
    (pooled,) = [d for d in plan.decisions if "one element per channel" in d.reason]
    assert pooled.becomes == "BatchChannelNorm(256/16)"
    assert "16 groups of 16 channels" in pooled.reason
    flat = nn.Sequential(nn.Linear(8, 24), nn.BatchNorm1d(24))
    assert becomes(mn.plan(flat)) == {"1": "BatchChannelNorm(24/1)"}
    wide = nn.Sequential(nn.Linear(8, 2048), nn.BatchNorm1d(2048))
    assert becomes(mn.plan(wide, mn.BCN(groups=32))) == {"1": "BatchChannelNorm(2048/32)"}


def test_layer_norms_stay_unless_asked():
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.tokens = nn.Conv2d(3, 16, 4, stride=4), nn.BatchNorm2d(16), nn.LayerNorm(16)

        def forward(self, x: Tensor) -> Tensor:
            return self.tokens(self.norm(self.conv(x)).flatten(2).transpose(1, 2))

    assert becomes(mn.plan(Tokens()))["tokens"] is None
    model = mn.convert(Tokens(), layer_norm=True)
    assert isinstance(model.tokens, mn.nn.ChannelsLast)
    assert model(torch.randn(2, 3, 16, 16)).shape == (2, 16, 16)


def test_norms_alone_and_weights_alone_can_be_converted():
    model = mn.convert(small(), weight=None)
    assert type(model[0]) is nn.Conv2d
    assert isinstance(model[1], mn.nn.BatchChannelNorm)
    model = mn.convert(small(), norm=None)
    assert isinstance(model[0], mn.nn.WSConv2d)
    assert type(model[1]) is nn.BatchNorm2d
    with pytest.raises(ValueError, match="nothing to convert"):
        mn.plan(small(), None, None)


def test_what_was_asked_for_already_is_left_and_its_convolutions_are_standardized():
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.GroupNorm(4, 32))
    plan = mn.plan(model, mn.GN(groups=4))
    assert becomes(plan) == {"0": "WSConv2d", "1": None}
    plan.apply()
    with pytest.raises(ValueError, match=r"the model is already converted\. .*its weight is reparameterized"):
        mn.plan(model, mn.GN(groups=4))


@pytest.mark.parametrize("spec, same", [(mn.GN(groups=4), (4, 32)), (mn.LN(), (1, 32))])
def test_our_group_norms_are_what_was_asked_for_and_convert_like_torchs(spec, same):
    for made in (nn.GroupNorm(*same), mn.nn.GroupNorm(*same), spec(32)):
        model = nn.Sequential(nn.Conv2d(3, 32, 3), made)
        assert becomes(mn.plan(model, spec))["1"] is None
        assert becomes(mn.plan(model, mn.GN(groups=2)))["1"] == "GroupNorm(32/2)"
        assert becomes(mn.plan(model, mn.BCN()))["1"] == "BatchChannelNorm(32/8)"
    assert becomes(mn.plan(nn.Sequential(nn.Conv2d(3, 32, 3), mn.IN()(32))))["1"] == "BatchChannelNorm(32/8)"


def test_fan_in_one_stays_plain():
    model = nn.Sequential(nn.Conv2d(8, 8, 1, groups=8), nn.BatchNorm2d(8))
    plan = mn.plan(model)
    assert becomes(plan) == {"0": None, "1": "BatchChannelNorm(8/2)"}
    assert "fan-in 1" in plan.decisions[0].reason


@pytest.mark.parametrize(
    "spec", [mn.GN(), mn.LN(), mn.IN(), mn.BN(micro_batch=2), mn.SN(), mn.BRN(), mn.FRN(), mn.BCN()]
)
@pytest.mark.parametrize("weight", [mn.WS(), mn.WN(), mn.CWN(), None])
def test_every_spec_converts_a_network_that_then_trains(spec, weight):
    model = mn.convert(SmallResNet(nn.BatchNorm2d), spec, weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss = model(torch.randn(2, 3, 8, 8)).square().sum()
    loss.backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
    optimizer.step()


def test_pairing_by_order_is_marked_as_such():
    class Broken(nn.Sequential):
        def forward(self, input: Tensor) -> Tensor:
            raise RuntimeError("no input fits")

    plan = mn.plan(Broken(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 2, 1)))
    assert plan.pairing == "order"
    assert "norms paired by order" in str(plan)
    assert becomes(plan) == {"0": "WSConv2d", "1": "BatchChannelNorm(8/2)", "2": None}


# --- what is refused -------------------------------------------------------------------------------------------------


def test_parametrized_layers_are_refused_by_name():
    model = small()
    parametrizations.weight_norm(model[0])
    with pytest.raises(ValueError, match=r"'0' \(_WeightNorm\)"):
        mn.plan(model)
    assert becomes(mn.plan(model, filter=lambda module, name: name != "0"))["0"] is None


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
def test_weights_computed_by_hooks_are_refused_by_name():
    model = small()
    nn.utils.weight_norm(model[0])
    with pytest.raises(ValueError, match=r"'0' .*computed by a hook"):
        mn.plan(model)
    model = small()
    prune.random_unstructured(model[0], "weight", 0.5)
    with pytest.raises(ValueError, match=r"'0' .*computed by a hook"):
        mn.plan(model)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_wrapped_models_are_refused():
    with pytest.raises(ValueError, match="wrapped in DataParallel: convert first"):
        mn.plan(nn.DataParallel(small()))
    with pytest.raises(ValueError, match="wrapped in OptimizedModule: convert first, then wrap or compile"):
        mn.plan(torch.compile(small()))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'0' is wrapped in ScriptModule"):
        mn.plan(nn.Sequential(torch.jit.script(nn.Identity()), small()))
    with pytest.raises(TypeError, match=r"torch\.nn\.Module is needed, got str"):
        mn.plan("resnet18")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"norm": "bcn"}, TypeError, "norm must be a spec or None, got 'bcn'"),
        ({"norm": mn.BCN}, TypeError, r"did you mean mn\.BCN\(\)\?"),
        ({"weight": nn.Conv2d}, TypeError, "weight must be a spec or None"),
        ({"absorb": True, "weight": mn.CWN()}, ValueError, "needs weight=mn.WS"),
        ({"warm_steps": 5, "absorb": False}, ValueError, "needs absorb=True"),
        ({"warm_steps": 5, "norm": mn.GN()}, ValueError, "needs norm=mn.BCN"),
        ({"warm_steps": 5, "weight": mn.CWN()}, ValueError, "CWN drops"),
        ({"warm_steps": -1}, ValueError, "warm_steps must be at least 1"),
    ],
)
def test_contradictory_wishes_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        mn.plan(small(), **arguments)


@pytest.mark.parametrize(
    "norm, reason",
    [
        (mn.BCN(groups=4), "it stays, with num_groups=8 and not 4"),
        (mn.BCN(groups=8, statistics="batch"), "it stays, with statistics='step' and not 'batch'"),
        (mn.BCN(groups=8, rate=0.1), "it stays, with rate='lr' and not 0.1"),
        (mn.GN(groups=4), "it stays; for another norm convert the original model"),
    ],
)
def test_the_plan_of_a_converted_model_says_what_differs_from_the_options(norm, reason):
    model = mn.convert(nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32)), mn.BCN(groups=8))
    with pytest.raises(ValueError, match=f"the model is already converted.*already converted: {reason}"):
        mn.plan(model, norm)


@pytest.mark.parametrize(
    "pad, met",
    [(nn.ZeroPad2d(1), True), (nn.ConstantPad2d(1, 0.0), True), (nn.ConstantPad2d(1, 3.0), False)],
    ids=["zeros", "constant 0", "constant 3"],
)
def test_a_convolution_meets_its_norm_through_padding_with_zeros_only(pad, met):
    plan = mn.plan(nn.Sequential(nn.Conv2d(3, 8, 3), pad, nn.BatchNorm2d(8)))
    assert (plan.decisions[0].becomes == "WSConv2d") == met
