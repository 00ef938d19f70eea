"""The training engine: optimizer steps as transactions, cut as memory allows, resumable at any moment."""

from micronorm.engine.listener import Listener
from micronorm.engine.loop import train
from micronorm.engine.optimization import SGD, AdamW, Constant, Cosine, Milestones, Poly
from micronorm.engine.settings import Execution, Outcome, Settings
from micronorm.engine.task import Loss, Samples, Task

__all__ = [
    "SGD",
    "AdamW",
    "Constant",
    "Cosine",
    "Execution",
    "Listener",
    "Loss",
    "Milestones",
    "Outcome",
    "Poly",
    "Samples",
    "Settings",
    "Task",
    "train",
]
