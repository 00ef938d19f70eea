"""Colours by name, light and dark. The page, the SVG files and the PNG files take theirs from here.

Of c0 to c4, the colours of the first five runs, every two differ by 14 in CIELAB or more, for readers without red,
green or blue cones too (simulated after Machado and others, 2009); from the sixth run on lines are dashed as well.
"""

from collections.abc import Mapping

RUNS = 8
"""Colours c0 to c7; further runs take the same ones again."""

LEVELS = 16
"""Colours h0 to h15 of a heat map, from near the paper's to the strongest."""


def _ramp(*stops: str) -> dict[str, str]:
    """LEVELS colours on the way from stop to stop."""
    rgb = [[int(stop[i : i + 2], 16) for i in (1, 3, 5)] for stop in stops]
    found = {}
    for level in range(LEVELS):
        at = level / (LEVELS - 1) * (len(stops) - 1)
        k = min(int(at), len(stops) - 2)
        mixed = (round(a + (b - a) * (at - k)) for a, b in zip(rgb[k], rgb[k + 1], strict=True))
        found[f"h{level}"] = "#" + "".join(f"{value:02x}" for value in mixed)
    return found


LIGHT: Mapping[str, str] = {
    "page": "#f5f6f8",
    "card": "#ffffff",
    "text": "#1b1f24",
    "quiet": "#5b6570",
    "rule": "#dde1e6",
    "bad": "#b3261e",
    "c0": "#0b62b8",
    "c1": "#d45500",
    "c2": "#00916a",
    "c3": "#a3248c",
    "c4": "#2b2f36",
    "c5": "#2b95c9",
    "c6": "#a88400",
    "c7": "#7b8490",
    "s0": "#0b62b8",
    "s1": "#e08a3c",
    "s2": "#7fb8a4",
    "s3": "#c9ced6",
    **_ramp("#eef3f9", "#a9cbe6", "#5d93c4", "#4d5aa5", "#4a1d6e"),
}
DARK: Mapping[str, str] = {
    "page": "#12151a",
    "card": "#1b2027",
    "text": "#e6e9ed",
    "quiet": "#a0aab5",
    "rule": "#323943",
    "bad": "#ff8a80",
    "c0": "#5aa9f5",
    "c1": "#ff8f4a",
    "c2": "#2fbf8f",
    "c3": "#f088cf",
    "c4": "#f2f3f5",
    "c5": "#a9e3fb",
    "c6": "#e3c84f",
    "c7": "#8a939e",
    "s0": "#3f8fdd",
    "s1": "#d98a45",
    "s2": "#4f8f7b",
    "s3": "#565e69",
    **_ramp("#222a35", "#2c4a74", "#3f78a8", "#67b0b5", "#f2e9a0"),
}


def variables(colours: Mapping[str, str]) -> str:
    """The colours as CSS variables."""
    return "".join(f"--{name}:{value};" for name, value in colours.items())
