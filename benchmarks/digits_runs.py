"""Shared by `cuts.py` and `kills.py`: run the command line in other processes, compare weights, say where it ran."""

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import safetensors.torch
import torch

from micronorm.cli.demo import largest_difference
from micronorm.engine.environment import environment

ROOT = Path(__file__).parents[1]


def command(arguments: Sequence[str], *, ranks: int = 1) -> list[str]:
    """Return the command `micronorm ARGUMENTS` on this many ranks."""
    launcher = ["torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone", "-m"] if ranks > 1 else []
    return [sys.executable, "-m", *launcher, "micronorm", *arguments]


def spawn(arguments: Sequence[str], *, ranks: int = 1, log: Path) -> subprocess.Popen:
    """Start the command with one thread per process; digests depend on the number of threads."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("ab") as file:
        return subprocess.Popen(command(arguments, ranks=ranks), env=env, stdout=file, stderr=subprocess.STDOUT)


def run(arguments: Sequence[str], *, ranks: int = 1, log: Path) -> None:
    """Run the command and wait; raise RuntimeError with its output if it fails."""
    process = spawn(arguments, ranks=ranks, log=log)
    if process.wait() != 0:
        raise RuntimeError(f"micronorm {shlex.join(arguments)}: exit code {process.returncode}\n{log.read_text()}")


def weights(out: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a run's final model."""
    return safetensors.torch.load_file(out / "model.safetensors")


def distance(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """Return the largest difference in any tensor, relative to that tensor's maximum."""
    if actual.keys() != expected.keys():
        raise ValueError("the runs have different tensors")
    wide = ({name: value.double() for name, value in tensors.items()} for tensors in (actual, expected))
    return largest_difference(*wide)


def provenance() -> str:
    """Return versions, processor and date in one sentence."""
    found = environment()
    cpu = found["cpu"]
    return (
        f"micronorm {found['micronorm']} ({(found['revision'] or 'no revision')[:12]}), torch {found['torch']}, Python "
        f"{found['python']}, {cpu['model']}, one thread per process, {found['date'][:10]}."
    )
