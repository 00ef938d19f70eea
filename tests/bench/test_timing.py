"""Clocks and the arithmetic on what they say."""

import pytest
import torch

from micronorm.bench import timing
from micronorm.bench.cases import CASES, Case
from micronorm.bench.timing import (
    FOOTPRINT,
    LARGE,
    Inputs,
    copy_bandwidth,
    floor_ms,
    host_ms,
    input_sets,
    repeats_for,
    spread,
)

CPU = torch.device("cpu")


def test_the_floor_is_five_passes_over_the_activation():
    # 2×256×200×336 in two bytes at 4.25 TB/s, by hand: 5 · 34,406,400 · 2 / 4.25e12 s
    assert floor_ms(2 * 256 * 200 * 336, 2, 4.25e12) == pytest.approx(0.0809562, rel=1e-5)
    assert floor_ms(1000, 4, 1e9) == 5 * 4 * 1000 / 1e9 * 1e3


def test_large_inputs_rotate_beyond_the_cache_and_small_ones_stay():
    for case in CASES["large"]:
        pair = 2 * case.elements * 2
        assert pair >= LARGE
        assert input_sets(case, 2) * pair >= FOOTPRINT
    assert {input_sets(case, 2) for case in CASES["small"]} == {1}


def test_a_chunk_between_events_is_filled_and_bounded():
    assert [repeats_for(ms) for ms in (50.0, 1.0, 0.004, 0.0)] == [1, 2, 100, 100]


def test_inputs_have_the_layout_and_take_turns():
    inputs = Inputs(Case((2, 3, 4, 5), ""), "nhwc", dtype=torch.bfloat16, device=CPU)
    assert len(inputs) == 1
    x, grad = inputs.next()
    assert x.requires_grad
    assert not grad.requires_grad
    assert x.dtype == grad.dtype == torch.bfloat16
    for tensor in (x, grad):
        assert tensor.is_contiguous(memory_format=torch.channels_last)
    inputs.pairs.append((x, x))
    assert [inputs.next()[1] is x for _ in range(4)] == [True, False, True, False]


def test_equal_seeds_give_equal_inputs():
    one, same, other = (
        Inputs(Case((2, 3), ""), "nchw", dtype=torch.float32, device=CPU, seed=s).pairs[0][0] for s in (0, 0, 1)
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_a_call_is_timed_by_the_mean_of_its_repetitions(monkeypatch):
    clock = iter([10.0, 10.6])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    calls = []
    assert host_ms(lambda: calls.append(1), 3) == pytest.approx(200.0)
    assert len(calls) == 3


def test_a_copy_counts_the_bytes_read_and_those_written(monkeypatch):
    monkeypatch.setattr(timing, "host_ms", lambda call: 4.0)
    assert copy_bandwidth(CPU, size=1000, rounds=3) == pytest.approx(2 * 1000 / 4e-3)


def test_quartiles_enclose_the_median():
    found = spread([3.0, 1.0, 2.0, 10.0])
    assert (found.q25, found.median, found.q75) == (1.75, 2.5, 4.75)
