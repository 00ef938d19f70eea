from collections.abc import Iterator

import pytest
import torch
from torch import nn

import micronorm as mn
from micronorm.cli.digits import BATCH_BN, METHODS, SAMPLES_PER_STEP, build, cut_difference, step_indices, train
from micronorm.data.digits import Digits, Labelled, read_digits
from tests.tolerances import tolerance

by_method = pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)


@pytest.fixture(scope="module")
def digits() -> Digits:
    return read_digits()


@pytest.fixture
def in_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@by_method
def test_a_step_does_not_depend_on_how_its_samples_were_cut(method, digits, in_float64):
    images = Labelled(digits.train.images.double(), digits.train.labels)
    assert cut_difference(method, images, seed=0) < tolerance("one_step", torch.float64)


def test_a_norm_that_sees_the_whole_batch_breaks_that_law(digits):
    # So a difference near zero is a property of the methods, not of the measurement.
    # 32 forwards move running statistics 1 − 0.9³² against 0.1: ten times as far. The count of forwards would give 31.
    assert 1 < cut_difference(BATCH_BN, digits.train, seed=0) < 20


@by_method
def test_for_one_seed_every_method_starts_from_the_same_weights(method):
    plain = [m for m in build(METHODS[0], seed=3).modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    made = [m for m in build(method, seed=3).modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    assert len(made) == len(plain) == 10
    for one, other in zip(made, plain, strict=True):
        assert torch.equal(one.weight, other.weight)


def test_the_weight_spec_reaches_every_convolution_and_not_the_classifier():
    network = build(METHODS[-1], seed=0)
    convolutions = [m for m in network.modules() if isinstance(m, nn.Conv2d)]
    assert {type(m) for m in convolutions} == {mn.nn.WSConv2d}
    assert type(network[-1]) is nn.Linear


def test_building_a_network_leaves_the_random_numbers_of_others_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    build(METHODS[0], seed=0)
    assert torch.equal(torch.rand(3), expected)


def test_every_step_has_the_same_count_and_every_epoch_takes_each_sample_once():
    indices = step_indices(48, epochs=4, seed=0)
    assert indices.shape == (6, SAMPLES_PER_STEP)
    for epoch in indices.flatten().split(48):
        assert epoch.sort().values.tolist() == list(range(48))
    assert not torch.equal(indices, step_indices(48, epochs=4, seed=1))
    assert step_indices(33, epochs=1, seed=0).shape == (1, SAMPLES_PER_STEP)


def test_a_network_learns_the_digits(digits):
    seen = []
    outcome = train(METHODS[1], digits, epochs=1, seed=0, on_step=lambda: seen.append(1))
    assert outcome.steps == len(seen) == 1297 // SAMPLES_PER_STEP
    assert outcome.error == 100 * outcome.wrong / 500
    assert outcome.error < 20  # of 90 by chance; 6.0 was seen
