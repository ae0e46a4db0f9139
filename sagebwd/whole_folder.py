"""Folders that are there whole or not at all, also where several processes make the same one."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def make_whole(folder: Path, fill: Callable[[Path], None]) -> None:
    """Makes `folder` with what `fill(path)` writes into the empty folder `path`; does nothing if it is there.

    It is filled beside its place and renamed, so that a reader never sees half of it. Of several processes at once the
    first to finish gives the folder, and the others' copies go: `fill` must write the same in each.
    """
    if folder.is_dir():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        fill(unfinished)
        unfinished.chmod(folder.parent.stat().st_mode & 0o777)  # mkdtemp's is closed to all but its owner
        unfinished.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
