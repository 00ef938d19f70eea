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
        cls, plans_manager: Any, *arguments: Any, **options: Any
    ) -> nn.Module:
        """Build the network of the plans and convert it.

        nnU-Net 2.8 looks for a parameter `plans_manager`, and passes the older arguments without it. Older
        versions pass these by position: `plans_manager` is then the name of the network's class.
        """
        network = super().build_network_architecture(plans_manager, *arguments, **options)
        return convert(network, cls.norm, cls.weight)
