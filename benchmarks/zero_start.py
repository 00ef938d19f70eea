"""Train torchvision's ResNet-18 on the digits at 32 px and lr 0.05, from three starts: usual, with a warm-up, and zero.

Print the highest loss of the first 20 steps, and the test accuracy after the last step.

    python benchmarks/zero_start.py --steps 100 --seeds 0 1
"""

import argparse

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

import micronorm as mn
from micronorm.data.digits import read_digits

METHODS = {"BCN+WS": (mn.BCN(), mn.WS()), "GN+WS": (mn.GN(), mn.WS()), "BN": (mn.BN(), None)}
STARTS = ("usual", "20 warm-up steps", "zero_init_residual")
LR, BATCH = 0.05, 32


def enlarge(images: Tensor) -> Tensor:
    """N×1×8×8 digits as N×3×32×32 images."""
    return F.interpolate(images, (32, 32), mode="bilinear").expand(-1, 3, -1, -1)


def build(method: str, start: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = torchvision.models.resnet18(num_classes=10)
    norm, weight = METHODS[method]
    zero = start == "zero_init_residual"
    return model if weight is None and not zero else mn.convert(model, norm, weight, zero_init_residual=zero)


def run(model: nn.Module, start: str, seed: int, steps: int) -> tuple[float, float]:
    """Return the highest loss of the first 20 steps, and the test accuracy."""
    train, test = read_digits()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, weight_decay=1e-4)
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for step in range(steps):
        warm = min(1.0, (step + 1) / 20) if start == "20 warm-up steps" else 1.0
        optimizer.param_groups[0]["lr"] = LR * warm
        rows = torch.randint(len(train.labels), (BATCH,), generator=generator)
        loss = F.cross_entropy(model(enlarge(train.images[rows])), train.labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        correct = model(enlarge(test.images)).argmax(1) == test.labels
    return max(losses[:20]), correct.double().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    options = parser.parse_args()
    for method in METHODS:
        for start in STARTS:
            for seed in options.seeds:
                peak, accuracy = run(build(method, start, seed), start, seed, options.steps)
                print(f"{method}  {start}  seed {seed}: peak loss {peak:.1f}, test accuracy {accuracy:.1%}", flush=True)


if __name__ == "__main__":
    main()
