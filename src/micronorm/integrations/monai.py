"""Batch-Channel Normalization by name in MONAI's networks: `norm="bcn"`."""

from typing import Any

from micronorm.nn.bcn import BatchChannelNorm

NAME = "bcn"


def register() -> None:
    """Add "bcn" to MONAI's factory `Norm`, for networks of one, two and three dimensions. Call it once.

    Afterwards `norm="bcn"` and `norm=("bcn", {"num_groups": 8})` work wherever MONAI takes a norm; the dictionary holds
    arguments of `mn.nn.BatchChannelNorm`. `mn.convert(network)` then standardizes the weights before these norms.

    Raises:
        ImportError: MONAI is not installed.

    Example:
        >>> from micronorm.integrations import monai as integration
        >>> integration.register()
        >>> from monai.networks.layers import get_norm_layer
        >>> get_norm_layer(("bcn", {"affine": True}), spatial_dims=3, channels=32).num_groups
        8
    """
    try:
        from monai.networks.layers import Norm
    except ImportError as error:
        raise ImportError("MONAI is not installed: pip install monai") from error
    factory: Any = Norm
    if NAME.upper() not in factory.names:
        factory.add_factory_callable(NAME, _layer, "Batch-Channel Normalization of micronorm, in any dimension")


def _layer(dims: int | None = None) -> type[BatchChannelNorm]:
    """Return the layer's class, which takes inputs of any number of dimensions."""
    return BatchChannelNorm
