"""The section with test samples and what the networks answered."""

import base64
import io
from collections.abc import Sequence
from html import escape
from typing import Any

from micronorm.report.html import Section, dot_html, is_finite
from micronorm.report.runs import NamedRun

_HEADING = "Sample predictions"
_ABSENT = (
    "No run directory holds predictions.json. micronorm train writes it at the end of a run, unless the model is "
    "compiled or sharded."
)
_ABOUT = (
    "Test samples, chosen evenly. Below each picture is its class. A cross marks a wrong answer; the percentage is the "
    "network's own confidence."
)
_LETTERS = 40
MOST = 32
"""Samples of a run that are shown."""


def predictions(runs: Sequence[NamedRun], limit: int) -> Section:
    """Return pictures with the networks' answers. Pictures that several runs share are shown once."""
    found = [run for run in runs if run.record.predictions]
    if not found:
        return Section("predictions", _HEADING, absent=_ABSENT)
    groups: dict[tuple[Any, ...], list[NamedRun]] = {}
    for run in found:
        pictures = tuple((sample["pixels"], sample["label"]) for sample in run.record.predictions)
        groups.setdefault(pictures, []).append(run)
    return Section("predictions", _HEADING, _ABOUT, body="".join(map(_group_html, groups.values())))


def _is_wrong(sample: dict[str, Any]) -> bool:
    return sample["prediction"] != sample["label"]


def _group_html(group: Sequence[NamedRun]) -> str:
    """Return each picture once, with its class and the wrong answers of all runs."""
    number = len(group[0].record.predictions)
    counts = "".join(
        f"<li>{dot_html(run.colour)}{escape(run.name)}: {sum(map(_is_wrong, run.record.predictions))}</li>"
        for run in group
    )
    items = ""
    for k, sample in enumerate(group[0].record.predictions[:MOST]):
        wrong = [(run.colour, own) for run in group if _is_wrong(own := run.record.predictions[k])]
        answers = "".join(
            f"<br>{dot_html(colour)}✗ {_short(own['prediction'])}{_confidence(own)}" for colour, own in wrong
        )
        kind = ' class="wrong"' if wrong else ""
        items += f"<li{kind}>{_image(sample)}{_short(sample['label'])}<span>{answers}</span></li>"
    return f'<h3>Wrong answers of {number}</h3><ul class="legend">{counts}</ul><ul class="samples">{items}</ul>'


def _confidence(sample: dict[str, Any]) -> str:
    value = sample.get("probability")
    return f" <small>{100 * value:.0f}\N{NO-BREAK SPACE}%</small>" if is_finite(value) else ""


def _short(text: str) -> str:
    return escape(text[:_LETTERS])


def _image(sample: dict[str, Any]) -> str:
    """Return the sample as an image. The PNG is made from pixels, so no file of a run gets on the page as it is."""
    from PIL import Image

    mode = "L" if sample["channels"] == 1 else "RGB"
    image = Image.frombytes(mode, (sample["width"], sample["height"]), base64.b64decode(sample["pixels"]))
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    data = base64.b64encode(file.getvalue()).decode()
    return f'<img alt="a sample of class {_short(sample["label"])}" src="data:image/png;base64,{data}">'
