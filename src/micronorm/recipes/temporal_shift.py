"""The temporal shift module (TSM; Lin et al., 2019): a 2-D residual network that reads clips.

Legend of shapes: N clips, T frames per clip, C channels.
"""

from typing import Any

import torch
import torch.fx
from torch import Tensor, nn

from micronorm.convert.flow import first_layers
from micronorm.convert.trace import trace_flow
from micronorm.nn.weight import PLAIN


class TemporalShift(nn.Module):
    """Move an eighth of the channels one frame back in time, and another eighth one frame ahead.

    The first C/share channels of a frame come from the next frame, the second C/share from the frame before; the rest
    stay. At the ends of a clip, where such a frame does not exist, they are zero.

    Args:
        frames: T, the frames of a clip, which are successive samples of the batch.
        share: move 1/share of the channels each way.

    Example:
        >>> clip = torch.arange(1.0, 4.0).reshape(3, 1, 1, 1).expand(3, 4, 1, 1)
        >>> TemporalShift(frames=3, share=4)(clip).squeeze()
        tensor([[2., 0., 1., 1.],
                [3., 1., 2., 2.],
                [0., 2., 3., 3.]])
    """

    def __init__(self, frames: int, *, share: int = 8) -> None:
        super().__init__()
        if frames < 1 or share < 2:
            raise ValueError(f"frames must be at least 1 and share at least 2, got {frames} and {share}")
        self.frames, self.share = frames, share

    def forward(self, x: Tensor) -> Tensor:
        """(N·T)×C×H×W to the same shape."""
        clips = x.unflatten(0, (-1, self.frames))
        moved = clips.shape[2] // self.share
        shifted = torch.zeros_like(clips)
        shifted[:, :-1, :moved] = clips[:, 1:, :moved]
        shifted[:, 1:, moved : 2 * moved] = clips[:, :-1, moved : 2 * moved]
        shifted[:, :, 2 * moved :] = clips[:, :, 2 * moved :]
        return shifted.flatten(0, 1)

    def shift_input(self, layer: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
        """Shift the input of a layer. This is the forward pre-hook of the layers that read shifted frames."""
        return self(*inputs)

    def extra_repr(self) -> str:
        """Return the arguments."""
        return f"frames={self.frames}, share={self.share}"


class ClipNetwork(nn.Module):
    """Apply an image network to each frame of a clip and average its outputs (the consensus of TSN and TSM).

    Without a shift, the output does not depend on the order of the frames.

    Args:
        network: maps images to logits, (N·T)×C×H×W to (N·T)×classes.
        frames: T.

    Example:
        >>> network = nn.Sequential(nn.Flatten(), nn.Linear(12, 5))
        >>> ClipNetwork(network, frames=8)(torch.randn(2, 8, 3, 2, 2)).shape
        torch.Size([2, 5])
    """

    def __init__(self, network: nn.Module, *, frames: int = 8) -> None:
        super().__init__()
        self.network, self.frames = network, frames

    def forward(self, clips: Tensor) -> Tensor:
        """N×T×C×H×W to N×classes."""
        logits = self.network(join_frames(clips, self.frames))
        return logits.unflatten(0, (-1, self.frames)).mean(1)


def join_frames(clips: Tensor, frames: int) -> Tensor:
    """Return N×T×C×H×W clips as (N·T)×C×H×W frames. Raise ValueError if T is not `frames`."""
    if clips.ndim != 5 or clips.shape[1] != frames:
        raise ValueError(f"the network takes clips of shape N×{frames}×C×H×W, got {tuple(clips.shape)}")
    return clips.flatten(0, 1)


torch.fx.wrap("join_frames")  # the check is not part of the data flow that a conversion traces


def temporal_shift(network: nn.Module, *, frames: int = 8, share: int = 8, example_inputs: Any = None) -> ClipNetwork:
    """Let a 2-D residual network read clips: shift channels between frames, and average the outputs of the frames.

    The input of the first convolution of each residual branch is shifted, by a hook on this convolution. Parameters
    keep their names in `network`, which is changed in place. Call `mn.convert` before or after this function.

    Norms that treat a batch as micro-batches count frames: one clip of 8 frames is `micro_batch=8`, for example
    `mn.BN(micro_batch=8)`.

    Args:
        network: maps images to logits, such as a ResNet of torchvision or timm.
        frames: T, the frames of a clip.
        share: move 1/share of the channels each way.
        example_inputs: images to run the network on if torch.fx cannot trace it.

    Returns:
        The network for N×T×C×H×W clips.

    Raises:
        ValueError: the network has no residual branch, has shifts already, or a branch has too few channels.

    Example:
        >>> from micronorm.recipes.networks import build_network
        >>> model = temporal_shift(build_network("cifar-resnet20", classes=5), frames=8)
        >>> model(torch.randn(2, 8, 3, 32, 32)).shape
        torch.Size([2, 5])
    """
    flow = trace_flow(network, _is_leaf, example_inputs=example_inputs)
    starts = [layer for layer in first_layers(flow) if isinstance(layer, nn.Conv2d)]
    if not starts:
        raise ValueError(
            f"{type(network).__name__} has no residual branch that begins with a Conv2d, in the data flow found by "
            f"{flow.method}{f' ({flow.detail})' if flow.detail else ''}; without branches use ClipNetwork"
        )
    narrow = min(starts, key=lambda layer: layer.in_channels)
    if narrow.in_channels < share:
        raise ValueError(f"1/{share} of {narrow.in_channels} channels is less than one channel; give a smaller share")
    if any(isinstance(getattr(hook, "__self__", None), TemporalShift) for hook in _input_hooks(starts)):
        raise ValueError("the network shifts its frames already; call temporal_shift once")
    model = ClipNetwork(network, frames=frames)
    model.shift = shift = TemporalShift(frames, share=share)  # copies of the model take its hooks along
    for layer in starts:
        layer.register_forward_pre_hook(shift.shift_input)
    return model


def _input_hooks(layers: list[nn.Conv2d]) -> list[Any]:
    return [hook for layer in layers for hook in layer._forward_pre_hooks.values()]


def _is_leaf(module: nn.Module) -> bool:
    return isinstance(module, PLAIN) or type(module).__module__.startswith("micronorm.nn.")
