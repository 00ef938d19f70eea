"""Define the hook type that observes a layer without changing what the layer computes.

`micronorm.diagnostics` registers these hooks; `micronorm.nn` recognises them by their class. A norm with an ordinary
hook calls the layers after it one by one, because the hook may read or replace its output. A norm whose hooks are all
passive stays fused with its activation.
"""

from collections.abc import Callable
from typing import Any


class PassiveHook:
    """Call `observe` with the arguments of the hook and return None, so that the model's values stay as they are.

    Copies of the model, made by `copy.deepcopy` or pickle, get a hook that observes nothing.

    Args:
        observe: receives what torch gives the hook (module, inputs, output), or the effective weight where the hook is
            in `weight_observers` of a reparameterized layer.
    """

    def __init__(self, observe: Callable[..., object]) -> None:
        self.observe = observe

    def __call__(self, *args: Any) -> None:
        """Pass the arguments on to `observe`."""
        self.observe(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> "PassiveHook":
        return PassiveHook(_ignore)

    def __reduce__(self) -> Any:
        return PassiveHook, (_ignore,)


def _ignore(*args: Any) -> None:
    """Do nothing: the observer of a copied hook. At module level so that pickle finds it."""
