"""A model takes from a file what fits by name and shape, and says what does not."""

import copy
import pickle
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import micronorm as mn
from micronorm.convert.checkpoint import pack_state
from micronorm.engine.weights import load_weights, read_weights


def network(classes=3):
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(2, classes))


def test_what_fits_is_loaded_and_the_rest_is_told():
    theirs = {**network(classes=5).state_dict(), "extra": torch.ones(1)}
    del theirs["1.bias"]
    model = network()
    initial = model[3].weight.clone()
    found = load_weights(model, theirs)
    assert (found.missing, found.unused, found.other_shape) == (("1.bias",), ("extra",), ("3.bias", "3.weight"))
    assert torch.equal(model[0].weight, theirs["0.weight"])
    assert torch.equal(model[3].weight, initial)
    assert str(found) == (
        "6 tensors loaded; 2 dropped for their shape: 3.bias, 3.weight; 1 dropped, the model lacks them: extra; "
        "1 missing, they keep their initial values: 1.bias"
    )


def test_weights_of_a_backbone_are_loaded_into_the_part_that_has_their_names():
    backbone = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    model: Any = nn.ModuleDict({"backbone": nn.ModuleDict({"body": network()}), "head": nn.Conv2d(2, 2, 1)})
    found = load_weights(model, {**backbone.state_dict(), "fc.weight": torch.ones(1)})
    assert found.unused == ("backbone.body.fc.weight",)
    assert set(found.loaded) == {f"backbone.body.{name}" for name in backbone.state_dict()}
    assert torch.equal(model["backbone"]["body"][0].weight, backbone[0].weight)


def test_weights_that_fit_two_parts_equally_are_loaded_into_neither():
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    with pytest.raises(ValueError, match="none of the 2 tensors fits"):
        load_weights(model, nn.Linear(2, 2).state_dict())


@pytest.mark.parametrize("wrapped", ["plain", "safetensors", "model", "ddp"])
def test_files_of_the_usual_forms_are_read(tmp_path, wrapped):
    state = network().state_dict()
    path = tmp_path / ("a.safetensors" if wrapped == "safetensors" else "a.pt")
    if wrapped == "safetensors":
        safetensors.torch.save_file(state, path)
    else:
        forms = {"plain": state, "model": {"model": {"state_dict": state}, "epoch": 3}}
        forms["ddp"] = {"state_dict": {f"module.{name}": value for name, value in state.items()}}
        torch.save(forms[wrapped], path)
    model = network()
    assert set(load_weights(model, read_weights(path)).loaded) == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_what_holds_no_weights_is_refused_and_not_executed(tmp_path):
    with pytest.raises(FileNotFoundError, match="no weights at"):
        read_weights(tmp_path / "absent.pt")
    torch.save({"epoch": 3}, tmp_path / "empty.pt")
    with pytest.raises(ValueError, match="no state dict found in"):
        read_weights(tmp_path / "empty.pt")
    (tmp_path / "code.pt").write_bytes(pickle.dumps(print))
    with pytest.raises(ValueError, match=r"is not a state dict of torch\.save, or contains code"):
        read_weights(tmp_path / "code.pt")
    with pytest.raises(ValueError, match=r"none of the 1 tensors fits the model: the file has 'a'"):
        load_weights(network(), {"a": torch.ones(1)})


def test_equal_weights_with_equal_metadata_give_equal_bytes():
    model, metadata = network(), {name: name for name in "abcdef"}
    assert len({pack_state(model, metadata) for _ in range(8)}) == 1


@pytest.mark.parametrize("weight", [None, mn.WS(scale=False)], ids=str)
@pytest.mark.parametrize("wrapped", [False, True])
def test_weights_of_layers_that_compute_something_else_give_a_warning(weight, wrapped):
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    saved = mn.convert(copy.deepcopy(network), None, mn.WS()).state_dict()
    model = network if weight is None else mn.convert(network, None, weight)
    with pytest.warns(UserWarning, match=r"was saved from WS\(center=True, scale=True"):
        load_weights(nn.ModuleDict({"backbone": model}) if wrapped else model, saved)


def test_weights_of_the_same_layers_give_none():
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    for spec in (mn.WS(), None):
        model = mn.convert(copy.deepcopy(network), mn.BCN(), spec)
        load_weights(nn.ModuleDict({"backbone": model}), copy.deepcopy(model).state_dict())
    load_weights(model, network.state_dict())
