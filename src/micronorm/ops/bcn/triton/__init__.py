"""Triton kernels for Batch-Channel Normalization and group normalization."""
