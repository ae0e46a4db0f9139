from collections.abc import Iterator

import pytest

from sagebwd.training import world
from sagebwd.training.world import World


@pytest.fixture
def alone() -> Iterator[World]:
    """Megatron's parallel state in a world of one, without torchrun, and gone again afterwards."""
    with world.join(tensor=1, seed=0) as here:
        yield here
