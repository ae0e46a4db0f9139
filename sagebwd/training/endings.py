"""Why a run ended, for status.json and for people: what has a remedy is a sentence, the rest keeps its stack trace."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

import torch

from sagebwd.errors import RunError, UserError
from sagebwd.training import status
from sagebwd.training.world import World

_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
_LOST = (
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe"),  # gloo's
    *("remote process exit", "exit of a remote peer", "communicator was aborted"),  # NCCL's
)


@contextlib.contextmanager
def told(folder: Path, here: World) -> Iterator[None]:
    """Around a run. Raises RunError in place of what the machine, and no mistake, is the cause of."""
    try:
        yield
    except UserError as error:
        status.fail(folder, str(error))
        raise
    except Exception as error:
        if isinstance(error, RuntimeError) and any(sign in str(error) for sign in _LOST):
            # Whoever killed that rank, the run can go on: its state stays "running", without a process.
            raise RunError(
                f"rank {here.rank} lost the connection to another rank, which ended or was killed: what it said is "
                "above or in its log; the same command resumes from the last checkpoint"
            ) from None
        cause = _sentence(error, here, folder)
        status.fail(folder, cause or f"{type(error).__name__}: {error}")
        if cause is None:
            raise
        raise RunError(cause) from None


def _sentence(error: Exception, here: World, folder: Path) -> str | None:
    """The cause and the remedy, of an error that is the machine's; None of any other."""
    if isinstance(error, RunError):
        return str(error)
    if isinstance(error, torch.OutOfMemoryError):
        free, total = torch.cuda.mem_get_info(here.device)
        return (
            f"rank {here.rank} is out of GPU memory ({(total - free) / 2**30:.1f} of {total / 2**30:.1f} GiB in use): "
            "lower train.micro_batch (the global batch stays what it is), raise parallel.tensor, or lower data.context"
        )
    if isinstance(error, OSError) and error.errno in _DISK:
        return (
            f"{error.strerror}, writing {error.filename or f'into {folder}'}: free space or mend the disk; the same "
            "command resumes from the last checkpoint"
        )
    return None
