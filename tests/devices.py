"""Where a test of a kernel runs: on a CUDA device under the marker `gpu`, else on the CPU by Triton's interpreter."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from micronorm.ops.runtime import LEAST_TRITON, interpreted

KERNEL_DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def require_kernels(device: str) -> str:
    """The device, or a skip where kernels cannot run on it."""
    pytest.importorskip("triton", minversion=".".join(map(str, LEAST_TRITON)))
    if (device == "cpu") != interpreted():
        pytest.skip("kernels run on the CPU where there is no CUDA device, by Triton's interpreter")
    if device == "cpu":
        hasten_interpreter()
    return device


@cache
def hasten_interpreter() -> None:
    """Leave out what takes two thirds of the interpreter's time, and changes nothing.

    It prepares Triton's language in each call of a function: once for each is enough, since a launch prepares it for
    all that its kernel calls, and restores it. And it repeats integer arithmetic in 64 bits, to see that 32 are enough:
    in tests of a few elements they are.
    """
    from triton.runtime import interpreter

    prepare = cache(interpreter._patch_lang)

    def call(self: interpreter.InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
        prepare(self.fn)
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
