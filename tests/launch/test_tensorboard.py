"""`make tensorboard`: it listens on this machine alone, and a browser shows the curves of a recipe's arms."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from sagebwd.tokenizer import prepare
from sagebwd.training import train
from sagebwd.training.recipe import Data
from tests.launch.browser import page
from tests.training.runs import ARMS, logged, tiny_recipe

pytest_plugins = ("tests.small_corpus",)
ROOT = Path(__file__).parents[2]
LISTENING = "0A"  # the state of a socket in /proc/net/tcp
LOOPBACK = "0100007F"  # 127.0.0.1, as it stands there


@dataclass(frozen=True)
class Board:
    url: str
    processes: set[int]  # make and what it has started


@pytest.fixture(scope="module")
def runs(small_data: Data, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two arms, trained for six steps; the second one faster, so that the curves lie apart."""
    place = tmp_path_factory.mktemp("board")
    prepared = prepare(small_data, place / "data")
    for arm in ARMS:
        recipe = tiny_recipe(small_data, arm, steps=6, tokens_per_step=256, micro_batch=4)
        faster = recipe.optimizer.model_copy(update={"lr": recipe.optimizer.lr * 20 ** ARMS.index(arm)})
        recipe = recipe.model_copy(update={"optimizer": faster})
        train.run(recipe, arm, place / "runs" / "tiny" / arm, prepared)
    return place / "runs"


@pytest.fixture(scope="module")
def board(runs: Path) -> Iterator[Board]:
    log = runs.parent / "tensorboard.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            ["make", "tensorboard", f"PY={sys.executable}", f"RUNS={runs}", "ARGS=--port 0"],
            cwd=ROOT,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )
    try:
        end = time.monotonic() + 90
        while not (found := re.search(r"at (http://\S+)", log.read_text())):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.3)
        yield Board(found[1], below(process.pid))
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait()


def below(pid: int) -> set[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return {pid}.union(*(below(int(child)) for child in children))


def listening(pid: int) -> list[str]:
    """The addresses (hexadecimal, as the kernel writes them) that a process listens at."""
    sockets = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            sockets.add(os.readlink(entry))
        except OSError:  # closed meanwhile
            continue
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == LISTENING and f"socket:[{inode}]" in sockets:
                found.append(local.split(":")[0])
    return found


def test_it_listens_on_the_loopback_alone(board: Board) -> None:
    addresses = [address for pid in board.processes for address in listening(pid)]
    assert addresses
    assert set(addresses) == {LOOPBACK}


def test_a_browser_shows_the_curves_of_the_arms(board: Board, runs: Path, tmp_path: Path) -> None:
    if not shutil.which("chromium"):
        pytest.skip("no chromium here: apt-get install --no-install-recommends chromium")
    # In the table below a tag's curves stand their last values, in four decimals at most.
    last = {
        tag: [logged(runs / "tiny" / arm).values(tag)[-1] for arm in ARMS] for tag in ("train/loss", "validation/loss")
    }
    wanted = [*last, *(f"tiny/{arm}" for arm in ARMS)]
    wanted += [f"{value:.4f}".rstrip("0") for values in last.values() for value in values]
    picture = tmp_path / "curves.png"
    with page(f"{board.url}?tagFilter=loss#timeseries", tmp_path / "profile") as shown:
        # A tag's name is broken after its first part.
        wait_for(lambda: all(text in shown.text().replace("\n/", "/") for text in wanted), shown.text)
        wait_for(lambda: picture.write_bytes(shown.picture()) and drawn(picture), lambda: str(picture))


def wait_for(condition: Callable[[], bool], found: Callable[[], str]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, found()
        time.sleep(0.5)


def drawn(picture: Path) -> bool:
    """Whether both charts, side by side, hold a curve of each arm: pixels of TensorBoard's first two colours."""
    pixels = (imread(picture)[:, :, :3] * 255).round()
    charts = pixels[:, 300:705], pixels[:, 722:1128]
    found = [(abs(c - np.array(rgb)).max(-1) < 12).sum() for c in charts for rgb in ((66, 80, 102), (18, 181, 203))]
    return min(found) > 200  # the dot in a chart's table is some 70
