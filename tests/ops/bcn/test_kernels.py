"""The kernels of BCN against the plain equations in float64, with every scheme and poisoned memory.

Without `slow`, every scheme has the activations and residuals that its kernels branch on, and odd shapes. The rest of
the matrix is `slow`: the interpreter takes about a second for each case.
"""

import pytest

from tests.ops.bcn.layers import Case, assert_agree, data, expected_of, layer_of, outcome, poison, set_scheme

# Every value of every column at least once, pairs of them where kernels branch on both: all modes with all activations,
# residuals with all activations, group sizes 1, 2, 3, 5, 6, 12 and C; ranks 2 to 5; one sample; one position.
PIECES = [
    Case((1, 6, 4, 29), 2, "step", "relu", layout="channels_last"),
    Case((1, 5, 103), 5, "step", "silu", "contiguous"),
    Case((1, 24, 3, 5, 2), 2, "step", "relu", "contiguous", "channels_last_3d"),
    Case((2, 16, 3, 7), 2, "step", "leaky_relu", layout="channels_last", blend=0.4),
    Case((1, 8, 5, 15), 2, "step", "relu", "sliced", "turned"),
    Case((2, 7, 53), 1, "sequential"),
    Case((3, 12, 3, 3), 2, "sequential", "relu", "contiguous", "channels_last", micro_batch=2),
    Case((2, 9, 4, 4), 3, "batch", "relu", "turned", "channels_last", blend=0.5),
    Case((2, 4, 51), 2, "batch"),
    Case((1, 6, 3, 2, 9), 6, "batch", "silu", layout="turned", form="eval"),
    Case((1, 12, 5, 11), 1, "step", "leaky_relu", layout="turned", blend=0.2, form="frozen"),
    Case((2, 8, 3, 4, 5), 2, "step", "leaky_relu", "channels_last_3d", "channels_last_3d"),
]
SPLIT = [
    Case((2, 12, 5, 7), 4, "step"),
    Case((3, 12), 3, "step", "leaky_relu", "contiguous", blend=0.3),
    Case((2, 8, 1, 1), 4, "step", None, "channels_last"),
    Case((2, 4, 6, 5), 4, "sequential", "silu", layout="sliced", blend=0.6),
    Case((1, 10, 47), 5, "sequential", "leaky_relu", "samples inside", "samples inside"),
    Case((2, 36, 5), 3, "batch", "silu", layout="sliced"),
    Case((3, 8), 2, "batch", "leaky_relu", "contiguous"),
    Case((1, 20, 4, 9), 4, "step", "relu", "channels_last", "channels_last", form="eval"),
    Case((2, 4, 3), 2, "sequential", form="frozen"),
]
MANY_SAMPLES = Case((131, 2, 2), 1, "step")  # more than are added at once
QUICK = {
    "whole": [PIECES[2], PIECES[10], SPLIT[3], SPLIT[5]],
    "twice": [PIECES[0], PIECES[1], PIECES[3], PIECES[4]],
    "pieces": [PIECES[1], PIECES[3], PIECES[6], PIECES[7], PIECES[11]],
    "split": [SPLIT[1], SPLIT[5], SPLIT[8]],
    "finish": [PIECES[1], PIECES[3], SPLIT[7]],
}
SLOW = {
    "whole": [*PIECES[::2], *SPLIT, MANY_SAMPLES],
    "twice": [PIECES[2], PIECES[7], PIECES[10], SPLIT[1], SPLIT[2], SPLIT[7]],
    "pieces": PIECES,
    "split": SPLIT,
    "finish": [PIECES[4], SPLIT[2], SPLIT[3]],
}
CUTS = [(case, scheme) for scheme, cases in QUICK.items() for case in cases]
CUTS += [
    pytest.param(case, scheme, marks=pytest.mark.slow)
    for scheme, cases in SLOW.items()
    for case in cases
    if case not in QUICK[scheme]
]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    poison(monkeypatch)


@pytest.mark.parametrize("case, scheme", CUTS, ids=str)
def test_outputs_gradients_windows_and_estimates_are_those_of_the_reference(device, case, scheme, monkeypatch):
    set_scheme(monkeypatch, scheme)
    norm = layer_of(case, device)
    inputs = data(case, device)
    expected = expected_of(norm, *inputs)
    assert_agree(outcome(norm, *inputs), expected)
