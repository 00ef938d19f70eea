"""Models for inference: folded to layers of torch, verified, written as ONNX."""

from micronorm.export.fold import fold
from micronorm.export.onnx import OnnxReport, onnx
from micronorm.export.verify import verify

__all__ = ["OnnxReport", "fold", "onnx", "verify"]
