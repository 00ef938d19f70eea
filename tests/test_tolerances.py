import pytest
import torch

from tests.tolerances import TOLERANCES, assert_close_to_max, tolerance


def test_the_error_is_measured_against_the_maximum_of_the_expected_tensor():
    expected = torch.tensor([1e-9, 100.0], dtype=torch.float64)
    assert_close_to_max(expected + 0.9e-3, expected, tol=1e-5)
    with pytest.raises(AssertionError, match=r"relative error 1\.1e-05"):
        assert_close_to_max(expected + 1.1e-3, expected, tol=1e-5)


def test_a_failure_reports_the_worst_element_and_how_many_are_beyond():
    expected = torch.zeros(2, 3)
    expected[0, 0] = 4.0
    actual = expected.clone()
    actual[1, 2] = 1.0
    with pytest.raises(AssertionError, match=r"worst at \(1, 2\): 1 where 0 was expected; 1 of 6 elements"):
        assert_close_to_max(actual, expected, tol=0.1)


def test_zeros_ask_for_exact_zeros_unless_a_scale_is_given():
    zeros = torch.zeros(3)
    assert_close_to_max(zeros, zeros, tol=1e-6)
    with pytest.raises(AssertionError, match="relative error infinite"):
        assert_close_to_max(zeros + 1e-9, zeros, tol=1e-6)
    assert_close_to_max(zeros + 1e-9, zeros, tol=1e-6, scale=1.0)


def test_empty_tensors_are_close_and_shapes_never_broadcast():
    assert_close_to_max(torch.empty(0, 3), torch.empty(0, 3), tol=0.0)
    with pytest.raises(AssertionError, match="shapes differ"):
        assert_close_to_max(torch.empty(0, 3), torch.empty(0, 4), tol=0.0)
    with pytest.raises(AssertionError, match="shapes differ"):
        assert_close_to_max(torch.zeros(3), torch.zeros(1), tol=1.0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_never_close(bad):
    fine, broken = torch.ones(2), torch.tensor([1.0, bad])
    for actual, expected in ((broken, fine), (fine, broken), (broken, broken)):
        with pytest.raises(AssertionError, match="1 of 2 elements that are not finite"):
            assert_close_to_max(actual, expected, tol=1.0)


def test_the_comparison_is_done_in_float64():
    # In float16 the difference of these two would round away.
    assert_close_to_max(torch.tensor([2048.0], dtype=torch.float16), torch.tensor([2048.5]), tol=1e-3)
    with pytest.raises(AssertionError):
        assert_close_to_max(torch.tensor([2048.0], dtype=torch.float16), torch.tensor([2048.5]), tol=1e-4)


def test_every_tolerance_is_wider_than_half_an_ulp_and_below_one_in_ten():
    for row in TOLERANCES.values():
        for dtype, tol in row.items():
            assert torch.finfo(dtype).eps / 2 < tol < 0.1


def test_the_condition_of_the_input_widens_the_tolerance():
    assert tolerance("output", torch.float32, condition=1e4) == 1e4 * tolerance("output", torch.float32)
    with pytest.raises(ValueError, match="got 0"):
        tolerance("output", torch.float32, condition=0.5)


def test_an_operation_or_dtype_without_an_entry_is_an_error():
    with pytest.raises(ValueError, match="no operation 'ouput' in the tolerance table; it has output, gradient"):
        tolerance("ouput", torch.float32)
    with pytest.raises(ValueError, match=r"'fifty_steps' has no tolerance for torch\.float32; it has torch\.float64"):
        tolerance("fifty_steps", torch.float32)
