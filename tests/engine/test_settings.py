"""What is computed and how it is computed are two values; both refuse what cannot be meant."""

import json

import pytest
import torch

from micronorm.engine.optimization import SGD, Cosine, ParameterGroup, Warmup
from micronorm.engine.settings import Execution, Settings, describe


def make(**changes):
    return Settings(**{"epochs": 2, "step_batch": 8, "optimizer": SGD(0.1), "schedule": Cosine(1), **changes})


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"steps": 5}, "give either epochs or steps, got epochs=2 and steps=5"),
        ({"epochs": None}, "give either epochs or steps"),
        ({"epochs": None, "steps": 0}, "steps must be at least 1 and below .*, got 0"),
        ({"ema": 1.0}, "ema must lie between 0 and 1"),
        ({"epochs": 0}, "epochs must be at least 1 and below .*, got 0"),
        ({"step_batch": 0}, "step_batch must be at least 1 and below .*, got 0"),
        ({"step_batch": 10**400}, r"step_batch must be at least 1 and below 2\*\*63, got 1000"),
        ({"unit": 0}, "unit must be at least 1 and below .*, got 0"),
        ({"unit": 4, "largest": 2}, "largest must be at least unit=4, got 2"),
        ({"dtype": torch.int32}, r"dtype must be one of float32, .*, got torch\.int32"),
    ],
)
def test_settings_refuse_what_cannot_be_computed(changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)


@pytest.mark.parametrize("name", ["micro_batch", "steps", "save_steps", "evaluate_epochs", "observe"])
def test_execution_refuses_counts_below_one(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1 and below .*, got 0"):
        Execution(**{name: 0})


def test_execution_refuses_an_unknown_way_of_sharing_the_model_on_one_rank_too():
    with pytest.raises(ValueError, match='parallel must be "ddp" or "fsdp", got \'dp\''):
        Execution(parallel="dp")  # type: ignore[arg-type]


def test_execution_refuses_to_recompute_what_compiled_code_decides_on():
    with pytest.raises(ValueError, match="no effect in compiled code"):
        Execution(compile=True, recompute=True)


def test_a_record_of_settings_is_plain_and_tells_different_ones_apart():
    described = describe(make(dtype=torch.bfloat16))
    assert json.loads(json.dumps(described)) == described
    assert described["dtype"] == "bfloat16"
    assert described["optimizer"]["kind"] == "SGD"
    assert described["schedule"] == {"kind": "Cosine", "warmup_epochs": 1}
    assert not described.keys() & {"steps", "groups", "ema"}  # records from before these existed have none
    more = describe(make(epochs=None, steps=9, ema=0.9, groups=(ParameterGroup(max_ndim=1, weight_decay=0.0),)))
    assert (more["epochs"], more["steps"], more["ema"], more["groups"][0]["weight_decay"]) == (None, 9, 0.9, 0.0)
    assert describe(make(schedule=Warmup(Cosine(), steps=5)))["schedule"]["schedule"]["kind"] == "Cosine"
    changed = (make(), make(seed=1), make(optimizer=SGD(0.2)), make(schedule=Cosine(2)), make(unit=2), make(largest=4))
    assert len({json.dumps(describe(settings)) for settings in changed}) == len(changed)
    assert describe(Execution(device=torch.device("cpu")))["device"] == "cpu"
