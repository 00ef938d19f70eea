"""The digits, but few of them: where what is printed or compared is under test, not what is learnt."""

import pytest

from micronorm.cli import train
from micronorm.data import digits
from micronorm.data.memory import MemorySamples
from micronorm.tasks.classification import Classification

TRAIN_IMAGES = 96  # a step of 64 and one of 32
TEST_IMAGES = 200


def keep_few_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    (pixels, labels), (test_pixels, test_labels) = digits._read()
    few = Classification(
        MemorySamples(
            pixels[:TRAIN_IMAGES], labels[:TRAIN_IMAGES], standardization=digits._SCALE, augmentation=digits.SHIFT
        ),
        MemorySamples(test_pixels[:TEST_IMAGES], test_labels[:TEST_IMAGES], standardization=digits._SCALE),
        classes=10,
    )
    monkeypatch.setattr(train, "open_classification", lambda name, folder, **options: few)
