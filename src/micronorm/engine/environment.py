"""The machine: hardware and software for the record, without names of users and folders, and signals to stop."""

import os
import platform
import re
import signal
import subprocess
import sys
import threading
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Self

import torch

_CPUINFO = Path("/proc/cpuinfo")
_DRIVER = Path("/proc/driver/nvidia/version")
_SOURCE = Path(__file__).parents[2]  # `src`, in a checkout


def environment() -> dict[str, Any]:
    """Return versions, processor, GPUs, source revision and date. Unknown values are None.

    CUDA is initialized only if there is a GPU.

    Example:
        >>> found = environment()
        >>> list(found)
        ['date', 'micronorm', 'revision', 'python', 'torch', 'platform', 'cpu', 'gpu']
        >>> list(found["cpu"])
        ['model', 'cores', 'threads', 'torch_threads']
    """
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        # Looked up rather than imported: the engine may not import the package's public names.
        "micronorm": getattr(sys.modules[__name__.partition(".")[0]], "__version__", None),
        "revision": revision(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": _platform(),
        "cpu": _cpu(),
        "gpu": _gpu(),
    }


def package_version(name: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def revision() -> str | None:
    """Return the commit of the checkout that micronorm runs from, with "-dirty" if its `src` differs, or None."""
    if _SOURCE.name != "src" or not (_SOURCE.parent / ".git").exists():
        return None  # an installed package, perhaps inside another repository
    commit = _git("rev-parse", "HEAD")
    changes = _git("status", "--porcelain", "--", "src")
    if not commit or changes is None:
        return None
    return f"{commit}-dirty" if changes else commit


def _git(*arguments: str) -> str | None:
    # The GIT_DIR of a git hook would name another repository.
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "--no-optional-locks", "-C", str(_SOURCE.parent), *arguments]
    try:
        done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _platform() -> str:
    # Without the kernel's release, which often contains the name of the machine's operator.
    return " ".join(filter(None, (platform.system(), platform.machine(), *platform.libc_ver())))


def _cpu() -> dict[str, Any]:
    text = _read(_CPUINFO)
    models = re.findall(r"^(?:model name|Model|cpu model)\s*: *(.+)$", text, re.MULTILINE)
    # A core is a pair of these; without them (ARM, some virtual machines) the number of cores is not known.
    cores = re.findall(r"^physical id\s*: *(\d+)$.*?^core id\s*: *(\d+)$", text, re.MULTILINE | re.DOTALL)
    affinity = getattr(os, "sched_getaffinity", None)  # the CPUs this process may use, if the system reports them
    return {
        "model": models[0].strip() if models else platform.processor() or platform.machine() or None,
        "cores": len(set(cores)) or None,
        "threads": len(affinity(0)) if affinity else os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
    }


def _gpu() -> dict[str, Any] | None:
    if not torch.cuda.is_available():
        return None
    count = torch.cuda.device_count()
    names = [torch.cuda.get_device_name(index) for index in range(count)]
    driver = re.search(r"\b\d{3,}\.\d+(?:\.\d+)?\b", _read(_DRIVER))
    return {
        "name": ", ".join(dict.fromkeys(names)),
        "count": count,
        "memory": torch.cuda.get_device_properties(0).total_memory,
        "driver": driver.group() if driver else None,
        "cuda": torch.version.cuda or torch.version.hip,
        "cudnn": torch.backends.cudnn.version(),
    }


def _read(file: Path) -> str:
    try:
        return file.read_text("utf-8", "replace")
    except OSError:
        return ""


class Signals:
    """Catch the first SIGTERM or Ctrl-C and store it in `received`. A second one ends the process as usual.

    Args:
        verbose: write a line to standard error when the first signal arrives, because a step may take long.
    """

    def __init__(self, *, verbose: bool = False) -> None:
        self.received: int | None = None
        self._verbose = verbose
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._remember)
        return self

    def _remember(self, number: int, frame: Any) -> None:
        self.received = number
        self._restore()
        if self._verbose:  # os.write, because the signal may have interrupted a write to sys.stderr
            os.write(2, b"\nfinishing the step, then saving; the same signal again ends at once\n")

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def __exit__(self, *exception: object) -> None:
        self._restore()
