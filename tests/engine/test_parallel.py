"""Ranks: no sample lost or taken twice, none that waits for another, and the result of one rank alone."""

import functools
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import micronorm as mn
from micronorm.engine.evaluate import evaluate
from micronorm.engine.parallel import Flags, OneRank, ShardedRanks, open_ranks, own_device
from tests.engine import ranks
from tests.engine.tasks import CPU, Toy, make_step
from tests.laws.ranks import launch
from tests.networks import SmallResNet, assert_same_state
from tests.tolerances import tolerance

COUNTS = st.integers(0, 300)
WORLDS = st.integers(1, 17)
UNITS = st.integers(1, 20)


def placed(rank, world, kind=OneRank):
    parallel = object.__new__(kind)
    parallel.device, parallel.rank, parallel.world = CPU, rank, world
    return parallel


@given(COUNTS, WORLDS, UNITS)
def test_shares_lose_no_sample_take_none_twice_and_cut_no_unit(samples, world, unit):
    shares = [placed(rank, world).share(samples, unit=unit) for rank in range(world)]
    assert [i for share in shares for i in range(samples)[share]] == list(range(samples))
    sizes = [len(range(samples)[share]) for share in shares]
    assert all(share.start % unit == 0 for share, size in zip(shares, sizes, strict=True) if size)
    units = [-(-size // unit) for size in sizes]
    assert max(units) - min(units) <= 1
    assert placed(0, world).largest_share(samples, unit=unit) == max(units) * unit
    assert units[0] == max(units)  # whose running statistics are kept must not be without samples


@given(COUNTS, WORLDS, UNITS, st.integers(1, 6))
def test_shards_make_equally_many_passes_and_enough_for_every_rank(samples, world, unit, multiple):
    size = unit * multiple
    own = [placed(rank, world).forward_count(samples, unit=unit, size=size) for rank in range(world)]
    sharded = {placed(rank, world, ShardedRanks).forward_count(samples, unit=unit, size=size) for rank in range(world)}
    assert sharded == {max(1, *own)}


def test_one_process_is_alone_and_answers_for_itself(monkeypatch):
    monkeypatch.delitem(os.environ, "RANK", raising=False)
    parallel = open_ranks(CPU, "ddp")
    assert type(parallel) is OneRank
    verdict = Flags(out_of_memory=True, save=True)
    assert parallel.agree(verdict) == verdict
    assert (parallel.broadcast("a"), parallel.gather("a")) == ("a", ["a"])


def test_each_rank_has_a_gpu_of_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setitem(os.environ, "LOCAL_RANK", "2")
    assert own_device(None) == own_device(torch.device("cuda")) == torch.device("cuda", 2)
    assert own_device(torch.device("cuda", 1)) == torch.device("cuda", 1)
    assert own_device(CPU) == CPU


RUNS = [
    {"samples": 22, "test": 5, "execution": {}},  # the last step of an epoch has one sample
    {"samples": 22, "test": 1, "execution": {"micro_batch": 2}},
    {"samples": 22, "test": 5, "execution": {"parallel": "fsdp", "micro_batch": 2}},
]
FAILURES = 8


@functools.cache
def on(world):
    return launch(ranks.everything, world, FAILURES, RUNS)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_rank_that_runs_out_of_memory_is_followed_by_all_and_none_waits(world):
    alone = ranks.fresh_step(ranks.SAMPLES, OneRank(CPU))
    alone(ranks.shared_out(alone))
    for rank in on(world):
        found = rank["memory"]
        assert {"forward", "backward"} <= set(found["phases"])
        assert len(found["failed"]) == FAILURES
        assert all(failed == [found["clean"], 2, 1] for failed in found["failed"])
        assert_same_state(found["state"], alone.model.state_dict(), tol=tolerance("one_step", torch.float64))


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_an_error_on_one_rank_is_raised_on_all_and_none_waits(world):
    *others, last = (rank["errors"] for rank in on(world))
    for name in ("forward", "backward", "both"):
        assert last[name] == "KeyError: 'a column'"
        assert others[0][name] == "StepFailed: the step failed on another rank, and was rolled back on this one"
    for result in (*others, last):
        assert result["never fits"].startswith("MemoryError: out of memory with 1 sample per micro-batch")
        assert result["goes on"] == "4"
    assert [result["evaluation"] for result in (*others, last)] == ["StepFailed"] * (world - 1) + ["TypeError"]


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_run_does_not_depend_on_its_ranks_even_where_some_have_no_samples(world):
    results = [rank["law"] for rank in on(world)]
    for k, run in enumerate(RUNS):
        one = ranks.law(**{**run, "execution": {}})
        for found in (result[k] for result in results):
            assert_same_state(found["state"], one["state"], tol=tolerance("fifty_steps", torch.float64))
            assert torch.equal(found["state"]["spare.weight"], ranks.law_network().spare.weight.double())
            assert found["figures"] == pytest.approx(one["figures"], rel=1e-9)
            assert found["digest"] == results[0][k]["digest"]
        assert results[0][k]["counts"] == one["counts"] == [7, 7, 7, 1] * 2
        assert results[0][k]["epochs"] == [22, 22]
        assert results[0][k]["losses"] == pytest.approx(one["losses"], rel=1e-9)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_figures_are_those_of_the_model_that_is_kept(world):
    found = [rank["figures"] for rank in on(world)]
    assert not torch.equal(found[0]["state"]["norm.running_mean"], found[1]["state"]["norm.running_mean"])
    one = make_step(SmallResNet(mn.BN()), Toy(), 4)
    one.model.load_state_dict(found[0]["state"])
    expected = evaluate(one, seed=0)
    for rank in found:
        assert rank["figures"] == pytest.approx(expected, rel=1e-12)
        assert rank["kept"]


def test_scores_made_of_objects_are_gathered_from_all_ranks():
    assert [rank["detections"] for rank in on(2)] == [ranks.detections()] * 2


def test_a_moving_average_is_the_same_on_any_number_of_ranks():
    alone, _ = ranks.averaged()
    assert "ema_loss" in alone
    for rank in on(2):
        for figures in rank["averaged"]:
            assert figures == pytest.approx(alone, rel=1e-9)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_statistics_over_the_whole_step_are_those_of_one_rank_alone(world):
    one = ranks.whole_batches()
    for rank in on(world):
        assert rank["batches"]["figures"] == pytest.approx(one["figures"], rel=1e-9)
    assert_same_state(on(world)[0]["batches"]["state"], one["state"], tol=tolerance("fifty_steps", torch.float64))


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kept", ["a window of a skipped step", "running statistics that nothing merges"])
def test_what_is_one_ranks_own_is_kept_for_it(world, kept):
    for rank in on(world):
        went_on, resumed = rank["resumed"][kept]
        assert resumed == went_on


def test_ranks_try_out_what_fits_together_or_not_at_all():
    assert [rank["fitting"] for rank in on(2)] == [5, 5]
