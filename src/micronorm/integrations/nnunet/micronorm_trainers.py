"""Trainers of nnU-Net v2 whose networks are converted. nnU-Net imports this file as a module of its own."""

from typing import Any

from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer  # type: ignore[import-not-found]
from torch import nn

from micronorm.convert import convert
from micronorm.nn import BCN, WS
from micronorm.nn.spec import NormSpec, WeightSpec


class nnUNetTrainerBCN(nnUNetTrainer):
    """nnU-Net's own trainer with BCN + WS in the network of the plans. Everything else is nnU-Net's.

    nnU-Net calls `build_network_architecture` in training, in resuming and in inference, so that checkpoints fit. For
    another norm, derive a class with other values of `norm` and `weight`.
    """

    norm: NormSpec | None = BCN()
    weight: WeightSpec | None = WS()

    @classmethod
    def build_network_architecture(  # type: ignore[override]  # a static method there, which cannot know its class
        cls, *arguments: Any, **options: Any
    ) -> nn.Module:
        """Build the network of the plans and convert it. The arguments differ between versions of nnU-Net."""
        return convert(super().build_network_architecture(*arguments, **options), cls.norm, cls.weight)
