"""Where a test of a kernel runs: on a CUDA device under the marker `gpu`, else on the CPU by Triton's interpreter."""

import pytest

from micronorm.ops.runtime import LEAST_TRITON, interpreted

KERNEL_DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def require_kernels(device: str) -> str:
    """The device, or a skip where kernels cannot run on it."""
    pytest.importorskip("triton", minversion=".".join(map(str, LEAST_TRITON)))
    if (device == "cpu") != interpreted():
        pytest.skip("kernels run on the CPU where there is no CUDA device, by Triton's interpreter")
    return device
