"""A real SLURM on this machine: Debian's munged, slurmctld and slurmd, everything of theirs in one folder.

`pytest_plugins = ("tests.launch.cluster",)` in a module gives it the fixture `slurm`, of one node, and with
"tests.launch.nodes" `slurm_of_two`, whose nodes are two network namespaces. Skipped, with the reason, where SLURM is
not installed or the tests do not run as root, which its daemons need.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.launch.nodes import Node

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")
SBIN = "/usr/local/sbin:/usr/sbin:/sbin"
CPUS = 8  # more than CI's machine has, so that a test's jobs start side by side


@dataclass(frozen=True)
class Slurm:
    """folder: conf, logs and state of the daemons. environment: what makes SLURM's commands talk to them. node: where
    the commands are run; None: on this machine."""

    folder: Path
    environment: dict[str, str]
    node: Node | None = None

    def run(self, *command: object, cwd: Path | None = None) -> str:
        answer = subprocess.run(
            [*(self.node.enter if self.node else ()), *map(str, command)],
            env=self.environment,
            cwd=cwd,
            capture_output=True,
            text=True,
            check=False,
        )
        assert answer.returncode == 0, f"{command}: {answer.stdout}{answer.stderr}"
        return answer.stdout

    def job(self, job: str) -> dict[str, str]:
        """What the controller says of a job (of one task of an array, as in 12_0)."""
        return dict(
            word.split("=", 1) for word in self.run("scontrol", "show", "job", "-o", job).split() if "=" in word
        )

    def wait(self, job: str, until: Callable[[dict[str, str]], bool], seconds: float) -> dict[str, str]:
        """Wait for a job to become what `until` asks of it."""
        end = time.monotonic() + seconds
        while not ((found := self.job(job)) and until(found)):
            assert time.monotonic() < end, f"job {job} after {seconds} s: {found}\n{self.logs()}"
            time.sleep(0.3)
        return found

    def logs(self) -> str:
        return "\n".join(f"== {path.name}\n{path.read_text()[-2000:]}" for path in sorted(self.folder.glob("*.log")))


def missing() -> str | None:
    """Why there can be no SLURM here."""
    absent = [name for name in PROGRAMS if not shutil.which(name, path=f"{os.environ['PATH']}:{SBIN}")]
    if absent:
        return f"no {', '.join(absent)} here: apt-get install --no-install-recommends slurm-wlm munge"
    return None if os.geteuid() == 0 else "SLURM's daemons need root"


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    with _started() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def slurm_of_two(nodes: tuple[Node, Node]) -> Iterator[Slurm]:
    """The first node is the controller too, and the one that jobs are submitted from."""
    with _started(nodes) as cluster:
        yield cluster


@contextlib.contextmanager
def _started(nodes: Sequence[Node] = ()) -> Iterator[Slurm]:
    """nodes: none for this machine as the only one."""
    if reason := missing():
        pytest.skip(reason)
    # Not pytest's folder: munged wants a path that every user may enter. Short, since it holds sockets.
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    folder.chmod(0o755)
    environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": f"{os.environ['PATH']}:{SBIN}"}
    here = Slurm(folder, environment)
    of_each = [replace(here, node=node) for node in nodes] or [here]
    names = [node.name for node in nodes] or ["localhost"]
    started: list[Path] = []
    try:
        _configure(folder, dict(zip(names, [node.address for node in nodes] or ["127.0.0.1"], strict=True)))
        here.run(
            "munged",
            f"--key-file={folder}/munge.key",
            f"--socket={folder}/munge.socket",
            f"--pid-file={folder}/munged.pid",
            f"--log-file={folder}/munged.log",
            f"--seed-file={folder}/munge.seed",
        )
        started.append(folder / "munged.pid")
        of_each[0].run("slurmctld")
        started.append(folder / "slurmctld.pid")
        for name, cluster in zip(names, of_each, strict=True):
            (folder / f"spool-{name}").mkdir()
            cluster.run("slurmd", "-N", name)
            started.append(folder / f"slurmd-{name}.pid")
        end = time.monotonic() + 30
        while of_each[0].run("sinfo", "--noheader", "--Node", "--format=%T").split() != ["idle"] * len(names):
            assert time.monotonic() < end, here.logs()
            time.sleep(0.2)
        yield of_each[0]
        of_each[0].run("scancel", "--user=root", "--signal=KILL", "--full")
    finally:
        for pid_file in reversed(started):
            _stop(pid_file)
        shutil.rmtree(folder, ignore_errors=True)


def _configure(folder: Path, addresses: dict[str, str]) -> None:
    key = folder / "munge.key"
    key.touch(0o600)
    key.write_bytes(secrets.token_bytes(128))
    controller, daemon = _free_ports(2)
    nodes = "\n".join(
        f"NodeName={name} NodeAddr={address} NodeHostname={name} CPUs={CPUS}" for name, address in addresses.items()
    )
    (folder / "slurm.conf").write_text(
        f"""
ClusterName=test
SlurmctldHost={next(iter(addresses))}
SlurmctldPort={controller}
SlurmdPort={daemon}
SlurmUser=root
AuthType=auth/munge
# A requeued job waits until the credential of its last start has expired: 120 seconds unless told otherwise.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
MpiDefault=none
JobRequeue=1
KillWait=30
MessageTimeout=60
ReturnToService=2
SchedulerParameters=sched_interval=5,bf_interval=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
{nodes}
PartitionName=test Nodes={",".join(addresses)} Default=YES MaxTime=INFINITE
""",
        encoding="utf-8",
    )


def _free_ports(number: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports


def _stop(pid_file: Path) -> None:
    try:
        pid = int(pid_file.read_text())
    except (OSError, ValueError):  # never came up, or is gone
        return
    for signal_, seconds in ((signal.SIGTERM, 20), (signal.SIGKILL, 5)):
        end = time.monotonic() + seconds
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal_)
            while time.monotonic() < end:
                os.kill(pid, 0)
                time.sleep(0.1)
