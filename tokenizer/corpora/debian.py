"""Debian packages through apt-get and dpkg-deb: fetched and read, neither installed nor run, and without root.

apt-get gets a state of its own in a folder of ours, with one release of Debian's main section as its only source, so
that the system's own sources and release do not matter. It checks signatures and checksums.
"""

from __future__ import annotations

import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from shutil import which

from sagebwd.errors import UserError

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
MIRROR = "http://deb.debian.org/debian"
ELSEWHERE = (
    "build it on Debian or Ubuntu, or in a container (`docker run -it debian:12`), and copy the folder; or bring your "
    "own text with data.corpus: files"
)


@dataclass(frozen=True)
class Package:
    name: str
    version: str
    sha256: str


class Archive:
    """One release's main section of a mirror."""

    def __init__(self, folder: Path, release: str, mirror: str = MIRROR) -> None:
        """folder: for apt's state. Raises UserError: a tool or Debian's keys are not on this system."""
        for program in ("apt-get", "apt-cache", "dpkg-deb"):
            if which(program) is None:
                raise UserError(f"building this corpus needs {program}, which is not on this system: {ELSEWHERE}")
        if not KEYRING.is_file():
            raise UserError(
                f"building this corpus needs Debian's keys, {KEYRING}: install debian-archive-keyring, or {ELSEWHERE}"
            )
        self.mirror = mirror
        folder = folder.absolute()
        for place in ("state/lists/partial", "cache/archives/partial"):
            (folder / place).mkdir(parents=True, exist_ok=True)
        (folder / "status").touch()
        sources = folder / "sources.list"
        sources.write_text(f"deb [arch=amd64 signed-by={KEYRING}] {mirror} {release} main\n", encoding="utf-8")
        options = {
            "Dir::Etc::SourceList": sources,
            "Dir::Etc::SourceParts": "/dev/null",
            "Dir::State": folder / "state",
            "Dir::State::status": folder / "status",
            "Dir::Cache": folder / "cache",
            "APT::Architecture": "amd64",  # nearly all are for all; the rest hold text as well
            "APT::Architectures": "amd64",
            "APT::Sandbox::User": "",
            "APT::Update::Error-Mode": "any",
            "Acquire::Languages": "none",
            "Acquire::Retries": "3",
        }
        self._options = [f"-o{name}={value}" for name, value in options.items()]

    def update(self) -> None:
        """Fetch the release's list of packages. Raises UserError with apt's own words."""
        self._run("apt-get", "-q", "update")

    def packages(self, names: tuple[str, ...]) -> dict[str, Package]:
        """The release's versions. Raises UserError: it has no package of a name."""
        found = {}
        fields: dict[str, str] = {}
        for line in [*self._run("apt-cache", "--no-all-versions", "show", *names).splitlines(), ""]:
            if line:
                name, _, value = line.partition(": ")
                fields.setdefault(name, value)
            elif fields:
                found[fields["Package"]] = Package(fields["Package"], fields["Version"], fields["SHA256"])
                fields = {}
        for name in names:
            if name not in found:
                raise UserError(f"{self.mirror} has no package {name}: give another --mirror")
        return found

    def download(self, package: Package, folder: Path) -> Path:
        """The package's file, in the empty folder given."""
        self._run("apt-get", "-q", "download", f"{package.name}={package.version}", folder=folder)
        (path,) = folder.glob("*.deb")
        return path

    def _run(self, program: str, *arguments: str, folder: Path | None = None) -> str:
        command = [program, *self._options, *arguments]
        answer = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
        if answer.returncode:
            lines = [line for line in answer.stderr.splitlines() if line.startswith(("E:", "W:"))]
            reason = "; ".join(lines[-2:]) or f"exit code {answer.returncode}"
            raise UserError(f"{program} {arguments[-1]} failed ({reason}): check the network, or give another --mirror")
        return answer.stdout


def files(path: Path) -> Iterator[tuple[str, bytes]]:
    """Path and contents of each file in a .deb, as a stream: nothing is unpacked to disk."""
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", path], stdout=subprocess.PIPE) as process:
        with tarfile.open(fileobj=process.stdout, mode="r|") as archive:
            for member in archive:
                if member.isfile():
                    yield member.name.removeprefix("."), archive.extractfile(member).read()
        process.stdout.read()  # padding after the archive's end, which dpkg-deb must be rid of
    if process.returncode:
        raise UserError(f"dpkg-deb cannot read {path}: remove it and run the same command again")
