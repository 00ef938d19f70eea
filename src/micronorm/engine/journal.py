"""The run directory of a run: record, events, checkpoints and weights. Only rank 0 writes."""

import errno
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from micronorm.commit.snapshot import Snapshot
from micronorm.engine import checkpoint
from micronorm.engine.checkpoint import OtherRun, check_state, load_run_state, run_state
from micronorm.engine.environment import environment
from micronorm.engine.parallel import ShardedRanks, on_rank_0
from micronorm.engine.settings import Outcome, Settings, changes, describe
from micronorm.engine.step import Step
from micronorm.engine.weights import save_weights
from micronorm.records import FACTS, OUTCOME, Run, read, remove_partials, write_atomically

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

CHECKPOINTS = "checkpoints"
EVENTS = "events"
WEIGHTS = "model.safetensors"
AVERAGE = "ema.safetensors"
LOCK = ".lock"
MICRO_BATCH = "micro_batch"
"""The file with the micro-batch to resume with, after a sharded run ran out of memory."""

SAVE_SECONDS = 600.0


def lock_folder(folder: Path) -> BinaryIO:
    """Return a file that locks a folder until it is closed or the process ends, so that only one process writes there.

    Child processes do not inherit the lock. If the system or the file system has no such locks, nothing is locked.

    Raises:
        FileExistsError: another process holds the folder.
        ValueError: the lock is a link or a pipe.
    """
    place = folder / LOCK
    if place.is_symlink() or (place.exists() and not place.is_file()):  # a link leads elsewhere, a pipe waits forever
        raise ValueError(f"{place} must be a file of its own; delete it")
    file = place.open("ab")
    try:
        if fcntl is not None:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            file.close()
            raise FileExistsError(
                f"another process is writing to {folder}, such as a rank whose launcher was killed; wait for it, or "
                "end it"
            ) from None
    return file


def open_events(folder: Path, *, resumed_at: int | None) -> Any:
    """Return a TensorBoard writer, or None without the tensorboard package.

    TensorBoard hides events of later steps than `resumed_at` that an earlier process wrote: those steps are repeated.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter  # optional, and slow to import
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=None if resumed_at is None else resumed_at + 1)


class Journal:
    """The run directory of one run, on every rank. Without a folder nothing is written."""

    def __init__(self, folder: Path | None, step: Step, settings: Settings) -> None:
        self.folder, self.step, self.settings = folder, step, settings
        self.parallel = step.parallel
        self.record: Run | None = None
        self.events: Any = None
        self.lock: BinaryIO | None = None
        self.saved: Path | None = None
        self.saved_at = time.monotonic()

    # --- the record ----------------------------------------------------------------------------------------------

    def begin(self, facts: Mapping[str, Any], *, resume: bool, done: int) -> None:
        """Create the record, or open the existing one and drop what follows step `done`."""
        folder = self.folder
        if folder is not None:
            on_rank_0(self.parallel, lambda: self._begin(folder, facts, resume=resume, done=done))

    def _begin(self, folder: Path, facts: Mapping[str, Any], *, resume: bool, done: int) -> None:
        found = environment()
        if folder.exists() and not folder.is_dir():
            raise FileExistsError(f"{folder} is a file, a run needs a folder; name another")
        folder.mkdir(parents=True, exist_ok=True)
        self.lock = lock_folder(folder)
        if resume and (folder / FACTS).exists():  # otherwise the run was killed before it wrote anything
            self.record = Run.open(folder)
            self.record.rewind(done)
            again = {"step": done, "ranks": self.parallel.world, "environment": found}
            self.record.add_facts(resumptions=[*self.record.facts.get("resumptions", []), again])
        else:
            left = checkpoint.newest(folder / CHECKPOINTS)
            if left is not None and not (resume or (folder / FACTS).exists()):
                # It would be taken for a checkpoint of this run.
                raise FileExistsError(f"{folder} holds {left.name} of another run; name another folder, or delete it")
            known = {"recipe": "", "command": "", "revision": found["revision"], "date": found["date"]}
            self.record = Run.create(folder, {**known, "environment": found, **facts})
        remove_partials(folder)
        remove_partials(folder / CHECKPOINTS)
        self.events = open_events(folder / EVENTS, resumed_at=done if resume else None)

    def add_facts(self, **facts: Any) -> None:
        """Add facts to the record, replacing those of the same names."""
        if self.record is not None:
            self.record.add_facts(**facts)

    def steps(self) -> list[dict[str, Any]]:
        """Return the rows of `steps.jsonl`, on rank 0."""
        return [] if self.record is None else read(self.record.path).steps

    def has_ended(self) -> bool:
        """Return whether the folder holds a run with weights and outcome."""
        folder = self.folder
        return folder is not None and on_rank_0(
            self.parallel, lambda: all((folder / name).exists() for name in (FACTS, WEIGHTS, OUTCOME))
        )

    def write_steps(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append rows of `steps.jsonl`."""
        if rows and self.record is not None:
            self.record.append_steps(rows)
        for row in rows:
            self._write_scalars(row["step"], {f"step/{name}": row[name] for name in ("loss", "lr") if name in row})

    def write_epoch(self, row: Mapping[str, Any]) -> None:
        """Append a row of `epochs.jsonl`."""
        if self.record is not None:
            self.record.append_epoch(row)
        for split in ("train", "test"):
            self._write_scalars(row["step"], {f"{split}/{name}": v for name, v in row.get(split, {}).items()})

    def _write_scalars(self, step: int, values: Mapping[str, float]) -> None:
        if self.events is not None:
            for name, value in values.items():
                self.events.add_scalar(name, value, step)

    def write_diagnostics(self, row: Mapping[str, Any]) -> None:
        """Append a row of `diagnostics.jsonl`. The observer writes the events itself."""
        if self.record is not None:
            self.record.append_diagnostics(row)

    def end(self, outcome: Outcome, *, average: dict[str, Any] | None = None) -> None:
        """Write the weights, their moving average if there is one, and the outcome. Collective."""
        if self.folder is not None:
            recipe = "" if self.record is None else self.record.facts["recipe"]
            save_weights(self.step, self.folder / WEIGHTS, recipe=recipe)
            if average is not None:
                save_weights(self.step, self.folder / AVERAGE, average, recipe=recipe)
        if self.record is not None:
            kept = ("steps", "figures", "digest", "finished")
            self.record.finish({name: getattr(outcome, name) for name in kept})
        self.parallel.barrier()

    def close(self) -> None:
        """Close the files and release the folder, also after an error."""
        if self.events is not None:
            self.events.close()
        if self.lock is not None:
            self.lock.close()

    # --- checkpoints ---------------------------------------------------------------------------------------------

    @property
    def is_late(self) -> bool:
        """Return whether the last checkpoint of this rank is older than ten minutes."""
        return self.folder is not None and time.monotonic() - self.saved_at > SAVE_SECONDS

    def save(self, done: int, rest: Mapping[str, Any]) -> None:
        """Write a checkpoint; `rest` is what else the loop needs when it resumes. Collective."""
        self.saved_at = time.monotonic()
        if self.folder is None:
            return
        state = run_state(self.step, done=done, seed=self.settings.seed)
        state |= {"settings": describe(self.settings), "micro_batch": self.step.micro_batch.size, **rest}
        if self.record is not None:  # steps before the checkpoint are not repeated
            self.record.sync()
        if self.events is not None:
            self.events.flush()
        folder = self.folder / CHECKPOINTS
        self.saved = on_rank_0(self.parallel, lambda: checkpoint.save(folder, done, state))

    def load_newest(self, facts: Mapping[str, Any]) -> dict[str, Any] | None:
        """Restore the newest checkpoint and return its state, with "step" and `rest`; None without a checkpoint.

        After an error a model that is not sharded is as it was before.

        Raises:
            OtherRun: the folder holds a run of other settings, another definition, other layers or another number of
                samples than `facts`, or of another model.
            CheckpointError: the checkpoint is damaged.
        """
        if self.folder is None:
            return None
        path = checkpoint.newest(self.folder / CHECKPOINTS)
        seen = self.parallel.gather(None if path is None else path.name)
        if len(set(seen)) > 1:
            # Ranks at different steps would average their gradients.
            named = ", ".join(f"rank {rank}: {name or 'none'}" for rank, name in enumerate(seen))
            raise checkpoint.CheckpointError(
                f"the ranks do not see the same newest checkpoint in {self.folder} ({named}); the folder must be on a "
                "file system that all machines share"
            )
        if (self.folder / FACTS).exists():  # also if the run was killed before its first checkpoint
            try:
                _check_facts(Run.open(self.folder).facts, facts)
            except OtherRun as error:
                raise OtherRun(f"{self.folder} {error}") from error
        if path is None:
            return None
        state = checkpoint.load(path)
        # torch cannot copy shards and whole buffers together.
        before = Snapshot(self.step.model, parameters=not isinstance(self.parallel, ShardedRanks))
        try:
            check_state(self.step, state, ema=self.settings.ema is not None)
            _check_settings(state["settings"], facts["settings"])
            load_run_state(self.step, state)
        except OtherRun as error:
            before.restore()
            raise OtherRun(f"{path.name} {error}") from error
        except Exception as error:  # what a file holds may raise errors of many types
            before.restore()
            why = " ".join(str(error).split())[:300]
            why = why if isinstance(error, ValueError) else f"{type(error).__name__}: {why}"
            raise checkpoint.refusal(path, f"is damaged or from another version of micronorm: {why}") from error
        self.saved = path
        return state

    # --- memory --------------------------------------------------------------------------------------------------

    def remember_size(self, size: int) -> None:
        """Write the micro-batch to resume with; called on the rank that ran out of memory."""
        if self.folder is not None:
            write_atomically(self.folder / MICRO_BATCH, str(size).encode())

    def remembered_size(self) -> int | None:
        """Return what `remember_size` wrote, or None."""
        file = None if self.folder is None else self.folder / MICRO_BATCH
        if file is None or not file.exists():
            return None
        text = file.read_bytes().decode("utf-8", "replace")
        if not (text.isdecimal() and len(text) < 10):
            raise ValueError(f"{file} must hold a number of samples, got {text[:20]!r}; delete it")
        return int(text)


def _check_facts(was: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise OtherRun if a run computes something else than this one."""
    if "definition" in was and "definition" in now:
        changed = changes(was["definition"], now["definition"])
        if changed:
            raise OtherRun(
                f"holds a run from before {now.get('recipe') or 'its recipe'} changed: {', '.join(changed)}; finish it "
                f"with revision {was['revision'] or 'of micronorm that began it'}, or move the folder away (or give "
                "another --out) to train the present recipe"
            )
    changed = changes(was.get("layers", now["layers"]), now["layers"])
    if changed:
        raise OtherRun(
            f"holds a run of a model with other layers: {', '.join(changed)}; build the model it was made with, or use "
            "another --out"
        )
    _check_settings(was["settings"], now["settings"])
    # A step's number says which samples it takes, and a label which class it is.
    for key, what in (("train", "training samples"), ("test", "test samples"), ("names", "classes by label")):
        before, present = was["data"].get(key), now["data"].get(key)
        if None not in (before, present) and before != present:
            raise OtherRun(
                f"holds a run with other {what}: {_shorten(before)}, but the data set has {_shorten(present)}; use the "
                "same data, or another --out"
            )
    sizes = [(facts.get("variation") or {}).get("size") for facts in (was, now)]
    if sizes[0] != sizes[1]:
        raise OtherRun(f"holds a run of --size {sizes[0]}, not {sizes[1]}; use that size, or another --out")


def _shorten(value: Any) -> str:
    """Return a number, or the first classes of a list, in words."""
    shown = ", ".join(map(str, value[:4])) if isinstance(value, list) else str(value)
    return f"{shown}, … ({len(value)})" if isinstance(value, list) and len(value) > 4 else shown


def _check_settings(was: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    changed = changes(was, now)
    if changed:
        raise OtherRun(f"belongs to a run with other settings: {', '.join(changed)}; use those, or another --out")
