"""Image classification in the manner of torchvision's references/classification, on scikit-learn's digits.

An ordinary script: only the line behind `--micronorm` uses micronorm. The images of a step are split into micro-batches
of `--micro-batch` images. With BatchNorm the result depends on that number; with the line it does not.

    python examples/train_reference.py --micro-batch 1
    python examples/train_reference.py --micro-batch 1 --micronorm
"""

import argparse
import time

import torch
import torch.nn.functional as F
import torchvision
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import micronorm as mn


def load_data(args: argparse.Namespace) -> tuple[TensorDataset, TensorDataset]:
    """1,297 training and 500 test images as N×3×size×size in [−1, 1], with their labels."""
    pixels, labels = (torch.from_numpy(a) for a in load_digits(return_X_y=True))
    images = F.interpolate(pixels.view(-1, 1, 8, 8) / 8 - 1, size=args.image_size, mode="bilinear")
    images = images.expand(-1, 3, -1, -1).to(getattr(torch, args.dtype))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:-500], order[-500:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def train_one_epoch(
    model: nn.Module,
    criterion: nn.Module,
    optimizer: torch.optim.Optimizer,
    data_loader: DataLoader[tuple[Tensor, ...]],
    device: torch.device,
    epoch: int,
    args: argparse.Namespace,
) -> None:
    model.train()
    start = time.time()
    for i, (images, targets) in enumerate(data_loader):
        if args.steps is not None and i >= args.steps:
            break
        images, targets = images.to(device), targets.to(device)
        optimizer.zero_grad()
        total = 0.0
        for image, target in zip(images.split(args.micro_batch), targets.split(args.micro_batch), strict=True):
            # a sum over samples, divided once by the count of the step: also right if the last piece is smaller
            loss = criterion(model(image), target).sum() / len(images)
            loss.backward()
            total += loss.item()
        optimizer.step()
        if i % args.print_freq == 0:
            lr = optimizer.param_groups[0]["lr"]
            speed = (i + 1) * len(images) / (time.time() - start)
            print(f"Epoch: [{epoch}] [{i}/{len(data_loader)}] lr: {lr:.4f} loss: {total:.4f} img/s: {speed:.0f}")


@torch.inference_mode()
def evaluate(model: nn.Module, data_loader: DataLoader[tuple[Tensor, ...]], device: torch.device) -> float:
    model.eval()
    right = count = 0
    for images, targets in data_loader:
        right += (model(images.to(device)).argmax(1).cpu() == targets).sum().item()
        count += len(targets)
    return 100 * right / count


def main(args: argparse.Namespace) -> nn.Module:
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    train, test = load_data(args)
    shuffle = torch.Generator().manual_seed(args.seed)
    data_loader = DataLoader(train, args.batch_size, shuffle=True, generator=shuffle, drop_last=True)
    data_loader_test = DataLoader(test, batch_size=100)

    model = torchvision.models.get_model(args.model, num_classes=10)
    if args.micronorm:
        model = mn.convert(model)  # the one line; before the optimizer, which needs the new parameters too
    model.to(device, getattr(torch, args.dtype))

    criterion = nn.CrossEntropyLoss(label_smoothing=args.label_smoothing, reduction="none")
    # no weight decay for norms and biases, by their shape
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": args.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": args.norm_weight_decay},
    ]
    optimizer = torch.optim.SGD(groups, lr=args.lr, momentum=args.momentum)
    lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)

    for epoch in range(args.epochs):
        train_one_epoch(model, criterion, optimizer, data_loader, device, epoch, args)
        lr_scheduler.step()
        if not args.no_test:
            print(f"Test: epoch {epoch} Acc@1 {evaluate(model, data_loader_test, device):.2f}")
    return model


def get_args_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="PyTorch Classification Training")
    parser.add_argument("--micronorm", action="store_true", help="the one line: mn.convert(model)")
    parser.add_argument("--micro-batch", default=32, type=int, help="images per forward and backward")
    parser.add_argument("-b", "--batch-size", default=32, type=int, help="images per optimizer step")
    parser.add_argument("--model", default="resnet18", type=str)
    parser.add_argument("--device", default="cpu", type=str)
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64"])
    parser.add_argument("--image-size", default=64, type=int)
    parser.add_argument("--epochs", default=2, type=int)
    parser.add_argument("--steps", default=None, type=int, help="stop each epoch after so many steps")
    parser.add_argument("--lr", default=0.01, type=float)
    parser.add_argument("--momentum", default=0.9, type=float)
    parser.add_argument("--wd", "--weight-decay", default=1e-4, type=float, dest="weight_decay")
    parser.add_argument("--norm-weight-decay", default=0.0, type=float)
    parser.add_argument("--label-smoothing", default=0.0, type=float)
    parser.add_argument("--print-freq", default=10, type=int)
    parser.add_argument("--no-test", action="store_true", help="train only")
    parser.add_argument("--seed", default=0, type=int)
    return parser


if __name__ == "__main__":
    main(get_args_parser().parse_args())
