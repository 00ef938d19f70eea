"""`mn.plan` and `mn.convert`: check the options, then plan and apply."""

from typing import Any, TypeVar, cast

from torch import nn

from micronorm.convert.plan import Plan
from micronorm.convert.planner import Filter, Planner
from micronorm.convert.surgery import WRAPPERS, refuse_wrappers
from micronorm.nn.bcn import BCN
from micronorm.nn.inputs import check_count, check_flag
from micronorm.nn.spec import NormSpec, WeightSpec
from micronorm.nn.weight import CWN, WS

Model = TypeVar("Model", bound=nn.Module)


def plan(
    model: nn.Module,
    norm: NormSpec | None = BCN(),  # noqa: B008  (specs are immutable)
    weight: WeightSpec | None = WS(),  # noqa: B008
    *,
    filter: Filter | None = None,
    example_inputs: Any = None,
    absorb: bool | None = None,
    warm_steps: int = 0,
    layer_norm: bool = False,
    fuse: bool = True,
    zero_init_residual: bool = False,
) -> Plan:
    """Decide what becomes of every normalization and convolution of `model`. Nothing changes until `apply()`.

    Every BatchNorm (also synchronized or frozen), GroupNorm and InstanceNorm becomes the layer of `norm`, with its
    affine and running statistics. A convolution becomes the layer of `weight` if its output reaches such a norm;
    classifiers and predictors stay as they are. So do frozen convolutions and the norms behind them.

    Args:
        model: any torch.nn.Module that is not wrapped (DDP, FSDP) or compiled.
        norm: the norm spec; None keeps the norms and converts the convolutions before them.
        weight: the weight spec; None keeps the convolutions.
        filter: filter(module, name) returns whether a layer may be converted.
        example_inputs: inputs to run the model on if torch.fx cannot trace it: a tuple of arguments, a dictionary of
            keyword arguments, or the one argument.
        absorb: keep each convolution's old mean and scale, so that it starts as the same function (WS only).
        warm_steps: start as the pretrained network and become BCN over this many optimizer steps; implies `absorb`.
        layer_norm: convert layer norms too.
        fuse: let norms compute the addition and the activation that follow them, in nn.Sequential and in known blocks
            (`docs/conversion.md`), and let kernels compute max-pooling on a GPU. Outputs and gradients are the same,
            except that in half precision the kernels round once where separate operations round each time. A model
            that already has our norms can be converted just for this, for example after unpickling.
        zero_init_residual: start the last norm of each residual branch at zero (BCN: `group_weight`, others: `weight`),
            so that each block starts as its shortcut. Deep networks that train from scratch need it.

    Returns:
        A plan that prints as a table with a reason for each layer. `plan.apply()` converts the model.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if options contradict each other, the model is wrapped, nothing would change, or
            `zero_init_residual` finds no residual branch.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 4, 1))
        >>> print(plan(model))
        name  type         becomes                 reason
        0     Conv2d       WSConv2d                its output meets BatchNorm2d '1'
        1     BatchNorm2d  BatchChannelNorm(16/4)  statistics and affine carried over; with the ReLU after it
        3     Conv2d       stays                   its output meets no converted norm: it is the model's output
        1 norms converted, 0 norms left, 1 convolutions converted, 1 convolutions left, 1 norms fused
        paired by fx
    """
    refuse_wrappers(model, dict.fromkeys(WRAPPERS, "convert first, then wrap or compile the converted model"))
    check_flag("layer_norm", layer_norm)
    check_flag("fuse", fuse)
    check_flag("zero_init_residual", zero_init_residual)
    if zero_init_residual and warm_steps:
        raise ValueError(
            "warm_steps starts as the pretrained network, zero_init_residual without its branches: use one"
        )
    absorb = _check_options(norm, weight, absorb=absorb, warm_steps=warm_steps)
    planner = Planner(
        model=model,
        norm=norm,
        weight=weight,
        filter=filter,
        absorb=absorb,
        warm_steps=warm_steps,
        layer_norm=layer_norm,
        fuse=fuse,
        zero_init_residual=zero_init_residual,
    )
    return planner.plan(example_inputs)


def convert(
    model: Model,
    norm: NormSpec | None = BCN(),  # noqa: B008
    weight: WeightSpec | None = WS(),  # noqa: B008
    *,
    filter: Filter | None = None,
    example_inputs: Any = None,
    absorb: bool | None = None,
    warm_steps: int = 0,
    layer_norm: bool = False,
    fuse: bool = True,
    zero_init_residual: bool = False,
) -> Model:
    """Convert `model` in place. Arguments and errors are those of `mn.plan`.

    Returns:
        The model, or the new layer if the model itself is a layer that was replaced.

    Example:
        >>> convert(nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16)))
        Sequential(
          (0): WSConv2d(3, 16, kernel_size=(3, 3), stride=(1, 1), eps=1e-05)
          (1): BatchChannelNorm(16, num_groups=4, statistics='step', rate='lr', eps=1e-05)
        )
    """
    made = plan(
        model,
        norm,
        weight,
        filter=filter,
        example_inputs=example_inputs,
        absorb=absorb,
        warm_steps=warm_steps,
        layer_norm=layer_norm,
        fuse=fuse,
        zero_init_residual=zero_init_residual,
    )
    return cast(Model, made.apply())  # the model itself, unless the model is a single norm


def _check_options(norm: NormSpec | None, weight: WeightSpec | None, *, absorb: bool | None, warm_steps: int) -> bool:
    """Raise if options contradict each other; return whether to absorb."""
    for name, spec, kind in (("norm", norm, NormSpec), ("weight", weight, WeightSpec)):
        if spec is not None and not isinstance(spec, kind):
            named = f"{spec.__name__}()" if isinstance(spec, type) and issubclass(spec, kind) else ""
            usual = "mn.BCN() or mn.GN()" if kind is NormSpec else "mn.WS()"
            hint = f"did you mean mn.{named}?" if named else f"write {usual}"
            raise TypeError(f"{name} must be a spec or None, got {spec!r}; {hint}")
    if norm is None and weight is None:
        raise ValueError("norm=None and weight=None leave nothing to convert")
    if absorb and not isinstance(weight, WS):
        raise ValueError(
            f"absorb=True keeps what weight standardization takes away; it needs weight=mn.WS(), got {weight}"
        )
    if not warm_steps:
        return bool(absorb)
    check_count("warm_steps", warm_steps)
    if not isinstance(norm, BCN):
        raise ValueError(f"warm_steps blends from BatchNorm to BCN; it needs norm=mn.BCN(), got {norm}")
    if norm.eps != BCN().eps:
        raise ValueError(
            f"warm_steps starts as the pretrained network, at its own eps; mn.BCN(eps={norm.eps}) is another"
        )
    if absorb is False and isinstance(weight, WS):
        raise ValueError(
            "warm_steps starts as the pretrained network, which standardized convolutions do only with absorb=True"
        )
    if isinstance(weight, CWN):
        raise ValueError("warm_steps starts as the pretrained network, but CWN drops its kernels' means; use mn.WS()")
    return isinstance(weight, WS)
