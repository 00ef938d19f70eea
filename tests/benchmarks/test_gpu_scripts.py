"""profile_steps.py, which needs a GPU to measure."""

import importlib
from collections import Counter
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_without_a_gpu_one_line_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    with pytest.raises(SystemExit) as end:
        importlib.import_module("profile_steps").main([])
    assert end.value.code == 2
    assert "error: torch finds no CUDA device" in capsys.readouterr().err.splitlines()[-1]


def test_kernels_of_a_profile_are_told_apart_by_their_names(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    script = importlib.import_module("profile_steps")
    kinds = {
        "forward_whole": "norm, per element",
        "backward_twice": "norm, per element",
        "triton_red_fused__native_batch_norm_legit_functional_2": "norm, per element",
        "gather_window": "norm, per channel",
        "backward_many": "weights",
        "sm90_xmma_dgrad_implicit_gemm_bf16bf16": "convolution, matmul",
        "nvjet_sm90_tst_64x64_64x13_1x2_h_bz_splitK_NTT": "convolution, matmul",
        "void at::native::(anonymous namespace)::max_pool_backward_nhwc<c10::BFloat16, float>": "pooling",
        "Memset (Device)": "sums, casts, copies",
        "mystery": "rest",
    }
    assert {name: script.kind_of(name) for name in kinds} == kinds
    found = script.Profile(100.0, Counter(forward_whole=50.0, mystery=20.0), Counter(forward_whole=3, mystery=1))
    assert found.by_kind() == {"norm, per element": (50.0, 3), "rest": (20.0, 1), "idle": (30.0, 0)}
