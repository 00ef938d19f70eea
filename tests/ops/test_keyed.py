import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from micronorm.ops.keyed import _mix, integers, permutation, sample_keys, uniforms, words

GOLDEN = 0x9E3779B97F4A7C15
WORDS = st.integers(0, 2**64 - 1)


def splitmix(state: int) -> int:
    """The reference generator's output for a state, in whole numbers without a limit."""
    z = (state + GOLDEN) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


def test_the_mixing_function_gives_the_first_outputs_of_splitmix64():
    # The reference generator with seed 0: its state grows by the golden ratio's word from output to output.
    states = torch.tensor([signed(k * GOLDEN % 2**64) for k in range(3)])
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [word % 2**64 for word in _mix(states).tolist()] == expected


@given(st.lists(WORDS, min_size=1, max_size=20))
def test_torch_arithmetic_wraps_as_64_bit_words_do(states):
    mixed = _mix(torch.tensor([signed(state) for state in states]))
    assert [word % 2**64 for word in mixed.tolist()] == [splitmix(state) for state in states]


@given(seed=WORDS, epoch=st.integers(0, 10**6), index=st.integers(0, 2**40), stream=WORDS)
def test_a_draw_is_a_function_of_seed_epoch_index_and_stream(seed, epoch, index, stream):
    # Written out in whole numbers: the same bits on every machine, for ever, or old runs cannot be repeated.
    key = splitmix((index + splitmix((splitmix(seed) + epoch) % 2**64)) % 2**64)
    start = splitmix((key + splitmix(stream)) % 2**64)
    expected = [splitmix((start + k * GOLDEN) % 2**64) for k in (1, 2, 3)]
    keys = sample_keys(torch.tensor([index]), seed=seed, epoch=epoch)
    assert [word % 2**64 for word in words(keys, 3, stream=stream)[0].tolist()] == expected


def test_a_list_of_indices_gives_the_keys_of_a_tensor():
    assert torch.equal(sample_keys([3, 1], seed=7, epoch=2), sample_keys(torch.tensor([3, 1]), seed=7, epoch=2))


def test_draws_do_not_depend_on_the_cut_or_the_order():
    order = torch.randperm(50)
    whole = uniforms(sample_keys(order, seed=7, epoch=2), 3, stream=4)
    for pieces in ([50], [1] * 50, [7, 43]):
        cut = [uniforms(sample_keys(part, seed=7, epoch=2), 3, stream=4) for part in order.split(pieces)]
        assert torch.equal(torch.cat(cut), whole)


def test_a_longer_draw_begins_with_the_shorter_one():
    keys = sample_keys(torch.arange(10), seed=0, epoch=0)
    assert torch.equal(words(keys, 5)[:, :2], words(keys, 2))


def test_nothing_collides_among_seeds_epochs_samples_and_streams():
    found = [
        words(sample_keys(torch.arange(100), seed=seed, epoch=epoch), 4, stream=stream).flatten()
        for seed, epoch, stream in itertools.product(range(4), range(4), range(4))
    ]
    assert torch.cat(found).unique().numel() == 64 * 400


def test_draws_leave_the_generator_of_torch_alone():
    before = torch.get_rng_state()
    permutation(10, seed=0, epoch=0)
    uniforms(sample_keys(torch.arange(3), seed=0, epoch=0), 2)
    assert torch.equal(torch.get_rng_state(), before)


def test_uniforms_are_uniform_and_uncorrelated():
    u = torch.cat(
        [uniforms(sample_keys(torch.arange(20_000), seed=0, epoch=1), 3, stream=stream) for stream in (0, 1)], dim=1
    )
    assert u.dtype == torch.float32
    assert u.min() >= 0
    assert u.max() < 1
    counts = torch.stack([torch.histc(column, bins=16, min=0, max=1) for column in u.T])
    chi2 = ((counts - 1250).square() / 1250).sum(1)  # 15 degrees of freedom: 44 is exceeded once in 10,000
    assert chi2.max() < 44
    # Draws, streams, and neighbouring samples; 20,000 independent pairs correlate by 0.007 on average.
    among = torch.corrcoef(torch.cat([u[1:].T, u[:-1].T])) - torch.eye(12)
    assert among.abs().max() < 0.035


@pytest.mark.parametrize("bound", [1, 2, 9, 2**24])
def test_integers_lie_below_their_bound_and_reach_both_ends(bound):
    drawn = integers(sample_keys(torch.arange(50_000), seed=0, epoch=0), 1, bound=bound)
    assert drawn.dtype == torch.int64
    assert drawn.min() >= 0
    assert drawn.max() < bound
    if bound < 10:
        counts = torch.bincount(drawn.flatten(), minlength=bound)
        assert (counts - 50_000 / bound).abs().max() < 5 * (50_000 / bound) ** 0.5


@pytest.mark.parametrize("bound", [0, -3, 2**24 + 1])
def test_a_bound_that_24_bits_cannot_serve_is_refused(bound):
    with pytest.raises(ValueError, match=f"between 1 and 16777216, got {bound}"):
        integers(torch.tensor([1]), 1, bound=bound)


@pytest.mark.parametrize("samples", [0, 1, 2, 1000])
def test_a_permutation_holds_every_index_once(samples):
    order = permutation(samples, seed=3, epoch=4)
    assert order.sort().values.tolist() == list(range(samples))


def test_permutations_of_epochs_and_seeds_are_unlike():
    orders = [permutation(1000, seed=seed, epoch=epoch) for seed in range(3) for epoch in range(3)]
    for one, other in itertools.combinations(orders, 2):
        assert (one == other).sum() < 10  # 1 on average
    assert torch.equal(orders[0], permutation(1000, seed=0, epoch=0))


def test_a_permutation_brings_each_index_to_each_place_equally_often():
    places = torch.stack([permutation(5, seed=0, epoch=epoch) for epoch in range(2000)])
    counts = torch.stack([torch.bincount(column, minlength=5) for column in places.T])
    assert (counts - 400).abs().max() < 5 * 400**0.5


@pytest.mark.gpu
def test_the_gpu_draws_the_bits_of_the_cpu():
    indices = torch.arange(1000)
    here = words(sample_keys(indices, seed=5, epoch=6), 7, stream=8)
    there = words(sample_keys(indices.cuda(), seed=5, epoch=6), 7, stream=8)
    assert torch.equal(here, there.cpu())
