"""What every spec of a norm refuses."""

from dataclasses import fields

import pytest
from torch import nn

import micronorm as mn
from micronorm.nn import SPECS, NormSpec

NORMS = [(name, spec) for name, spec in SPECS.items() if issubclass(spec, NormSpec)]
ARGUMENTS = [(name, field.name) for name, spec in NORMS for field in fields(spec)]


@pytest.mark.parametrize("name, argument", ARGUMENTS)
def test_a_module_where_an_argument_belongs_is_refused_with_the_call_that_was_meant(name, argument):
    with pytest.raises(TypeError, match=rf"mn\.{name}\({argument}=.*Conv2d.*did you mean mn\.{name}\(\)\("):
        SPECS[name](**{argument: nn.Conv2d(3, 8, 1)})


@pytest.mark.parametrize("argument", ["tlu", "learnable_eps"])
def test_a_flag_of_a_spec_is_a_bool(argument):
    for make in (mn.FRN, lambda **options: mn.nn.FilterResponseNorm(8, **options)):
        with pytest.raises(TypeError, match=f"{argument} must be True or False, got 0"):
            make(**{argument: 0})
