"""The page of the sweep: totals, the share per family, and everything that did not convert."""

import collections
from collections.abc import Callable, Sequence
from typing import Any

from micronorm.bench.results import markdown_table

COUNTS = (
    "norms_converted",
    "norms_left",
    "norms_fused",
    "convolutions_converted",
    "convolutions_left",
    "batchnorms_after_convolution_left",
    "convolutions_directly_before_norm_left",
)
CONVERTIBLE = ("converted", "refused", "traceback")


def summary(rows: Sequence[Any], *, command: str) -> str:
    """Return the summary as Markdown."""
    return "\n".join([*_head(rows, command), *_totals(rows), *_families(rows), *_faults(rows), *_reasons(rows)]) + "\n"


def _head(rows: Sequence[Any], command: str) -> list[str]:
    packages = ("micronorm", "torch", "timm", "torchvision", "python")
    used = sorted({", ".join(f"{package} {getattr(row, package)}" for package in packages) for row in rows})
    dates = sorted({row.date[:10] for row in rows})
    return [
        "# Conversion of every architecture of timm and torchvision",
        "",
        f"`{command}` (or `make sweep`), {' to '.join([dates[0], *dates[1:][-1:]])}. {'; '.join(used)}.",
        "Models have fresh weights and live on the meta device, on the CPU where that is impossible. One row per",
        "architecture is in the CSV of the same name. A model without a BatchNorm, GroupNorm or InstanceNorm beside a",
        "convolution has nothing to convert; one that has them and is refused, or raises, is a failure.",
        "",
    ]


def _totals(rows: Sequence[Any]) -> list[str]:
    parts = [[r for r in rows if r.source == source] for source in ("timm", "torchvision")] + [rows]

    def line(label: str, value: Callable[[Any], int]) -> list[str]:
        return [label, *(f"{sum(map(value, part)):,}" for part in parts)]

    outcomes = ("converted", "nothing to convert", "refused", "traceback")
    lines = [
        line("architectures", lambda r: 1),
        *(line(outcome, lambda r, o=outcome: r.outcome == o) for outcome in outcomes),
        *(line(f"paired by {way}", lambda r, w=way: r.pairing == w) for way in ("fx", "execution", "order")),
        *(line(column.replace("_", " "), lambda r, c=column: getattr(r, c)) for column in COUNTS),
        line("failed checks", lambda r: r.checks not in ("", "ok")),
    ]
    return [markdown_table(["", "timm", "torchvision", "all"], lines), ""]


def _families(rows: Sequence[Any]) -> list[str]:
    by_family: dict[str, list[Any]] = collections.defaultdict(list)
    for row in rows:
        by_family[f"{row.source} {row.family}"].append(row)
    found, nothing = [], []
    for family, part in by_family.items():
        able = [r for r in part if r.outcome in CONVERTIBLE]
        if not able:
            nothing.append(f"{family} ({len(part)})")
            continue
        done, convolutions = sum(r.outcome == "converted" for r in able), _convolution_share(able)
        pairing = ", ".join(f"{m} {n}" for m, n in collections.Counter(r.pairing for r in able).most_common())
        share = f"{done} of {len(able)} ({done / len(able):.0%})"
        line = [family, share, len(part) - len(able), f"{convolutions:.0%}", pairing]
        found.append((done / len(able), convolutions, line))
    header = ["family", "converted", "nothing to convert", "convolutions converted", "pairing"]
    worst_first = [line for _, _, line in sorted(found, key=lambda item: item[:2])]
    lines = ["## Converted share per family, worst first", "", markdown_table(header, worst_first), ""]
    return [*lines, f"Nothing to convert in all of: {', '.join(nothing)}.", ""] if nothing else lines


def _convolution_share(rows: Sequence[Any]) -> float:
    done, left = sum(r.convolutions_converted for r in rows), sum(r.convolutions_left for r in rows)
    return done / max(1, done + left)


def _faults(rows: Sequence[Any]) -> list[str]:
    lines = []
    for title, chosen, text in (
        ("Tracebacks", [r for r in rows if r.outcome == "traceback"], lambda r: r.detail),
        ("Refused", [r for r in rows if r.outcome == "refused"], lambda r: r.detail),
        ("Failed checks", [r for r in rows if r.checks not in ("", "ok")], lambda r: r.checks),
        ("Paired by order", [r for r in rows if r.pairing == "order"], lambda r: r.detail),
        (
            "BatchNorms left",
            [r for r in rows if r.batchnorms_after_convolution_left],
            lambda r: f"{r.batchnorms_after_convolution_left}: {r.norms_left_because}",
        ),
        (
            "Convolutions left directly before a norm",
            [r for r in rows if r.convolutions_directly_before_norm_left],
            lambda r: f"{r.convolutions_directly_before_norm_left}: {r.convolutions_left_because}",
        ),
    ):
        lines += [f"## {title}", ""]
        lines += [f"- {r.source} {r.name}: {text(r)}" for r in chosen] or ["None."]
        lines.append("")
    return lines


def _reasons(rows: Sequence[Any]) -> list[str]:
    """Return tables of the forty commonest reasons; the CSV has all."""
    lines = []
    for title, column in (("norms", "norms_left_because"), ("convolutions", "convolutions_left_because")):
        counts: collections.Counter[str] = collections.Counter()
        models: collections.Counter[str] = collections.Counter()
        for row in rows:
            for entry in filter(None, getattr(row, column).split(" | ")):
                count, _, reason = entry.partition("× ")
                counts[reason] += int(count)
                models[reason] += 1
        found = [[reason, f"{count:,}", f"{models[reason]:,}"] for reason, count in counts.most_common(40)]
        table = markdown_table(["reason", "layers", "architectures"], found)
        lines += [f"## Why {title} were left: the commonest reasons", "", table, ""]
    return lines
