"""The rule for the number of groups."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import micronorm as mn
from micronorm.functional import choose_groups


@given(channels=st.integers(1, 2048), groups=st.integers(1, 64), least=st.integers(1, 32))
def test_the_rule_is_its_own_definition(channels, groups, least):
    chosen = choose_groups(channels, groups=groups, min_channels_per_group=least)
    if channels % groups == 0 and channels // groups >= least:
        assert chosen == groups
    else:
        limit = min(groups, channels // max(4, least))
        assert chosen == max([d for d in range(1, limit + 1) if channels % d == 0], default=1)


def test_the_papers_settings():
    assert [mn.BCN(groups=32).groups_for(c) for c in (64, 128, 256, 2048)] == [32] * 4
    cifar = mn.BCN(groups=32, min_channels_per_group=4)  # min(32, C/4)
    assert [cifar.groups_for(c) for c in (16, 32, 64, 128, 256)] == [4, 8, 16, 32, 32]
    assert [mn.GN(groups=32, min_channels_per_group=4).groups_for(c) for c in (16, 32, 64)] == [4, 8, 16]


@pytest.mark.parametrize("bad", [0, -1])
def test_counts_below_one_are_refused(bad):
    with pytest.raises(ValueError, match=f"at least 1, got {bad}"):
        choose_groups(bad)
    with pytest.raises(ValueError, match=f"groups must be at least 1, got {bad}"):
        mn.GN(groups=bad)
    with pytest.raises(TypeError, match=r"2\.0"):
        choose_groups(2.0)  # type: ignore[arg-type]
