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
MOST = 32
"""Samples of a run that are shown."""


def predictions(runs: Sequence[NamedRun], detail: Detail) -> Section:
    """Pictures with what the network says; what is wrong is marked, and stands with the right answer."""
    found = [run for run in runs if run.record.predictions]
    if not found:
        return Section("predictions", _HEADING, absent=_ABSENT)
    body = ""
    for run in found:
        samples = run.record.predictions
        wrong = sum(sample["prediction"] != sample["label"] for sample in samples)
        name = f'<i class="dot {run.colour}"></i>{escape(run.name)}: ' if len(runs) > 1 else ""
        body += f"<h3>{name}{wrong} of {len(samples)} wrong</h3>"
        body += f'<ul class="samples">{"".join(map(_item, samples[:MOST]))}</ul>'
    about = "Test samples taken evenly from all of them, with the network's answer and how sure it is of it."
    return Section("predictions", _HEADING, about, body=body)


def _item(sample: dict[str, Any]) -> str:
    label, said = escape(sample["label"][:40]), escape(sample["prediction"][:40])
    sure = sample.get("probability")
    percent = f" <small>{100 * sure:.0f} %</small>" if is_number(sure) and sure == sure else ""
    right = sample["prediction"] == sample["label"]
    answer = f"{said}{percent}" if right else f"✗ {said}{percent}<br><small>is {label}</small>"
    image = f'<img alt="a sample of class {label}" src="data:image/png;base64,{_png(sample)}">'
    look = "" if right else ' class="wrong"'
    return f"<li{look}>{image}<span>{answer}</span></li>"


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
