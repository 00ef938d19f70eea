"""The figures of an observed step, against their definitions."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import micronorm as mn
from micronorm.diagnostics.lipschitz import effective_gradients, weight_shares
from tests.diagnostics.observed import NORMS, network, observed_layers, take_step
from tests.networks import SmallResNet
from tests.tolerances import assert_close_to_max, tolerance


def test_the_figures_of_a_norm_are_those_of_its_channels():
    torch.manual_seed(1)
    norm = nn.GroupNorm(2, 4).double()
    nn.init.normal_(norm.weight)
    nn.init.constant_(norm.bias[:1], -20)  # never positive
    model = nn.Sequential(norm, nn.ReLU())
    x = torch.randn(5, 4, 6, 6, dtype=torch.float64) * torch.tensor([1, 2, 3, 4.0]).view(4, 1, 1) + 1
    with mn.observe(model) as observer:
        model(x).sum().backward()
        observer.step()
    assert observer.latest is not None
    row = observer.latest["layers"]["0"]
    assert (row["kind"], row["norm"], row["channels"], row["groups"]) == ("norm", "GroupNorm", 4, 2)

    mean, std = x.mean((0, 2, 3)).view(2, 2), x.std((0, 2, 3), correction=0).view(2, 2)
    difference = mean.std(1, correction=0) / std.mean(1)
    plain = F.group_norm(x, 2)
    spread = plain.mean((0, 2, 3)).std(correction=0), plain.std((0, 2, 3), correction=0).log().std(correction=0)
    positive = (F.group_norm(x, 2, norm.weight, norm.bias) > 0).double().mean((0, 2, 3))
    names = ("stat_diff", "stat_diff_worst", "sigma_mean", "sigma_std", "active")
    expected = torch.stack([difference.mean(), difference.max(), *spread, positive.mean()])
    found = torch.tensor([row[name] for name in names], dtype=torch.float64)
    assert_close_to_max(found, expected, tol=tolerance("output", torch.float64))
    assert row["dead"] == int((positive == 0).sum()) >= 1
    assert row["rare"] == int(((positive > 0) & (positive < 0.01)).sum())


@pytest.mark.parametrize("added", [False, True])
def test_the_figures_of_estimates_that_move_are_those_of_what_the_forward_computed(added):
    torch.manual_seed(1)
    norm = mn.nn.BatchChannelNorm(8, 2, statistics="sequential", rate=0.2).double()
    nn.init.normal_(norm.bias)
    x = torch.randn(6, 8, 4, 4, dtype=torch.float64) * 2 + torch.randn(8, 1, 1, dtype=torch.float64)
    shortcut = torch.full_like(x, 100.0) if added else None
    alone = copy.deepcopy(norm)(x)  # γ^c is 1 and β^c is 0
    with mn.observe(norm) as observer:
        norm(x, residual=shortcut).sum().backward()
        observer.step()
    assert observer.latest is not None
    row = observer.latest["layers"][""]

    per_sample = norm._window.scanned[-1].estimates
    channel = (x - per_sample.mean[..., None, None]) / (per_sample.var[..., None, None] + float(norm.eps)).sqrt()
    mean, std = channel.mean((0, 2, 3)).view(2, 4), channel.std((0, 2, 3), correction=0).view(2, 4)
    normalized = F.group_norm(channel, 2)
    expected = torch.stack(
        [
            (mean.std(1, correction=0) / std.mean(1)).mean(),
            normalized.mean((0, 2, 3)).std(correction=0),
            (alone > 0).double().mean(),
        ]
    )
    found = torch.tensor([row[name] for name in ("stat_diff", "sigma_mean", "active")], dtype=torch.float64)
    assert_close_to_max(found, expected, tol=tolerance("output", torch.float64))


def test_the_figures_of_a_standardized_weight_are_the_shares_of_its_gradient():
    torch.manual_seed(0)
    conv = mn.nn.WSConv2d(3, 6, 3, eps=0.0).double()
    x = torch.randn(4, 3, 5, 5, dtype=torch.float64)
    effective = conv.effective_weight().detach().requires_grad_()
    conv._conv_forward(x, effective, conv.bias).square().sum().backward()
    assert effective.grad is not None
    g, what = effective.grad.flatten(1), effective.detach().flatten(1)
    total, fan_in = g.square().sum(), g.shape[1]

    optimizer = torch.optim.SGD(conv.parameters(), lr=0.1)
    before = conv.weight.norm().item()
    with mn.observe(conv) as observer:
        conv(x).square().sum().backward()
        optimizer.step()
    assert observer.latest is not None
    row = observer.latest["layers"][""]
    assert (row["kind"], row["weight"]) == ("weight", "WS")
    assert conv.weight.grad is not None
    shares = [(g * what).sum(1).square().sum() / fan_in, g.sum(1).square().sum() / fan_in]
    expected = torch.stack([*(share / total for share in shares), conv.weight.grad.norm()])
    found = torch.tensor([row[name] for name in ("along", "mean", "grad")], dtype=torch.float64)
    assert_close_to_max(found, expected, tol=tolerance("gradient", torch.float64))
    assert row["norm"] == pytest.approx(before, rel=tolerance("output", torch.float64))  # as it was in the forward
    assert row["along"] + row["mean"] + row["rest"] + row["residual"] == pytest.approx(1)


@pytest.mark.parametrize(
    "weight", [mn.WS(), mn.WS(scale=False), mn.WS(center=False), mn.WN(), mn.CWN(), lambda layer: layer]
)
def test_layers_are_divided_into_shares_together_as_they_would_be_alone(weight):
    def build() -> nn.Module:
        torch.manual_seed(0)
        model = SmallResNet(NORMS["GN"], weight).double().train()
        first = model.stem
        if hasattr(first, "absorb"):
            first.absorb()
        return model

    found, model = observed_layers(build(), (4, 4)), build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with effective_gradients(model) as captured:
        take_step(model, optimizer, (4, 4))
    for name, shares in weight_shares(model, captured).items():
        totals = shares.totals()
        assert found[name].keys() == {"kind", "weight", *totals, "norm", "grad"}
        ours, theirs = (
            torch.tensor([row[key] for key in totals], dtype=torch.float64) for row in (found[name], totals)
        )
        assert_close_to_max(ours, theirs, tol=tolerance("gradient", torch.float64), scale=1.0)
        assert found[name]["grad"] == pytest.approx(float(model.get_submodule(name).weight.grad.norm()))


def test_a_plain_weight_is_seen_by_its_parameters_gradient():
    layers = observed_layers(network("GN", lambda layer: layer))
    rows = [row for row in layers.values() if row["kind"] == "weight"]
    assert [row["weight"] for row in rows] == ["none"] * 7
    assert all(row["along"] + row["mean"] + row["rest"] == pytest.approx(1) for row in rows)
    assert all(row["grad"] > 0 for row in rows)


def test_norms_of_torch_timm_and_micronorm_are_observed():
    layers = pytest.importorskip("timm.layers")
    norms: list[nn.Module] = [
        nn.BatchNorm2d(8),
        nn.InstanceNorm2d(8),
        nn.GroupNorm(2, 8),
        layers.BatchNormAct2d(8),
        layers.GroupNormAct(8, num_groups=2),
        layers.LayerNorm2d(8),
        mn.nn.GroupNorm(2, 8),
        mn.nn.BatchChannelNorm(8, 2),
        mn.nn.BatchChannelNormAct(8, 2),
        mn.nn.GhostBatchNorm(8, micro_batch=2),
    ]
    model = nn.Sequential(*norms)
    with mn.observe(model) as observer:
        model(torch.randn(4, 8, 5, 5)).square().sum().backward()
        observer.step()
    assert observer.latest is not None
    rows = list(observer.latest["layers"].values())
    assert [row["norm"] for row in rows] == [type(norm).__name__ for norm in norms]
    assert [row["groups"] for row in rows] == [8, 8, 2, 8, 2, 1, 2, 2, 2, 8]
    assert all(0 < row["active"] < 1 and row["stat_diff"] >= 0 for row in rows)
