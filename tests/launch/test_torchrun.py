"""launch/torchrun.sh on one node and on two."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sagebwd.training import status
from tests.launch.nodes import Node
from tests.training.runs import logged

pytest_plugins = ("tests.launch.nodes", "tests.small_corpus")
SCRIPT = Path(__file__).parents[2] / "launch" / "torchrun.sh"
HEAD = "10.213.7.1"


def torchrun(place: Path, environment: dict[str, str], *arguments: str, node: Node | None = None) -> subprocess.Popen:
    return subprocess.Popen(
        # SIGINT as a terminal has it: in the background of a script it is ignored, and the test would wait for ever
        [*(node.enter if node else ()), "env", "--default-signal=INT", str(SCRIPT), *arguments],
        cwd=place,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("", "give a recipe and the name of an arm"),
        ("tiny.yaml sagebw", "tiny.yaml has no arm 'sagebw': did you mean 'sagebwd'?"),
        ("tiny.yaml sagebwd --nproc two", "--nproc is 'two', not a number of processes"),
        ("tiny.yaml sagebwd --nproc 3", "train.tokens_per_step"),
        ("tiny.yaml sagebwd --nproc 1 --head here", "--node-rank and --head are for several nodes: give --nodes too"),
        ("tiny.yaml sagebwd --nproc 1 --nodes 2 --node-rank 0", "--nodes 2 needs --head HOST"),
        (f"tiny.yaml sagebwd --nproc 1 --nodes 2 --head {HEAD}", "--nodes 2 needs --node-rank"),
        (f"tiny.yaml sagebwd --nproc 1 --nodes 2 --node-rank 2 --head {HEAD}", "2 nodes have the ranks 0 to 1"),
        (f"tiny.yaml sagebwd --nproc 1 --nodes 2 --node-rank 0 --head {HEAD}:0", "the port of --head is '0'"),
        ("tiny.yaml sagebwd --nproc 1 --nodes 2 --node-rank 1 --head no.such.host.invalid", "cannot resolve --head"),
        ("tiny.yaml sagebwd --nproc 1 --nodes 2 --node-rank 0 --head 127.0.0.1", "which no other node can reach"),
        (
            f"tiny.yaml sagebwd --nproc 1 --nodes 2 --node-rank 0 --head {HEAD}",
            "this node, of --node-rank 0, has no such",
        ),
    ],
)
def test_a_mistake_is_one_line(place: Path, environment: dict[str, str], arguments: str, complaint: str) -> None:
    output, errors = (process := torchrun(place, environment, *arguments.split())).communicate()
    assert (process.returncode, output) == (2, "")
    assert re.fullmatch(r"error: [^\n]+\n", errors), errors
    assert complaint in errors
    assert not (place / "runs").exists()


def test_a_rank_s_mistake_is_the_script_s(place: Path, environment: dict[str, str]) -> None:
    """Not a stack trace of torchrun's, and not an exit code that a scheduler would take for worth another try."""
    process = torchrun(place, environment, "tiny.yaml", "fpa", "--nproc", "2", "data.files=[nothing.jsonl]")
    _, errors = process.communicate()
    assert process.returncode == 2
    assert "error: data.files: no file matches 'nothing.jsonl'" in errors
    assert "Traceback" not in errors


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 200
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)


def begun(place: Path, run: str) -> bool:
    return (place / "runs" / run / "sagebwd" / "status.json").exists()


def trained(place: Path, run: str) -> int:
    """The newest checkpoint's step."""
    return max((int(path.name[5:13]) for path in place.glob(f"runs/{run}/sagebwd/checkpoints/step_*")), default=0)


def test_two_nodes_stop_together_go_on_and_compute_what_one_does(
    place: Path, environment: dict[str, str], nodes: tuple[Node, Node]
) -> None:
    """The signal comes to the node that is not the head: both save at the same step, and say so to their callers."""
    run = ["tiny.yaml", "sagebwd", "train.total_tokens=51200"]  # 200 steps
    one = torchrun(place, environment, *run, "--nproc", "2", "name=one")
    two = [*run, "--nproc", "1", "name=two", "--nodes", "2", "--head", nodes[0].address]
    for expected in (75, 0):
        both = [
            torchrun(place, environment, *two, "--node-rank", str(rank), node=node) for rank, node in enumerate(nodes)
        ]
        if expected:
            wait_for(lambda: trained(place, "two") > 20, both[1])
            both[1].send_signal(signal.SIGUSR1)
        for process in both:
            output, errors = process.communicate(timeout=300)
            assert process.returncode == expected, output + errors
    output, errors = one.communicate(timeout=300)
    assert one.returncode == 0, output + errors
    theirs, ours = (logged(place / "runs" / name / "sagebwd").scalars for name in ("two", "one"))
    for tag in ("train/loss", "train/grad_norm", "validation/loss"):
        assert theirs[tag] == ours[tag], tag


def test_a_signal_while_the_ranks_start_is_not_lost(place: Path, environment: dict[str, str]) -> None:
    """It would end a Python that has not come to listen to it, or torchrun."""
    process = torchrun(place, environment, "tiny.yaml", "sagebwd", "--nproc", "1", "train.total_tokens=51200000")
    wait_for(lambda: bool(launchers(process.pid)), process)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 75, output + errors
    assert begun(place, "tiny")
    assert re.search(
        r"^\S+ -m sagebwd\.ranks --standalone --nproc-per-node=1 \S+ -m sagebwd\.cli train tiny\.yaml "
        r"--arm sagebwd train\.total_tokens=51200000 --runs runs $",
        output,
        re.MULTILINE,
    )


def of(pid: int, what: str) -> str:
    """What /proc tells of a process; "" of one that has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/{what}").read_text()
    return ""


def children(pid: int) -> list[int]:
    return [int(child) for child in of(pid, f"task/{pid}/children").split()]


def launchers(pid: int) -> list[int]:
    """The script's torchrun, once it runs."""
    return [child for child in children(pid) if "sagebwd.ranks" in of(child, "cmdline")]


def test_a_second_interrupt_stops_at_once(place: Path, environment: dict[str, str]) -> None:
    """Also where the ranks do not listen: as here, the moment that torchrun starts them. None trains on by itself."""
    process = torchrun(place, environment, "tiny.yaml", "sagebwd", "--nproc", "2", "train.total_tokens=51200000")
    wait_for(lambda: any(map(children, launchers(process.pid))), process)
    process.send_signal(signal.SIGINT)
    for line in process.stdout:
        if "a signal asks to stop" in line:  # so it has taken the first one for one
            break
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=300)
    assert process.returncode == 75
    assert not trains_in(place)


def test_where_torchrun_is_killed_the_ranks_save_and_end(place: Path, environment: dict[str, str]) -> None:
    process = torchrun(place, environment, "tiny.yaml", "sagebwd", "--nproc", "2", "train.total_tokens=51200000")
    wait_for(lambda: trained(place, "tiny") > 8, process)
    os.kill(*launchers(process.pid), signal.SIGKILL)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 75, output + errors
    assert "the same command goes on" in output
    found = status.read(place / "runs" / "tiny" / "sagebwd")
    assert (found.state, found.checkpoint) == ("preempted", found.step)
    assert not trains_in(place)


def trains_in(place: Path) -> list[str]:
    """The command lines of processes that work there."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "cwd").readlink() == place and "sagebwd" in (command := of(int(process.name), "cmdline")):
                found.append(command)
    return found
