"""Images for the commands: what a source may be, and in which numbers it arrives."""

from pathlib import Path

import pytest
import torch
from PIL import Image

from micronorm.cli.diagnose import random_images, read_images
from micronorm.data.digits import read_digits
from micronorm.data.samples import Standardization


def write_pictures(folder: Path, count: int, *, size: tuple[int, int] = (20, 16)) -> None:
    """Pictures in folders of folders, the n-th all of the value 10·n."""
    for n in range(count):
        place = folder / f"class{n % 2}" / "deep"
        place.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size, (10 * n, 10 * n, 10 * n)).save(place / f"{n}.png")


def test_digits_are_the_test_images_and_become_as_many_channels_as_asked():
    expected = read_digits().test.images[:5]
    assert torch.equal(read_images("digits", count=5, size=None, channels=1), expected)
    assert torch.equal(read_images("digits", count=5, size=None, channels=3), expected.expand(5, 3, 8, 8))
    assert read_images("digits", count=5, size=16, channels=3).shape == (5, 3, 16, 16)


def test_pictures_are_taken_evenly_from_a_folder_and_standardized(tmp_path):
    write_pictures(tmp_path, 8)
    plain = Standardization((0.0,) * 3, (1.0,) * 3)
    every = read_images(str(tmp_path), count=100, size=12, channels=3, standardization=plain)
    assert every.shape == (8, 3, 12, 12)
    assert sorted(every[:, 0, 0, 0].tolist()) == [0, 10, 20, 30, 40, 50, 60, 70]
    some = read_images(str(tmp_path), count=4, size=12, channels=3, standardization=plain)
    assert some[:, 0, 0, 0].tolist() == every[::2, 0, 0, 0].tolist()
    usual = read_images(str(tmp_path), count=1, size=12, channels=3)
    assert usual[0, 0, 0, 0].item() == pytest.approx((0 - 0.485) / 0.229, rel=1e-5)
    assert read_images(str(tmp_path), count=1, size=12, channels=1).shape == (1, 1, 12, 12)


def test_a_picture_that_is_none_is_named(tmp_path):
    (tmp_path / "a.jpg").write_text("no picture")
    with pytest.raises(ValueError, match=r"a\.jpg is not a readable image"):
        read_images(str(tmp_path), count=1, size=8, channels=3)


def test_random_images_have_the_spectrum_of_photographs():
    images = random_images(64, channels=3, size=32)
    assert torch.equal(images, random_images(64, channels=3, size=32))
    power = torch.fft.rfft2(images).abs().square().mean((0, 1))
    # amplitude 1/f: the power at twice the frequency is a quarter, along both axes
    for k in (2, 4, 8):
        assert (power[0, k] / power[0, 2 * k]).item() == pytest.approx(4, rel=0.25)
        assert (power[k, 0] / power[2 * k, 0]).item() == pytest.approx(4, rel=0.25)
    colours = torch.corrcoef(images.movedim(1, 0).flatten(1))
    assert colours[0, 1] > 0.7
