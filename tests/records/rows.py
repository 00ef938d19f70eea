"""The facts and the rows of a small run."""

FACTS = {
    "recipe": "digits",
    "settings": {"epochs": 2, "step_batch": 32, "seed": 0, "dtype": "float32"},
    "execution": {"micro_batch": None},
    "data": {"name": "digits", "train": 1297, "test": 500},
    "environment": {"python": "3.11"},
    "revision": None,
    "command": "micronorm train digits",
    "date": "2025-01-01T00:00:00+00:00",
}


def step_row(step: int) -> dict:
    return {"step": step, "epoch": 0, "loss": 1 / step, "lr": 0.1, "memory": None}
