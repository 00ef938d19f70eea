"""Activations that are computed again in the backward pass instead of being kept for it. `handle.py` has the entrance.

A normalization's output is an elementwise function of its input, which the normalization saves for its own backward.
So what the next layers save of it need not be kept: `collector.py` recognises it among the tensors autograd saves and
stores its `formula.py` instead; `followers.py` lists the operations through which it is still recognised.
"""
