"""Gradient accumulation in Lightning: eight images per step, one at a time.

    pip install -e '.[lightning]'
    python examples/lightning_loop.py

`mn.convert` is the only new line. `main(accumulate=8, micro_batch=1)` and `main(accumulate=1, micro_batch=8)` train the
same network: Lightning divides the loss of each batch by `accumulate_grad_batches`, so with batches of equal size a
mean over the batch is right. `drop_last=True` keeps the sizes equal.
"""

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import micronorm as mn
from micronorm.data.digits import read_digits


class Digits(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        model = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 10),
        )
        self.model = mn.convert(model)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.model(images), labels)
        if batch_idx % (10 * self.trainer.accumulate_grad_batches) == 0:
            print(f"step {self.global_step:3d} loss of the first batch {loss.item():.4f}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9)


def main(
    steps: int = 40, accumulate: int = 8, micro_batch: int = 1, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    L.seed_everything(0, verbose=False)
    images, labels = read_digits().train
    shuffle = torch.Generator().manual_seed(0)
    loader = DataLoader(
        TensorDataset(images.to(dtype), labels), micro_batch, shuffle=True, generator=shuffle, drop_last=True
    )

    task = Digits().to(dtype)
    trainer = L.Trainer(
        max_steps=steps,
        accumulate_grad_batches=accumulate,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(task, loader)  # the optimizer commits the estimates at each of its steps

    moved = max(b.abs().max().item() for name, b in task.named_buffers() if name.endswith("running_mean"))
    print(f"the estimates of the mean moved by up to {moved:.3f} from 0")
    return task.model.state_dict()


if __name__ == "__main__":
    main()
