"""Launches on the device of the tensors, which need not be the current one."""

import contextlib

import torch


def on_device(device: torch.device) -> contextlib.AbstractContextManager:
    """A block in which Triton launches on this device: it takes the current one, whatever its arguments are on.

    Example:
        >>> with on_device(torch.device("cpu")):
        ...     pass
    """
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)
