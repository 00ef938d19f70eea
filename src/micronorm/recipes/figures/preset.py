"""The network of `fig:dist`, and many such networks computed side by side.

The paper describes four convolutions of 32 channels, each normalized to preset means and deviations, followed by ReLU
and mean pooling by two, then the mean over space and a linear classifier. We chose kernels of 3×3 without bias, torch's
default initial weights, and BatchNorm's running statistics (momentum 0.1) for evaluation.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LAYERS = 4
WIDTH = 32


class PresetNorm(nn.BatchNorm2d):
    """Y = γ(σ̂ (X − μ)/σ + μ̂) + β for each channel, with fixed μ̂ and σ̂. BatchNorm has μ̂ = 0 and σ̂ = 1.

    Args:
        mean: μ̂, C numbers.
        std: σ̂, C numbers.

    Example:
        >>> y = PresetNorm(torch.tensor([3.0]), torch.tensor([0.5]))(torch.randn(64, 1, 8, 8))
        >>> round(y.mean().item(), 3), round(y.std().item(), 3)
        (3.0, 0.5)
    """

    preset_mean: Tensor
    preset_std: Tensor

    def __init__(self, mean: Tensor, std: Tensor) -> None:
        super().__init__(len(mean))
        self.register_buffer("preset_mean", mean)
        self.register_buffer("preset_std", std)

    def forward(self, input: Tensor) -> Tensor:
        """Normalize N×C×H×W."""
        # γ(σ̂ x̂ + μ̂) + β = (γσ̂) x̂ + (γμ̂ + β): batch normalization with this affine
        weight, bias = self.weight * self.preset_std, self.weight * self.preset_mean + self.bias
        mean, var = self.running_mean, self.running_var
        return F.batch_norm(input, mean, var, weight, bias, training=self.training, momentum=0.1, eps=self.eps)


class PresetNetwork(nn.Module):
    """One network: 3×3 convolution, PresetNorm, ReLU and 2×2 mean pooling per layer, then a linear classifier.

    Args:
        means: layers×WIDTH preset means.
        stds: layers×WIDTH preset deviations.
        inputs: channels of the images.
        classes: outputs.

    Example:
        >>> network = PresetNetwork(torch.zeros(4, 32), torch.ones(4, 32), inputs=3, classes=10)
        >>> network(torch.randn(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(self, means: Tensor, stds: Tensor, *, inputs: int, classes: int) -> None:
        super().__init__()
        widths = [inputs, *(len(mean) for mean in means)]
        self.convs = nn.ModuleList(
            nn.Conv2d(before, after, 3, padding=1, bias=False) for before, after in pairwise(widths)
        )
        self.norms = nn.ModuleList(PresetNorm(mean, std) for mean, std in zip(means, stds, strict=True))
        self.classifier = nn.Linear(widths[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        """Compute N×classes logits of N×inputs×H×W images."""
        return self.classifier(_features(images, self.convs, self.norms))


def _features(x: Tensor, convs: Iterable[nn.Module], norms: Iterable[nn.Module]) -> Tensor:
    for conv, norm in zip(convs, norms, strict=True):
        x = F.avg_pool2d(F.relu(norm(conv(x)), inplace=True), 2)
    return x.mean((2, 3))


class StackedNetworks(nn.Module):
    """K networks computed together: their channels lie side by side, and convolutions have a group per network.

    The networks do not influence one another. A loss that is summed over the networks gives each network the gradients
    that it has alone; an elementwise optimizer then takes the same steps.

    Args:
        networks: networks of equal shapes. They are copied.

    Example:
        >>> def network(std: float) -> PresetNetwork:
        ...     return PresetNetwork(torch.zeros(4, 32), torch.full((4, 32), std), inputs=1, classes=10)
        >>> one, two = network(1.0), network(2.0)
        >>> images = torch.randn(8, 1, 16, 16)
        >>> both = StackedNetworks([one, two])(images)
        >>> torch.allclose(both[:, 1], two(images), atol=1e-4)
        True
    """

    def __init__(self, networks: Sequence[PresetNetwork]) -> None:
        super().__init__()
        self.networks = len(networks)
        layers = range(len(networks[0].convs))
        # All networks see the same image, so the first convolution needs no groups.
        self.convs = nn.ModuleList(
            self._join_convs([network.convs[k] for network in networks], groups=self.networks if k else 1)
            for k in layers
        )
        self.norms = nn.ModuleList(self._join_norms([network.norms[k] for network in networks]) for k in layers)
        self.classifier = nn.Parameter(torch.stack([network.classifier.weight.detach().T for network in networks]))
        self.bias = nn.Parameter(torch.stack([network.classifier.bias.detach() for network in networks]))

    @staticmethod
    def _join_convs(convs: Sequence[nn.Module], *, groups: int) -> nn.Conv2d:
        weight = torch.cat([conv.weight.detach() for conv in convs])  # type: ignore[union-attr]
        joined = nn.Conv2d(weight.shape[1] * groups, len(weight), 3, padding=1, groups=groups, bias=False)
        joined.weight = nn.Parameter(weight)
        return joined

    @staticmethod
    def _join_norms(norms: Sequence[nn.Module]) -> PresetNorm:
        states = [norm.state_dict() for norm in norms]
        values = {name: torch.cat([state[name] for state in states]) for name in states[0] if states[0][name].ndim}
        joined = PresetNorm(values["preset_mean"], values["preset_std"]).to(values["weight"].dtype)
        joined.load_state_dict(values, strict=False)  # everything but BatchNorm's counter of batches, which is unused
        return joined

    def forward(self, images: Tensor) -> Tensor:
        """Compute N×K×classes logits of N×inputs×H×W images."""
        features = _features(images, self.convs, self.norms).unflatten(1, (self.networks, -1))
        return torch.baddbmm(self.bias[:, None], features.transpose(0, 1), self.classifier).transpose(0, 1)
