"""Fine-tune a converted BatchNorm network on another task: warm or abrupt conversion, at equal budgets.

    python benchmarks/transfer.py DATA OUT.csv    # DATA has CIFAR-10 and CIFAR-100

timm's resnet10t learns 20,000 images of CIFAR-100, gets a new classifier, is converted, and learns 2,000 images of
CIFAR-10 in 150 steps of 32. OUT.csv has the error in per cent on 2,000 test images.
"""

import copy
import sys
from itertools import product
from typing import Any

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import micronorm as mn
from micronorm.data.cifar import open_cifar

BATCH, STEPS, LR = 32, 150, 0.02
METHODS = {"BN kept": None, "abrupt": 0, "warm 15 steps": 15, "warm 75 steps": 75}  # steps of the blend


def load(samples, indices: Tensor, epoch: int = 0) -> tuple[Tensor, Tensor]:
    return next(iter(samples.load([(epoch, indices)], seed=0)))


def train(model: nn.Module, samples, pool: Tensor, *, steps: int, lr: float, seed: int) -> nn.Module:
    """SGD with a linear rise of the rate over a tenth of the steps, and a linear fall."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)
    options = {"pct_start": 0.1, "cycle_momentum": False, "anneal_strategy": "linear"}
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, **options)
    random = torch.Generator().manual_seed(seed)
    epochs = steps * BATCH // len(pool) + 1
    order = torch.cat([torch.randperm(len(pool), generator=random) for _ in range(epochs)])
    for step, chosen in enumerate(order[: steps * BATCH].split(BATCH)):
        images, labels = load(samples, pool[chosen], step)
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model.eval()


def main(data: str, out: str) -> None:
    torch.manual_seed(0)
    base: Any = timm.create_model("resnet10t", num_classes=100)
    train(base, open_cifar(data, classes=100)[0], torch.arange(20_000), steps=1875, lr=0.1, seed=0).train()
    samples, tests = open_cifar(data, classes=10)
    test = [load(tests, torch.arange(k, k + 250)) for k in range(0, 2000, 250)]
    with open(out, "w") as file:
        print("method,seed,test_error", file=file)
        for seed, (method, blend) in product(range(3), METHODS.items()):
            torch.manual_seed(seed)
            model = copy.deepcopy(base)
            model.reset_classifier(10)
            pool = torch.randperm(50_000)[:2000]
            model = model if blend is None else mn.convert(model, warm_steps=blend)
            train(model, samples, pool, steps=STEPS, lr=LR, seed=seed)
            with torch.no_grad():
                wrong = sum(int((model(images).argmax(1) != labels).sum()) for images, labels in test)
            print(f"{method},{seed},{wrong / 20}", file=file, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
