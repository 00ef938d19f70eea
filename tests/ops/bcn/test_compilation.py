"""The kernels compile for a GPU, also on a machine without one. Triton's interpreter runs what its compiler refuses."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")


@pytest.mark.parametrize("count", [14, pytest.param(250, marks=pytest.mark.slow)])
def test_every_specialization_passes_the_compiler(count):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.ops.bcn.compiling", str(count)]
    found = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert found.stdout == f"0 of {count} failed\n", found.stdout + found.stderr[:4000]
