"""A state dict says what its layers compute, and does not load into layers that compute something else."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import Tensor, nn

import micronorm as mn
from micronorm.convert.checkpoint import header_of, load_state, pack_state, read_state

BCN, GN, WS = mn.BCN(), mn.GN(), mn.WS()
OTHER = {
    "BCN+WS to BCN": ((BCN, WS), (BCN, None), r"from WS\(center=True, scale=True, .* has a plain weight"),
    "BCN to BCN+WS": ((BCN, None), (BCN, WS), r"from a plain weight, but the model has WS\(center=True"),
    "GN+WS to GN": ((GN, WS), (GN, None), r"from WS\(center=True, scale=True, .* has a plain weight"),
    "GN(16) to GN(32)": ((mn.GN(16), None), (mn.GN(32, 1), None), r"GN\(num_groups=16, .* GN\(num_groups=32,"),
    "WS to WS(scale=False)": ((GN, WS), (GN, mn.WS(scale=False)), r"scale=True, .* scale=False"),
    "eps": ((mn.BCN(eps=1e-3), WS), (mn.BCN(eps=1e-2), WS), r"eps=0\.001.*eps=0\.01"),
}
warned = pytest.mark.filterwarnings("ignore:.*was saved from")
cases = pytest.mark.parametrize("saved, loaded, message", OTHER.values(), ids=OTHER)


class Block(nn.Module):
    """A convolution and a norm, as a child of the model."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(inputs, outputs, 3), nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """N×inputs×H×W to N×outputs×(H−2)×(W−2)."""
        return self.norm(self.conv(x)).relu()


def plain() -> nn.Sequential:
    return nn.Sequential(Block(3, 32), Block(32, 32), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4)).eval()


def make(specs: tuple) -> nn.Module:
    return mn.convert(plain(), *specs)


def through_torch(model: nn.Module) -> dict[str, Tensor]:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@warned
@cases
def test_a_state_dict_of_another_conversion_is_refused_in_one_message(saved, loaded, message):
    with pytest.raises(RuntimeError, match=message) as error:
        make(loaded).load_state_dict(through_torch(make(saved)))
    assert str(error.value).count("mn.convert") == 1


@warned
@cases
def test_it_is_refused_below_a_wrapper_and_for_a_part_of_the_model_too(saved, loaded, message):
    with pytest.raises(RuntimeError, match=message):
        nn.ModuleDict({"module": make(loaded)}).load_state_dict(nn.ModuleDict({"module": make(saved)}).state_dict())
    with pytest.raises(RuntimeError, match=message):
        make(loaded).get_submodule("1").load_state_dict(make(saved).get_submodule("1").state_dict())


@cases
def test_a_load_that_is_not_strict_warns(saved, loaded, message):
    with pytest.warns(UserWarning, match=message):
        make(loaded).load_state_dict(make(saved).state_dict(), strict=False)


@cases
def test_a_safetensors_file_says_it_too(tmp_path, saved, loaded, message):
    file, model = tmp_path / "model.safetensors", make(saved)
    file.write_bytes(pack_state(model, header_of(model)))
    load_state(make(saved), read_state(file))
    with pytest.raises(ValueError, match=message):
        load_state(make(loaded), read_state(file))


@pytest.mark.parametrize("specs", [(BCN, WS), (BCN, None), (GN, WS), (None, WS)], ids=str)
def test_what_fits_loads_without_a_warning(specs):
    model = make(specs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for again in (make(specs), copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert again.state_dict().keys() == model.state_dict().keys()
            again.load_state_dict(through_torch(model))
            again.load_state_dict(dict(model.state_dict()))  # tensors alone


def test_statistics_activations_and_kernels_do_not_count():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    one = mn.convert(copy.deepcopy(model), mn.BCN(statistics="sequential", rate=0.1), fuse=False)
    other = mn.convert(copy.deepcopy(model))
    other.load_state_dict(one.state_dict())
    assert all(torch.equal(value, one.state_dict()[key]) for key, value in other.state_dict().items())


@pytest.mark.parametrize("specs", [(BCN, WS), (BCN, None), (mn.BN(micro_batch=1), WS), (None, WS)], ids=str)
def test_an_unconverted_network_loads_wherever_it_did(specs):
    model, source = make(specs), plain().state_dict()
    model.load_state_dict(source)
    assert all(torch.equal(value, source[key]) for key, value in model.state_dict().items() if key in source)


@pytest.mark.parametrize("options", [{"absorb": True}, {"warm_steps": 5}], ids=str)
def test_a_kernel_does_not_load_silently_beside_the_absorbed_mean_and_scale_of_another(options):
    model = mn.convert(plain(), **options)
    for source in (plain(), make((BCN, WS))):
        with pytest.warns(UserWarning, match="load the weights first"):
            model.load_state_dict(source.state_dict(), strict=False)
        with pytest.raises(ValueError, match="load the weights first") as error:
            load_state(model, source.state_dict())
        assert str(error.value).count("mn.convert(") == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.load_state_dict(mn.convert(plain(), **options).state_dict())


def test_tensors_alone_load_as_they_did():
    for saved, loaded, _ in OTHER.values():
        model, source = make(loaded), dict(make(saved).state_dict())
        model.load_state_dict(source)
        assert all(torch.equal(value, source[key]) for key, value in model.state_dict().items())


@warned
def test_a_second_conversion_counts_and_not_the_first():
    both, once = mn.convert(make((GN, None)), None, WS), make((GN, WS))
    once.load_state_dict(both.state_dict())
    both.load_state_dict(once.state_dict())
    with pytest.raises(RuntimeError, match="plain weight"):
        both.load_state_dict(make((GN, None)).state_dict())


def test_a_folded_model_is_of_torch_alone_when_it_is_pickled():
    folded = mn.fold(make((BCN, None)))
    assert b"micronorm" not in pickle.dumps(folded)
    assert "micronorm" not in str(folded.state_dict()._metadata)


@pytest.mark.parametrize("text", ["[1]", "{", '"x"', "[" * 5000])
def test_damaged_metadata_are_named(tmp_path, text):
    file = tmp_path / "model.safetensors"
    file.write_bytes(pack_state(plain(), {"micronorm": text}))
    with pytest.raises(ValueError, match=r"model\.safetensors: its metadata 'micronorm'"):
        read_state(file)


def test_our_loaders_refuse_a_network_that_was_never_converted(tmp_path):
    model = mn.convert(plain(), None, WS)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    with pytest.raises(ValueError, match=r"0\.conv: its weight was saved from WS\(.* but the model has Conv2d"):
        load_state(plain(), read_state(tmp_path / "model.pt"))
