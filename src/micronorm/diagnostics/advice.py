"""What to do about a layer that is accused, and what to expect of it."""

from typing import Literal

from torch import Tensor

from micronorm.diagnostics.seen import NormLook

Problem = Literal["non_finite", "estimates", "stat_diff", "dead", "rare"]


def would_be_active(seen: NormLook) -> Tensor:
    """Which channels would be active in 1 % of positions or more if no affine transformation followed normalization.

    By their normalized moments: a normal one is, from a mean of −2.33 deviations on.
    """
    mean, var = seen.normalized
    return (mean > -2.33 * var.sqrt()) & (var > seen.eps)


def advise(
    problem: Problem, seen: NormLook, standardized: bool, *, name: str = "", channels: tuple[int, ...] = ()
) -> tuple[str, str]:
    """The remedy for a layer and its expected effect, each in words."""
    if problem == "non_finite":
        held = [part for part in seen.not_finite if part not in ("input", "output")]
        if held:
            again = "" if any("running" not in part for part in held) else ", or mn.calibrate(model, batches)"
            return (
                f"{', '.join(held)} of this layer cannot be used: load them from a checkpoint that is finite{again}",
                "everything behind this layer is unknown until then",
            )
        if "input" not in seen.not_finite:
            return (
                "the layer overflows by itself: look at its estimates (a variance below 0?), the size of its input and "
                "its dtype",
                "everything behind this layer is unknown until then",
            )
        return (
            "find what overflows before this layer: the learning rate, half precision, a division by zero",
            "everything behind this layer is unknown until then",
        )
    if problem == "estimates":
        return (
            "mn.calibrate(model, batches) with training images; if these are other images than it was trained on, that "
            "is the finding",
            "normalized channels have mean 0 and deviation 1 again. In a trained network estimates that stand at "
            "(0, 1) were never committed: see mn.attach",
        )
    if problem != "stat_diff" and _affine_is_to_blame(seen, channels):
        shown = list(channels[:8])
        return (
            f"model.get_submodule({name!r}).bias.data[{shown}{' + …' if len(channels) > 8 else ''}] = 0 and train on "
            "with a smaller learning rate or a warm-up: the normalized channels are in order, their weight and bias "
            "push them below zero. No conversion changes that",
            "about half of these channels' positions are active again and pass gradients",
        )
    if seen.family in ("batch", "instance", "batch-channel"):
        return (
            "look at the images and the layers before: the norm itself holds its channels apart",
            "none is promised",
        )
    return _conversion(seen, standardized)


def _affine_is_to_blame(seen: NormLook, channels: tuple[int, ...]) -> bool:
    """Whether most of these channels are kept down by what comes after normalization."""
    return bool(would_be_active(seen)[list(channels)].double().mean() > 0.5)


def _conversion(seen: NormLook, standardized: bool) -> tuple[str, str]:
    layer_norm = ", layer_norm=True" if seen.family == "layer" else ""
    weight = "None" if standardized else "mn.WS()"
    less = "" if standardized else "; mn.convert(model, None, mn.WS()) keeps the norm and helps less"
    worst = float(seen.stat_diff.max())
    by_ws = "" if standardized else "; WS alone brings it nearer to 0 (the paper's fig:stat_diff)"
    return (
        f"mn.convert(model, mn.BCN(), {weight}{layer_norm}), then train on or anew{less}",
        f"StatDiff of this layer goes from {worst:.2g} to 0 as BCN's estimates settle, so that no channel is pushed "
        f"below zero by its neighbours{by_ws}",
    )
