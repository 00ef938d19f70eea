"""A training run from its first step to its last.

A run is a sequence of optimizer steps, numbered from 0. The samples of step k, and what augmentation does to each of
them, are functions of the seed, the epoch and the sample's index. So the number of the next step is the run's position.
"""

import contextlib
import math
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from micronorm.commit.snapshot import RandomState
from micronorm.engine.checkpoint import digest, run_state
from micronorm.engine.dropout import describe_randomness, key_dropout
from micronorm.engine.ema import MovingAverage
from micronorm.engine.environment import Signals
from micronorm.engine.evaluate import EvaluationStopped, check_loss_is_a_sum, choose_micro_batch, evaluate
from micronorm.engine.graph import GraphedStep
from micronorm.engine.journal import Journal
from micronorm.engine.optimization import set_learning_rate
from micronorm.engine.parallel import Flags, open_ranks
from micronorm.engine.sampling import Sampler, StepInputs
from micronorm.engine.settings import Execution, Outcome, Settings, describe, describe_layers
from micronorm.engine.step import ShardOutOfMemory, Step, StepResult
from micronorm.engine.task import Listener, Task, check_task
from micronorm.nn.per_step.recompute import Recomputation, recompute
from micronorm.records import CollapseWatch

AT_MOST = 50  # steps between two reads of their results, each of which waits for the GPU
SECONDS = 1.0  # after which a read is due


class Diverged(ArithmeticError):
    """The loss or a weight is not finite. The last checkpoint was written before that."""


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
    observer: Callable[..., Any] | None = None,
) -> Outcome:
    """Train a model, and record the run in a directory.

    Args:
        model: is trained in place.
        task: data, loss and score.
        settings: what to compute.
        execution: how to compute it.
        out: the run directory; None writes nothing.
        resume: continue from the newest checkpoint in `out`.
        facts: more entries for `run.json`, such as the recipe's name and the command.
        listener: receives steps, epochs and messages.
        observer: `mn.observe`, or a function with its arguments and result. It measures the layers as often as
            `execution.observe` says, on rank 0 and its samples. The engine does not import it, as any network trains.

    Returns:
        The steps done, the figures and a digest. After SIGTERM or Ctrl-C the step in progress is finished and saved,
        and `finished` is False.

    Raises:
        Diverged: the loss or a weight is not finite.
    """
    folder = None if out is None else Path(out)
    execution = execution or Execution()
    if execution.observe is not None and (observer is None or folder is None):
        lacking = "an observer, observer=mn.observe," if observer is None else "a run directory to write to"
        raise ValueError(f"observe={execution.observe} needs {lacking} as well")
    run = _TrainingRun(model, task, settings, execution, folder, listener or Listener(), observer)
    try:
        with RandomState.preserved([run.device]):
            # For code that draws from the global generators: no two ranks may draw the same numbers.
            RandomState.seed(settings.seed + 2**20 * run.parallel.rank, run.device)
            if run.execution.recompute:
                run.recomputation = recompute(run.step.model)
            return run.run(resume=resume, facts=facts or {})
    finally:
        if run.recomputation is not None:
            run.recomputation.remove()
        run.journal.close()
        run.step.transaction.detach()
        run.parallel.close()


class _TrainingRun:
    """The state of one call of `train`."""

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        settings: Settings,
        execution: Execution,
        out: Path | None,
        listener: Listener,
        observer: Callable[..., Any] | None = None,
    ) -> None:
        check_task(task)
        self.task, self.settings, self.execution, self.observer = task, settings, execution, observer
        self.parallel = open_ranks(execution.device, execution.parallel)
        self.is_first = self.parallel.rank == 0
        self.listener = listener if self.is_first else Listener()
        self.device = self.parallel.device
        self.sampler = Sampler(task.train, settings, self.parallel)
        self.total = settings.steps or self.sampler.steps_per_epoch * (settings.epochs or 0)
        self.last = min(self.total, execution.steps or self.total)
        self.deadline = math.inf if execution.minutes is None else time.monotonic() + 60 * execution.minutes
        self.done = 0
        self.figures: dict[str, float] = {}
        self.signal: int | None = None
        self.signals = Signals(verbose=self.is_first)
        self.evaluation_due = False
        """Whether the last step ended an epoch whose evaluation was stopped."""
        self.recomputation: Recomputation | None = None
        self.already_complete = False
        self.randomness = describe_randomness(model, key_dropout(model))
        self.layers = describe_layers(model)  # before shards change the names of classes
        self.step = Step(model, task, settings, execution, self.parallel)
        self.execute_step = GraphedStep(self.step, settings.step_batch) if execution.cuda_graph else self.step
        self.average = None if settings.ema is None else MovingAverage(self.step, settings.ema)
        self.meter = Meter(task, self.device)
        self.collapse_watch = CollapseWatch()
        self.journal = Journal(out, self.step, settings)

    def run(self, *, resume: bool, facts: dict[str, Any]) -> Outcome:
        """Take all steps and return the outcome."""
        self._begin(resume=resume, facts=facts)
        description = facts.get("recipe") or type(self.step.model).__name__
        if self.parallel.world > 1:
            description += f", {self.parallel.world} ranks"
        self.listener.on_start(self.last, min(self.done, self.last), description)
        if self.done >= self.last and not self.evaluation_due:
            self.listener.on_message(f"nothing is left to do: {self.done} of {self.total} steps are done")
        if self.randomness:
            self.listener.on_message(self.randomness)
        with self.signals:
            try:
                if self.done < self.last or self.evaluation_due:
                    with self._observed():
                        self._all_steps()
            except EvaluationStopped:
                self.evaluation_due = True
                self._stop(self.signals.received or signal.SIGTERM)
            except ShardOutOfMemory as error:
                self.journal.remember_size(error.micro_batch)
                raise
            finally:
                self.listener.on_end()
        return self._end()

    def _begin(self, *, resume: bool, facts: dict[str, Any]) -> None:
        """Restore the newest checkpoint if the run is resumed, and open the run directory."""
        known = {
            "settings": describe(self.settings),
            "execution": describe(self.execution) | {"ranks": self.parallel.world, "device": str(self.device)},
            "data": {"train": len(self.task.train), "test": len(self.task.test)},
            "layers": self.layers,
            "chance": self.randomness or "keyed by sample",
            **facts,
        }
        state = self.journal.load_newest(known) if resume else None
        if state is not None:
            self.done, self.figures = state["step"], state["figures"]
            self.evaluation_due = state.get("evaluation_due", False)
            self.meter.epoch_sums = state["epoch_sums"]
            if self.average is not None:
                self.average.load_state_dict(state["ema"])
        elif resume:  # the folder may be mistyped
            self.listener.on_message(f"no checkpoint in {self.journal.folder}: the run starts with its first step")
        if resume and self.execution.micro_batch is None:  # start with a size that fitted into memory before
            micro_batch = self.step.micro_batch
            saved = None if state is None else state["micro_batch"]
            sizes = [size for size in (saved, self.journal.remembered_size()) if size is not None]
            micro_batch.size = max(micro_batch.unit, min([micro_batch.size, *sizes]))
        nothing_left = self.done >= self.last and not self.evaluation_due
        self.already_complete = resume and nothing_left and self.journal.has_ended()
        if not self.already_complete:
            self.journal.begin(known, resume=resume, done=self.done)
            for row in self.journal.steps():
                if row.get("loss") is not None and row.get("samples") is not None:
                    self.collapse_watch.add(row["loss"], samples=row["samples"])

    @contextlib.contextmanager
    def _observed(self) -> Iterator[None]:
        every = self.execution.observe
        if every is None or self.observer is None or not self.is_first:
            yield
            return
        writer, sink = self.journal.events, self.journal.write_diagnostics
        observation = self.observer(self.step.model, every=every, writer=writer, sink=sink, start=self.done)
        with observation as self.step.observation:
            yield
        self.step.observation = None

    def _all_steps(self) -> None:
        if self.evaluation_due:
            self._end_epoch((self.done - 1) // self.sampler.steps_per_epoch)
            self.evaluation_due = False
            self._save()
        self.meter.restart()
        first_step = self.done + 1
        for epoch, inputs in self.sampler.load(self.done, self.last):
            if self.done == 0:
                self._try_out(inputs)
            out_of_time = time.monotonic() > self.deadline
            result = self._take_step(inputs, epoch, stop=out_of_time or self.signals.received is not None)
            if self.recomputation is not None and self.is_first and self.done == first_step:
                self.listener.on_message(f"{self.recomputation.report()}, but recomputed in the backward")
            epoch_ended = self.done % self.sampler.steps_per_epoch == 0
            evaluated = self._end_epoch(epoch) if epoch_ended or self.done == self.last else False
            if result.requests.stop:
                self._stop(None if out_of_time else self.signals.received or signal.SIGTERM)
                return
            # Not after every epoch: one of a small data set may take less time than its checkpoint.
            if evaluated or result.requests.save:
                self._save()

    def _take_step(self, inputs: StepInputs, epoch: int, *, stop: bool) -> StepResult:
        """Take one step and log it. `stop` requests that the run ends after it."""
        per_epoch, rate = self.sampler.steps_per_epoch, self.settings.optimizer.lr
        rate *= self.settings.schedule.factor(self.done, steps_per_epoch=per_epoch, total_steps=self.total)
        set_learning_rate(self.step.optimizer, rate)  # before the forward, which may read it
        if self.step.observation is not None:
            self.step.observation.epoch = epoch
        every = self.execution.save_steps
        save = self.journal.is_late if every is None else (self.done + 1) % every == 0
        result = self.execute_step(inputs, Flags(stop=stop, save=save))
        self.done += 1
        if self.average is not None:
            self.average.update()
        row = {"step": self.done, "epoch": epoch, "lr": rate, "samples": inputs.step_samples}
        self._log(self.meter.add(row, result))
        for message in result.messages:
            self.listener.on_message(message)
        return result

    def _stop(self, received: int | None) -> None:
        """Save, and remember the signal that ends the run; None if its time is over."""
        self._save()
        self.signal = self.parallel.broadcast(received)

    def _try_out(self, inputs: StepInputs) -> None:
        """Find the micro-batch that fits, and check that the loss is a sum, before the first step."""
        if self.execution.micro_batch is None:
            choose_micro_batch(self.step, inputs)
        warning = None if self.randomness else check_loss_is_a_sum(self.step, inputs)
        if warning is not None:
            self.listener.on_message(warning)

    def _end_epoch(self, epoch: int) -> bool:
        """Write the row of the epoch. If an evaluation is due, evaluate and return True."""
        self._log(self.meter.flush())
        row: dict[str, Any] = {"epoch": epoch, "step": self.done, "train": self.meter.epoch_figures()}
        is_due = (epoch + 1) % self.execution.evaluate_epochs == 0 or self.done == self.last
        if is_due and len(self.task.test) > 0:
            started = time.perf_counter()
            self.figures = row["test"] = self._evaluate()
            row["evaluation_seconds"] = time.perf_counter() - started
        self.journal.write_epoch(row)
        self.listener.on_epoch(row)
        self.meter.restart()
        if self.done % self.sampler.steps_per_epoch == 0:
            self.meter.epoch_sums = {}
        return is_due

    def _evaluate(self) -> dict[str, float]:
        def watch(done: int, samples: int) -> bool:
            self.listener.on_test(done, samples)
            return self.signals.received is not None

        def measure() -> dict[str, float]:
            return evaluate(self.step, seed=self.settings.seed, watch=watch)

        figures = measure()
        if self.average is not None:
            with self.average.applied():
                averaged = measure()
            figures |= {f"ema_{name}": value for name, value in averaged.items()}
        return figures

    def _log(self, rows: list[dict[str, Any]]) -> None:
        self.journal.write_steps(rows)
        for row in rows:
            self.listener.on_step(row)
            loss = row.get("loss", 0.0)
            if not math.isfinite(loss):
                raise Diverged(f"the loss is {loss} at step {row['step']}{self._last_checkpoint()}")
            collapse = self.collapse_watch.add(loss, samples=row["samples"])
            if collapse is not None:
                self.listener.on_message(collapse)
                self.journal.add_facts(collapse=collapse)

    def _save(self) -> None:
        """Write a checkpoint, unless a weight is not finite. Collective."""
        self._log(self.meter.flush())
        weights = self.parallel.local([parameter.detach() for parameter in self.step.parameters])
        if not all(self.parallel.gather(bool(torch.stack([weight.isfinite().all() for weight in weights]).all()))):
            raise Diverged(f"a weight is not finite after step {self.done}{self._last_checkpoint()}")
        rest: dict[str, Any] = {"epoch_sums": self.meter.epoch_sums, "figures": self.figures}
        rest["evaluation_due"] = self.evaluation_due
        if self.average is not None:
            rest["ema"] = self.average.state_dict()
        self.journal.save(self.done, rest)
        self.meter.restart()

    def _last_checkpoint(self) -> str:
        kept = f"; {self.journal.saved} was written before that" if self.journal.saved is not None else ""
        return f"{kept}; lower the learning rate, or lengthen the warm-up"

    def _end(self) -> Outcome:
        state = run_state(self.step, done=self.done, seed=self.settings.seed)
        average = None if self.average is None else self.average.state_dict()
        outcome = Outcome(
            steps=self.done,
            figures=self.figures,
            digest=self.parallel.broadcast(digest(state if average is None else state | {"ema": average})),
            finished=self.done == self.total and not self.evaluation_due,
            checkpoint=self.journal.saved,
            signal=self.signal,
            first=self.is_first,
        )
        if not self.already_complete:
            self.journal.end(outcome, average=average)
        return outcome


class Meter:
    """Turns the results of steps into rows of the record. `epoch_sums` are their sums over the epoch so far."""

    def __init__(self, task: Task, device: torch.device) -> None:
        self.task, self.device = task, device
        self._pending: list[tuple[dict[str, Any], StepResult]] = []
        self.epoch_sums: dict[str, float] = {}
        self._flushed = time.perf_counter()

    def add(self, row: dict[str, Any], result: StepResult) -> list[dict[str, Any]]:
        """Add the result of one step. Return the rows of all pending steps if a read is due, else an empty list."""
        self._pending.append((row, result))
        late = time.perf_counter() - self._flushed > SECONDS
        cheap = self.device.type == "cpu"
        return self.flush() if cheap or late or len(self._pending) >= AT_MOST else []

    def flush(self) -> list[dict[str, Any]]:
        """Return the rows of all pending steps."""
        if not self._pending:
            return []
        sums = torch.stack([result.sums for _, result in self._pending]).tolist()
        now = time.perf_counter()
        seconds = (now - self._flushed) / len(self._pending)
        rows = []
        for (row, result), values in zip(self._pending, sums, strict=True):
            named = dict(zip(result.names, values, strict=True))
            for name, value in named.items():
                self.epoch_sums[name] = self.epoch_sums.get(name, 0.0) + value
            row |= {"seconds": seconds, "micro_batch": result.micro_batch, "memory": self._memory()}
            rows.append(row | self.task.figures(named))
        self._pending.clear()
        self._flushed = now
        return rows

    def restart(self) -> None:
        """Restart the clock, after time that was not spent on steps."""
        self._flushed = time.perf_counter()

    def epoch_figures(self) -> dict[str, float]:
        """Return the training figures over all samples of the epoch so far."""
        return self.task.figures(self.epoch_sums) if self.epoch_sums else {}

    def _memory(self) -> int | None:
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None
