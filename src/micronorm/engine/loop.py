"""A training run from its first step to its last, whatever happens between.

The run is a sequence of optimizer steps, numbered from 0. Which samples step k takes and what happens to each of them
is a function of the seed, the epoch and the sample's index, so the number of the next step is the run's whole position.
"""

import contextlib
import math
import signal
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from micronorm.commit.snapshot import RandomState
from micronorm.engine.checkpoint import digest
from micronorm.engine.dropout import key_dropout
from micronorm.engine.evaluate import evaluate
from micronorm.engine.graph import GraphedStep
from micronorm.engine.inputs import check_samples
from micronorm.engine.journal import Journal
from micronorm.engine.listener import Listener, Silent
from micronorm.engine.meter import Meter
from micronorm.engine.microbatch import MicroBatch, describe_randomness
from micronorm.engine.observer import Observer
from micronorm.engine.parallel import Sharded, Wishes, open_ranks
from micronorm.engine.probe import describe_dependence
from micronorm.engine.settings import Execution, Outcome, Settings, describe
from micronorm.engine.signals import Signals
from micronorm.engine.state import rest_of_state, whole_state
from micronorm.engine.step import Portion, ShardOutOfMemory, Step
from micronorm.engine.task import Share, Task
from micronorm.nn.per_step.recompute import Recomputation, recompute
from micronorm.ops.keyed import permutation, sample_keys


class _Position(NamedTuple):
    """Of one step: its epoch, its samples, and those of this rank."""

    epoch: int
    samples: int
    indices: torch.Tensor
    counted: int


def train(
    model: nn.Module,
    task: Task,
    settings: Settings,
    execution: Execution | None = None,
    *,
    out: Path | str | None = None,
    resume: bool = False,
    facts: dict[str, Any] | None = None,
    listener: Listener | None = None,
    observer: Observer | None = None,
) -> Outcome:
    """Train a model, and write what happened into a run directory.

    Args:
        model: is trained in place.
        task: its data, loss and score.
        settings: what to compute.
        execution: how to compute it.
        out: the run directory; None keeps no record and no checkpoints.
        resume: go on from the newest checkpoint in `out`.
        facts: more for the record, such as the recipe's name and the command.
        listener: is told of steps, epochs and messages.
        observer: looks into the network where `execution.observe` says so: `mn.observe`. On rank 0, at its samples.

    Returns:
        Where the run ended. After SIGTERM or Ctrl-C the step in progress is finished and saved, and `finished` is
        False.
    """
    folder = None if out is None else Path(out)
    execution = execution or Execution()
    if execution.observe is not None and (observer is None or folder is None):
        lacking = "an observer, observer=mn.observe," if observer is None else "a run directory to write to"
        raise ValueError(f"observe={execution.observe} needs {lacking} as well")
    run = _TrainingRun(model, task, settings, execution, folder, listener or Silent())
    run.observer = observer
    callers = RandomState.get(run.device)
    try:
        # For what draws from the global generators in spite of the keys; ranks must not draw the same.
        RandomState.seed(settings.seed + 2**20 * run.parallel.rank, run.device)
        if run.execution.recompute:
            run.recomputation = recompute(run.step.model)
        return run.go(resume=resume, facts=facts or {})
    finally:
        if run.recomputation is not None:
            run.recomputation.remove()
        run.journal.close()
        run.step.transaction.close()
        RandomState.set(callers, run.device)
        run.parallel.close()


class _TrainingRun:
    """The state of one call of `train`."""

    def __init__(
        self, model: nn.Module, task: Task, settings: Settings, execution: Execution, out: Path | None, listener: Any
    ) -> None:
        check_samples(task)
        self.task, self.settings, self.execution = task, settings, execution
        self.parallel = open_ranks(execution.device, execution.parallel)
        self.first = self.parallel.rank == 0
        self.listener = listener if self.first else Silent()
        self.device = self.parallel.device
        self.steps_per_epoch = math.ceil(len(task.train) / settings.step_batch)
        self.total = self.steps_per_epoch * settings.epochs
        self.last = min(self.total, execution.steps or self.total)
        self.deadline = math.inf if execution.minutes is None else time.monotonic() + 60 * execution.minutes
        self.done = 0
        self.figures: dict[str, float] = {}
        self.signal: int | None = None
        self.recomputation: Recomputation | None = None
        self.observer: Observer | None = None
        self.untouched = False
        self.step = self._make_step(model)
        self.take_step = GraphedStep(self.step, settings.step_batch) if execution.cuda_graph else self.step
        self.meter = Meter(task, self.device)
        self.journal = Journal(out, self.step, settings)

    def _make_step(self, model: nn.Module) -> Step:
        settings, execution = self.settings, self.execution
        if isinstance(self.parallel, Sharded) and settings.dtype == torch.float16:
            raise ValueError("float16's loss scaling does not know shards; use bfloat16 or parallel='ddp'")
        unkeyed = key_dropout(model)
        self.randomness = describe_randomness(model, unkeyed)
        wide = torch.float64 if settings.dtype == torch.float64 else torch.float32
        layout = torch.channels_last if execution.channels_last else torch.preserve_format
        model = model.to(self.device, wide)
        model = model.to(memory_format=layout) if execution.channels_last else model  # type: ignore[call-overload]
        model = self.parallel.prepare(model.train())
        if execution.compile:
            model.compile()
        options: dict[str, Any] = {}
        if execution.cuda_graph:
            # Fused kernels take the learning rate in float32, whatever the parameters are.
            lr = torch.tensor(settings.optimizer.lr, dtype=torch.float32, device=self.device)
            options = {"lr": lr, "fused": True, "capturable": True}
        optimizer = settings.optimizer(model.parameters(), **options)
        whole = self.parallel.largest_share(settings.step_batch, unit=settings.unit)
        size = MicroBatch(execution.micro_batch or whole, unit=settings.unit, largest=settings.largest)
        return Step(
            model,
            self.task,
            optimizer,
            parallel=self.parallel,
            micro_batch=size,
            dtype=settings.dtype,
            channels_last=execution.channels_last,
            step_batch=settings.step_batch,
        )

    # --- the run -------------------------------------------------------------------------------------------------

    def go(self, *, resume: bool, facts: dict[str, Any]) -> Outcome:
        self._begin(resume=resume, facts=facts)
        description = facts.get("recipe") or type(self.step.model).__name__
        if self.parallel.world > 1:
            description += f", {self.parallel.world} ranks"
        self.listener.on_start(self.last, min(self.done, self.last), description)
        if self.done >= self.last:
            self.listener.on_message(f"nothing is left to do: {self.done} of {self.total} steps are done")
        if self.randomness:
            self.listener.on_message(self.randomness)
        with Signals(say=self.first) as signals:
            try:
                if self.done < self.last:
                    with self._observed():
                        self._all_steps(signals)
            except ShardOutOfMemory as error:
                self.journal.remember_size(error.micro_batch)
                raise
            finally:
                self.listener.on_end()
        return self._end()

    @contextlib.contextmanager
    def _observed(self) -> Iterator[None]:
        every = self.execution.observe
        if every is None or self.observer is None or not self.first:
            yield
            return
        events = self.journal.events
        writer = events if events is not None and events.available else None
        options: dict[str, Any] = {"writer": writer, "sink": self.journal.write_look, "start": self.done}
        with self.observer(self.step.model, every=every, **options) as self.step.watch:
            yield
        self.step.watch = None

    def _all_steps(self, signals: Signals) -> None:
        upcoming: deque[_Position] = deque()
        batches = self.task.train.load(self._shares(upcoming), seed=self.settings.seed)
        self.meter.restart()
        began = self.done
        for batch in batches:
            if not upcoming:
                raise ValueError("task.train.load gave more batches than it was asked for; yield one per share")
            position = upcoming.popleft()
            keys = sample_keys(position.indices, seed=self.settings.seed, epoch=position.epoch).to(self.device)
            portion = Portion(batch, keys, position.samples, position.counted)
            if self.done == 0:
                self._look_ahead(portion)
            factor = self._set_rate()
            if self.step.watch is not None:
                self.step.watch.epoch = position.epoch
            out_of_time = time.monotonic() > self.deadline
            wishes = Wishes(stop=out_of_time or signals.received is not None, save=self._wants_checkpoint())
            result = self.take_step(portion, wishes)
            self.done += 1
            row = {"step": self.done, "epoch": position.epoch, "lr": factor, "samples": position.samples}
            self._log(self.meter.add(row, result))
            for message in result.messages:
                self.listener.on_message(message)
            if self.recomputation is not None and self.first and self.done == began + 1:
                self.listener.on_message(f"{self.recomputation.report()}, but recomputed in the backward")
            ended = self.done % self.steps_per_epoch == 0
            if ended or self.done == self.last:
                self._report_epoch(position.epoch, evaluated=self._is_due(position.epoch))
            if ended:
                self.meter.end_epoch()
            if ended or self.done == self.last or result.wishes.stop or result.wishes.save:
                self._save()
            if result.wishes.stop:
                self.signal = self.parallel.broadcast(None if out_of_time else signals.received or signal.SIGTERM)
                return
        if self.done < self.last:
            raise ValueError(f"task.train.load ended after {self.done} of {self.last} steps; yield one batch per share")

    def _shares(self, upcoming: deque[_Position]) -> Iterator[Share]:
        """This rank's share of each step still to come; what else there is to know of it goes into `upcoming`."""
        settings, order, order_epoch = self.settings, torch.empty(0), -1
        for k in range(self.done, self.last):
            epoch, within = divmod(k, self.steps_per_epoch)
            if epoch != order_epoch:
                order, order_epoch = permutation(len(self.task.train), seed=settings.seed, epoch=epoch), epoch
            chosen = order[within * settings.step_batch : (within + 1) * settings.step_batch]
            indices = chosen[self.parallel.share(len(chosen), unit=settings.unit)]
            counted = len(indices)
            # A rank without samples still loads one: loaders need not know empty batches, and collective forwards do
            # not either.
            upcoming.append(_Position(epoch, len(chosen), indices if counted else chosen[:1], counted))
            yield epoch, upcoming[-1].indices

    def _set_rate(self) -> float:
        """Write the learning rate of the coming step to the optimizer; before the forward, which may ask for it."""
        factor = self.settings.schedule.factor(
            self.done, steps_per_epoch=self.steps_per_epoch, epochs=self.settings.epochs
        )
        rate = self.settings.optimizer.lr * factor
        for group in self.step.optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        return rate

    def _look_ahead(self, portion: Portion) -> None:
        """Before the first step: how much fits, and whether the loss is a sum. Leaves no trace."""
        if self.execution.micro_batch is None:
            self._fit(portion)
        dependence = None if self.randomness else describe_dependence(self.step, portion)
        if dependence is not None:
            self.listener.on_message(dependence)

    def _fit(self, portion: Portion) -> None:
        """Begin with the largest micro-batch that memory seems to hold; a wrong guess costs one repeated step."""
        cut = self.step.micro_batch
        # Shares may differ by a unit: what the ranks do next they must all do.
        if self.device.type != "cuda" or min(cut.size, self.parallel.smallest(portion.counted)) <= 4 * cut.unit:
            return
        fits = self.parallel.smallest(self.step.fit(portion, (cut.unit, 4 * cut.unit)))
        cut.size = max(cut.unit, min(cut.size, fits) // cut.unit * cut.unit)

    def _wants_checkpoint(self) -> bool:
        """Whether the state after the coming step should be kept."""
        every = self.execution.save_steps
        return self.journal.is_late if every is None else (self.done + 1) % every == 0

    def _is_due(self, epoch: int) -> bool:
        due = (epoch + 1) % self.execution.evaluate_epochs == 0 or self.done == self.last
        return due and len(self.task.test) > 0

    def _report_epoch(self, epoch: int, *, evaluated: bool) -> None:
        self._log(self.meter.flush())
        row: dict[str, Any] = {"epoch": epoch, "step": self.done, "train": self.meter.epoch_figures()}
        if evaluated:
            started = time.perf_counter()
            self.figures = row["test"] = evaluate(self.step, seed=self.settings.seed)
            row["evaluation_seconds"] = time.perf_counter() - started
        self.journal.write_epoch(row)
        self.listener.on_epoch(row)
        self.meter.restart()

    def _log(self, rows: list[dict[str, Any]]) -> None:
        self.journal.write_steps(rows)
        for row in rows:
            self.listener.on_step(row)

    # --- before and after ----------------------------------------------------------------------------------------

    def _begin(self, *, resume: bool, facts: dict[str, Any]) -> None:
        state = self.journal.load_newest(samples=len(self.task.train)) if resume else None
        if state is not None:
            self.done, self.figures = state["step"], state["figures"]
            self.meter.load_state_dict(state["epoch_sums"])
            self._limit_size(state["micro_batch"])
        elif resume:  # a mistyped folder must not pass for one
            self.listener.on_message(f"no checkpoint in {self.journal.folder}: the run begins with its first step")
        if resume:
            self._limit_size(self.journal.remembered_size())
        known = {
            "settings": describe(self.settings),
            "execution": describe(self.execution) | {"ranks": self.parallel.world, "device": str(self.device)},
            "data": {"train": len(self.task.train), "test": len(self.task.test)},
            "chance": self.randomness or "keyed by sample",
        }
        self.untouched = resume and self.done >= self.last and self.journal.has_ended()
        if not self.untouched:
            self.journal.begin({**known, **facts}, resume=resume, done=self.done)

    def _limit_size(self, size: int | None) -> None:
        """Begin with the size that memory was found to hold, where the user did not ask for one."""
        cut = self.step.micro_batch
        if size is not None and self.execution.micro_batch is None:
            cut.size = max(cut.unit, min(size, cut.size))

    def _save(self) -> None:
        self._log(self.meter.flush())
        self.journal.save(self.done, {"epoch_sums": self.meter.state_dict(), "figures": self.figures})
        self.meter.restart()

    def _end(self) -> Outcome:
        state = whole_state(self.step) | rest_of_state(self.step, done=self.done, seed=self.settings.seed)
        outcome = Outcome(
            steps=self.done,
            figures=self.figures,
            digest=self.parallel.broadcast(digest(state)),
            finished=self.done == self.total,
            checkpoint=self.journal.saved,
            signal=self.signal,
            first=self.first,
        )
        if not self.untouched:
            self.journal.end(outcome)
        return outcome
