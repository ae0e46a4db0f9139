"""Prefetching: the same batches, ahead of time, and no thread left behind."""

import threading
import time
from collections.abc import Iterator

import pytest

from sagebwd.training.prefetch import prefetch


def threads() -> int:
    return sum(thread.name == "prefetch" for thread in threading.enumerate())


def test_the_same_in_the_same_order() -> None:
    assert list(prefetch(range(50), ahead=3)) == list(range(50))
    assert threads() == 0


def test_it_runs_ahead_and_no_further() -> None:
    made: list[int] = []

    def batches() -> Iterator[int]:
        for number in range(100):
            made.append(number)
            yield number

    batch = prefetch(batches(), ahead=3)
    assert next(batch) == 0
    deadline = time.monotonic() + 10
    while len(made) < 5 and time.monotonic() < deadline:  # the first, three waiting, and one in hand
        time.sleep(0.01)
    time.sleep(0.05)
    assert made == list(range(5))
    batch.close()
    assert threads() == 0


def test_an_error_comes_out_where_it_happened() -> None:
    def batches() -> Iterator[int]:
        yield 1
        raise OSError("the disk is gone")

    batch = prefetch(batches())
    assert next(batch) == 1
    with pytest.raises(OSError, match="the disk is gone"):
        next(batch)
    assert threads() == 0
