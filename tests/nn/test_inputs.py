import pytest
import torch

from micronorm.nn.inputs import check_count, check_flag, check_input


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 4), (2, 3, 4, 5), (2, 3, 1, 4, 5), (0, 3, 4, 5)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_floating_input_of_rank_2_to_5_passes_with_its_own_channel_count_alone(shape, dtype):
    x = torch.empty(shape, dtype=dtype)
    check_input(x, 3, "Norm")
    with pytest.raises(ValueError, match="4 channels, got 3"):
        check_input(x, 4, "Norm")


@pytest.mark.parametrize(
    "x, error, message",
    [
        (torch.zeros(3), ValueError, r"Norm takes N×C to .*, got shape \(3,\); a single sample needs a batch axis"),
        (torch.zeros(2, 3, 1, 1, 1, 1), ValueError, r"rank 2 to 5, got shape \(2, 3, 1, 1, 1, 1\)"),
        (torch.zeros(2, 4, 4, 3), ValueError, r"Norm has 3 channels, got 4 in axis 1 .* x\.movedim\(-1, 1\)"),
        (torch.zeros(3, 4, 4), ValueError, r"got 4 in axis 1 .* add a batch axis: x\.unsqueeze\(0\)"),
        (torch.zeros(2, 3, 0, 4), ValueError, r"an empty batch but no empty map, got shape \(2, 3, 0, 4\)"),
        (torch.zeros(2, 3, dtype=torch.int32), TypeError, r"floating-point input, got torch\.int32; .* x\.float\(\)"),
        (torch.zeros(2, 3, dtype=torch.complex64), TypeError, r"floating-point input, got torch\.complex64"),
    ],
)
def test_other_input_is_refused_with_the_way_out(x, error, message):
    with pytest.raises(error, match=message):
        check_input(x, 3, "Norm")


@pytest.mark.parametrize("value", [True, 2.0, "2", None])
def test_a_count_is_an_int(value):
    with pytest.raises(TypeError, match=f"size must be an int, got {value!r}"):
        check_count("size", value)


@pytest.mark.parametrize("value", [1, None, "yes"])
def test_a_flag_is_a_bool(value):
    with pytest.raises(TypeError, match=f"tlu must be True or False, got {value!r}"):
        check_flag("tlu", value)
