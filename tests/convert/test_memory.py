"""Conversion replaces modules, not weights: no second copy of the model, in time that nobody waits for."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

import micronorm as mn

torchvision = pytest.importorskip("torchvision")
SRC = Path(__file__).parents[2] / "src"

# In a process of its own, and against what is resident when it begins: an earlier peak would hide a later one.
MEASURE = """
import json, pathlib, sys, time
import torch, torchvision
import micronorm as mn

def memory(what):
    line = next(s for s in pathlib.Path("/proc/self/status").read_text().splitlines() if s.startswith(what))
    return 1024 * int(line.split()[1])

mn.convert(torchvision.models.resnet18(), **json.loads(sys.argv[1]))  # what is set up once is not the conversion's
model = torchvision.models.resnet152()
pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
before, start = memory("VmRSS"), time.process_time()
mn.convert(model, **json.loads(sys.argv[1]))
seconds, after = time.process_time() - start, memory("VmHWM")
size = sum(t.numel() * t.element_size() for t in model.state_dict().values())
print(json.dumps(dict(seconds=seconds, grown=after - before, size=size)))
"""


@pytest.mark.parametrize("options", [pytest.param({}, marks=pytest.mark.slow), {"warm_steps": 100}], ids=str)
def test_every_parameter_of_the_original_is_in_the_converted_model_at_its_address(options):
    model = torchvision.models.resnet152()
    before = {name: (p, p.data_ptr()) for name, p in model.named_parameters()}
    mn.convert(model, **options)
    after = dict(model.named_parameters())
    assert all(after[name] is p and p.data_ptr() == address for name, (p, address) in before.items())
    new = [name for name in after if name not in before]
    assert all(name.endswith(("group_weight", "group_bias")) for name in new)
    assert not any(isinstance(m, nn.BatchNorm2d) for m in model.modules())


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of memory is read from Linux's /proc")
@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"warm_steps": 100}], ids=str)
def test_converting_a_resnet152_takes_a_fraction_of_its_memory(options):
    env = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", MEASURE, json.dumps(options)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["size"] > 240e6
    assert told["grown"] < 0.2 * told["size"], told
    assert told["seconds"] < 10, told  # of this process alone; a slow machine is no reason for a red test
