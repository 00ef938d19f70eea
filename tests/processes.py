"""Processes that can be killed, forked from one that has imported everything: a start takes no seconds of imports.

`torch.distributed.run` sets the same variables as `start` does for ranks; tests that need the launcher itself are slow.
"""

import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PRELOADED = (
    "micronorm.cli",
    "micronorm.tasks.classification",
    "sklearn.datasets",
    "torch.utils.tensorboard",
    "torch._dynamo",  # which the first optimizer imports
    "torch.distributed.fsdp",
    "tests.engine.ranks",
)
TIMEOUT = 120.0


@contextmanager
def _import_path() -> Iterator[None]:
    # The server does not get our sys.path in time for its imports (Python 3.11); what fails to import, it passes over.
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, [before])])
    try:
        yield
    finally:
        os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)


def forks() -> ForkServerContext:
    """Start the process that others are forked from, once; return what starts them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, __name__])
    with _import_path():
        forkserver.ensure_running()
    return context


def start(function: Callable[..., Any], *args: Any, log: Path, ranks: int = 1) -> Sequence[BaseProcess]:
    """Start function(*args) in a process, or in one per rank; what they print goes to `log`."""
    context = forks()
    variables: list[dict[str, str]] = [{}]
    if ranks > 1:
        group = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": str(_free_port())}
        variables = [{**group, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    processes = [context.Process(target=_enter, args=(mine, log, function, args)) for mine in variables]
    for process in processes:
        process.start()
    return processes


def _free_port() -> int:
    """A port that nobody has and, until the ranks take it, nobody is likely to: the system hands out higher ones.

    One of those it hands out may go to a socket of gloo's in the meantime; ranks then wait for each other in vain.
    """
    for port in _ports:
        try:
            with socket.create_server(("localhost", port)):
                return port
        except OSError:
            continue
    raise AssertionError("the ports do not end")


# Each test process begins somewhere else.
_ports = (20_000 + (97 * os.getpid() + k) % 10_000 for k in count())


def _enter(variables: dict[str, str], log: Path, function: Callable[..., Any], args: tuple) -> None:
    import torch

    os.environ.update(variables)
    torch.set_num_threads(1)
    sys.stdout.flush()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout, sys.stderr = (os.fdopen(os.dup(n), "w", buffering=1) for n in (1, 2))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the server ignores it, and its children with it
    function(*args)


def finish(processes: Sequence[BaseProcess], timeout: float = TIMEOUT) -> list[int | None]:
    """Wait for all; their exit codes, negative for a signal. Whoever is not done in time is killed, and fails."""
    end = time.monotonic() + timeout
    for process in processes:
        process.join(max(end - time.monotonic(), 0))
    late = [process for process in processes if process.exitcode is None]
    for process in late:
        process.kill()
        process.join()
    assert not late, f"{len(late)} of {len(processes)} processes were not done after {timeout:.0f} s"
    return [process.exitcode for process in processes]


def micronorm(*arguments: str) -> None:
    """The command line, to be started in a process."""
    from micronorm.cli import main

    sys.argv = ["micronorm", *arguments]
    main()
