"""The size of a micro-batch: halved when memory runs out, never below what must stay together."""

import itertools

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

from micronorm.engine.dropout import describe_randomness
from micronorm.engine.sampling import MicroBatch, is_out_of_memory


@given(st.integers(1, 300), st.integers(1, 20), st.integers(1, 40), st.none() | st.integers(1, 300))
def test_pieces_hold_every_sample_once_and_cut_no_unit(samples, unit, multiple, largest):
    assume(largest is None or largest >= unit)
    cut = MicroBatch(unit * multiple, unit=unit, largest=largest)
    pieces = cut.pieces(samples)
    assert [i for piece in pieces for i in range(samples)[piece]] == list(range(samples))
    assert all(piece.start % unit == 0 for piece in pieces)
    assert all(piece.stop - piece.start <= (largest or cut.size) for piece in pieces)
    assert cut.pieces(0) == []


@given(st.integers(1, 1000), st.integers(1, 20))
def test_halving_ends_at_one_unit_with_a_message(multiple, unit):
    cut = MicroBatch(multiple * unit, unit=unit)
    sizes = [cut.size]
    while cut.size > unit:
        sizes.append(cut.halve())
    with pytest.raises(MemoryError, match=rf"out of memory with {unit} sample.*--dtype bfloat16"):
        cut.halve()
    assert sizes[-1] == cut.size == unit
    assert all(small % unit == 0 and small <= max(large / 2, unit) for large, small in itertools.pairwise(sizes))
    assert len(sizes) <= multiple.bit_length()


def test_a_size_below_the_unit_is_refused():
    with pytest.raises(ValueError, match=r"micro_batch must be at least 64, got 32: .* statistics are over 64 samples"):
        MicroBatch(32, unit=64)


@pytest.mark.parametrize(
    "error, expected",
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("shapes differ"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_lack_of_memory_is_told_from_other_errors(error, expected):
    assert is_out_of_memory(error) is expected


def test_an_allocation_that_the_cpu_refuses_is_a_lack_of_memory():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    assert is_out_of_memory(caught.value)


def test_randomness_without_keys_is_named():
    model = nn.Linear(1, 1)
    assert describe_randomness(model, []) is None
    text = describe_randomness(model, list("abcdef"))
    assert text == "invariant in distribution only: a, b, c, d and 2 more of Linear draw from the global generator"
