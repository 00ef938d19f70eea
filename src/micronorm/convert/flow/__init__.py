"""The data flow of a model: which layer's output reaches which. Conversion pairs layers by it, folding merges by it."""

from micronorm.convert.flow.graph import Flow, Node
from micronorm.convert.flow.trace import trace_flow

__all__ = ["Flow", "Node", "trace_flow"]
