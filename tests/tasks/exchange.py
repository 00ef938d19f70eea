"""What a rank receives of another one's score."""

import io
from typing import Any

import torch


def sent(value: Any) -> Any:
    """Return a value as `gather` of several ranks returns it."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
