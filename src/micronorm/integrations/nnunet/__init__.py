"""Trainer classes for nnU-Net v2, which nnU-Net finds through its environment variable `nnUNet_extTrainer`.

nnU-Net imports every module in the folder of that variable. So this folder holds the trainers alone.

Example:
    >>> (TRAINERS / "micronorm_trainers.py").is_file()
    True
"""

from pathlib import Path

TRAINERS = Path(__file__).parent
"""The folder to set `nnUNet_extTrainer` to."""
