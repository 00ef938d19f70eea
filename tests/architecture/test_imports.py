"""The table of allowed imports between the rooms of src/micronorm, and what importing the package costs.

A room is a top-level module or package of micronorm. An edge that the table lacks is not allowed: add one only with its
reason in the commit. Data flows recipe → engine → records → report and never back.
"""

import io
import json
import os
import subprocess
import sys
import tokenize
from collections.abc import Mapping

import pytest

from tests.architecture.sources import SRC, imported_modules, read_sources, room_of

ANYTHING = None  # this room may import every other

# room -> the rooms it may import, itself always included. `__init__` is the package's own file, with its public names.
ALLOWED: Mapping[str, frozenset[str] | None] = {
    "__init__": ANYTHING,
    "__main__": frozenset({"cli"}),
    "cli": ANYTHING,
    "ops": frozenset(),
    "functional": frozenset({"ops"}),
    "nn": frozenset({"ops"}),
    "commit": frozenset({"ops", "nn"}),
    "convert": frozenset({"ops", "nn"}),
    # convert for the data flow of a model and for replacing its modules
    "export": frozenset({"ops", "nn", "convert"}),
    # records for recognizing a collapse in losses
    "check": frozenset({"ops", "nn", "commit", "convert", "records"}),
    # commit for running a model elsewhere in weight space and putting it back
    "diagnostics": frozenset({"ops", "nn", "commit", "convert"}),
    "records": frozenset(),
    "report": frozenset({"records"}),
    # what it times (nn), what it compares with (ops), what an optimizer's step would do between two rounds (commit),
    # where a run ran (engine), and writing files atomically (records)
    "bench": frozenset({"ops", "nn", "commit", "engine", "records"}),
    # ops and nn for what is keyed by sample (order, dropout) and for weights computed once per step
    "engine": frozenset({"ops", "nn", "convert", "commit", "records"}),
    "data": frozenset({"ops"}),  # keyed random numbers, for augmentation
    "tasks": frozenset({"ops", "nn", "data"}),  # nn: a detector's heads key their dropout by image
    "integrations": frozenset({"nn", "convert"}),  # what the networks of other trainers are made of
    # the networks (nn, convert), what a figure measures (diagnostics), how pictures are drawn (report)
    "recipes": frozenset({"ops", "nn", "convert", "data", "tasks", "engine", "records", "diagnostics", "report"}),
}

# Rooms that import the standard library and nothing else: they can be read on a machine without torch.
STANDARD_LIBRARY_ONLY = frozenset({"records"})

# Edges against the direction of imports. The first room calls what the second has registered with this function.
CALLBACKS: Mapping[tuple[str, str], str] = {
    # The first layer installs the optimizer hooks: before that, optimizers have none.
    ("nn", "commit"): "call_at_first_window",
}

# The engine trains any network. It must not depend on Batch-Channel Normalization.
UNSPEAKABLE: Mapping[str, tuple[str, ...]] = {"engine": ("batchchannelnorm", "bcn")}


def violations(sources: Mapping[str, str]) -> list[str]:
    """What breaks the tables above in these sources, given as {path relative to the package: text}."""
    rooms = frozenset(map(room_of, sources)) | frozenset(ALLOWED)
    unknown = sorted(rooms - frozenset(ALLOWED))
    found = [f"{room}: a room without a row in the table of allowed imports" for room in unknown]
    for path, source in sorted(sources.items()):
        room = room_of(path)
        allowed = ALLOWED.get(room, frozenset())
        for line, module in sorted(set(imported_modules(path, source, rooms))):
            top, _, rest = module.partition(".")
            target = rest.split(".")[0] or "__init__"
            if top == "micronorm" and allowed is not None and target not in allowed | {room}:
                found.append(f"{path}:{line}: {room} may not import {target}")
            if top != "micronorm" and room in STANDARD_LIBRARY_ONLY and top not in sys.stdlib_module_names:
                found.append(f"{path}:{line}: {room} may import the standard library only, not {top}")
        for word in UNSPEAKABLE.get(room, ()):
            for token in tokenize.generate_tokens(io.StringIO(source).readline):
                if token.type == tokenize.NAME and word in token.string.lower():
                    found.append(f"{path}:{token.start[0]}: {room} may not name {token.string}")
    return found


def test_rooms_import_only_what_the_table_allows():
    sources = read_sources()
    assert "__init__.py" in sources
    assert violations(sources) == []


def test_only_the_listed_rooms_register_callbacks():
    sources = read_sources()
    for (caller, registrar), function in CALLBACKS.items():
        users = {room_of(path) for path, source in sources.items() if f"{function}(" in source}
        assert users == {caller, registrar}


@pytest.mark.parametrize(
    "path, source, complaint",
    [
        ("ops/weight.py", "import micronorm.nn", "ops/weight.py:1: ops may not import nn"),
        ("ops/weight.py", "import micronorm.nn.conv as conv", "ops/weight.py:1: ops may not import nn"),
        ("ops/weight.py", "from micronorm.nn.conv import WSConv2d", "ops/weight.py:1: ops may not import nn"),
        ("ops/weight.py", "from micronorm import nn", "ops/weight.py:1: ops may not import nn"),
        ("ops/weight.py", "from ..nn import WSConv2d", "ops/weight.py:1: ops may not import nn"),
        ("ops/weight.py", "from .. import nn", "ops/weight.py:1: ops may not import nn"),
        ("ops/bcn/triton.py", "from ...nn.conv import WSConv2d", "ops/bcn/triton.py:1: ops may not import nn"),
        ("ops/__init__.py", "from ..commit import attach", "ops/__init__.py:1: ops may not import commit"),
        ("records.py", "from .ops import moments", "records.py:1: records may not import ops"),
        ("nn/conv.py", "from micronorm import BCN", "nn/conv.py:1: nn may not import __init__"),
        ("nn/conv.py", "import micronorm as mn", "nn/conv.py:1: nn may not import __init__"),
        ("nn/conv.py", "def f():\n    from micronorm.commit import attach", "nn/conv.py:2: nn may not import commit"),
        (
            "nn/conv.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import micronorm.commit",
            "nn/conv.py:3: nn may not import commit",
        ),
        ("nn/conv.py", 'importlib.import_module("micronorm.commit")', "nn/conv.py:1: nn may not import commit"),
        ("report/page.py", "import micronorm.engine.loop", "report/page.py:1: report may not import engine"),
        ("records.py", "import json, torch", "records.py:1: records may import the standard library only, not torch"),
        ("engine/step.py", "isinstance(m, BatchChannelNorm)", "engine/step.py:1: engine may not name BatchChannelNorm"),
        ("engine/step.py", "x = 1\nis_bcn = True", "engine/step.py:2: engine may not name is_bcn"),
        ("misc.py", "", "misc: a room without a row in the table of allowed imports"),
    ],
)
def test_a_planted_violation_is_found(path, source, complaint):
    assert violations({path: source}) == [complaint]


@pytest.mark.parametrize(
    "path, source",
    [
        (
            "ops/weight.py",
            "from micronorm.ops.moments import moments\nfrom .moments import moments\nfrom . import moments",
        ),
        ("ops/bcn/triton.py", "from ..moments import moments\nfrom .. import moments\nimport torch, triton"),
        (
            "nn/conv.py",
            "from micronorm import ops\nfrom micronorm.ops.weight import weight_standardize\nfrom ..ops import weight",
        ),
        ("nn/__init__.py", "from .conv import WSConv2d\nfrom . import conv"),
        ("records.py", "import json\nfrom pathlib import Path\nfrom __future__ import annotations"),
        ("engine/step.py", "# as BCN needs it\nfrom micronorm.commit import commit\nfrom ..records import Run"),
        ("cli/__init__.py", "import micronorm\nfrom .. import BCN, engine\nfrom micronorm.report import page"),
        ("__init__.py", "from . import nn\nfrom .nn import BCN\nfrom micronorm.commit import attach"),
    ],
)
def test_what_the_table_allows_is_not_a_violation(path, source):
    assert violations({path: source}) == []


IMPORT_AND_TELL = """
import json, sys, time
start = time.process_time()
import torch
torch_s = time.process_time() - start
before = set(sys.modules)
start = time.process_time()
import micronorm
micronorm_s = time.process_time() - start
print(json.dumps(dict(
    torch_s=torch_s, micronorm_s=micronorm_s, loaded=sorted(set(sys.modules) - before), cuda=torch.cuda.is_initialized()
)))
"""


@pytest.fixture(scope="module")
def fresh_import() -> dict:
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    done = subprocess.run([sys.executable, "-c", IMPORT_AND_TELL], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "heavy",
    [
        "triton",
        "torchvision",
        "timm",
        "faster_coco_eval",
        "torch._dynamo",
        "sklearn",
        "typer",
        "onnx",
        "onnxscript",
        "onnxruntime",
        "tensorboard",
        "matplotlib",
        "PIL",
        "rich",
        "monai",
        "nibabel",
    ],
)
def test_importing_micronorm_does_not_load(fresh_import, heavy):
    assert [name for name in fresh_import["loaded"] if name == heavy or name.startswith(heavy + ".")] == []


def test_importing_micronorm_does_not_touch_cuda(fresh_import):
    assert fresh_import["cuda"] is False


def test_importing_micronorm_costs_little_beside_torch(fresh_import):
    # CPU time, and as a share of torch's own: neither a busy machine nor a slow one changes it. Of what could slip in
    # the lightest was scikit-learn with 0.65 of torch's import, then torch._dynamo with 0.75 and torchvision with 1.25.
    assert fresh_import["micronorm_s"] < 0.3 * fresh_import["torch_s"]
