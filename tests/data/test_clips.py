"""Which frames a clip has, and clips in memory."""

import pytest
import torch

from micronorm.data.samples import Standardization
from micronorm.data.videos import MemoryClips, choose_frames
from micronorm.ops.keyed import sample_keys

BYTES = Standardization((0.0,), (1.0,))


def clips(**options):
    """Two videos of 9 and 20 frames of 6×8 pixels. Frame t of video n is 100·n + t, with 50 more at (0, 0)."""
    numbers = torch.cat([torch.arange(9), 100 + torch.arange(20)]).to(torch.uint8)
    pixels = numbers[:, None, None, None].repeat(1, 1, 6, 8)
    pixels[:, :, 0, 0] += 50
    return MemoryClips(pixels, torch.tensor([9, 20]), torch.tensor([3, 4]), standardization=BYTES, **options)


def load(samples, *indices, seed=0, epoch=0):
    return next(samples.load([(epoch, torch.tensor(indices))], seed=seed))


def test_frames_are_drawn_within_equal_parts_of_the_video():
    lengths = torch.arange(1, 60)
    keys = sample_keys(torch.arange(59), seed=0, epoch=0)
    for chosen in (choose_frames(lengths, keys), choose_frames(lengths, None)):
        part = torch.arange(8)
        assert (chosen >= (part * lengths[:, None]).div(8, rounding_mode="floor")).all()
        assert (chosen * 8 < (part + 1) * lengths[:, None]).all()
        assert (chosen.diff() >= 0).all()
    assert not torch.equal(choose_frames(lengths, keys), choose_frames(lengths, None))


def test_a_video_of_eight_frames_gives_all_of_them():
    keys = sample_keys(torch.arange(5), seed=0, epoch=0)
    assert torch.equal(choose_frames(torch.full((5,), 8), keys), torch.arange(8).expand(5, 8))


def test_test_clips_are_central():
    batch, labels = load(clips(crop=4), 1, 0)
    assert labels.tolist() == [4, 3]
    assert batch.shape == (2, 8, 1, 4, 4)
    assert batch[:, :, 0, 0, 0].long().tolist() == [
        [101, 103, 106, 108, 111, 113, 116, 118],
        [0, 1, 2, 3, 5, 6, 7, 8],
    ]


def test_all_frames_of_a_clip_have_the_same_crop():
    corner = []
    for epoch in range(40):
        batch, _ = load(clips(crop=4, augment=True), 0, 1, epoch=epoch)
        marked = batch[..., 0, 0] > batch[..., 1, 1]  # the crop begins at the corner of the frame
        assert (marked == marked[:, :1]).all()
        corner.append(bool(marked.any()))
    assert 0 < sum(corner) < 40


def test_a_crop_larger_than_the_frames_is_refused():
    with pytest.raises(ValueError, match="crop must be from 1 to 6 for frames of 6×8, got 7"):
        clips(crop=7)
