"""The shapes to measure, and how the command line names them."""

import pytest
import torch

from micronorm.bench.cases import CASES, GIVEN, LAYOUTS, choose_cases, lay_out, parse_case


def test_every_case_is_of_its_group_with_a_reason_and_named_once():
    for group, cases in CASES.items():
        assert all(case.group == group and case.reason for case in cases)
        assert len({case.shape for case in cases}) == len(cases)


@pytest.mark.parametrize("text, rank", [("16x1024", 2), ("4x8x9", 3), ("4x8x5x6", 4), ("4x8x3x5x6", 5)])
def test_shapes_of_rank_two_to_five_are_cases(text, rank):
    case = parse_case(text)
    assert (len(case.shape), case.name, case.group) == (rank, text, GIVEN)


@pytest.mark.parametrize("text", ["8", "1x2x3x4x5x6", "2x0x3", "2x-1x3", "axb", "", "2x8x"])
def test_what_is_no_shape_is_refused(text):
    with pytest.raises(ValueError, match="two to five positive sizes"):
        parse_case(text)


@pytest.mark.parametrize("text, group, channel", [("1x8x1x1", 4, 1), ("2x64x8", 16, 16), ("15x1024", 32, 15)])
def test_groups_and_channels_of_too_few_elements_are_refused_with_their_number(text, group, channel):
    with pytest.raises(ValueError, match=f"{text} has {group} elements per group and {channel} per channel; at least"):
        parse_case(text)


def test_a_device_measures_its_own_groups_unless_told_otherwise():
    assert choose_cases([], on_gpu=False) == list(CASES["cpu"])
    assert choose_cases([], on_gpu=True) == [*CASES["large"], *CASES["small"]]
    assert choose_cases(["small"], on_gpu=True) == list(CASES["small"])
    with pytest.raises(ValueError, match="for a GPU, this runs on the CPU"):
        choose_cases(["large"], on_gpu=False)


def test_a_shape_that_is_known_keeps_its_group_and_its_reason_on_its_device():
    (gpu,) = choose_cases(["1x256x100x168", "1x256x100x168"], on_gpu=True)
    (cpu,) = choose_cases(["1x256x100x168"], on_gpu=False)
    (other,) = choose_cases(["64x64x112x112"], on_gpu=False)
    assert (gpu.group, cpu.group, other.group) == ("small", "cpu", GIVEN)


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 4), (2, 3, 4, 5), (2, 3, 4, 5, 6)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_moves_memory_and_not_values(shape, layout):
    x = torch.arange(torch.Size(shape).numel()).reshape(shape)
    y = lay_out(x, layout)
    assert torch.equal(x, y)
    assert y.stride(1) == (1 if layout == "nhwc" or len(shape) == 2 else y[0, 0].numel())
