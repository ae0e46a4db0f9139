"""Micro-batches made ahead of time, in a thread: while the host waits for the device, the next ones come about."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Generator, Iterable
from typing import Any

AHEAD = 4
PATIENCE = 0.1  # seconds after which a thread whose queue is full looks whether anybody still wants it


def prefetch(batches: Iterable[Any], ahead: int = AHEAD) -> Generator[Any, None, None]:
    """The same in the same order, up to `ahead` of them made before they are asked for.

    What `batches` raises is raised here, in its place. The thread ends with the iterator: at its end, or on close().
    """
    made: queue.Queue[tuple[Any, BaseException | None, bool]] = queue.Queue(ahead)
    unwanted = threading.Event()

    def hand_over(item: tuple[Any, BaseException | None, bool]) -> None:
        while not unwanted.is_set():
            with contextlib.suppress(queue.Full):
                made.put(item, timeout=PATIENCE)
                return

    def work() -> None:
        try:
            for batch in batches:
                hand_over((batch, None, False))
                if unwanted.is_set():
                    return
        except BaseException as error:
            hand_over((None, error, True))
        else:
            hand_over((None, None, True))

    thread = threading.Thread(target=work, name="prefetch", daemon=True)
    thread.start()
    try:
        while True:
            batch, error, last = made.get()
            if error is not None:
                raise error
            if last:
                return
            yield batch
    finally:
        unwanted.set()
        thread.join()
