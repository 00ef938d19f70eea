"""The training engine: optimizer steps as transactions, in micro-batches, on any number of ranks, resumable.

Recipes, data sets and tasks live elsewhere: the engine uses a task only through the protocol in `engine/task.py`.

Reading order:

1. `loop.py`: the run. `settings.py`, `optimization.py`, `schedules.py`: what it computes. `task.py`: what a task does.
   `sampling.py`: the samples of each step.
2. `step.py`: one step. `microbatch.py`: its pieces. `parallel.py`: ranks. `graph.py`: the captured step.
3. `trial.py`: before the first step. `evaluate.py`, `ema.py`, `meter.py`, `listener.py`: figures.
4. `journal.py`: the run directory. `state.py`, `checkpoint.py`, `weights.py`: its files.
5. `dropout.py`: randomness keyed by sample. `environment.py`, `signals.py`: the machine.
"""

from micronorm.engine.listener import Listener
from micronorm.engine.loop import Diverged, train
from micronorm.engine.optimization import SGD, AdamW, ParameterGroup
from micronorm.engine.schedules import Constant, Cosine, Milestones, Poly, StepMilestones, Warmup
from micronorm.engine.settings import Execution, Outcome, Settings
from micronorm.engine.task import Loss, Samples, Score, Task

__all__ = [
    "SGD",
    "AdamW",
    "Constant",
    "Cosine",
    "Diverged",
    "Execution",
    "Listener",
    "Loss",
    "Milestones",
    "Outcome",
    "ParameterGroup",
    "Poly",
    "Samples",
    "Score",
    "Settings",
    "StepMilestones",
    "Task",
    "Warmup",
    "train",
]
