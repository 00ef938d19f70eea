"""Where the kernels of BCN are tested."""

import pytest

from tests.devices import KERNEL_DEVICES, require_kernels


@pytest.fixture(params=KERNEL_DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """A device that runs kernels."""
    return require_kernels(request.param)
