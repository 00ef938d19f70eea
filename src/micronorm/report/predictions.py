"""The section with test samples and what the networks answered."""

import base64
import io
from collections.abc import Sequence
from html import escape
from typing import Any

from micronorm.report.html import Section, breakable, dot_html, is_finite
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
_ABOUT_SCENES = (
    "Test images, chosen evenly, with the truth and what each network answered. A colour is a class; where all boxes "
    "of an image are of one class, a colour is an object."
)
_LETTERS = 40
MOST = 32
"""Samples of a run that are shown."""
MOST_SCENES = 8
"""Label maps or images with boxes of a run that are shown."""


def predictions(runs: Sequence[NamedRun]) -> Section:
    """Return pictures with the networks' answers. Pictures that several runs share are shown once."""
    found = [run for run in runs if run.record.predictions]
    if not found:
        return Section("predictions", _HEADING, absent=_ABSENT)
    groups: dict[tuple[Any, ...], list[NamedRun]] = {}
    for run in found:
        pictures = tuple(
            (s["image"], s["truth"]) if _is_scene(s) else (s["pixels"], s["label"]) for s in run.record.predictions
        )
        groups.setdefault(pictures, []).append(run)
    scenes = [_is_scene(group[0].record.predictions[0]) for group in groups.values()]
    about = " ".join(text for text, shown in ((_ABOUT, not all(scenes)), (_ABOUT_SCENES, any(scenes))) if shown)
    bodies = (
        (_scenes_html if scene else _group_html)(group) for scene, group in zip(scenes, groups.values(), strict=True)
    )
    return Section("predictions", _HEADING, about, body="".join(bodies))


def _is_scene(sample: dict[str, Any]) -> bool:
    return "image" in sample


def _scenes_html(group: Sequence[NamedRun]) -> str:
    """Return a table with a row per image: the image, the truth, and the answer of each run."""
    shown = [run.record.predictions[:MOST_SCENES] for run in group]
    colours: dict[str, str] = {}
    for samples in shown:
        for sample in samples:
            colours |= sample.get("colours", {})
    legend = "".join(f"<li>{_swatch(colour)}{_short(name)}</li>" for name, colour in colours.items())
    names = "".join(f'<th scope="col">{dot_html(run.colour)}{breakable(run.name)}</th>' for run in group)
    rows = ""
    for first, *others in zip(*shown, strict=True):
        truth = f"the truth: {first['label']}"
        cells = _scene(first["image"], "the image") + _scene(first["truth"], truth)
        for sample in (first, *others):
            cells += _scene(sample["answer"], f"the answer: {sample['prediction']}", sample.get("note", ""))
        rows += f"<tr>{cells}</tr>"
    head = f'<tr><th scope="col">image</th><th scope="col">truth</th>{names}</tr>'
    table = f'<table class="scenes"><thead>{head}</thead><tbody>{rows}</tbody></table>'
    return f'<ul class="legend">{legend}</ul><div class="scroll">{table}</div>'


def _scene(file: str, words: str, note: str = "") -> str:
    """Return a cell with a picture. Records hold PNG and JPEG files only, which an <img> cannot run."""
    kind = "png" if file.startswith("iVBOR") else "jpeg"
    below = f"<small>{escape(note[: 2 * _LETTERS])}</small>" if note else ""
    return f'<td><img alt="{_short(words)}" src="data:image/{kind};base64,{file}">{below}</td>'


def _swatch(colour: str) -> str:
    """Return a square of that colour. The page's policy forbids style attributes."""
    return f'<svg class="swatch" aria-hidden="true"><rect width="100%" height="100%" fill="{colour}"/></svg>'


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
    # The frames of a clip are side by side, and need more than an eighth of the page.
    first = group[0].record.predictions[0]
    strips = " strips" if first["width"] > 3 * first["height"] else ""
    return f'<h3>Wrong answers of {number}</h3><ul class="legend">{counts}</ul><ul class="samples{strips}">{items}</ul>'


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
