"""What a run writes: its record, its events, its checkpoints and its weights. Rank 0 holds the pen."""

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from micronorm.engine import checkpoint
from micronorm.engine.environment import environment
from micronorm.engine.events import Events
from micronorm.engine.lock import Lock
from micronorm.engine.parallel import Sharded, on_rank_0
from micronorm.engine.settings import Outcome, Settings, describe
from micronorm.engine.state import (
    check_model,
    load_rest_of_state,
    load_whole_state,
    rest_of_state,
    save_weights,
    whole_state,
)
from micronorm.engine.step import Step
from micronorm.records import FACTS, OUTCOME, Run, remove_partials, write_atomically

CHECKPOINTS = "checkpoints"
EVENTS = "events"
WEIGHTS = "model.safetensors"
SMALLER = "micro_batch"
"""Holds the micro-batch to resume with, where a sharded run ended out of memory."""

SAVE_SECONDS = 600.0


class Journal:
    """The run directory of one run, on every rank. Without a folder it keeps nothing."""

    def __init__(self, folder: Path | None, step: Step, settings: Settings) -> None:
        self.folder, self.step, self.settings = folder, step, settings
        self.parallel = step.parallel
        self.record: Run | None = None
        self.events: Events | None = None
        self.lock: Lock | None = None
        self.saved: Path | None = None
        self.saved_at = time.monotonic()

    # --- the record ----------------------------------------------------------------------------------------------

    def begin(self, facts: Mapping[str, Any], *, resume: bool, done: int) -> None:
        """Open the record: a new one, or the old one as it was after `done` steps."""
        folder = self.folder
        if folder is not None:
            on_rank_0(self.parallel, lambda: self._begin(folder, facts, resume=resume, done=done))

    def _begin(self, folder: Path, facts: Mapping[str, Any], *, resume: bool, done: int) -> None:
        found = environment()
        if folder.exists() and not folder.is_dir():
            raise FileExistsError(f"{folder} is a file, a run needs a folder; name another")
        folder.mkdir(parents=True, exist_ok=True)
        self.lock = Lock(folder)
        if resume and (folder / FACTS).exists():  # else it was killed before it had begun
            self.record = Run.open(folder)
            self.record.rewind(done)
            again = {"step": done, "ranks": self.parallel.world, "environment": found}
            self.record.add_facts(resumptions=[*self.record.facts.get("resumptions", []), again])
        else:
            left = checkpoint.newest(folder / CHECKPOINTS)
            if left is not None and not (resume or (folder / FACTS).exists()):
                # It would pass for a newer one of this run.
                raise FileExistsError(f"{folder} holds {left.name} of another run; name another folder, or delete it")
            known = {"recipe": "", "command": "", "revision": found["revision"], "date": found["date"]}
            self.record = Run.create(folder, {**known, "environment": found, **facts})
        remove_partials(folder)
        checkpoint.remove_unfinished(folder / CHECKPOINTS)
        self.events = Events(folder / EVENTS, resumed_at=done if resume else None)

    def has_ended(self) -> bool:
        """Whether the run that is here was written to its end, weights and outcome."""
        folder = self.folder
        return folder is not None and on_rank_0(
            self.parallel, lambda: all((folder / name).exists() for name in (FACTS, WEIGHTS, OUTCOME))
        )

    def write_steps(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append rows, one per step."""
        if rows and self.record is not None:
            self.record.append_steps(rows)
        for row in rows if self.events is not None else ():
            assert self.events is not None
            self.events.scalars(row["step"], {"step/loss": row["loss"], "step/lr": row["lr"]})

    def write_epoch(self, row: Mapping[str, Any]) -> None:
        """Append an epoch's row."""
        if self.record is not None:
            self.record.append_epoch(row)
        if self.events is not None:
            for split in ("train", "test"):
                self.events.scalars(row["step"], {f"{split}/{name}": v for name, v in row.get(split, {}).items()})

    def write_look(self, row: Mapping[str, Any]) -> None:
        """Append a look into the network; its events the observer writes itself."""
        if self.record is not None:
            self.record.append_diagnostics(row)

    def end(self, outcome: Outcome) -> None:
        """Write the weights and what the run came to. Collective."""
        if self.folder is not None:
            save_weights(self.step, self.folder / WEIGHTS)
        if self.record is not None:
            kept = ("steps", "figures", "digest", "finished")
            self.record.finish({name: getattr(outcome, name) for name in kept})
        self.parallel.barrier()

    def close(self) -> None:
        """Write nothing more; also where the run ended with an error."""
        if self.events is not None:
            self.events.close()
        if self.lock is not None:
            self.lock.release()

    # --- checkpoints ---------------------------------------------------------------------------------------------

    @property
    def is_late(self) -> bool:
        """Whether the last checkpoint is so old that this rank would like another."""
        return self.folder is not None and time.monotonic() - self.saved_at > SAVE_SECONDS

    def save(self, done: int, rest: Mapping[str, Any]) -> None:
        """Write a checkpoint, with what the loop wants to find again in `rest`. Collective."""
        self.saved_at = time.monotonic()
        if self.folder is None:
            return
        state = rest_of_state(self.step, done=done, seed=self.settings.seed)
        state |= {"settings": describe(self.settings), "micro_batch": self.step.micro_batch.size, **rest}
        if self.record is not None and self.events is not None:  # what the checkpoint is past does not recur
            self.record.sync()
            self.events.flush()
        if isinstance(self.parallel, Sharded):
            from micronorm.engine import sharded  # here: torch's DCP takes a second to import, and few runs need it

            self.saved = sharded.save(self.folder / CHECKPOINTS, done, self.step, state)
        else:
            folder, whole = self.folder / CHECKPOINTS, whole_state(self.step)
            self.saved = on_rank_0(self.parallel, lambda: checkpoint.save(folder, done, whole | state))

    def load_newest(self, *, samples: int) -> dict[str, Any] | None:
        """Put the newest checkpoint back; what `save` was given as `rest`, with "step". None where there is none.

        Nothing is changed before the checkpoint was found whole and its settings were found to be these, and so many
        samples those that the run trains on.
        """
        if self.folder is None:
            return None
        path = checkpoint.newest(self.folder / CHECKPOINTS)
        seen = self.parallel.gather(None if path is None else path.name)
        if len(set(seen)) > 1:
            # Each would go on from where it thinks the run is, and their gradients be averaged nevertheless.
            named = ", ".join(f"rank {rank}: {name or 'none'}" for rank, name in enumerate(seen))
            raise checkpoint.CheckpointError(
                f"the ranks do not see the same newest checkpoint in {self.folder} ({named}); it must lie where all of "
                "them can read it, such as a file system that the machines share"
            )
        if (self.folder / FACTS).exists():  # it may have been killed before its first checkpoint
            facts = Run.open(self.folder).facts
            self._check_settings(self.folder / FACTS, facts["settings"])
            self._check_samples(facts["data"].get("train"), samples)
        if path is None:
            return None
        state = self._load_sharded(path) if path.is_dir() else self._load_file(path)
        self.saved = path
        return {**state, "step": load_rest_of_state(self.step, state)}

    def _load_file(self, path: Path) -> dict[str, Any]:
        state = checkpoint.load(path)
        self._check_settings(path, state["settings"])
        check_model(self.step, {name: value.shape for name, value in state["model"].items()}, source=path.name)
        load_whole_state(self.step, state)
        return state

    def _load_sharded(self, path: Path) -> dict[str, Any]:
        from micronorm.engine import sharded

        state = sharded.load_rest(path)
        self._check_settings(path, state["settings"])
        check_model(self.step, sharded.model_shapes(path), source=path.name)
        sharded.load(path, self.step)
        return state

    def _check_settings(self, path: Path, theirs: Mapping[str, Any]) -> None:
        mine = dict(_flat(describe(self.settings)))
        changes = [f"{key} was {was} and is {mine.get(key)}" for key, was in _flat(theirs) if mine.get(key) != was]
        if changes:
            raise ValueError(
                f"{path.name} belongs to a run with other settings: {', '.join(changes)}; use those, or another --out"
            )

    def _check_samples(self, was: int | None, now: int) -> None:
        """The number of a step says which samples it takes, of so many and no others."""
        if was not in (None, now):
            raise ValueError(
                f"{self.folder} holds a run of {was} training samples, here are {now}: its steps would mean others; "
                "give it the data it began with, or another --out"
            )

    # --- memory --------------------------------------------------------------------------------------------------

    def remember_size(self, size: int) -> None:
        """Note the micro-batch to resume with; any rank may be the one that has to."""
        if self.folder is not None:
            write_atomically(self.folder / SMALLER, str(size).encode())

    def remembered_size(self) -> int | None:
        """What `remember_size` noted."""
        file = None if self.folder is None else self.folder / SMALLER
        return int(file.read_text()) if file is not None and file.exists() else None


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested values by dotted names."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
