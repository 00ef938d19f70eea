"""What every spec of a norm refuses, and specs of a user's own."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
import torch
from torch import nn

import micronorm as mn
from micronorm.bench.cases import choose_methods
from micronorm.diagnostics.norms import as_norm_layer
from micronorm.nn import SPECS, NormSpec
from micronorm.ops.moments import moments

NORMS = [(name, spec) for name, spec in SPECS.items() if issubclass(spec, NormSpec)]
ARGUMENTS = [(name, field.name) for name, spec in NORMS for field in fields(spec)]


@pytest.mark.parametrize("name, argument", ARGUMENTS)
def test_a_module_where_an_argument_belongs_is_refused_with_the_call_that_was_meant(name, argument):
    with pytest.raises(TypeError, match=rf"mn\.{name}\({argument}=.*Conv2d.*did you mean mn\.{name}\(\)\("):
        SPECS[name](**{argument: nn.Conv2d(3, 8, 1)})


def test_a_flag_of_a_spec_is_a_bool():
    for make in (mn.FRN, lambda **options: mn.nn.FilterResponseNorm(8, **options)):
        with pytest.raises(TypeError, match="tlu must be True or False, got 0"):
            make(tlu=0)


# --- a norm of one's own ---------------------------------------------------------------------------------------------


class Root(nn.Module):
    """y = weight·sqrt(|x|), a norm that no library knows."""

    def __init__(self, num_channels: int, *, power: float = 0.5) -> None:
        super().__init__()
        if power <= 0:
            raise ValueError(f"power must be positive, got {power}")
        self.num_channels, self.power = num_channels, power
        self.weight = nn.Parameter(torch.ones(num_channels))

    def normalized(self, x: torch.Tensor) -> torch.Tensor:
        return x.abs().pow(self.power)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.normalized(x) * self.weight.view(-1, *[1] * (x.ndim - 2))


@dataclass(frozen=True)
class RootSpec(mn.NormSpec):
    layer = Root
    power: float = 0.5


@pytest.fixture
def registered():
    yield mn.nn.register(RootSpec)
    del SPECS["RootSpec"]


def test_the_fields_of_a_spec_are_the_arguments_of_its_layer_which_checks_them():
    assert RootSpec(power=2.0)(8).power == 2.0
    assert RootSpec() == RootSpec(power=0.5)
    with pytest.raises(ValueError, match="power must be positive, got -1"):
        RootSpec(power=-1)


def test_a_norm_of_ones_own_is_converted_to_with_the_old_affine():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    weight = model[1].weight
    mn.convert(model, norm=RootSpec(power=1.0))
    assert isinstance(model[1], Root)
    assert model[1].weight is weight
    assert model[1].power == 1.0


def test_a_registered_norm_is_a_method_of_bench(registered):
    (method,) = choose_methods(["rootspec"], on_gpu=False)
    assert method.label == "RootSpec>ReLU (train)"
    assert method.build(8, torch.float32)(torch.randn(2, 8, 4, 4)).shape == (2, 8, 4, 4)


def test_the_layers_of_a_registered_norm_are_observed(registered):
    layer = RootSpec()(8)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mn.observe(model, every=1) as observer:
        model(torch.randn(2, 3, 8, 8)).sum().backward()
        optimizer.step()
    row = observer.rows[-1]["layers"]["1"]
    assert row["norm"] == "Root"
    assert row["dead"] == 0
    x = torch.randn(2, 8, 4, 4)
    norm = as_norm_layer(layer)
    assert norm is not None
    _, normalized = norm.normalize(x, moments(x))
    assert torch.allclose(normalized.mean, layer.normalized(x).double().mean((2, 3)))


def test_layers_of_a_spec_that_is_not_registered_are_not_taken_for_norms():
    assert as_norm_layer(RootSpec()(8)) is None


def test_a_name_of_micronorm_cannot_be_registered_but_ones_own_can_be_redefined(registered):
    other = dataclass(frozen=True)(type("RootSpec", (mn.NormSpec,), {"layer": Root}))
    assert mn.nn.register(other) is SPECS["RootSpec"] is other
    with pytest.raises(ValueError, match="micronorm has a spec named GN"):
        mn.nn.register(type("GN", (mn.NormSpec,), {"layer": Root}))
    with pytest.raises(TypeError, match=r"subclass of mn\.NormSpec"):
        mn.nn.register(Root)


def test_a_spec_without_a_layer_says_what_it_needs():
    with pytest.raises(TypeError, match="Bare must set `layer` or override `__call__`"):
        type("Bare", (mn.NormSpec,), {})()(8)


@pytest.mark.slow
def test_the_norm_of_the_page_passes_the_contract_tests(tmp_path):
    root = Path(__file__).parents[2]
    page = (root / "docs" / "add_a_normalization.md").read_text()
    code = re.search(r"```python\n(# my_norms\.py\n.*?)```", page, re.DOTALL)
    assert code is not None
    (tmp_path / "my_norms.py").write_text(code[1])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/contract", "-k", "DyT"]
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    found = subprocess.run(
        [*command, "--spec", "my_norms:DyT", "-m", "not gpu"],
        cwd=root,
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stdout[-2000:]
    assert int(re.search(r"(\d+) passed", found.stdout)[1]) > 20  # type: ignore[index]
