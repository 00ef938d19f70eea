"""Batch-Channel Normalization, and group normalization with it, in Triton kernels."""
