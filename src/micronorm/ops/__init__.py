"""Pure tensor functions and kernels: no Module and no stored state; new statistics are return values.

Layers with parameters and buffers are in `nn`, which chooses among the implementations in this room.
"""
