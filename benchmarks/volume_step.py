"""Training steps of a residual 3-D U-Net with two volumes of 128×128×128: time and peak memory by norm and layout.

    python benchmarks/volume_step.py --out benchmarks/results/volume_step.csv
    python benchmarks/volume_step.py --tiny --device cpu        # the same logic in seconds

The network has the widths and depths of nnU-Net's residual encoder for this patch size, LeakyReLU and deep supervision.
A step is forward, Dice + cross entropy, backward and SGD in bfloat16 autocast, on random volumes. The baseline is
torch's InstanceNorm3d and LeakyReLU in place, as in nnU-Net; ratios are to the faster of its two layouts by the same
route. Routes: "eager", "captured" (the whole step in a CUDA graph) and "compiled" (the network). Methods take turns,
round by round.
"""

from collections.abc import Callable
from typing import Any

import torch
from step_rounds import parse_arguments, prepare, run
from torch import nn
from training_step import allocator_memory

import micronorm as mn
from micronorm.bench.timing import Captured
from micronorm.recipes.networks import ResidualUNet3d
from micronorm.tasks.volumes import Volumes

TORCH = "IN of torch"
METHODS = {
    TORCH: None,
    "IN": (mn.IN(), None),
    "GN": (mn.GN(), None),
    "BCN": (mn.BCN(), None),
    "BCN+WS": (mn.BCN(), mn.WS()),
}
LAYOUTS = {"nhwc": torch.channels_last_3d, "nchw": torch.contiguous_format}
NAMES = ("background", "Anterior", "Posterior")
LEARNING_RATE = 1e-4


class VolumeStep:
    """A network, its optimizer and two volumes; a call takes one step."""

    def __init__(self, method: str, layout: str, route: str, device: torch.device, *, tiny: bool) -> None:
        self.device = device
        on_gpu = device.type == "cuda"
        self.memory_before, _ = allocator_memory(device)
        torch.manual_seed(0)
        widths, blocks, side = ((8, 16, 16), (1, 1, 1), 16) if tiny else _RESIDUAL_ENCODER
        network: Any = ResidualUNet3d(widths=widths, blocks=blocks, classes=len(NAMES))
        if METHODS[method] is None:
            use_instance_norm(network)
        else:
            mn.convert(network, *METHODS[method])
        network = network.to(device).train().to(memory_format=LAYOUTS[layout])
        rate: Any = torch.tensor(LEARNING_RATE, device=device) if on_gpu else LEARNING_RATE
        self.optimizer = torch.optim.SGD(network.parameters(), lr=rate, momentum=0.99, nesterov=True, fused=on_gpu)
        self.network = torch.compile(network, dynamic=False) if route == "compiled" else network
        volumes = torch.randn(2, 1, *[side] * 3, device=device).contiguous(memory_format=LAYOUTS[layout])
        self.batch = (volumes, torch.randint(0, len(NAMES), (2, *[side] * 3), device=device))
        self.task = Volumes(None, None, names=NAMES, patch=(side,) * 3)

    def __call__(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        # The cast weights that autocast keeps would outlive a capture.
        with torch.autocast(self.device.type, dtype=torch.bfloat16, cache_enabled=False):
            loss = self.task.loss(self.network, self.batch)
        (loss.sum / loss.count).backward()
        self.optimizer.step()

    def capture(self) -> Callable[[], object]:
        """Return the step as a CUDA graph."""
        self.optimizer.zero_grad(set_to_none=True)
        return Captured(self)


_RESIDUAL_ENCODER = ((32, 64, 128, 256, 320, 320), (1, 3, 4, 6, 6, 6), 128)


def use_instance_norm(network: nn.Module) -> None:
    """Replace each BatchNorm3d by torch's InstanceNorm3d with an affine, as nnU-Net builds it."""
    for module in list(network.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm3d):
                setattr(module, name, nn.InstanceNorm3d(child.num_features, affine=True))


def build(row: dict[str, Any], device: torch.device, tiny: bool) -> tuple[Callable[[], object], float | None]:
    """Return what to time for a row, and the peak of its memory in MB."""
    step = VolumeStep(row["method"], row["layout"], row["route"], device, tiny=tiny)
    return prepare(step, captured=row["route"] == "captured")


def main() -> None:
    options = parse_arguments(__doc__, {"layout": list(LAYOUTS), "method": list(METHODS)})
    keys = [{"method": method, "layout": layout} for layout in options.layout for method in options.method]
    run("volume_step.py", options, [keys], build, base=TORCH, suffix="torch")


if __name__ == "__main__":
    main()
