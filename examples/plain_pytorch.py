"""Gradient accumulation in plain PyTorch: eight images per step, one at a time.

    python examples/plain_pytorch.py

`main(accumulate=8, micro_batch=1)` and `main(accumulate=1, micro_batch=8)` train the same network. The loss is a sum
over the samples, divided once by the step's count: that would hold for pieces of unequal sizes too.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import micronorm as mn
from micronorm.data.digits import read_digits


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def main(
    steps: int = 40, accumulate: int = 8, micro_batch: int = 1, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    torch.manual_seed(0)
    images, labels = read_digits().train
    shuffle = torch.Generator().manual_seed(0)
    loader = DataLoader(
        TensorDataset(images.to(dtype), labels), accumulate * micro_batch, shuffle=True, generator=shuffle
    )

    model = mn.convert(make_model()).to(dtype)  # before the optimizer, which must hold the new parameters
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

    for step, (images, labels) in zip(range(steps), loader, strict=False):
        optimizer.zero_grad()
        total = 0.0
        for x, y in zip(images.split(micro_batch), labels.split(micro_batch), strict=True):
            loss = F.cross_entropy(model(x), y, reduction="sum") / len(images)
            loss.backward()
            total += loss.item()
        optimizer.step()  # parameters and estimates move together
        if step % 10 == 0:
            print(f"step {step:3d} loss {total:.4f}")

    moved = max(b.abs().max().item() for name, b in model.named_buffers() if name.endswith("running_mean"))
    print(f"the estimates of the mean moved by up to {moved:.3f} from 0")
    return model.state_dict()


if __name__ == "__main__":
    main()
