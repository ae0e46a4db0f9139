"""The processes of a run: what is left of them when it is over."""

from datetime import timedelta

import torch
from torch import distributed

from sagebwd.training import world


def test_a_run_leaves_none_of_its_groups_behind() -> None:
    """One after another in the same default group, as in the parity suite: on a GPU each group holds memory."""
    groups = distributed.distributed_c10d._world.pg_map
    with world.process_group(torch.device("cpu"), timedelta(minutes=1)):
        for _ in range(2):
            with world.join(1, seed=1):
                assert len(groups) > 1
            assert list(groups) == [distributed.group.WORLD]
    assert not groups
