"""Table `quick`, ours: small networks on CIFAR-10 for 30 epochs, to see the methods apart within minutes."""

from micronorm.engine.schedules import Milestones
from micronorm.engine.settings import Settings
from micronorm.nn import BCN, BN, GN, WS
from micronorm.nn.spec import NormSpec, WeightSpec
from micronorm.recipes.protocols import OPTIMIZER, make
from micronorm.recipes.recipe import Recipe, Table

_GN = GN(groups=32, min_channels_per_group=4)
_BCN = BCN(groups=32, min_channels_per_group=4, statistics="step")
_OURS = 'our own table: the paper has none like it. BCN is statistics="step"'


def _row(network: str, method: str, norm: NormSpec, weight: WeightSpec | None, *, batch: int = 1) -> Recipe:
    settings = Settings(epochs=30, step_batch=128, optimizer=OPTIMIZER, schedule=Milestones((15, 22)))
    short = network.replace("cifar-resnet", "rn")
    return make(
        f"quick/{short}-{method}", network, "cifar10", norm, weight, batch=batch, settings=settings, notes=(_OURS,)
    )


def _rows(network: str) -> tuple[Recipe, ...]:
    return (
        _row(network, "bn", BN(), None, batch=128),
        _row(network, "gn", _GN, None),
        _row(network, "gn-ws", _GN, WS()),
        _row(network, "bcn-ws", _BCN, WS()),
    )


TABLE = Table(
    name="quick",
    title="Ours: ResNet-20 and ResNet-56 on CIFAR-10 for 30 epochs, BN of 128 images, GN, GN+WS and BCN+WS of one",
    rows=(*_rows("cifar-resnet20"), *_rows("cifar-resnet56")),
)
