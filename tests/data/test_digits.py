import torch

from micronorm.data.digits import open_digits, read_digits


def test_the_two_parts_are_the_whole_data_set():
    train, test = read_digits()
    assert len(train.labels) == len(train.images) == 1297
    assert len(test.labels) == len(test.images) == 500
    assert train.images.shape[1:] == test.images.shape[1:] == (1, 8, 8)
    # scikit-learn's documentation counts 174 to 183 images per digit, 1,797 in all, whose pixels add up to 561,718
    pixels = (torch.cat([train.images, test.images]).double() + 1) * 8
    assert pixels.sum().item() == 561_718
    counts = torch.bincount(torch.cat([train.labels, test.labels]))
    assert counts.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_every_digit_has_the_same_share_in_both_parts():
    train, test = read_digits()
    share = torch.bincount(test.labels) / (torch.bincount(train.labels) + torch.bincount(test.labels))
    assert (share - 500 / 1797).abs().max() < 1 / 174  # within one image


def test_pixels_are_scaled_to_between_minus_one_and_one():
    train, _ = read_digits()
    assert train.images.dtype == torch.float32
    assert train.images.min() == -1
    assert train.images.max() == 1
    assert train.labels.dtype == torch.int64


def test_the_split_is_the_same_at_every_call():
    for first, second in zip(read_digits(), read_digits(), strict=True):
        assert torch.equal(first.images, second.images)
        assert torch.equal(first.labels, second.labels)


def test_digits_in_memory_are_the_images_that_are_read():
    read, held = read_digits(), open_digits()
    (_, trained), (images, tested) = (next(part.load([(0, torch.arange(len(part)))], seed=0)) for part in held)
    assert torch.equal(images, read.test.images)  # training images are shifted
    assert torch.equal(trained, read.train.labels)
    assert torch.equal(tested, read.test.labels)


def test_training_digits_are_shifted_by_one_pixel_at_most_and_never_mirrored():
    read, (train, _) = read_digits(), open_digits()
    images, _ = next(train.load([(0, torch.arange(200))], seed=0))
    padded = torch.nn.functional.pad(read.train.images[:200], (1,) * 4, value=-1)  # -1 is a pixel of 0
    shifts = torch.stack([padded[..., y : y + 8, x : x + 8] for y in range(3) for x in range(3)])
    matches = (shifts == images).flatten(2).all(2)
    assert matches.any(0).all()
    assert matches.any(1).all()  # each of the nine shifts occurs
