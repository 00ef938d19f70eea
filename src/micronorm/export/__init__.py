"""Models for inference: fold a model into layers of torch, compare it with the original, and write it as ONNX.

The data flow that folding follows is recorded by `micronorm.convert`; the command line is `micronorm.cli.fold`.
"""

from micronorm.export.fold import fold
from micronorm.export.onnx import OnnxReport, onnx, verify

__all__ = ["OnnxReport", "fold", "onnx", "verify"]
