"""The data flow of a model: the calls of one forward, and which output goes to which call.

Conversion uses it to find the norm after a convolution, folding to merge layers. What to do with it is decided there.
"""

from micronorm.convert.flow.graph import Flow, Node
from micronorm.convert.flow.trace import trace_flow

__all__ = ["Flow", "Node", "trace_flow"]
