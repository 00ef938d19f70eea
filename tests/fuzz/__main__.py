"""The script: `python -m tests.fuzz --seconds 60 --seed 0`."""

import argparse
import sys

import torch

from tests import fuzz
from tests.fuzz import Failure, run_case
from tests.fuzz.inputs import KINDS


def main() -> int:
    """Run cases, print the failures by group, and return 1 if there are any."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=fuzz.__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS, action="append", help="repeatable; default: all")
    parser.add_argument("--case", type=int, help="run only the case of this number")
    given = parser.parse_args()
    kinds = tuple(given.kind or ())
    if given.case is not None:
        found = [run_case(kind, given.seed, given.case) for kind in kinds or KINDS]
        done, failures = len(found), [failure for failure in found if failure is not None]
    else:
        done, failures = fuzz.fuzz(given.seed, seconds=given.seconds, kinds=kinds)
    groups: dict[str, list[Failure]] = {}
    for failure in failures:
        groups.setdefault(failure.what.partition(": ")[0], []).append(failure)
    write = sys.stdout.write
    for group in sorted(groups.values(), key=len, reverse=True):
        first = group[0]
        write(f"{len(group)} × {first.what}\n    {' '.join(map(ascii, first.arguments))[:300]}\n")
        write(f"    python -m tests.fuzz --seed {given.seed} --kind {first.kind} --case {first.number}\n")
    write(f"{done} cases, {len(failures)} failures in {len(groups)} groups\n")
    return 1 if failures else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
