"""Two nodes on this machine: network namespaces joined by two veth interfaces, each with a host name of its own.

`pytest_plugins = ("tests.launch.nodes",)` in a module gives it the fixture `nodes`. Skipped, with the reason, where
there can be none.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

# In namespaces of its own for mounts and the host name: $1 node, $2 its hosts file, then the command.
BECOME = 'echo "$1" >/proc/sys/kernel/hostname && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'


@dataclass(frozen=True)
class Node:
    """namespace: its network's. hosts: what it has as /etc/hosts."""

    name: str
    address: str
    namespace: str
    hosts: Path

    @property
    def enter(self) -> list[str]:
        """What a command that is run on this node begins with."""
        # Not `ip netns exec`, under which SLURM misses /sys/fs/cgroup.
        net = ["nsenter", f"--net=/run/netns/{self.namespace}", "unshare", "--mount", "--uts"]
        return [*net, "sh", "-c", BECOME, "-", self.name, str(self.hosts)]

    def link(self, state: str) -> None:
        """state: up or down."""
        ip("-n", self.namespace, "link", "set", "node", state)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, Node]]:
    """node1 and node2, which reach each other and nothing else. To itself each is 127.0.1.1, as Debian has it."""
    if os.geteuid() or not all(map(shutil.which, ("ip", "nsenter", "unshare"))):
        pytest.skip("network namespaces need root, iproute2 and util-linux")
    folder = tmp_path_factory.mktemp("nodes")
    pair = tuple(
        Node(f"node{number}", f"10.213.7.{number}", f"sagebwd-{os.getpid()}-{number}", folder / f"hosts{number}")
        for number in (1, 2)
    )
    for node, other in (pair, pair[::-1]):
        node.hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {node.name}\n{other.address} {other.name}\n")
    try:
        for node in pair:
            made = subprocess.run(["ip", "netns", "add", node.namespace], capture_output=True, text=True, check=False)
            if made.returncode:
                pytest.skip(f"no network namespaces here: {made.stderr.strip()}")
        one, two = (node.namespace for node in pair)
        ip("link", "add", "node", "netns", one, "type", "veth", "peer", "name", "node", "netns", two)
        for node in pair:
            ip("-n", node.namespace, "address", "add", f"{node.address}/24", "dev", "node")
            ip("-n", node.namespace, "link", "set", "lo", "up")
            node.link("up")
        yield pair
    finally:
        for node in pair:
            subprocess.run(["ip", "netns", "delete", node.namespace], capture_output=True, check=False)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
