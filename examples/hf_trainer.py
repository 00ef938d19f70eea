"""Gradient accumulation in the Hugging Face Trainer: eight images per step, one at a time.

    pip install -e '.[transformers]'
    python examples/hf_trainer.py

`main(accumulate=8, micro_batch=1)` and `main(accumulate=1, micro_batch=8)` train the same network. The Trainer counts
the labels of all batches of a step and passes the count to `compute_loss_func`. So the loss is a sum over samples,
divided by the step's count. That also holds for the last, smaller step of an epoch.
"""

import tempfile

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

import micronorm as mn
from micronorm.data.digits import read_digits


class Digits(Dataset[dict[str, Tensor]]):
    def __init__(self, dtype: torch.dtype) -> None:
        images, self.labels = read_digits().train
        self.images = images.to(dtype)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"images": self.images[index], "labels": self.labels[index]}


class Classifier(nn.Module):
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

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        return {"logits": self.model(images)}


def summed_loss(outputs: dict[str, Tensor], labels: Tensor, num_items_in_batch: Tensor | None = None) -> Tensor:
    count = len(labels) if num_items_in_batch is None else num_items_in_batch
    return F.cross_entropy(outputs["logits"], labels, reduction="sum") / count


def main(
    steps: int = 40, accumulate: int = 8, micro_batch: int = 1, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Classifier().to(dtype)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            label_names=["labels"],  # the Trainer drops columns it does not know, and the model takes images only
            max_steps=steps,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=accumulate,
            optim="sgd",
            optim_args="momentum=0.9",
            learning_rate=0.02,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,  # the default clips to 1, and clipping hides a loss of the wrong size
            use_cpu=True,
            logging_steps=10,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,  # print the losses instead
            seed=0,
        )
        # The optimizer commits the estimates at each of its steps
        Trainer(model, args, train_dataset=Digits(dtype), compute_loss_func=summed_loss).train()

    moved = max(b.abs().max().item() for name, b in model.named_buffers() if name.endswith("running_mean"))
    print(f"the estimates of the mean moved by up to {moved:.3f} from 0")
    return model.model.state_dict()


if __name__ == "__main__":
    main()
