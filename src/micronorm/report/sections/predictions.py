"""What the trained networks say of some test samples."""

import base64
import struct
import zlib
from collections.abc import Sequence
from html import escape
from typing import Any

from micronorm.report.runs import Detail, NamedRun
from micronorm.report.text import Section, is_number

_HEADING = "Sample predictions"
_ABSENT = (
    "None of these run directories holds predictions.json; micronorm train writes it at the end of a run, unless the "
    "model is compiled or sharded."
)
_ABOUT = (
    "Test samples taken evenly from all of them. A cross marks an answer that is wrong; per cents are how sure the "
    "network is of its own."
)
_LETTERS = 40
MOST = 32
"""Samples of a run that are shown."""


def predictions(runs: Sequence[NamedRun], detail: Detail) -> Section:
    """Pictures with what the network says; what is wrong is marked, and stands with the right answer."""
    found = [run for run in runs if run.record.predictions]
    if not found:
        return Section("predictions", _HEADING, absent=_ABSENT)
    groups: dict[tuple[Any, ...], list[NamedRun]] = {}
    for run in found:
        pictures = tuple((sample["pixels"], sample["label"]) for sample in run.record.predictions)
        groups.setdefault(pictures, []).append(run)
    body = "".join(_alone(group[0], runs) if len(group) == 1 else _together(group) for group in groups.values())
    return Section("predictions", _HEADING, _ABOUT, body=body)


def _is_wrong(sample: dict[str, Any]) -> bool:
    return sample["prediction"] != sample["label"]


def _alone(run: NamedRun, runs: Sequence[NamedRun]) -> str:
    samples = run.record.predictions
    name = f"{_dot(run)}{escape(run.name)}: " if len(runs) > 1 else ""
    items = "".join(map(_item, samples[:MOST]))
    return f'<h3>{name}{sum(map(_is_wrong, samples))} of {len(samples)} wrong</h3><ul class="samples">{items}</ul>'


def _together(group: Sequence[NamedRun]) -> str:
    """Runs that were shown the same pictures: each picture once, with the answers that were wrong."""
    number = len(group[0].record.predictions)
    counts = "".join(
        f"<li>{_dot(run)}{escape(run.name)}: {sum(map(_is_wrong, run.record.predictions))}</li>" for run in group
    )
    items = ""
    for k, sample in enumerate(group[0].record.predictions[:MOST]):
        wrong = [run for run in group if _is_wrong(run.record.predictions[k])]
        answers = "".join(f"<br>{_dot(run)}✗ {_short(run.record.predictions[k]['prediction'])}" for run in wrong)
        look = ' class="wrong"' if wrong else ""
        items += f"<li{look}>{_image(sample)}{_short(sample['label'])}<span>{answers}</span></li>"
    return f'<h3>Wrong of {number}</h3><ul class="legend">{counts}</ul><ul class="samples">{items}</ul>'


def _dot(run: NamedRun) -> str:
    return f'<i class="dot {run.colour}"></i>'


def _item(sample: dict[str, Any]) -> str:
    label = _short(sample["label"])
    if _is_wrong(sample):
        return f'<li class="wrong">{_image(sample)}<span>✗ {_said(sample)}<br><small>is {label}</small></span></li>'
    return f"<li>{_image(sample)}<span>{_said(sample)}</span></li>"


def _said(sample: dict[str, Any]) -> str:
    sure = sample.get("probability")
    percent = f" <small>{100 * sure:.0f}\N{NO-BREAK SPACE}%</small>" if is_number(sure) and sure == sure else ""
    return _short(sample["prediction"]) + percent


def _short(text: str) -> str:
    return escape(text[:_LETTERS])


def _image(sample: dict[str, Any]) -> str:
    label = _short(sample["label"])
    return f'<img alt="a sample of class {label}" src="data:image/png;base64,{_png(sample)}">'


def _png(sample: dict[str, Any]) -> str:
    """The sample as a PNG file of our own making, in base64: nothing that a run holds is shown as it stands."""
    pixels = base64.b64decode(sample["pixels"])
    height, width, channels = sample["height"], sample["width"], sample["channels"]
    rows = b"".join(b"\0" + pixels[k * width * channels : (k + 1) * width * channels] for k in range(height))
    header = struct.pack(">IIBBBBB", width, height, 8, 0 if channels == 1 else 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b""))
    whole = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    return base64.b64encode(whole).decode()
