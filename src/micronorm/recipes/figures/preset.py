"""The network of the figure `fig:dist`, one by one and many side by side.

Four convolutions of 32 channels, each normalized to preset means and deviations, rectified and pooled by two; then the
mean over space and a linear classifier. The paper says so much. Kernels of 3×3, no bias, torch's own initial weights
and running statistics for the evaluation (BatchNorm's, momentum 0.1) are ours.
"""

import copy
from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LAYERS = 4
WIDTH = 32


class PresetNorm(nn.BatchNorm2d):
    """Y = γ(σ̂ (X − μ)/σ + μ̂) + β, channel by channel, with μ̂ and σ̂ given and fixed; BN at μ̂ = 0, σ̂ = 1.

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
        """N×C×H×W to the same shape."""
        # γ(σ̂ x̂ + μ̂) + β = (γσ̂) x̂ + (γμ̂ + β): batch normalization with this affine, in its own two passes
        weight, bias = self.weight * self.preset_std, self.weight * self.preset_mean + self.bias
        return F.batch_norm(
            input,
            self.running_mean,
            self.running_var,
            weight,
            bias,
            training=self.training,
            momentum=0.1,
            eps=self.eps,
        )


class PresetNetwork(nn.Module):
    """One network: `layers` times (3×3 convolution, PresetNorm, ReLU, 2×2 mean), mean over space, classifier.

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
        """N×inputs×H×W to N×classes."""
        return self.classifier(_features(images, self.convs, self.norms))


def _features(x: Tensor, convs: Iterable[nn.Module], norms: Iterable[nn.Module]) -> Tensor:
    for conv, norm in zip(convs, norms, strict=True):
        x = F.avg_pool2d(F.relu(norm(conv(x)), inplace=True), 2)  # the norm's backward needs its input only
    return x.mean((2, 3))


class StackedNetworks(nn.Module):
    """K networks computed at once: the channels of all lie side by side, and convolutions are grouped by network.

    No number of one network enters another's: losses that are summed over the networks give each the gradients, and an
    optimizer that works element by element gives each the steps, that it has alone.

    Args:
        networks: of equal shapes. They are copied, not changed.

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
        first = networks[0]
        self.networks = len(networks)
        self.convs = nn.ModuleList(
            self._conv([network.convs[layer] for network in networks], groups=self.networks if layer else 1)
            for layer in range(len(first.convs))
        )
        self.norms = nn.ModuleList(
            self._norm([network.norms[layer] for network in networks]) for layer in range(len(first.norms))
        )
        self.classifier = nn.Parameter(torch.stack([network.classifier.weight.detach().T for network in networks]))
        self.bias = nn.Parameter(torch.stack([network.classifier.bias.detach() for network in networks]))

    @staticmethod
    def _conv(convs: Sequence[nn.Module], *, groups: int) -> nn.Conv2d:
        """The first layer sees one image, so that its kernels lie side by side; the others see their own channels."""
        weight = torch.cat([conv.weight.detach() for conv in convs])  # type: ignore[union-attr]
        made = nn.Conv2d(weight.shape[1] * groups, len(weight), 3, padding=1, groups=groups, bias=False)
        made.weight = nn.Parameter(weight)
        return made

    @staticmethod
    def _norm(norms: Sequence[nn.Module]) -> PresetNorm:
        states = [norm.state_dict() for norm in norms]
        joined = {name: torch.cat([state[name] for state in states]) for name in states[0] if states[0][name].ndim}
        made = PresetNorm(joined["preset_mean"], joined["preset_std"]).to(joined["weight"].dtype)
        made.load_state_dict(joined, strict=False)  # all but the count of batches, which nothing here reads
        return made

    def forward(self, images: Tensor) -> Tensor:
        """N×inputs×H×W to N×K×classes."""
        features = _features(images, self.convs, self.norms).unflatten(1, (self.networks, -1))
        return torch.baddbmm(self.bias[:, None], features.transpose(0, 1), self.classifier).transpose(0, 1)

    def take(self, index: int, like: PresetNetwork) -> PresetNetwork:
        """A copy of `like` with the present numbers of network `index`."""
        taken = copy.deepcopy(like)
        with torch.no_grad():
            for own, theirs in zip(taken.convs, self.convs, strict=True):
                own.weight.copy_(theirs.weight.chunk(self.networks)[index])  # type: ignore[union-attr]
            for own, theirs in zip(taken.norms, self.norms, strict=True):
                state = theirs.state_dict()
                for name, value in own.state_dict().items():
                    if value.ndim:
                        value.copy_(state[name].chunk(self.networks)[index])
            taken.classifier.weight.copy_(self.classifier[index].T)
            taken.classifier.bias.copy_(self.bias[index])
        return taken
