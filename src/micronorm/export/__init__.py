"""Models for inference: folded to layers of torch, verified, written as ONNX."""

from micronorm.export.fold import fold

__all__ = ["fold"]
