"""The networks of fig:dist, trained together and one by one: seconds per training step of one network.

    python benchmarks/grid.py [--dataset cifar10] [--device cuda] [--networks 1 7 49]

Each is a forward, a backward and a step of SGD on random images of the data set's size. A stack of K counts as K steps.
"""

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from micronorm.recipes.figures import dist
from micronorm.recipes.figures.preset import StackedNetworks
from micronorm.recipes.recipe import DATA


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", choices=("digits", "cifar10"), default="digits")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--networks", type=int, nargs="+", default=[7, 49])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    device = torch.device(options.device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} thread(s)"
    print(f"{options.dataset}, {dist.STEP_BATCH[options.dataset]} images per step, {name}, torch {torch.__version__}")
    print("| networks | together, ms per network | one by one, ms per network | ratio |\n| --- | --- | --- | --- |")
    for count in options.networks:
        works = [prepare(options.dataset, device, count, stacked=stacked) for stacked in (True, False)]
        # In turn, so that a busy moment of the machine falls on both; the least of each is what it can do.
        rounds = [[measure(work, device) for work in works] for _ in range(options.rounds + 1)][1:]
        together, alone = (1e3 * min(column) / count for column in zip(*rounds, strict=True))
        print(f"| {count} | {together:.2f} | {alone:.2f} | {alone / together:.2f} |")


def prepare(dataset: str, device: torch.device, count: int, *, stacked: bool) -> Callable[[], None]:
    """A training step of `count` networks: at once, or one after the other."""
    facts = DATA[dataset]
    size, batch = facts.shape[1] * (2 if dataset == "digits" else 1), dist.STEP_BATCH[dataset]
    images = torch.randn(batch, facts.shape[0], size, size, device=device).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(facts.classes, (batch,), device=device)
    made = [dist.make(1.0, 0.5, seed=0, inputs=facts.shape[0], classes=facts.classes) for _ in range(count)]
    models = [StackedNetworks(made)] if stacked else made
    for model in models:
        model.to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9) for model in models]

    def work() -> None:
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            logits = model(images).reshape(-1, facts.classes)
            F.cross_entropy(logits, labels.repeat_interleave(len(logits) // batch)).backward()
            optimizer.step()

    return work


def measure(work: Callable[[], None], device: torch.device) -> float:
    """Seconds: the process's own on a CPU, which may be shared; the wall's on a GPU, whose work is waited for."""
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    start = clock()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - start


if __name__ == "__main__":
    main()
