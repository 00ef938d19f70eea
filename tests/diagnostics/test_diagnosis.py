"""The diagnosis: networks broken on purpose are found in the right layer, and their healthy twins are not accused."""

import copy
import json
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import micronorm as mn
from micronorm.diagnostics.diagnosis import Diagnosis, diagnose, judge
from micronorm.diagnostics.norm_stats import measure_norms
from micronorm.diagnostics.norms import as_norm_layer
from micronorm.ops.moments import Moments
from tests.networks import SmallResNet

SPECS = {
    "BN": nn.BatchNorm2d,
    "GN": partial(nn.GroupNorm, 4),
    "LN": partial(nn.GroupNorm, 1),
    "IN": lambda channels: nn.InstanceNorm2d(channels, affine=True),
    "BCN": mn.BCN(groups=4),
    "BCN batch": mn.BCN(groups=4, statistics="batch"),
}


def images() -> Tensor:
    return torch.randn(48, 3, 8, 8, generator=torch.Generator().manual_seed(1)) * 1.5 + 0.5


def network(norm: str) -> Any:
    """A fresh network whose estimates fit the images."""
    return copy.deepcopy(_network(norm))


@cache
def _network(norm: str) -> nn.Module:
    torch.manual_seed(0)
    return settled(SmallResNet(SPECS[norm], channels=16))


def settled(model: nn.Module) -> nn.Module:
    """The model with estimates that fit."""
    if any(hasattr(module, "running_mean") for module in model.modules() if not isinstance(module, nn.InstanceNorm2d)):
        mn.calibrate(model, [images()])
    return model


def found(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    return [(finding.layer, finding.problem) for finding in diagnosis.findings]


def offset(conv: Any, channels: int, by: float) -> None:
    """Shift some output channels of a convolution that has no bias."""
    conv.bias = nn.Parameter(torch.zeros(conv.out_channels))
    with torch.no_grad():
        conv.bias[:channels] += by


@pytest.mark.parametrize("norm", SPECS)
def test_a_healthy_network_is_not_accused(norm):
    diagnosis = diagnose(network(norm), images().split(16))
    assert diagnosis.ok
    assert bool(diagnosis)
    assert diagnosis.judged == len(diagnosis.statistics) == 6
    assert diagnosis.summary().startswith("No layer is near an elimination singularity. 6 of 6 norms judged")


@pytest.mark.parametrize(
    "norm, layer",
    [
        *((norm, layer) for norm in SPECS for layer in ("norm", "block1.norm1", "down_norm")),
        # not BCN: the group half bounds what the bias of its channel half does, and the shortcut outweighs it
        *((norm, layer) for norm in SPECS if "BCN" not in norm for layer in ("block1.norm2", "block2.norm2")),
    ],
)
def test_dead_channels_are_found_in_their_layer_and_blamed_on_its_bias(norm, layer):
    model = network(norm)
    with torch.no_grad():
        model.get_submodule(layer).bias[[1, 2, 5]] = -50.0
    diagnosis = diagnose(model, images().split(16), trained=False)
    assert found(diagnosis) == [(layer, "dead")]
    finding = diagnosis.findings[0]
    assert finding.channels == (1, 2, 5)
    assert f"get_submodule('{layer}').bias.data[[1, 2, 5]] = 0" in finding.remedy
    assert finding.severity > 1


@pytest.mark.parametrize("layer, conv", [("norm", "stem"), ("block1.norm1", "block1.conv1"), ("down_norm", "down")])
@pytest.mark.parametrize("norm", ["GN", "LN"])
def test_a_huge_offset_of_some_channels_of_a_group_is_found_in_its_layer(norm, layer, conv):
    model = network(norm)
    offset(model.get_submodule(conv), 2, 300.0)
    diagnosis = diagnose(model, images().split(16))
    assert found(diagnosis)[0] == (layer, "stat_diff")
    if norm == "GN":  # of one group the whole layer is crushed, and what follows sees constants
        assert len(diagnosis.findings) == 1
    finding = diagnosis.findings[0]
    assert diagnosis.severities[layer] == max(diagnosis.severities.values()) == finding.severity
    assert set(finding.channels) >= {0, 1}
    assert finding.remedy.startswith("mn.convert(model, mn.BCN(), mn.WS())")
    assert "to 0 as BCN's estimates settle" in finding.effect


def test_the_conversion_that_is_advised_mends_it():
    model = network("GN")
    offset(model.down, 2, 300.0)
    assert found(diagnose(model, images().split(16))) == [("down_norm", "stat_diff")]
    assert diagnose(settled(mn.convert(model, mn.BCN(groups=4), None)), images().split(16)).ok


def test_a_network_that_is_standardized_already_is_not_told_to_be():
    model = mn.convert(network("GN"), None, mn.WS())
    offset(model.down, 2, 300.0)
    diagnosis = diagnose(model, images().split(16))
    assert diagnosis.findings[0].remedy.startswith("mn.convert(model, mn.BCN(), None)")


@pytest.mark.parametrize("norm", ["BN", "BCN batch"])
def test_estimates_that_do_not_fit_are_found_unless_the_network_is_fresh(norm):
    model = network(norm)
    offset(model.down, 32, 20.0)
    diagnosis = diagnose(model, images().split(16))
    assert ("down_norm", "estimates") in found(diagnosis)
    assert "mn.calibrate" in diagnosis.findings[0].remedy
    assert ("down_norm", "estimates") not in found(diagnose(model, images().split(16), trained=False))


def test_a_network_that_trained_with_its_estimates_is_not_accused_for_their_distance_from_the_data():
    model = network("BCN")
    for norm in model.modules():
        if isinstance(norm, mn.nn.BatchChannelNorm):
            norm.running_var /= 25  # deviations too small by a factor of 5, as after few steps of AdamW
    diagnosis = diagnose(model, images().split(16))
    assert diagnosis.ok
    assert "calibrate" not in str(diagnosis)


def test_estimates_that_never_moved_are_a_note_unless_the_network_is_fresh():
    model = SmallResNet(SPECS["BCN"])
    for trained in (True, False):
        notes = " ".join(diagnose(model, images().split(16), trained=trained).notes)
        assert ("6 BatchChannelNorm layers have never moved from (0, 1), at first 'norm'" in notes) == trained


@pytest.mark.parametrize("layer, conv", [("norm", "stem"), ("block1.norm1", "block1.conv1"), ("down_norm", "down")])
@pytest.mark.parametrize("norm, problem", [("BN", "estimates"), ("BCN batch", "estimates"), ("BCN", "stat_diff")])
def test_an_offset_that_came_after_the_estimates_is_found_in_its_layer_before_its_consequences(
    norm, problem, layer, conv
):
    model = network(norm)
    offset(model.get_submodule(conv), 2, 300.0)
    first = diagnose(model, images().split(16)).findings[0]
    assert (first.layer, first.problem) == (layer, problem)
    assert first.channels[:2] == (0, 1)
    assert ("bias_correction=True" in first.remedy) == (norm == "BCN")


def test_batch_normalization_by_the_batch_takes_an_offset_away():
    model = network("BN")
    offset(model.down, 2, 300.0)
    assert diagnose(model, images().split(16), statistics="batch").ok


def test_values_that_are_not_finite_come_first():
    model = network("GN")
    with torch.no_grad():
        model.down.weight[0, 0, 0, 0] = torch.nan
    diagnosis = diagnose(model, images().split(16))
    assert found(diagnosis)[0] == ("down_norm", "non_finite")
    json.loads(json.dumps(diagnosis.to_dict(), allow_nan=False))


def stacked(activation: type[nn.Module] = nn.ReLU) -> Any:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), activation(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), activation())
    return settled(nn.Sequential(*layers))


@pytest.mark.parametrize("activation", [nn.ReLU, nn.SiLU])
@pytest.mark.parametrize("name", ["running_mean", "running_var", "weight", "bias"])
def test_numbers_that_are_not_finite_are_found_in_the_layer_that_holds_them(name, activation):
    model = stacked(activation)
    with torch.no_grad():
        getattr(model[1], name)[3] = torch.nan
    first, second = diagnose(model, images().split(16)).findings
    assert (first.layer, first.problem, first.channels) == ("1", "non_finite", (3,))
    assert first.evidence == {"not finite": f"{name}, output"}
    assert first.remedy.startswith(f"{name} of this layer cannot be used")
    assert ("mn.calibrate" in first.remedy) == name.startswith("running")
    assert (second.layer, second.evidence) == ("4", {"not finite": "input, output"})


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_the_last_norm_of_a_network_is_accused_where_its_estimates_are_not_finite(value):
    model = stacked(nn.SiLU)
    model[4].running_var[:4] = value  # by infinity a channel is divided to zero: the output is finite
    diagnosis = diagnose(model, images().split(16))
    assert found(diagnosis) == [("4", "non_finite")]
    assert diagnosis.severities["4"] == torch.inf


def test_means_of_bcn_that_are_not_finite_are_no_dead_channels():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), mn.nn.BatchChannelNorm(8, 2), nn.ReLU())
    model[1].running_mean.fill_(torch.nan)
    assert found(diagnose(model, images().split(16))) == [("1", "non_finite")]


def test_a_layer_that_makes_numbers_that_are_not_finite_is_accused():
    model = stacked()
    model[1].running_var[2] = -1.0
    first = diagnose(model, images().split(16)).findings[0]
    assert (first.layer, first.evidence, first.channels) == ("1", {"not finite": "output"}, (2,))
    assert "itself overflows" in first.remedy


def test_estimates_that_are_not_in_use_are_not_judged():
    model = stacked()
    model[1].running_var.fill_(torch.nan)
    assert diagnose(model, images().split(16), statistics="batch").ok


def test_a_figure_that_is_no_number_is_beyond_its_limit():
    seen = measure_norms(stacked(), images().split(16))
    mean, var = seen["4"].normalized
    bad = replace(seen["4"], normalized=Moments(mean * torch.nan, var))
    diagnosis = judge({**seen, "4": bad})
    assert found(diagnosis) == [("4", "estimates")]
    assert diagnosis.severities["4"] == torch.inf


@pytest.mark.parametrize("statistics", ["estimates", "batch"])
def test_frozen_batch_normalization_is_judged_by_its_estimates_in_either_mode(statistics):
    frozen = pytest.importorskip("torchvision.ops").FrozenBatchNorm2d(3)
    model = nn.Sequential(frozen, nn.ReLU()).train()
    norm = as_norm_layer(frozen)
    assert norm is not None
    assert (norm.uses_batch, norm.by_estimates) == (False, True)
    assert found(diagnose(model, [images() + 20], statistics=statistics)) == [("0", "estimates")]
    frozen.running_mean.fill_(0.5)
    frozen.running_var.fill_(1.5**2)
    assert diagnose(model, [images()], statistics=statistics).ok


def test_maps_of_one_position_are_judged_only_by_many_samples():
    torch.manual_seed(0)
    grouped, batch = (nn.Sequential(norm, nn.ReLU()) for norm in (nn.GroupNorm(2, 8), nn.BatchNorm2d(8)))
    x = torch.randn(400, 8, 1, 1)
    apart = x + 20 * (torch.arange(8).view(8, 1, 1) % 4 == 0)
    assert diagnose(batch, [x[:1]]).ok  # of one position every deviation is 0
    for count in (1, 48):
        diagnosis = diagnose(grouped, [apart[:count]])
        assert (diagnosis.ok, diagnosis.judged) == (True, 0)
        assert diagnosis.summary().startswith("Nothing could be judged: there were too few samples")
    assert found(diagnose(grouped, [apart])) == [("0", "stat_diff")]


def test_rare_channels_are_found_where_many_are_nearly_dead():
    model = nn.Sequential(nn.BatchNorm2d(8), nn.ReLU())
    with torch.no_grad():
        model[0].bias[:4] = -2.9  # a normal channel is positive in 0.2 % of positions
    x = torch.randn(64, 8, 8, 8)
    assert found(diagnose(model, [x], statistics="batch")) == [("0", "rare")]
    with torch.no_grad():
        model[0].bias[2:4] = 0
    assert diagnose(model, [x], statistics="batch").ok


def test_few_samples_are_no_evidence_and_the_report_says_so():
    model = network("BN")
    with torch.no_grad():
        model.norm.bias[:4] = -50.0
    diagnosis = diagnose(model, [images()[:16]], trained=False)
    assert diagnosis.ok
    assert any("too few to judge" in note for note in diagnosis.notes)


def test_one_dead_channel_is_counted_and_accuses_no_layer():
    model = network("BN")
    with torch.no_grad():
        model.norm.bias[4] = -50.0
    diagnosis = diagnose(model, images().split(16), trained=False)
    assert diagnosis.ok
    assert "1 dead" in diagnosis.summary()
    assert diagnosis.to_dict()["layers"]["norm"]["dead"] == 1


def test_norms_without_a_visible_activation_are_listed_and_not_judged():
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.GroupNorm(2, 8), nn.Conv2d(8, 4, 1))
    with torch.no_grad():
        model[0].bias[:2] += 300
    diagnosis = diagnose(model, images().split(16))
    assert (diagnosis.judged, diagnosis.ok, list(diagnosis.statistics)) == (0, True, ["1"])
    assert diagnosis.summary().startswith("Nothing could be judged")
    assert any("not judged" in " ".join(note.split()) for note in diagnosis.notes)


def test_findings_come_in_the_order_of_layers_and_the_table_s_worst_first():
    model = network("GN")
    offset(model.stem, 2, 100.0)
    offset(model.down, 2, 1000.0)
    diagnosis = diagnose(model, images().split(16))
    assert found(diagnosis) == [("norm", "stat_diff"), ("down_norm", "stat_diff")]
    assert diagnosis.summary().startswith("2 LAYERS ARE IN TROUBLE: norm, down_norm.")
    head, first, second, *rest = diagnosis.table(rows=4).splitlines()
    assert head.split()[:3] == ["layer", "norm", "then"]
    assert (first.split()[0], second.split()[0], len(rest)) == ("down_norm", "norm", 2)
    assert "stat_diff" in first
    assert "[stat_diff]" in str(diagnosis)
    assert "fix: mn.convert" in str(diagnosis)
