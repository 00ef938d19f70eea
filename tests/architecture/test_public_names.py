"""The public names, frozen: one that appears or goes is a decision, with a line in the CHANGELOG."""

import importlib
import inspect
import re

import pytest

PUBLIC = {
    "micronorm": {
        # weight specs
        "WS",
        "WN",
        "CWN",
        # norm specs
        "BN",
        "GN",
        "LN",
        "IN",
        "BCN",
        # comparators
        "SN",
        "BRN",
        "FRN",
        "EvoNormS0",
        # a norm of one's own
        "NormSpec",
        # control
        "attach",
        # memory
        "recompute",
        # conversion
        "plan",
        "convert",
        "calibrate",
        # the law on a model of your own
        "check_cuts",
        # a look into the network while it trains
        "observe",
        # inference
        "fold",
        "load",
        # modules
        "export",
        "nn",
        "functional",
    },
    "micronorm.nn": {
        "BatchChannelNorm",
        "BatchChannelNormAct",
        "BatchRenorm",
        "ChannelsLast",
        "EvoNorm",
        "FilterResponseNorm",
        "GhostBatchNorm",
        "GroupNorm",
        "NormAct",
        "NormSpec",
        "SPECS",
        "SwitchableNorm",
        "WSConv1d",
        "WSConv2d",
        "WSConv2dSame",
        "WSConv3d",
        "WSConvTranspose1d",
        "WSConvTranspose2d",
        "WSConvTranspose3d",
        "WSLinear",
        "WeightSpec",
        "norm_act_layer",
        "register",
    },
    "micronorm.export": {"OnnxReport", "fold", "onnx", "verify"},
    "micronorm.functional": {
        "Moments",
        "Running",
        "algorithm1",
        "batch_channel_norm",
        "batch_channel_norm_reference",
        "batch_norm",
        "batch_renorm",
        "centered_weight_normalize",
        "choose_groups",
        "evonorm_s0",
        "filter_response_norm",
        "moments",
        "scan",
        "switchable_norm",
        "weight_normalize",
        "weight_standardize",
        "weight_standardize_many",
    },
}


@pytest.mark.parametrize("module", PUBLIC)
def test_the_public_names_are_exactly_these(module):
    names = importlib.import_module(module).__all__
    assert len(names) == len(set(names))
    assert set(names) == PUBLIC[module]


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_exists_and_has_a_docstring(module):
    namespace = importlib.import_module(module)
    undocumented = [name for name in namespace.__all__ if not (getattr(namespace, name).__doc__ or "").strip()]
    assert undocumented == []


@pytest.mark.parametrize("module", ["micronorm", "micronorm.nn"])
def test_docstrings_have_arguments_returns_raises_and_an_example_in_this_order(module):
    namespace = importlib.import_module(module)
    for name in namespace.__all__:
        value = getattr(namespace, name)
        text = inspect.getdoc(value) or ""
        if not callable(value) or re.search(r"as in `WSConv2d`", text):
            continue
        sections = re.findall(r"^(Args|Returns|Raises|Example):$", text, re.MULTILINE)
        assert sections == [s for s in ("Args", "Returns", "Raises", "Example") if s in sections], name
        assert "Example" in sections, name
        if inspect.isfunction(value):
            assert "Returns" in sections, name
        if "those of `mn.plan`" not in text:
            missing = [
                p for p in inspect.signature(value).parameters if not re.search(rf"^    {p}: ", text, re.MULTILINE)
            ]
            assert set(missing) <= {"kwargs"}, name
