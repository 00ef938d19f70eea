"""Gradient accumulation in Accelerate: eight images per step, one at a time.

    pip install -e '.[accelerate]'
    python examples/accelerate_loop.py

`mn.convert` is the only new line. `main(accumulate=8, micro_batch=1)` and `main(accumulate=1, micro_batch=8)` train the
same network: `accelerator.backward` divides each loss by `gradient_accumulation_steps`, so with batches of equal size a
mean over the batch is right. `drop_last=True` keeps the sizes equal.
"""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
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
        TensorDataset(images.to(dtype), labels), micro_batch, shuffle=True, generator=shuffle, drop_last=True
    )

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    model = mn.convert(make_model()).to(dtype)  # before `prepare`, which may wrap the model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    model.train()
    for batch, (images, labels) in zip(range(steps * accumulate), loader, strict=False):
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()  # a step, and with it a commit of the estimates, at every `accumulate`-th batch only
            optimizer.zero_grad()
        if batch % (10 * accumulate) == 0:
            print(f"step {batch // accumulate:3d} loss of the first batch {loss.item():.4f}")

    model = accelerator.unwrap_model(model)
    moved = max(b.abs().max().item() for name, b in model.named_buffers() if name.endswith("running_mean"))
    print(f"the estimates of the mean moved by up to {moved:.3f} from 0")
    return model.state_dict()


if __name__ == "__main__":
    main()
