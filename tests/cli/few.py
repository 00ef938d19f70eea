"""Replace the digits by a few of them, for tests of what is printed or compared."""

import pytest

from micronorm.data import digits
from micronorm.data.samples import MemorySamples
from micronorm.recipes import run
from micronorm.tasks.classification import Classification

TRAIN_IMAGES = 96  # a step of 64 and one of 32
TEST_IMAGES = 200


def keep_few_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    (pixels, labels), (test_pixels, test_labels) = digits._read()
    few = Classification(
        MemorySamples(
            pixels[:TRAIN_IMAGES], labels[:TRAIN_IMAGES], standardization=digits.SCALE, augmentation=digits.SHIFT
        ),
        MemorySamples(test_pixels[:TEST_IMAGES], test_labels[:TEST_IMAGES], standardization=digits.SCALE),
        classes=10,
    )
    monkeypatch.setattr(run, "open_task", lambda task, data, folder, **options: few)
