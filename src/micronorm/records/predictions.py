"""`predictions.json`: small pictures of test samples, and what the trained network says of them."""

import base64
import binascii
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from micronorm.records.atomic import write_atomically
from micronorm.records.encoding import Row, encode_document, is_count, parse
from micronorm.records.facts import read_facts
from micronorm.records.folder import PREDICTIONS


def write_predictions(path: str | os.PathLike[str], samples: Iterable[Mapping[str, Any]]) -> None:
    """Write what the trained network says of some samples into a run directory, in place of what was there.

    Raises:
        FileNotFoundError: there is no run.
        ValueError: a sample lacks something, or its pixels are not as many as its size says.
    """
    file = Path(path) / PREDICTIONS
    kept = [dict(sample) for sample in samples]
    _check_predictions(kept, file)
    read_facts(Path(path))
    write_atomically(file, encode_document({"samples": kept}))


def read_predictions(file: Path) -> list[Row]:
    """The samples of such a file; none where there is none."""
    if not file.exists():
        return []
    samples: Any = parse(file.read_bytes(), str(file)).get("samples")
    _check_predictions(samples, file)
    return samples


def _check_predictions(samples: Any, file: Path) -> None:
    if not isinstance(samples, list):
        raise ValueError(f"{file}: a list of samples was expected, got {type(samples).__name__}")
    for number, sample in enumerate(samples):
        where = f"{file}, sample {number}"
        sides: list[Any] = [sample.get(name) for name in ("height", "width")] if isinstance(sample, dict) else []
        if not sides or not all(is_count(side) and side for side in sides) or sample.get("channels") not in (1, 3):
            raise ValueError(f"{where}: height and width from 1 on and 1 or 3 channels were expected")
        for name in ("pixels", "label", "prediction"):
            if not isinstance(sample.get(name), str):
                raise ValueError(f"{where}: {name} must be str, got {type(sample.get(name)).__name__}")
        try:
            found = len(base64.b64decode(sample["pixels"], validate=True))
        except (binascii.Error, ValueError) as error:
            raise ValueError(f"{where}: its pixels are no base64 ({error})") from None
        wanted = math.prod(sides) * sample["channels"]
        if found != wanted:
            raise ValueError(f"{where}: {found} bytes of pixels where its size gives {wanted}")
