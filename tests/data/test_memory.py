import pytest
import torch
import torch.nn.functional as F

from micronorm.data.samples import MemorySamples, PadCropFlip, Standardization

PLAIN = Standardization((0.0, 0.0), (1.0, 1.0))  # bytes as they are


def noise(count: int = 12, *, height: int = 6, width: int = 5) -> torch.Tensor:
    return torch.randint(1, 256, (count, 2, height, width), dtype=torch.uint8)  # 0 is the border's alone


def samples(images: torch.Tensor, *, pad: int = 2, flip: bool = True, device: str = "cpu") -> MemorySamples:
    labels = torch.arange(len(images)) % 7
    return MemorySamples(
        images, labels, standardization=PLAIN, augmentation=PadCropFlip(pad=pad, flip=flip), device=device
    )


def one(held: MemorySamples, indices: list[int], *, seed: int = 0, epoch: int = 0) -> torch.Tensor:
    return next(held.load([(epoch, torch.tensor(indices, dtype=torch.int64))], seed=seed))[0]


def windows(image: torch.Tensor, pad: int) -> list[torch.Tensor]:
    """Every crop of the padded image and its mirror image, by nested loops."""
    height, width = image.shape[1:]
    padded = F.pad(image.float(), (pad,) * 4)
    crops = [padded[:, y : y + height, x : x + width] for y in range(2 * pad + 1) for x in range(2 * pad + 1)]
    return crops + [crop.flip(-1) for crop in crops]


def test_an_augmented_image_is_a_window_of_the_padded_image_or_its_mirror_image():
    images = noise()
    batch = one(samples(images), list(range(12)))
    for image, augmented in zip(images, batch, strict=True):
        assert any(torch.equal(augmented, window) for window in windows(image, 2))


def test_every_window_and_both_directions_occur_equally_often():
    image = noise(1, height=4, width=4)
    held = samples(image, pad=1)
    drawn = torch.stack([one(held, [0], epoch=epoch)[0] for epoch in range(1800)])
    counts = [int((drawn == window).flatten(1).all(1).sum()) for window in windows(image[0], 1)]
    assert sum(counts) == 1800
    assert min(counts) > 50  # 18 outcomes, 100 ± 10 of each
    assert max(counts) < 150


def test_window_and_mirroring_are_independent_of_each_other():
    # The same images with one of the two switched off: each draw stays what it was.
    images = noise(200)
    both = one(samples(images), list(range(200)))
    cropped = one(samples(images, flip=False), list(range(200)))
    mirrored = (both != cropped).flatten(1).any(1)
    assert torch.equal(torch.where(mirrored[:, None, None, None], cropped.flip(-1), cropped), both)
    only_flipped = one(samples(images, pad=0), list(range(200)))
    assert torch.equal((only_flipped != images).flatten(1).any(1), mirrored)


def test_without_augmentation_images_come_as_they_are():
    images = noise()
    held = samples(images, pad=0, flip=False)
    batch, labels = next(held.load([(4, torch.tensor([7, 0, 7]))], seed=9))
    assert torch.equal(batch, images[[7, 0, 7]].float())
    assert labels.tolist() == [0, 0, 0]
    assert labels.dtype == torch.int64
    assert len(held) == 12


def test_padding_is_black_before_standardization():
    held = MemorySamples(
        noise(40),
        torch.zeros(40, dtype=torch.int64),
        standardization=Standardization((100.0, 50.0), (10.0, 25.0)),
        augmentation=PadCropFlip(pad=2),
    )
    batch = one(held, list(range(40)))
    assert batch.amin((0, 2, 3)).tolist() == [-10.0, -2.0]  # a zero byte, standardized


def test_shares_are_read_one_at_a_time():
    read = []

    def shares():
        for epoch in range(5):
            read.append(epoch)
            yield epoch, torch.tensor([epoch])

    batches = samples(noise()).load(shares(), seed=0)
    next(batches)
    next(batches)
    assert read == [0, 1]


@pytest.mark.parametrize("pad", [0, 1])
def test_an_empty_share_gives_an_empty_batch(pad):
    batch, labels = next(samples(noise(), pad=pad).load([(0, torch.tensor([], dtype=torch.int64))], seed=0))
    assert batch.shape == (0, 2, 6, 5)
    assert labels.shape == (0,)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"images": torch.zeros(3, 2, 4, 4)}, "uint8"),
        ({"images": torch.zeros(3, 4, 4, dtype=torch.uint8)}, "N×C×H×W"),
        ({"labels": torch.zeros(4, dtype=torch.int64)}, "each of 3 images"),
        ({"labels": torch.zeros(3)}, "whole number"),
        ({"augmentation": PadCropFlip(pad=-1)}, "pad must not be negative"),
        ({"standardization": Standardization((0.0,), (1.0,))}, "for 1 channels, the images have 2"),
    ],
)
def test_a_set_that_does_not_fit_together_is_refused(change, message):
    fit = {
        "images": torch.zeros(3, 2, 4, 4, dtype=torch.uint8),
        "labels": torch.zeros(3, dtype=torch.int64),
        "standardization": PLAIN,
    }
    with pytest.raises(ValueError, match=message):
        MemorySamples(**{**fit, **change})


@pytest.mark.gpu
def test_the_gpu_gives_the_batches_of_the_cpu():
    images = noise(100)
    shares = [(epoch, torch.randperm(100)[:31]) for epoch in range(4)]
    for here, there in zip(
        samples(images).load(shares, seed=2), samples(images, device="cuda").load(shares, seed=2), strict=True
    ):
        assert there[0].is_cuda
        assert torch.equal(here[0], there[0].cpu())
        assert torch.equal(here[1], there[1].cpu())
