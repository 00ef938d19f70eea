"""The law over processes: a step does not depend on which rank saw which sample."""

import copy

import pytest
import torch

import micronorm as mn
from tests.laws.ranks import group_cases, launch, merge_cases, never_steps, sequential_average, train_ddp
from tests.networks import SAMPLES, SmallResNet, assert_same_state, train
from tests.tolerances import assert_close_to_max, tolerance

pytestmark = pytest.mark.slow  # starts processes

SHARES = {
    1: [[5, 19]],
    2: [[2, 4, 1], [9, 1, 7]],  # 7 + 17
    4: [[1], [3], [13], [7]],
}
NETWORKS = {
    "GN": (mn.GN(groups=4), None),
    "BCN": (mn.BCN(groups=4), None),
    "BCN+WS": (mn.BCN(groups=4), mn.WS()),
    "BCN with bias correction": (mn.BCN(groups=4, bias_correction=True), None),
}


@pytest.mark.parametrize("world", SHARES)
def test_a_step_does_not_depend_on_the_number_of_ranks_or_their_shares(world):
    scenarios, expected, tols = [], [], []
    for norm, weight in NETWORKS.values():
        for sync_each, broadcast, steps in ((False, False, 1), (True, True, 1), (False, True, 1), (True, True, 8)):
            model = SmallResNet(norm, weight).double()
            scenarios.append(
                {
                    "model": model,
                    "shares": SHARES[world],
                    "steps": steps,
                    "sync_each": sync_each,
                    "broadcast": broadcast,
                }
            )
            expected.append(train(copy.deepcopy(model), [SAMPLES], steps=steps, lr=0.02))
            tols.append(tolerance("one_step" if steps == 1 else "fifty_steps", torch.float64))
    for rank, results in enumerate(launch(train_ddp, world, scenarios)):
        assert len(results) == len(scenarios) > 0, rank
        for result, state, tol in zip(results, expected, tols, strict=True):
            assert_same_state(result, state, tol=tol)


def test_sequential_estimates_are_averaged_over_ranks_at_the_step():
    layer = mn.nn.BatchChannelNorm(4, 2, statistics="sequential", rate=0.3).double()
    results = launch(sequential_average, 2, layer)
    for name in ("mean", "var"):
        average = (results[0][name] + results[1][name]) / 2
        assert not torch.equal(results[0][name], results[1][name])
        for result in results:
            assert_close_to_max(result[f"merged_{name}"], average, tol=1e-15)


def test_merging_follows_counts_groups_skips_and_refuses_different_lists():
    # Rank r sees the constant r + 1; with rate 1 the estimate becomes what the merged window saw.
    results = launch(merge_cases, 3)
    for rank, result in enumerate(results):
        assert torch.equal(result["one rank saw samples"], torch.full((2,), 2.0))
        for statistics in ("sequential", "batch"):
            assert result[f"{statistics} blend"].item() == 0.25
        assert torch.equal(result["no group"], torch.full((2,), rank + 1.0))
        assert torch.equal(result["group of two"], torch.full((2,), 1.5 if rank < 2 else 3.0))
        assert torch.equal(result["skipped on one rank"], torch.zeros(2))
        assert torch.equal(result["joined the next step"], torch.full((2,), 2.0))
        assert torch.equal(result["zero redundancy"], torch.full((2,), 2.0))
        assert torch.equal(result["a copy on one rank"], torch.full((2,), 2.0))
        assert "different lists" in result["different lists"]
        assert "rank 0: 1 layers, rank 1: 2 layers" in result["different lists"]


def test_statistics_are_merged_over_the_group_of_ddp_and_models_that_differ_are_noticed():
    for rank, result in enumerate(launch(group_cases, 4)):
        before, message, after = result["DDP in pairs"]
        assert not before.any()
        assert message == ""
        assert torch.equal(after, torch.full((2,), 1.5 if rank < 2 else 3.5))
        first, *later = result["own models"]
        assert "parameters of these layers differ between the ranks" in first
        assert "process_group=None" in first
        assert later == ["", ""]  # once
        assert result["replicas"] == ["", "", ""]
        assert "algorithms.Join" in result["Join"]


def test_a_rank_that_never_steps_ends_in_a_timeout_that_names_the_layers(tmp_path):
    messages = launch(never_steps, 2, str(tmp_path / "done"), timeout=3)
    assert "merging the statistics of 0 across ranks failed" in messages[0]
    assert "all ranks of the group" in messages[0]
