"""The sweep's rows as a page: totals, the share per family, and everything that did not convert."""

import collections
from collections.abc import Iterable, Sequence
from typing import Any

CONVERTIBLE = ("converted", "refused", "traceback")


def summary(rows: Sequence[Any], *, command: str) -> str:
    """Markdown, for the terminal too."""
    return "\n".join([*_head(rows, command), *_totals(rows), *_families(rows), *_faults(rows), *_reasons(rows)]) + "\n"


def _head(rows: Sequence[Any], command: str) -> list[str]:
    used = sorted(
        {
            ", ".join(
                (
                    f"micronorm {r.micronorm}",
                    f"torch {r.torch}",
                    f"timm {r.timm}",
                    f"torchvision {r.torchvision}",
                    f"Python {r.python}",
                )
            )
            for r in rows
        }
    )
    dates = sorted(r.date[:10] for r in rows)
    return [
        "# Conversion of every architecture of timm and torchvision",
        "",
        f"`{command}` (or `make sweep`), {dates[0]}"
        + (f" to {dates[-1]}" if dates[-1] != dates[0] else "")
        + ". "
        + "; ".join(used)
        + ".",
        "Models have fresh weights and live on the meta device, on the CPU where that is impossible. One row per",
        "architecture is in the CSV of the same name. A model without a BatchNorm, GroupNorm or InstanceNorm beside a",
        "convolution has nothing to convert; one that has them and is refused, or raises, is a failure.",
        "",
    ]


def _totals(rows: Sequence[Any]) -> list[str]:
    lines = ["| | timm | torchvision | all |", "|---|---:|---:|---:|"]

    def line(label: str, value: Any) -> None:
        parts = [[r for r in rows if r.source == source] for source in ("timm", "torchvision")]
        lines.append(f"| {label} | " + " | ".join(f"{value(part):,}" for part in [*parts, rows]) + " |")

    line("architectures", len)
    for outcome in ("converted", "nothing to convert", "refused", "traceback"):
        line(outcome, lambda part, o=outcome: sum(r.outcome == o for r in part))
    for method in ("fx", "execution", "order"):
        line(f"paired by {method}", lambda part, m=method: sum(r.pairing == m for r in part))
    for column in (
        "norms_converted",
        "norms_left",
        "norms_fused",
        "convolutions_converted",
        "convolutions_left",
        "batchnorms_after_convolution_left",
        "convolutions_directly_before_norm_left",
    ):
        line(column.replace("_", " "), lambda part, c=column: sum(getattr(r, c) for r in part))
    line("failed checks", lambda part: sum(r.checks not in ("", "ok") for r in part))
    return [*lines, ""]


def _families(rows: Sequence[Any]) -> list[str]:
    by_family: dict[tuple[str, str], list[Any]] = collections.defaultdict(list)
    for row in rows:
        by_family[row.source, row.family].append(row)
    lines = ["## Converted share per family, worst first", ""]
    lines += [
        "| family | converted | nothing to convert | convolutions converted | pairing |",
        "|---|---:|---:|---:|---|",
    ]
    nothing = []

    def share(item: tuple[tuple[str, str], list[Any]]) -> tuple[float, float]:
        able = [r for r in item[1] if r.outcome in CONVERTIBLE]
        return sum(r.outcome == "converted" for r in able) / max(1, len(able)), _convolution_share(able)

    for (source, family), part in sorted(by_family.items(), key=share):
        able = [r for r in part if r.outcome in CONVERTIBLE]
        if not able:
            nothing.append(f"{source} {family} ({len(part)})")
            continue
        done = sum(r.outcome == "converted" for r in able)
        pairing = ", ".join(f"{m} {n}" for m, n in collections.Counter(r.pairing for r in able).most_common())
        lines.append(
            f"| {source} {family} | {done} of {len(able)} ({done / len(able):.0%}) | {len(part) - len(able)} "
            f"| {_convolution_share(able):.0%} | {pairing} |"
        )
    if nothing:
        lines += ["", f"Nothing to convert in all of: {', '.join(nothing)}."]
    return [*lines, ""]


def _convolution_share(rows: Iterable[Any]) -> float:
    rows = list(rows)
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
            "Convolutions left whose very output a norm takes",
            [r for r in rows if r.convolutions_directly_before_norm_left],
            lambda r: f"{r.convolutions_directly_before_norm_left}: {r.convolutions_left_because}",
        ),
    ):
        lines += [f"## {title}", ""]
        lines += [f"- {r.source} {r.name}: {text(r)}" for r in chosen] or ["None."]
        lines.append("")
    return lines


def _reasons(rows: Sequence[Any]) -> list[str]:
    lines = []
    for title, column in (("norms", "norms_left_because"), ("convolutions", "convolutions_left_because")):
        counts: collections.Counter[str] = collections.Counter()
        models: collections.Counter[str] = collections.Counter()
        for row in rows:
            for entry in filter(None, getattr(row, column).split(" | ")):
                count, _, reason = entry.partition("× ")
                counts[reason] += int(count)
                models[reason] += 1
        lines += [f"## Why {title} were left", "", "| reason | layers | architectures |", "|---|---:|---:|"]
        lines += [f"| {reason} | {count:,} | {models[reason]:,} |" for reason, count in counts.most_common(40)]
        rest = len(counts) - 40
        if rest > 0:
            lines.append(f"| {rest} more reasons, in the CSV | {sum(c for _, c in counts.most_common()[40:]):,} | |")
        lines.append("")
    return lines
