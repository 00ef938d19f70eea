"""What runs in the processes of `test_parallel`: a rank whose memory runs out, whose code fails, or who has no samples.

Every function returns plain values and tensors: the launcher reads them with `weights_only=True`.
"""

import contextlib
import copy
import faulthandler
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import micronorm as mn
from micronorm.engine import evaluate as evaluation
from micronorm.engine.checkpoint import digest, load_run_state, run_state
from micronorm.engine.evaluate import evaluate
from micronorm.engine.loop import _TrainingRun, train
from micronorm.engine.parallel import Flags, OneRank, ReplicatedRanks, open_ranks
from micronorm.engine.settings import Execution
from micronorm.engine.step import Step
from micronorm.engine.task import Listener
from micronorm.nn.batch_renorm import RenormSchedule
from tests.engine.tasks import (
    CPU,
    Dropping,
    Failures,
    Sum,
    Toy,
    make_step,
    operations,
    random_places,
    settings,
    step_inputs,
)
from tests.networks import SmallResNet

LIMIT = 100  # seconds after which a rank that waits for another gives up, and fails the test
SAMPLES = 12


@contextlib.contextmanager
def time_limit() -> Iterator[None]:
    """End this process where it hangs; the group's own timeout ends collectives only."""
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def fresh_step(size: int, parallel: OneRank) -> Step:
    """The network of the laws with dropout and a layer nobody uses, the same on every rank."""
    torch.manual_seed(0)
    model = Dropping(mn.BCN(groups=2))
    model.spare = nn.Linear(2, 2)
    return make_step(model, Toy(), size, parallel=parallel)


def shared_out(step: Step, samples: int = SAMPLES) -> Any:
    indices = torch.arange(samples)[step.parallel.share(samples)]
    return step_inputs(step.task, indices, samples=samples)  # type: ignore[arg-type]


def everything(rank: int, world: int, failures: int, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """All of the below in one start of the processes, which takes longer than any of it."""
    with time_limit():
        found = {"memory": memory(rank, world, failures), "errors": errors(rank, world)}
        found["figures"], found["batches"] = batch_figures(), whole_batches()
        found["resumed"], found["detections"], found["averaged"] = resumed(), detections(), averaged()
        return {**found, "law": [law(**run) for run in runs], "fitting": fitting()}


def memory(rank: int, world: int, failures: int) -> dict[str, Any]:
    """One rank in turn fails at a random operation, then all end like a run that had halves from the beginning."""
    clean = fresh_step(2, ReplicatedRanks(CPU))
    clean(shared_out(clean))
    phases = operations(fresh_step(4, ReplicatedRanks(CPU)), shared_out(clean))
    gc.freeze()  # every rollback collects garbage, and most of what it looks at came with the imports
    found: dict[str, Any] = {
        "clean": digest(clean.model.state_dict()),
        "state": clean.model.state_dict(),
        "failed": [],
        "phases": [],
    }
    for k, at in enumerate(random_places(phases, failures, seed=world)):
        step = fresh_step(4, ReplicatedRanks(CPU))
        with Failures(step, *([at] if k % world == rank else [])):
            result = step(shared_out(step), Flags(save=rank == world - 1))
        found["failed"].append([digest(step.model.state_dict()), result.micro_batch, len(result.messages)])
        found["phases"].append(phases[at])
        assert result.requests == Flags(save=True)
    return found


def errors(rank: int, world: int) -> dict[str, str]:
    """What every rank raises when one does."""
    said: dict[str, str] = {}

    def note(name: str, step: Step, *at: int, error: BaseException | None = None) -> None:
        before = digest(step.model.state_dict())
        try:
            with Failures(step, *at, error=error):
                step(shared_out(step))
            said[name] = "nothing"
        except Exception as caught:
            said[name] = f"{type(caught).__name__}: {caught}"
        assert digest(step.model.state_dict()) == before
        assert all(parameter.grad is None for parameter in step.model.parameters())

    last = rank == world - 1
    parallel = ReplicatedRanks(CPU)
    note("forward", fresh_step(4, parallel), *([30] if last else []), error=KeyError("a column"))
    note("backward", fresh_step(4, parallel), *([900] if last else []), error=KeyError("a column"))
    # memory on one rank, something else on another
    kind = None if rank == 0 else KeyError("a column")
    note("both", fresh_step(4, parallel), 200, error=kind)
    note("never fits", fresh_step(4, parallel), *([100] * 3 if rank == 0 else []))
    step = fresh_step(4, parallel)
    try:
        if last:
            step.task.score = None  # type: ignore[method-assign]
        evaluate(step, seed=0)
    except Exception as caught:
        said["evaluation"] = type(caught).__name__
    said["goes on"] = str(fresh_step(4, parallel)(shared_out(step)).micro_batch)
    return said


def batch_figures() -> dict[str, Any]:
    """Figures of a network whose running statistics differ from rank to rank."""
    torch.manual_seed(0)
    step = make_step(SmallResNet(mn.BN()), Toy(), 4, parallel=ReplicatedRanks(CPU))
    for _ in range(3):
        step(shared_out(step))
    before = digest(step.model.state_dict())
    figures = evaluate(step, seed=0)
    return {"figures": figures, "state": step.model.state_dict(), "kept": digest(step.model.state_dict()) == before}


def whole_batches() -> dict[str, Any]:
    """A run in which every step is one batch of BatchNorm, so that one rank alone computes it."""
    torch.manual_seed(0)
    model = SmallResNet(mn.BN(), channels=4)
    outcome = train(model, Toy(22, 5), settings(step_batch=8, unit=8, largest=8), Execution(device=CPU))
    return {"figures": outcome.figures, "state": model.state_dict()}


class Overflowing(Toy):
    """Makes float16 skip its first step, whose windows then wait for the next."""

    overflow = True

    def loss(self, model: nn.Module, batch: tuple[Any, ...]) -> Sum:
        loss = super().loss(model, batch)
        return Sum(loss.sum * float("inf"), loss.count, loss.counts) if self.overflow else loss


class Passing(nn.Module):
    """Counts its forwards in a buffer that no state dict has, and computes with it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x * self.count


def resumed() -> dict[str, list[str]]:
    """Digests after a step, of a run that went on and of one that went on from what rank 0 kept of it."""
    renorm = mn.BRN(momentum=0.3, schedule=RenormSchedule(warmup=0, r_until=1, d_until=1))
    cases = {
        "a window of a skipped step": (mn.BCN(groups=2), torch.float16),
        "running statistics that nothing merges": (renorm, torch.float64),
    }
    return {name: _resumed(norm, dtype) for name, (norm, dtype) in cases.items()}


def _resumed(norm: Any, dtype: torch.dtype) -> list[str]:
    task = Overflowing()

    def fresh() -> Step:
        torch.manual_seed(0)
        model = nn.Sequential(Passing(), SmallResNet(norm, channels=4))
        return make_step(model, task, 2, parallel=ReplicatedRanks(CPU), dtype=dtype)

    ran = fresh()
    task.overflow = dtype == torch.float16
    ran(shared_out(ran))
    task.overflow = False
    kept = ran.parallel.broadcast(copy.deepcopy(run_state(ran, done=1, seed=0)))
    again = fresh()
    load_run_state(again, kept)
    digests = []
    for step in (ran, again):
        step(shared_out(step, 7))
        digests.append(digest(step.model.state_dict()))
    return digests


class Counting(Toy):
    """Reports how many samples its figures are of."""

    def figures(self, sums: Any) -> dict[str, float]:
        return {**super().figures(sums), "count": sums["count"]}


class Detections:
    """A score that is a list of objects of different sizes."""

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []

    def merge(self, other: "Detections") -> None:
        self.found += other.found

    def figures(self) -> dict[str, float]:
        boxes = torch.cat([found["boxes"] for found in sorted(self.found, key=lambda found: found["image"])])
        return {"images": len(self.found), "boxes": len(boxes), "first": boxes[0, 0].item()}

    def state_dict(self) -> dict[str, Any]:
        return {"found": self.found}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.found = state["found"]


class Detecting(Toy):
    """Finds one box more in an image than its label says."""

    new_score = Detections  # type: ignore[assignment]

    def score(self, model: nn.Module, batch: tuple[Any, ...]) -> Any:
        score = Detections()
        for image, label in zip(*batch, strict=True):
            boxes = image.flatten()[: 4 * int(label) + 4].reshape(-1, 4)
            score.found.append({"image": image.sum().item(), "boxes": boxes, "names": ["a"] * len(boxes)})
        return score


def detections() -> dict[str, float]:
    """Figures of a score that is a list of objects, over all ranks."""
    step = make_step(SmallResNet(mn.GN(groups=2)), Detecting(test=5), 4, parallel=open_ranks(CPU, "ddp"))
    return evaluate(step, seed=0)


class Rows(Listener):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.epochs: list[dict[str, Any]] = []

    def on_step(self, row: dict[str, Any]) -> None:
        self.steps.append(row)

    def on_epoch(self, row: dict[str, Any]) -> None:
        self.epochs.append(row)


def law_network() -> nn.Module:
    """Blocks in a sequence, which FSDP shards one by one; a layer nobody uses."""
    torch.manual_seed(0)
    model = Dropping(mn.BCN(groups=2))
    model.net.block1 = nn.Sequential(model.net.block1)
    model.spare = nn.Linear(2, 2)
    return model


def law(*, samples: int, test: int, execution: dict[str, Any]) -> dict[str, Any]:
    """A whole run on these ranks."""
    task, rows, model = Counting(samples, test), Rows(), law_network()
    chosen = settings(step_batch=7, epochs=2)
    outcome = train(model, task, chosen, Execution(device=CPU, **execution), listener=rows)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return {
        "state": state,
        "figures": outcome.figures,
        "digest": outcome.digest,
        "counts": [row["count"] for row in rows.steps],
        "epochs": [row["train"]["count"] for row in rows.epochs],
        "losses": [row["loss"] for row in rows.steps],
    }


def averaged() -> list[dict[str, float]]:
    """Figures of runs with a moving average, replicated and sharded."""
    found = []
    for parallel in ("ddp", "fsdp"):
        chosen = settings(step_batch=7, ema=0.5)
        execution = Execution(device=CPU, parallel=parallel)  # type: ignore[arg-type]
        found.append(train(law_network(), Toy(14, 5), chosen, execution).figures)
    return found


def fitting() -> int:
    """Shares of four and five samples, on both sides of the limit up to which nothing is tried out."""
    run = _TrainingRun(SmallResNet(), Toy(), settings(step_batch=9), Execution(device=CPU), None, Listener())
    run.step.device = torch.device("cuda")  # the only place where it is asked for
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation, "largest_fitting", lambda *args: 1)
        evaluation.choose_micro_batch(run.step, shared_out(run.step, samples=9))
    return run.step.micro_batch.size
