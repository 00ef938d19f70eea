"""The networks of fig:dist, trained together and one by one: seconds per training step of one network.

    python benchmarks/grid.py [--dataset cifar10] [--device cuda] [--networks 1 7 49]

Each is a forward, a backward and a step of SGD on random images of the data set's size. A stack of K counts as K steps.
"""

import argparse
import time

import torch
import torch.nn.functional as F

from micronorm.figures import dist
from micronorm.figures.preset import StackedNetworks
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
        together, alone = (measure(options, device, count, stacked=stacked) for stacked in (True, False))
        print(f"| {count} | {1e3 * together:.2f} | {1e3 * alone:.2f} | {alone / together:.2f} |")


def measure(options: argparse.Namespace, device: torch.device, count: int, *, stacked: bool) -> float:
    """Seconds per network and step, the least over rounds; one by one, the networks take turns."""
    facts = DATA[options.dataset]
    size = facts.shape[1] * (2 if options.dataset == "digits" else 1)
    batch = dist.STEP_BATCH[options.dataset]
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
        if device.type == "cuda":
            torch.cuda.synchronize()

    work()
    times = []
    for _ in range(options.rounds):
        # On a shared CPU the process's own time; a GPU's work is waited for, which is the wall's.
        clock = time.perf_counter if device.type == "cuda" else time.process_time
        start = clock()
        work()
        times.append(clock() - start)
    return min(times) / count


if __name__ == "__main__":
    main()
