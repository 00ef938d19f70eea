"""What layers do over a whole optimizer step: recomputed activations, shared weights, and dropout keyed by sample.

The layers themselves are in `micronorm.nn`; the training loop that uses these tools is in `micronorm.engine`.
"""
