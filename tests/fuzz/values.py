"""Values that no file should contain, and how they get into one."""

import math
import os
import random
from pathlib import Path
from typing import Any

TEXTS = (
    *(
        "",
        "text",
        "1",
        "\0",
        "\x1b[31m",
        "<script>",
        "$x$",
        "x" * 3000,
        "recipe:digits",
        "good:make",
        "os:abort",
        "{}",
        "[",
    ),
    *('{"a": 1}', '{"conv": "WS()"}', "digits", "digits/gn", "cifar10", "coco128", "nuclei", "camvid", "motion", "voc"),
    *(
        "clips-0",
        "hippocampus-fold0",
        "detection",
        "instances",
        "volumes",
        "video",
        "segmentation",
        "../x",
        "/etc/passwd",
    ),
)
NUMBERS = (0, -1, 1, 7, 2**31, 2**63, 10**399, -(10**399), 1e308, -1e308, 5e-324, 0.5, math.nan, math.inf)
VALUES: tuple[Any, ...] = (
    *(None, True, False, "\ud800", [], [1], {}, {"a": 1}, {"float": "nan"}, [[[]]], {"": {}}, [None]),
    *TEXTS,
    *NUMBERS,
)


def changed(chance: random.Random, value: Any, values: tuple[Any, ...] = VALUES) -> Any:
    """Return the value with one part at any depth replaced, doubled or removed."""
    if isinstance(value, (dict, list)) and value and chance.random() < 0.85:
        key: Any = chance.choice(list(value)) if isinstance(value, dict) else chance.randrange(len(value))
        copy: Any = value.copy()
        way = chance.random()
        if way < 0.1:
            del copy[key]
        elif way < 0.2 and isinstance(copy, list):
            copy.append(copy[key])
        else:
            copy[key] = changed(chance, value[key], values)
        return copy
    return chance.choice(values)


def pipe(path: Path) -> None:
    """Make a pipe that nobody writes to: whoever reads it hangs."""
    os.mkfifo(path)
