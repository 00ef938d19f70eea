"""What ranks exchange comes back as it was, without pickle."""

import math

import pytest
import torch

from micronorm.engine.packing import pack, unpack


def test_nested_tensors_and_plain_values_come_back_as_they_were():
    shared = torch.arange(6.0).reshape(2, 3)
    value = {
        "boxes": [shared, shared.T, torch.empty(0, 4), torch.tensor(7)],
        "plain": [None, True, 3, 0.1, math.inf, "µ", {}],
        "half": torch.ones(2, dtype=torch.bfloat16),
    }
    found = unpack(pack(value))
    assert found["plain"] == value["plain"]
    for mine, theirs in zip([*value["boxes"], value["half"]], [*found["boxes"], found["half"]], strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("value", [{1: 2}, {"a": {3}}, object(), [b"bytes"]])
def test_what_only_pickle_could_send_is_refused(value):
    with pytest.raises(TypeError, match=r"keys must be strings|ranks exchange tensors"):
        pack(value)
