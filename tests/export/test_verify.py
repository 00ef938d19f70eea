import pytest
import torch
from torch import Tensor

from micronorm.export import verify


def double(x: Tensor) -> Tensor:
    return 2 * x


def test_the_worst_difference_over_all_inputs_is_returned():
    def other(x: Tensor) -> Tensor:
        return double(x) * (1 + (1e-6 if len(x) == 3 else 1e-7))

    x = torch.rand(3, 4, dtype=torch.float64)
    assert verify(double, other, [x[:2], x, x[:1]]) == pytest.approx(1e-6, rel=1e-3)


def test_a_difference_is_relative_to_the_outputs_maximum():
    x = torch.tensor([1000.0, 0.0])
    assert verify(double, lambda x: 2 * x + torch.tensor([0, 0.02]), [x]) == pytest.approx(1e-5, rel=1e-3)


def test_a_mismatch_names_the_output_the_inputs_and_the_tolerance():
    def model(x: Tensor, off: float = 0.0) -> dict:
        return {"a": [x, x + 1], "b": x + off}

    message = r"output 2 on inputs 3×4 differs by 0\.5 of its maximum, above 0\.0001\. .* a larger tol="
    with pytest.raises(RuntimeError, match=message):
        verify(model, lambda x: model(x, 0.5), [torch.ones(3, 4)])


@pytest.mark.parametrize(
    "other, message",
    [
        (lambda x: x[:, :1], r"output 0 on inputs 2×4 has shape \(2, 1\) where \(2, 4\) was expected"),
        (lambda x: (x, x), "2 outputs where 1 were expected"),
        (lambda x: x / 0, r"output 0 on inputs 2×4 is not finite \(actual\)"),
    ],
)
def test_what_cannot_be_compared_is_a_mismatch(other, message):
    with pytest.raises(RuntimeError, match=message):
        verify(double, other, [torch.ones(2, 4)])


def test_zeros_ask_for_zeros():
    assert verify(torch.zeros_like, torch.zeros_like, [torch.ones(2)]) == 0
    with pytest.raises(RuntimeError, match="differs by inf"):
        verify(torch.zeros_like, lambda x: 1e-30 * x, [torch.ones(2)])


def test_an_empty_batch_is_compared_by_its_shape():
    assert verify(double, double, [torch.ones(0, 3)]) == 0


def test_arguments_and_keyword_arguments_reach_both():
    def add(x: Tensor, *, y: Tensor) -> Tensor:
        return x + y

    x = torch.ones(2)
    assert verify(torch.add, torch.add, [(x, x)]) == 0
    assert verify(add, add, [{"x": x, "y": x}]) == 0


def test_nothing_to_compare_is_refused():
    with pytest.raises(ValueError, match="no inputs to compare on"):
        verify(double, double, [])
    with pytest.raises(ValueError, match="no tensor among the outputs"):
        verify(lambda x: 1, lambda x: 1, [torch.ones(2)])
