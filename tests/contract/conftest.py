"""`--spec module:Spec` runs the contract tests on a spec of one's own, too: see docs/add_a_normalization.md."""

import importlib

import pytest

from micronorm.nn import register


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--spec", action="append", default=[], metavar="MODULE:SPEC", help="a norm spec of your own")


def pytest_configure(config: pytest.Config) -> None:
    for target in (
        config.getoption("--spec", default=None) or ()
    ):  # absent if this folder was not named on the command line
        module, _, name = target.partition(":")
        register(getattr(importlib.import_module(module), name))
