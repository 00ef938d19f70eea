"""micronorm: train any vision network one image at a time, as accurately as with a large batch."""

from typing import TYPE_CHECKING, Any

from micronorm import export, functional, nn
from micronorm.check import check_cuts
from micronorm.commit import attach
from micronorm.convert import calibrate, convert, plan
from micronorm.diagnostics.observe import observe
from micronorm.export import fold
from micronorm.nn.batch import BN
from micronorm.nn.batch_renorm import BRN
from micronorm.nn.bcn import BCN
from micronorm.nn.frn_evonorm import FRN, EvoNormS0
from micronorm.nn.group import GN, IN, LN
from micronorm.nn.per_step.recompute import recompute
from micronorm.nn.spec import NormSpec
from micronorm.nn.switchable import SN
from micronorm.nn.weight import CWN, WN, WS

if TYPE_CHECKING:
    from micronorm.recipes.load import load

__version__ = "0.1.0"

__all__ = [
    "BCN",
    "BN",
    "BRN",
    "CWN",
    "FRN",
    "GN",
    "IN",
    "LN",
    "SN",
    "WN",
    "WS",
    "EvoNormS0",
    "NormSpec",
    "attach",
    "calibrate",
    "check_cuts",
    "convert",
    "export",
    "fold",
    "functional",
    "load",
    "nn",
    "observe",
    "plan",
    "recompute",
]


def __getattr__(name: str) -> Any:
    if name == "load":  # imported on first use: the recipes import the whole training engine
        from micronorm.recipes.load import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
