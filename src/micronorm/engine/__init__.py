"""The training engine: optimizer steps as transactions, in micro-batches, on any number of ranks, resumable.

Recipes, data sets and tasks are in other rooms: the engine uses tasks only through the protocol in `engine/task.py`.

Reading order:

1. `loop.py`: the run. `settings.py`, `optimization.py`: what it computes. `task.py`: what a task does.
2. `sampling.py`: the samples of each step, and their pieces. `step.py`: one step. `parallel.py`: ranks. `graph.py`: the
   captured step.
3. `evaluate.py`: passes that leave no trace, before the first step and after each epoch. `ema.py`: averaged weights.
4. `journal.py`: the run directory. `checkpoint.py`: its checkpoints and weights.
5. `dropout.py`: randomness keyed by sample. `environment.py`: the machine, and its signals.
"""

from micronorm.engine.loop import Diverged, train
from micronorm.engine.optimization import (
    SGD,
    AdamW,
    Constant,
    Cosine,
    Milestones,
    ParameterGroup,
    Poly,
    StepMilestones,
    Warmup,
)
from micronorm.engine.settings import Execution, Outcome, Settings
from micronorm.engine.task import Listener, Loss, Samples, Score, Task

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
