import pytest
import torch

from micronorm.data.samples import IMAGENET, Standardization, Standardizer

CPU = torch.device("cpu")


def test_standardized_images_have_mean_zero_and_deviation_one():
    images = torch.randint(0, 256, (50, 2, 8, 8), dtype=torch.uint8)
    std, mean = torch.std_mean(images.double(), (0, 2, 3), correction=0)
    y = Standardizer(Standardization((*mean.tolist(),), (*std.tolist(),)), CPU)(images)
    assert y.dtype == torch.float32
    assert y.mean((0, 2, 3)).abs().max() < 1e-5
    assert (y.std((0, 2, 3), correction=0) - 1).abs().max() < 1e-5


def test_imagenet_figures_are_for_bytes():
    # 0.485 of 255 becomes 0, and one deviation more becomes 1.
    white = torch.full((1, 3, 1, 1), 255, dtype=torch.uint8)
    expected = [(1 - 0.485) / 0.229, (1 - 0.456) / 0.224, (1 - 0.406) / 0.225]
    assert Standardizer(IMAGENET, CPU)(white).flatten().tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("bad", [Standardization((1.0,), (0.0,)), Standardization((1.0, 2.0), (1.0,))])
def test_a_standardization_needs_a_positive_deviation_for_each_mean(bad):
    with pytest.raises(ValueError, match="one mean and one positive std"):
        Standardizer(bad, CPU)
