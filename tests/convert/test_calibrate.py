"""`mn.calibrate`: statistics of all elements together, in the order of the data flow, however they were cut."""

import copy

import pytest
import torch
from torch import Tensor, nn

import micronorm as mn
from tests.laws.ranks import launch
from tests.networks import SmallResNet, samples
from tests.tolerances import assert_close_to_max


def norms(model: nn.Module) -> dict[str, mn.nn.BatchChannelNorm]:
    return {n: m for n, m in model.named_modules() if isinstance(m, mn.nn.BatchChannelNorm)}


def test_one_call_gives_each_norm_the_moments_of_its_input_behind_calibrated_norms_whatever_the_cut():
    torch.manual_seed(0)
    model = SmallResNet().double().train()
    x, _ = samples()
    for cut in ([24], [1, 20, 3], [1] * 24):
        twin = copy.deepcopy(model)
        assert mn.calibrate(twin, x.split(cut)) == len(cut)
        assert all(module.training for module in twin.modules())
        assert_calibrated(twin, x)


def assert_calibrated(model: nn.Module, x: Tensor) -> None:
    """Compare the estimates with the inputs of each norm when the calibrated model runs."""
    inputs: dict[str, list[Tensor]] = {}
    for name, layer in norms(model).items():
        layer.register_forward_pre_hook(lambda _, args, name=name: inputs.setdefault(name, []).append(args[0].detach()))
    model.eval()(x)
    for name, layer in norms(model).items():
        by_channel = torch.cat([y.transpose(0, 1).flatten(1) for y in inputs[name]], 1)
        assert_close_to_max(layer.running_mean, by_channel.mean(1), tol=1e-13)
        assert_close_to_max(layer.running_var, by_channel.var(1, correction=0), tol=1e-13)


def test_a_norm_that_a_forward_calls_for_several_maps_gets_the_moments_of_all_of_them():
    class SharedHead(nn.Module):
        """Two levels go through the same head, one after the other, as in RetinaNet."""

        def __init__(self) -> None:
            super().__init__()
            self.stem, self.conv = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1)
            self.first, self.second = mn.nn.BatchChannelNorm(8, 2), mn.nn.BatchChannelNorm(8, 2)

        def forward(self, x: Tensor) -> list[Tensor]:
            y = self.stem(x)
            return [self.second(self.conv(self.first(level).relu())) for level in (y, y[..., ::2, ::2] + 1)]

    torch.manual_seed(0)
    x, _ = samples()
    for cut in ([24], [7, 17]):
        model = SharedHead().double()
        mn.calibrate(model, x.split(cut))
        assert_calibrated(model, x)


def test_a_norm_behind_itself_gets_the_same_moments_whatever_the_cut():
    torch.manual_seed(0)
    norm, x = mn.nn.BatchChannelNorm(4, 2).double(), torch.randn(6, 4, 5, 5, dtype=torch.float64) + 2
    model = nn.Sequential(norm, nn.Conv2d(4, 4, 1).double(), norm)
    found = []
    for size in (6, 2):
        model.load_state_dict({**model.state_dict(), "0.running_mean": torch.zeros(4), "0.running_var": torch.ones(4)})
        mn.calibrate(model, list(x.split(size)))
        found.append((norm.running_mean.clone(), norm.running_var.clone()))
    for whole, cut in zip(*found, strict=True):
        torch.testing.assert_close(cut, whole, rtol=1e-12, atol=1e-12)


def test_the_batches_of_an_iterator_are_read_once_and_those_of_a_loader_once_per_norm():
    model = SmallResNet()
    x, _ = samples(torch.float32)
    expected = copy.deepcopy(model)
    mn.calibrate(expected, x.split(6))
    assert mn.calibrate(model, iter(x.split(6))) == 4
    for a, b in zip(model.buffers(), expected.buffers(), strict=True):
        assert torch.equal(a, b)


def test_batch_norms_get_the_unbiased_variance():
    norm = nn.BatchNorm2d(3)
    x = torch.randn(4, 3, 5, 5) * 2 + 1
    mn.calibrate(norm, [x[:1], x[1:]])
    assert norm.running_var is not None
    assert norm.running_mean is not None
    assert_close_to_max(norm.running_var, x.transpose(0, 1).flatten(1).var(1), tol=1e-6)
    assert_close_to_max(norm.running_mean, x.mean((0, 2, 3)), tol=1e-6)


@pytest.mark.parametrize(
    "norm", [mn.BN(micro_batch=2), mn.BRN(micro_batch=1), mn.SN()], ids=lambda norm: type(norm).__name__
)
def test_norms_by_micro_batches_get_the_moments_of_all_elements(norm):
    layer, x = norm(4).double(), torch.randn(5, 4, 3, 3, dtype=torch.float64)
    mn.calibrate(layer, x.split([2, 3]))
    by_channel = x.transpose(0, 1).flatten(1)
    assert_close_to_max(layer.running_mean, by_channel.mean(1), tol=1e-13)
    # Each layer's own kind of running variance: a batch of all samples, absorbed whole, gives the same.
    layer.micro_batch, layer.momentum, running = None, 1.0, layer.running_var.clone()
    layer.train()(x)
    assert_close_to_max(layer.running_var, running, tol=1e-13)


def test_batches_may_be_pairs_or_anything_with_a_forward_of_ones_own():
    x, labels = samples(torch.float32)
    model = SmallResNet()
    expected = copy.deepcopy(model)
    mn.calibrate(expected, [x])
    for batches, forward in (([(x, labels)], None), ([{"image": x}], lambda m, b: m(b["image"]))):
        twin = copy.deepcopy(model)
        mn.calibrate(twin, batches, forward=forward)
        for name, layer in norms(twin).items():
            assert torch.equal(layer.running_var, norms(expected)[name].running_var)


def test_nothing_is_changed_where_something_is_wrong():
    model = nn.Sequential(mn.nn.BatchChannelNorm(3), nn.ReLU(), mn.nn.BatchChannelNorm(3))
    bad = torch.ones(1, 3, 2, 2)
    bad[0, 0, 0, 0] = torch.inf
    for batches, message in (([], "reached no norm"), ([bad], "no finite statistics")):
        with pytest.raises(ValueError, match=message):
            mn.calibrate(model, batches)
        assert all(layer.running_mean.eq(0).all() and layer.running_var.eq(1).all() for layer in norms(model).values())
    with pytest.raises(ValueError, match="no layer with running statistics"):
        mn.calibrate(nn.Conv2d(3, 4, 1), [bad])


def test_calibration_drops_what_was_gathered_around_the_old_statistics():
    norm = mn.nn.BatchChannelNorm(4, 2, rate=1.0)
    optimizer = torch.optim.SGD(norm.parameters(), lr=0.1)
    norm(torch.randn(2, 4, 8, 8) + 10)
    mn.calibrate(norm, [torch.randn(2, 4, 8, 8) + 100])
    calibrated = norm.running_mean.clone()
    optimizer.step()
    assert torch.equal(norm.running_mean, calibrated)


def test_norms_that_evaluation_does_not_reach_keep_their_statistics_with_a_warning():
    class Auxiliary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.extra = mn.nn.BatchChannelNorm(4), mn.nn.BatchChannelNorm(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x=self.extra(x) if self.training else x)

    model = Auxiliary()
    with pytest.warns(UserWarning, match="1 norms had no input in eval mode and keep their statistics: extra"):
        mn.calibrate(model, [torch.ones(1, 4, 2, 2)])
    assert model.norm.running_mean.eq(1).all()


def test_statistics_that_the_buffers_cannot_hold_are_refused():
    norm = nn.BatchNorm2d(4).half()
    with pytest.raises(ValueError, match="no finite statistics in its dtype"):
        mn.calibrate(norm, [torch.randn(2, 4, 8, 8).half() * 400])
    assert norm.running_var is not None
    assert norm.running_var.eq(1).all()


def test_calibrate_says_what_it_was_given_in_the_wrong_place():
    norm = mn.nn.BatchChannelNorm(4)
    with pytest.raises(TypeError, match="the model comes first, got list"):
        mn.calibrate([torch.ones(1, 4, 2, 2)], norm)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"one tensor of \(1, 4, 2, 2\)"):
        mn.calibrate(norm, torch.ones(1, 4, 2, 2))
    with pytest.raises(TypeError) as caught:
        mn.calibrate(nn.Sequential(nn.Conv2d(3, 4, 1), norm), [{"pixels": torch.ones(1, 3, 2, 2)}])
    assert "a dictionary with ['pixels']; give forward=" in caught.value.__notes__[0]


def calibrate_on(rank: int, world: int, model: nn.Module) -> dict[str, Tensor]:
    x, _ = samples()
    mn.calibrate(model, [x[:5]] if rank == 0 else x[5:].split(4))
    return model.state_dict()


@pytest.mark.slow  # two processes
def test_ranks_with_unequal_shares_find_the_statistics_of_one():
    torch.manual_seed(0)
    model = SmallResNet().double()
    alone = copy.deepcopy(model)
    mn.calibrate(alone, [samples()[0]])
    for state in launch(calibrate_on, 2, model):
        for name, value in alone.state_dict().items():
            assert_close_to_max(state[name], value, tol=1e-13)
