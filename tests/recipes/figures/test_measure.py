"""Measurements at a tiny size: what they keep, and that an interruption changes nothing."""

import math

import pytest
import torch

from micronorm.diagnostics.lipschitz import gradient_shares, observe_weight
from micronorm.engine.task import Listener
from micronorm.nn import WS, WSConv2d
from micronorm.recipes import figures
from micronorm.recipes.figures import dist, dist_exp, mean_div, methods, stat_diff
from micronorm.recipes.figures.figure import Request
from micronorm.recipes.figures.mean_div import FirstGradients, effective_gradient_shares
from micronorm.recipes.figures.stat_diff import MOMENTUM, ChannelStatistics
from micronorm.tasks.classification import Classification, open_classification
from tests.tolerances import assert_close_to_max, tolerance


class Few:
    """The first samples of a set."""

    def __init__(self, samples, count):
        self.samples, self.count = samples, count

    def __len__(self):
        return self.count

    def load(self, shares, *, seed):
        return self.samples.load(shares, seed=seed)


class Impatient(Listener):
    """Interrupts after so many steps."""

    def __init__(self, steps):
        self.left = steps

    def on_step(self, row):
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


@pytest.fixture(autouse=True)
def few(monkeypatch):
    def opened(name, folder=None, *, device="cpu"):
        task = open_classification(name)
        return Classification(Few(task.train, 96), Few(task.test, 50), classes=10)

    monkeypatch.setattr(dist, "open_classification", opened)
    monkeypatch.setattr(methods, "open_classification", opened)


@pytest.fixture
def tiny_grid(monkeypatch):
    monkeypatch.setattr(dist, "SIGMA_MEAN", (0.0, 1.0))
    monkeypatch.setattr(dist, "SIGMA_STD", (0.6,))
    monkeypatch.setattr(dist, "SEEDS", 2)


def measured(name, folder, *, listener=None, **options):
    figure = figures.find(name)
    path = folder / "figure.json"
    return figure.run(Request(**options), path, command="test", listener=listener)


@pytest.mark.usefixtures("tiny_grid")
def test_every_cell_and_seed_has_an_accuracy_and_an_interrupted_grid_continues(tmp_path):
    whole = measured("fig:dist", tmp_path / "whole", epochs=1)
    cells = whole["numbers"]["cells"]
    assert {(c["sigma_mean"], c["sigma_std"], c["seed"]) for c in cells} == {
        (m, 0.6, seed) for m in (0.0, 1.0) for seed in (0, 1)
    }
    assert all(0 <= cell["accuracy"] <= 100 for cell in cells)
    assert whole["settings"]["training"]["epochs"] == 1
    with pytest.raises(KeyboardInterrupt):
        measured("fig:dist", tmp_path, epochs=1, listener=Impatient(5))  # two steps each: in the third network
    rest = Impatient(10**6)
    assert measured("fig:dist", tmp_path, epochs=1, listener=rest)["numbers"] == whole["numbers"]
    assert 10**6 - rest.left == 4  # two networks were missing


@pytest.mark.usefixtures("tiny_grid")
def test_a_network_that_diverges_has_accuracy_0(tmp_path, monkeypatch):
    build = dist.build

    def broken(sigma_mean, sigma_std, **options):
        network = build(sigma_mean, sigma_std, **options)
        if (sigma_mean, sigma_std) == (1.0, 0.6):
            torch.nn.init.constant_(network[1].weight, torch.inf)  # a convolution
        return network

    monkeypatch.setattr(dist, "build", broken)
    monkeypatch.setattr(dist, "SEEDS", 1)
    cells = measured("fig:dist", tmp_path, epochs=1)["numbers"]["cells"]
    assert [cell["accuracy"] == 0 for cell in cells] == [False, True]


@pytest.mark.parametrize("module, name", [(stat_diff, "fig:stat_diff"), (mean_div, "fig:mean_div")])
def test_an_interrupted_measurement_keeps_the_trainings_that_were_finished(module, name, tmp_path, monkeypatch):
    monkeypatch.setitem(methods.SEEDS, "digits", 2)
    for method in module.METHODS.keys() - {"GN+WS", "GN + both"}:
        monkeypatch.delitem(module.METHODS, method)
    whole = measured(name, tmp_path / "whole", epochs=2)
    assert [[row["epoch"] for row in rows] for seeds in whole["numbers"]["methods"].values() for rows in seeds] == (
        [[1, 2]] * 2
    )
    with pytest.raises(KeyboardInterrupt):
        measured(name, tmp_path, epochs=2, listener=Impatient(5))  # two steps per epoch: in the second training
    rest = Impatient(10**6)
    assert measured(name, tmp_path, epochs=2, listener=rest)["numbers"] == whole["numbers"]
    assert 10**6 - rest.left == 4


def test_stat_diff_is_that_of_the_running_moments_of_training_forwards():
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.GroupNorm(2, 4)).double()
    recorder = ChannelStatistics(model)
    batches = torch.randn(3, 8, 1, 6, 6, dtype=torch.float64)
    seen = []
    for batch in batches:
        model(batch)
        var, mean = torch.var_mean(model[0](batch), (0, 2, 3), correction=0)
        seen.append(torch.stack([mean, var]))
    running = seen[0]
    for now in seen[1:]:
        running = (1 - MOMENTUM) * running + MOMENTUM * now
    model.eval()(100 * batches[0])  # an evaluation is not seen
    mean, std = running[0].unflatten(0, (2, 2)), running[1].sqrt().unflatten(0, (2, 2))
    expected = ((mean[:, 0] - mean[:, 1]).abs() / 2 / std.mean(1)).mean()
    row = recorder.after_epoch()
    assert_close_to_max(
        torch.tensor(row["mean"], dtype=torch.float64), expected, tol=tolerance("gradient", torch.float64)
    )
    assert row["std"] == 0  # of one layer


def test_shares_and_residual_sum_to_one_and_measuring_changes_no_gradient():
    images, labels = torch.randn(8, 1, 8, 8).double(), torch.randint(10, (8,))
    measured, plain = (methods.build("digits", methods.GROUPS, WS(), seed=0, classes=10).double() for _ in range(2))
    shares = effective_gradient_shares(measured, lambda: torch.nn.functional.cross_entropy(measured(images), labels))
    torch.nn.functional.cross_entropy(plain(images), labels).backward()
    assert math.isclose(sum(shares.values()), 1, rel_tol=1e-12)
    assert all(shares[part] > 0 for part in ("along", "mean", "rest"))
    for one, other in zip(measured.parameters(), plain.parameters(), strict=True):
        assert_close_to_max(one.grad, other.grad, tol=tolerance("one_step", torch.float64))


def test_the_first_gradients_of_an_epoch_leave_the_model_as_it_was():
    model = methods.build("digits", methods.GROUPS, WS(), seed=0, classes=10)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plan = methods.training_settings(Request(), epochs={"digits": 1})
    recorder = FirstGradients(model, open_classification("digits"), plan, Listener())
    assert recorder.before_epoch(0) != recorder.before_epoch(1)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_channels_and_layers_without_gradient_are_left_out_of_the_shares():
    torch.manual_seed(0)
    used, unused = WSConv2d(3, 8, 3).double(), WSConv2d(3, 8, 3).double()
    x = torch.randn(4, 3, 6, 6, dtype=torch.float64)
    grads = []
    observe_weight(used, lambda weight: weight.register_hook(grads.append))

    def loss():
        return used(x)[:, :4].square().sum() + 0 * unused(x).sum()  # four channels and a layer without gradients

    shares = effective_gradient_shares(torch.nn.ModuleList([used, unused]), loss)
    four = gradient_shares(used.weight[:4], grads[0][:4], eps=used.eps)
    for part, share in shares.items():
        assert math.isclose(share, getattr(four, part).mean(), rel_tol=1e-12, abs_tol=1e-12)


def test_shares_of_no_gradient_at_all_are_refused():
    with pytest.raises(RuntimeError, match="has a gradient"):
        effective_gradient_shares(WSConv2d(3, 8, 3), lambda: torch.zeros((), requires_grad=True))


def test_a_network_of_plain_weights_has_no_shares():
    model = methods.build("digits", methods.GROUPS, None, seed=0, classes=10)
    assert effective_gradient_shares(model, lambda: model(torch.randn(2, 1, 8, 8)).sum()) == {}


def test_the_larger_stat_diff_the_more_of_a_channel_is_cut_off(tmp_path):
    examples = measured("fig:dist_exp", tmp_path)["numbers"]["examples"]
    assert len(examples) == len(dist_exp.EXAMPLES)
    diffs = [example["stat_diff"] for example in examples]
    assert diffs == sorted(diffs)
    active = [min(example["active"]) for example in examples]
    assert active == sorted(active, reverse=True)
    (low, _), (high, _) = dist_exp.EXAMPLES[0]
    assert math.isclose(diffs[0], (high - low) / 2, rel_tol=0.1)
    for example in examples:
        assert all(math.isclose(sum(shares), 1, rel_tol=1e-3) for shares in example["after"]["shares"])


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("fig:dist_exp", {"dataset": "digits"}, "fig:dist_exp has no data set 'digits'; leave out --dataset"),
        ("fig:front", {"epochs": 2}, "fig:front trains nothing; leave out --epochs"),
        ("fig:dist", {"dataset": "imagenet"}, "fig:dist has no data set 'imagenet'; it has digits, cifar10"),
        ("fig:all", {}, "fig:all is a drawing"),
    ],
)
def test_what_a_figure_does_not_have_is_refused(tmp_path, name, options, message):
    with pytest.raises(ValueError, match=message):
        measured(name, tmp_path, **options)
