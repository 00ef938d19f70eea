"""The demo's experiment: one residual network on scikit-learn's digits, one image per micro-batch, by four methods.

Nothing here is specific to a method but the two specs that build its layers.
"""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import micronorm as mn
from micronorm.data.digits import Digits, Labelled
from micronorm.nn.spec import NormSpec, WeightSpec

# One setting for every method. Momentum, decay, the cosine and the step's size were set beforehand. The learning rate
# (of 0.02, 0.05, 0.1) and the epochs (of 6, 12) had the lowest validation error, as a mean over the four methods and
# three seeds, trained on 1,000 of the training images and validated on the other 297. No test image had a part in it.
EPOCHS = 6
SAMPLES_PER_STEP = 32
LEARNING_RATE = 0.05
MOMENTUM = 0.9
WEIGHT_DECAY = 1e-4


@dataclass(frozen=True)
class Method:
    """A norm for every norm layer and, where there is one, a reparameterization for every convolution."""

    name: str
    norm: NormSpec
    weight: WeightSpec | None = None

    def conv(self, inputs: int, outputs: int, kernel: int, *, stride: int = 1) -> nn.Module:
        """A convolution without bias, which the norm after it would subtract or has of its own."""
        plain = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)
        return plain if self.weight is None else self.weight(plain)


METHODS = (
    Method("BN of one image", mn.BN(micro_batch=1)),
    Method("GN", mn.GN()),
    Method("GN+WS", mn.GN(), mn.WS()),
    Method("BCN+WS", mn.BCN(), mn.WS()),
)

# Not trained: it is there to be seen breaking the law that the others keep.
BATCH_BN = Method("nn.BatchNorm2d", mn.BN())


class Block(nn.Module):
    """relu(norm(conv(relu(norm(conv(x))))) + shortcut(x)); the first convolution and the shortcut take the stride."""

    def __init__(self, method: Method, inputs: int, outputs: int, *, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            method.conv(inputs, outputs, 3, stride=stride),
            method.norm(outputs),
            nn.ReLU(),
            method.conv(outputs, outputs, 3),
            method.norm(outputs),
        )
        self.shortcut = (
            nn.Identity()
            if inputs == outputs and stride == 1
            else nn.Sequential(method.conv(inputs, outputs, 1, stride=stride), method.norm(outputs))
        )

    def forward(self, x: Tensor) -> Tensor:
        """N×inputs×H×W to N×outputs×H/stride×W/stride."""
        return F.relu(self.body(x) + self.shortcut(x))


def build(method: Method, *, seed: int) -> nn.Sequential:
    """The network for N×1×8×8 images; for one seed every method starts from the same convolutions and classifier."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            method.conv(1, 16, 3),
            method.norm(16),
            nn.ReLU(),
            Block(method, 16, 16, stride=1),
            Block(method, 16, 32, stride=2),
            Block(method, 32, 64, stride=2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(64, 10),
        )


def make_optimizer(network: nn.Module) -> torch.optim.SGD:
    """The one setting of all methods."""
    return torch.optim.SGD(network.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)


def take_step(network: nn.Module, optimizer: torch.optim.Optimizer, batch: Labelled, *, micro_batch: int) -> None:
    """One optimizer step on `batch`, cut into forwards and backwards of `micro_batch` samples."""
    optimizer.zero_grad()
    for images, labels in zip(*(part.split(micro_batch) for part in batch), strict=True):
        F.cross_entropy(network(images), labels, reduction="sum").backward()
    for parameter in network.parameters():
        assert parameter.grad is not None
        parameter.grad /= len(batch.labels)  # losses were summed; this is the one division
    optimizer.step()


def count_steps(samples: int, *, epochs: int) -> int:
    """How many whole steps `epochs` passes over the samples make."""
    return samples * epochs // SAMPLES_PER_STEP


def step_indices(samples: int, *, epochs: int, seed: int) -> Tensor:
    """Which samples each step takes, steps×SAMPLES_PER_STEP: a fresh order per epoch, one epoch running into the next.

    So every step has the same count; what is left of the last epoch, less than one step, is not used.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.cat([torch.randperm(samples, generator=generator) for _ in range(epochs)])
    steps = count_steps(samples, epochs=epochs)
    return order[: steps * SAMPLES_PER_STEP].view(steps, SAMPLES_PER_STEP)


@dataclass(frozen=True)
class Outcome:
    """What one training run came to."""

    method: str
    wrong: int
    images: int
    steps: int
    seconds: float

    @property
    def error(self) -> float:
        """Test error in %."""
        return 100 * self.wrong / self.images


def train(method: Method, digits: Digits, *, epochs: int, seed: int, on_step: Callable[[], None]) -> Outcome:
    """Train on the training images, then count the wrong among the test images, once.

    Each step takes its samples in one forward, which by the law of these methods equals one image per micro-batch with
    gradients accumulated over the step: `cut_difference` shows it. So `seconds` are those of forwards of
    SAMPLES_PER_STEP images.
    """
    network = build(method, seed=seed)
    optimizer = make_optimizer(network)
    indices = step_indices(len(digits.train.labels), epochs=epochs, seed=seed)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=len(indices))
    start = time.perf_counter()
    for chosen in indices:
        batch = Labelled(*(part[chosen] for part in digits.train))
        take_step(network, optimizer, batch, micro_batch=SAMPLES_PER_STEP)
        schedule.step()
        on_step()
    seconds = time.perf_counter() - start
    network.eval()
    with torch.no_grad():
        wrong = (network(digits.test.images).argmax(1) != digits.test.labels).sum().item()
    return Outcome(method.name, int(wrong), len(digits.test.labels), len(indices), seconds)


def cut_difference(method: Method, train: Labelled, *, seed: int) -> float:
    """How far the first step ends from itself when it is taken image by image instead of whole.

    The largest |difference| over all parameters and running statistics, each relative to its tensor's maximum. Counters
    are left out: that of a plain BatchNorm counts forwards, and would outweigh what the cut does to its statistics.
    """
    chosen = step_indices(len(train.labels), epochs=1, seed=seed)[0]
    batch = Labelled(*(part[chosen] for part in train))
    whole = build(method, seed=seed)
    single = copy.deepcopy(whole)
    take_step(whole, make_optimizer(whole), batch, micro_batch=SAMPLES_PER_STEP)
    take_step(single, make_optimizer(single), batch, micro_batch=1)
    expected = whole.state_dict()
    ended = single.state_dict()
    return max(_relative(ended[name], tensor) for name, tensor in expected.items() if tensor.is_floating_point())


def _relative(actual: Tensor, expected: Tensor) -> float:
    difference = (actual.double() - expected.double()).abs().max().item()
    return difference / expected.double().abs().max().item() if difference else 0.0
