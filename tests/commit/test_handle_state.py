"""What layers gather in a step is committed whole, or taken back as if the step had not been begun."""

import copy

import pytest
import torch
from torch import nn

import micronorm as mn
from micronorm.commit.handle import Handle, merge_states
from micronorm.commit.snapshot import Snapshot
from micronorm.engine.checkpoint import digest
from tests.tolerances import assert_close_to_max


def layers(statistics="step"):
    return nn.Sequential(*(mn.nn.BatchChannelNorm(4, 2, statistics=statistics, rate=0.5) for _ in range(2))).double()


def begun(model):
    return Handle(model, [torch.optim.SGD(model.parameters(), lr=0.1)])


def images(seed=0):
    return torch.randn(3, 4, 4, 4, generator=torch.Generator().manual_seed(seed)).double() + seed


def test_a_window_that_was_not_empty_is_put_back_as_often_as_asked():
    model = layers()
    model(images(1))  # of a step that was skipped
    handle, snapshot = begun(model), Snapshot(model)
    before = digest(handle.state_dict())
    for seed in (2, 3):
        model(images(seed))
        assert digest(handle.state_dict()) != before
        snapshot.restore()
        assert digest(handle.state_dict()) == before
    assert [window.forwards for window in handle.windows] == [1, 1]


def test_a_rolled_back_forward_does_not_count_in_the_commit():
    model, clean = layers(), layers()
    handle, expected, snapshot = begun(model), begun(clean), Snapshot(model)
    model(images(1))
    snapshot.restore()
    for net, made in ((model, handle), (clean, expected)):
        net(images(2))
        made.commit()
    assert digest(model.state_dict()) == digest(clean.state_dict())
    assert model[0].running_mean.any()


def test_losses_that_were_counted_are_taken_back():
    handle = begun(model := layers())
    snapshot = Snapshot(model)
    model(images() * float("inf"))
    assert handle.windows[0].lost.tolist() == [3, 0]
    snapshot.restore()
    assert handle.windows[0].lost.tolist() == [0, 0]


def test_passes_that_checkpointing_may_repeat_are_put_back():
    model = layers("sequential")
    model(images(1))
    handle, snapshot = begun(model), Snapshot(model)
    kept = [list(window.scanned) for window in handle.windows]
    model(images(2))
    assert len(handle.windows[0].scanned) == 2
    snapshot.restore()
    for window, passes in zip(handle.windows, kept, strict=True):
        assert [id(one) for one in window.scanned] == [id(one) for one in passes]
    assert [len(window.scanned) for window in handle.windows] == [1, 1]


def test_forwards_in_a_pause_leave_no_trace():
    handle = begun(model := layers())
    before = digest(handle.state_dict())
    with handle.paused():
        model(images())
    assert digest(handle.state_dict()) == before


def test_a_model_without_such_layers_may_have_a_handle():
    model = nn.Linear(2, 2)
    handle = begun(model)
    with handle.paused():
        model(torch.ones(1, 2))
    handle.refresh()
    handle.detach()
    assert handle.state_dict() == {"sums": [], "lost": [], "forwards": []}


def test_what_was_gathered_goes_through_a_checkpoint():
    model = layers()
    handle = begun(model)
    model(images())
    state = copy.deepcopy(handle.state_dict())
    model(images(1))
    assert digest(handle.state_dict()) != digest(state)  # the state is a copy
    other = begun(layers())
    other.load_state_dict(state)
    assert digest(other.state_dict()) == digest(state)


@pytest.mark.parametrize("channels", [[4], [4, 8]])
def test_the_windows_of_another_model_are_refused(channels):
    state = begun(layers()).state_dict()
    other = begun(nn.Sequential(*(mn.nn.BatchChannelNorm(c, 2) for c in channels)))
    with pytest.raises(ValueError, match=rf"windows of 2 layers, the model has {len(channels)}, or they differ"):
        other.load_state_dict(state)


def test_a_step_may_take_as_many_forwards_as_it_is_told():
    model = layers()
    handle = Handle(model, [torch.optim.SGD(model.parameters(), lr=0.1)], max_forwards=2)
    model(images())
    model(images())
    with pytest.raises(RuntimeError, match="has gathered 2 training forwards without a commit"):
        model(images())
    assert handle.windows[0].forwards == 2


def test_windows_of_ranks_that_are_gone_are_taken_over_and_new_ranks_begin_with_none():
    kept = []
    for seed in range(3):
        handle = begun(model := layers())
        model(images(seed))
        kept.append(handle.state_dict())
    one = begun(whole := layers())
    for seed in range(3):
        whole(images(seed))
    merged = merge_states(kept, kept)
    assert merged["forwards"] == one.state_dict()["forwards"] == [3, 3]
    torch.testing.assert_close(merged["sums"][0], one.state_dict()["sums"][0])
    none = begun(layers())
    none.load_state_dict(merge_states(kept, []))
    assert digest(none.state_dict()) == digest(begun(layers()).state_dict())


def test_a_checkpoint_in_mid_window_holds_sums_around_the_estimates_it_was_saved_with():
    model = layers()
    handle = begun(model)
    model(images(1))
    model.load_state_dict({name: tensor + 2 for name, tensor in model.state_dict().items()})
    model(images(2))
    resumed = layers()
    resumed.load_state_dict(model.state_dict())
    other = begun(resumed)
    other.load_state_dict(handle.state_dict())
    for net, made in ((model, handle), (resumed, other)):
        made.commit()
        assert net[0].running_mean.any()
    for name, tensor in model.state_dict().items():
        assert_close_to_max(resumed.state_dict()[name], tensor, tol=1e-14)
