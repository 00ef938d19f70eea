"""Generated clips: each class is another one played backwards."""

import torch

from micronorm.data.digits import read_digits
from micronorm.data.motion import CLASSES, draw_motion, open_motion
from micronorm.ops.keyed import sample_keys

DIGITS = read_digits().train.images


def draw(indices, labels, *, seed=0):
    return draw_motion(sample_keys(indices, seed=seed, epoch=0), labels, DIGITS)


def test_a_clip_played_backwards_is_a_clip_of_the_partner_class():
    indices, labels = torch.arange(20), torch.arange(20) % 10
    clips, partners = draw(indices, labels), draw(indices, labels ^ 1)
    assert torch.equal(partners, clips.flip(1))
    assert not torch.equal(partners, clips)


def test_a_clip_is_a_function_of_seed_and_index():
    def clips(*indices, seed=0):
        return draw(torch.tensor(indices), torch.full((len(indices),), 3), seed=seed)

    assert torch.equal(clips(5, 9)[1:], clips(9))
    assert not torch.equal(clips(5), clips(9))
    assert not torch.equal(clips(5), clips(5, seed=1))


def bright_columns(clips):
    """Return the mean column of what is brighter than the background, N×T."""
    light = (clips[:, :, 0].float() - 90).clamp_min(0)
    return (light.sum(2) * torch.arange(24)).sum(2) / light.sum((2, 3))


def test_classes_show_what_their_names_say():
    def of_class(name):
        return draw(torch.arange(50), torch.full((50,), CLASSES.index(name)))

    assert bright_columns(of_class("right")).diff(dim=1).mean() > 0.3  # the tile that rests halves the speed
    assert bright_columns(of_class("left")).diff(dim=1).mean() < -0.3
    light = {name: of_class(name).float().mean((2, 3, 4)).mean(0) for name in ("grow", "shrink", "hide", "appear")}
    assert light["grow"][-1] > 1.2 * light["grow"][0]
    assert light["shrink"][0] > 1.2 * light["shrink"][-1]
    assert light["hide"][0] > 1.1 * light["hide"][-1]
    assert light["appear"][-1] > 1.1 * light["appear"][0]


def test_the_set_is_balanced_and_its_parts_differ():
    train, test, _ = open_motion()
    assert (len(train), len(test)) == (3000, 1000)
    clips, labels = next(test.load([(0, torch.arange(1000))], seed=0))
    assert labels.bincount().tolist() == [100] * 10
    assert abs(clips.mean()) < 0.2
    assert abs(clips.std() - 1) < 0.2
    assert not torch.equal(clips[:10], next(train.load([(0, torch.arange(10))], seed=0))[0])


def test_a_frame_is_blurred_along_the_line_of_motion():
    def ratio(name):  # of the changes of brightness from pixel to pixel: across to down
        clips = draw(torch.arange(100), torch.full((100,), CLASSES.index(name))).float()
        return clips.diff(dim=-1).abs().mean() / clips.diff(dim=-2).abs().mean()

    assert ratio("right") < 0.95 * ratio("down")


def test_training_clips_are_drawn_anew_in_each_epoch():
    train, test, _ = open_motion()
    first, second = (next(train.load([(epoch, torch.arange(20))], seed=0)) for epoch in (0, 1))
    assert not torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert torch.equal(*(next(test.load([(epoch, torch.arange(20))], seed=0))[0] for epoch in (0, 1)))
