"""One process at a time trains in a folder: the kernel holds the lock, and drops it however the process ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from sagebwd.errors import UserError

logger = logging.getLogger(__name__)
LOCK = ".lock"
PATIENCE_SECONDS = 2.0  # somebody who only asks whether the lock is held holds it for a moment
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold the folder's lock. Raises UserError: another process holds it (which, and since when)."""
    with (folder / LOCK).open("a+", encoding="utf-8") as file:
        until = time.monotonic() + PATIENCE_SECONDS
        while not _take(file.fileno(), fcntl.LOCK_EX, folder):
            if time.monotonic() > until:
                file.seek(0)
                raise UserError(
                    f"another process trains in {folder} ({file.read().strip() or 'it has not said which'}): wait for "
                    "its end, stop it, or give this run another name (name=...) or --runs folder"
                )
            time.sleep(0.1)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
        file.flush()
        yield


def is_held(folder: Path) -> bool:
    """Whether a process trains in the folder at this moment."""
    try:
        file = (folder / LOCK).open("rb")
    except OSError:
        return False
    with file:
        return not _take(file.fileno(), fcntl.LOCK_SH, folder)


def _take(file: int, kind: int, folder: Path) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        logger.warning("WARNING: the file system of %s has no locks: nothing keeps a second run out of it", folder)
    return True
