"""Kill training runs at random moments, resume them, and compare the result with an uninterrupted run.

Every run is killed once and then resumed to its end. On one rank its digest over the raw bytes of model, optimizer,
random states and position must equal that of the uninterrupted run. With --rank-changes runs are resumed on another
number of ranks, and the weights must agree in float64. New rows replace rows of the same kind. See README.md.
"""

import argparse
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from digits_runs import ROOT, distance, provenance, run, spawn, weights

from micronorm import records
from micronorm.bench.results import markdown_table, read_csv, write_csv

RUN = ["train", "digits", "--epochs", "4", "--save-every", "2", "--device", "cpu"]  # 84 steps, 44 checkpoints
RANKS = ["train", "digits", "--steps", "30", "--save-every", "2", "--device", "cpu", "--dtype", "float64"]
SHORT = ["train", "digits", "--steps", "12", "--save-every", "2", "--device", "cpu", "--dtype", "float64"]
ONE = (1, "ddp")
# (ranks, parallel) before and after
CHANGES = [((4, "ddp"), ONE), ((4, "ddp"), (2, "ddp")), (ONE, (2, "ddp")), ((2, "ddp"), (4, "ddp"))]
CHANGES += [((4, "fsdp"), ONE), ((4, "fsdp"), (2, "fsdp")), (ONE, (2, "fsdp"))]
EARLY = 5  # one kill in five comes before training begins
LIMIT = 1e-10
COMMAND = shlex.join(["python", "benchmarks/kills.py", *sys.argv[1:]])
SIGNALS = {"KILL": signal.SIGKILL, "TERM": signal.SIGTERM, "INT": signal.SIGINT}


@dataclass(frozen=True)
class Kill:
    """When a kill came, the exit code, completed steps, the newest checkpoint, and the number of torn files."""

    phase: str
    seconds: float
    exit_code: int
    steps: int
    checkpoint: int
    torn: int


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="runs to kill, for each signal or change of ranks")
    parser.add_argument("--signal", choices=SIGNALS, default="KILL")
    parser.add_argument("--rank-changes", action="store_true", help="kill runs on some ranks, resume on others")
    parser.add_argument("--quick", action="store_true", help="short runs, one of them resumed on two ranks")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random moments")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "kills.csv")
    options = parser.parse_args(argv)
    arguments, changes = (RANKS, CHANGES) if options.rank_changes else (RUN, [(ONE, ONE)])
    if options.quick:
        arguments, changes = SHORT, [(ONE, ONE), (ONE, (2, "fsdp"))]
    with tempfile.TemporaryDirectory() as folder:
        runs = KilledRuns(Path(folder), arguments, options.signal, random.Random(options.seed), options.out)
        good = [runs.kill_runs(before, after, options.kills) for before, after in changes]
    print(f"{options.out} and {options.out.with_suffix('.md').name} written")
    return 0 if all(good) else 1


class KilledRuns:
    """Kill runs, and update the table after each."""

    def __init__(self, folder: Path, arguments: list[str], name: str, chance: random.Random, out: Path) -> None:
        self.folder, self.arguments, self.name, self.chance, self.out = folder, arguments, name, chance, out
        self.log = folder / "log"
        self.expected = folder / "expected"
        self.times = {ONE: self._time(ONE, self.expected)}

    def kill_runs(self, before: tuple[int, str], after: tuple[int, str], kills: int) -> bool:
        """Kill `kills` runs on `before`, resume each on `after`; return whether all results are as expected."""
        kind = f"{self.name} {before[0]} {before[1]} > {after[0]} {after[1]}"
        if before not in self.times:
            self.times[before] = self._time(before, self.folder / "timed")
            shutil.rmtree(self.folder / "timed")
        others = [row for row in read_csv(self.out) if row["kind"] != kind]
        rows: list[dict[str, object]] = []
        for number in range(1, kills + 1):
            out = self.folder / "run"
            kill = self._kill(before, out, early=number % EARLY == 0)
            resumed = [*self.arguments, "--parallel", after[1], "--out", str(out), "--resume"]
            run(resumed, ranks=after[0], log=self.log)
            rows.append({"kind": kind, "run": number, **vars(kill), **self._compare(out, same=before == after)})
            rows[-1] |= {"command": COMMAND, "provenance": provenance()}
            write_csv(self.out, [*others, *rows])
            self.out.with_suffix(".md").write_text(page(read_csv(self.out)))
            print(", ".join(f"{key} {value}" for key, value in list(rows[-1].items())[:-2]), flush=True)
            shutil.rmtree(out)
        return all(row["good"] for row in rows)

    def _compare(self, out: Path, *, same: bool) -> dict[str, object]:
        """Return the columns that compare a resumed run with the uninterrupted one, on the `same` ranks or others."""
        record = records.read(out)
        once = [row["step"] for row in record.steps] == list(range(1, len(record.steps) + 1))
        ours, theirs = record.outcome or {}, records.read(self.expected).outcome or {}
        far = distance(weights(out), weights(self.expected))
        good = once and ours["steps"] == theirs["steps"] and (ours == theirs if same else far <= LIMIT)
        digests = {"digest": ours["digest"][:16], "expected": theirs["digest"][:16]}
        return {"distance": f"{far:.3g}", "good": good, **digests}

    def _time(self, ranks: tuple[int, str], out: Path) -> tuple[float, float]:
        """Train without a kill on `ranks`; return the seconds that start and training take."""
        began = time.monotonic()
        process = self._start(ranks, out)
        _wait_for_start(process, out)
        started = time.monotonic()
        if process.wait() != 0:
            raise RuntimeError(f"exit code {process.returncode}\n{self.log.read_text()}")
        return started - began, time.monotonic() - started

    def _start(self, ranks: tuple[int, str], out: Path) -> subprocess.Popen:
        arguments = [*self.arguments, "--parallel", ranks[1], "--out", str(out)]
        return spawn(arguments, ranks=ranks[0], log=self.log)

    def _kill(self, before: tuple[int, str], out: Path, *, early: bool) -> Kill:
        start, training = self.times[before]
        while True:
            began = time.monotonic()
            process = self._start(before, out)
            if not early:
                _wait_for_start(process, out)
            time.sleep(self.chance.uniform(0, start if early else training))
            if process.poll() is None:
                moment = time.monotonic() - began
                self._send(process)
                process.wait()
                return Kill("start" if early else "training", round(moment, 3), process.returncode, *_found(out))
            shutil.rmtree(out, ignore_errors=True)  # it ended before the signal: try again

    def _send(self, process: subprocess.Popen) -> None:
        number = SIGNALS[self.name]
        ranks = _children(process.pid) if number == signal.SIGKILL else []  # a launcher passes other signals on
        for pid in (process.pid, *ranks):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
        while any(Path(f"/proc/{pid}").exists() for pid in ranks):
            time.sleep(0.05)  # they are dead, but their files are closed when they are gone


def _wait_for_start(process: subprocess.Popen, out: Path) -> None:
    """Wait until the run has written its facts, after imports and set-up."""
    while process.poll() is None and not (out / records.FACTS).exists():
        time.sleep(0.005)


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _found(out: Path) -> tuple[int, int, int]:
    """Return the recorded steps, the step of the newest checkpoint, and the number of unfinished files."""
    steps = (out / records.STEPS).read_bytes().count(b"\n") if (out / records.STEPS).exists() else 0
    names = [path.name for path in (out / "checkpoints").glob("step-*")]
    newest = max((int(name.split(".")[0].removeprefix("step-")) for name in names), default=0)
    return steps, newest, len([*out.rglob(f".*{records.PARTIAL}"), *out.rglob(".step-*.tmp")])


def page(rows: list[dict[str, str]]) -> str:
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    lines = []
    for kind in kinds:
        mine = [row for row in rows if row["kind"] == kind]
        name, ranks, parallel, _, later, later_parallel = kind.split()
        good = sum(row["good"] == "True" for row in mine)
        same = (ranks, parallel) == (later, later_parallel)
        found = f"{good} of {len(mine)}"
        worst = max(float(row["distance"]) for row in mine)
        began = sum(int(row["steps"]) > 0 for row in mine)
        torn = sum(int(row["torn"]) > 0 for row in mine)
        codes = ", ".join(sorted({row["exit_code"] for row in mine}, key=int))
        change = [_ranks(ranks, parallel), _ranks(later, later_parallel)]
        lines.append([f"SIG{name}", *change, found if same else f"{found}, at most {worst:.2g}", began, torn, codes])
    header = ["signal", "ranks", "resumed on", "same result", "in training", "in a write", "exit codes"]
    parts = [
        "# Runs killed at random moments",
        f"{', '.join(f'`{command}`' for command in dict.fromkeys(row['command'] for row in rows))}. "
        f"{rows[-1]['provenance']}",
        f"`micronorm {shlex.join(RUN)}` (84 steps, 44 checkpoints) is killed once and resumed with `--resume` to its "
        f"end. One kill in {EARLY} comes at a moment drawn uniformly from the time before training begins (imports, "
        "set-up), the others from the time after, to the end of the process. Same result: its digest over the raw "
        "bytes of model, optimizer, random states and position equals that of an uninterrupted run, and every step is "
        f"in its record once. If the number of ranks changes, `micronorm {shlex.join(RANKS)}` must end with weights "
        f"within {LIMIT:g} of those of one rank, relative to each tensor's maximum; the largest distance is given.",
        markdown_table(header, lines),
        "In training: kills after the first recorded step. In a write: kills that left an unfinished file of a "
        "checkpoint or a record. A negative exit code means that the signal ended the process, as during imports; a "
        "launcher of several ranks has its own codes. The CSV file of the same name has one row per kill.",
    ]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def _ranks(ranks: str, parallel: str) -> str:
    return ranks if ranks == "1" else f"{ranks} ({parallel})"


if __name__ == "__main__":
    sys.exit(main())
