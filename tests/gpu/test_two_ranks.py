"""Two GPUs over NCCL through launch/torchrun.sh: stopped, killed and hung, and each time going on to the same bits."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from sagebwd.training import checkpoint, status
from tests.training.runs import journal

pytest_plugins = ("tests.small_corpus",)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs, and torch sees fewer"),
]
SCRIPT = Path(__file__).parents[2] / "launch" / "torchrun.sh"
RECIPE = """
model: {{layers: 2, hidden: 256, heads: 4, ffn: 512}}
data: {{corpus: files, files: ["{corpus}"], vocab_size: 512, context: 64, validation_fraction: 0.2}}
train: {{tokens_per_step: 4096, total_tokens: 1_638_400, micro_batch: 16, deterministic: true, fusion: "off"}}
optimizer: {{lr: 1e-3, min_lr: 1e-4}}
evaluation: {{every_steps: 100, tokens: 1024}}
checkpoint: {{every_steps: 10}}
arms: {{sagebwd: {{attention.kind: sagebwd}}}}
"""
STEPS = 400
EARLY = 20  # a fault comes after this step


@dataclass(frozen=True)
class Run:
    place: Path
    name: str
    options: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        return self.place / "runs" / self.name / "sagebwd"

    def start(self) -> subprocess.Popen[str]:
        command = [str(SCRIPT), "tiny.yaml", "sagebwd", "--nproc", "2", f"name={self.name}", *self.options]
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        environment = os.environ | {"PYTHON": sys.executable}
        return subprocess.Popen(command, cwd=self.place, env=environment, **options)

    def begun(self) -> tuple[subprocess.Popen[str], int, int]:
        """Trained to a step past EARLY: the script, and its two ranks."""
        process = self.start()
        while not any(line.get("step", 0) > EARLY for line in self._lines()):
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        first = status.read(self.folder).pid
        (launcher,) = [pid for pid in _children(process.pid) if first in _children(pid)]
        (second,) = set(_children(launcher)) - {first}
        return process, first, second

    def to_the_end(self) -> None:
        process = self.start()
        said, _ = process.communicate(timeout=300)
        assert process.returncode == 0, said

    def _lines(self) -> list[dict]:
        try:
            text = (self.folder / "log.jsonl").read_text()
        except FileNotFoundError:
            return []
        return [{"step": int(step)} for step in re.findall(r'^\{"step": (\d+)', text, re.MULTILINE)]


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def stopped(run: Run) -> None:
    """One rank alone gets the signal."""
    process, _, second = run.begun()
    os.kill(second, signal.SIGUSR1)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 75, said
    assert (found := status.read(run.folder)).state == "preempted"
    assert found.checkpoint == found.step > EARLY


def killed(run: Run) -> None:
    """The other one waits in a collective, or is told by NCCL: torchrun ends it."""
    process, _, second = run.begun()
    os.kill(second, signal.SIGKILL)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 75, said
    assert re.search(r"error: rank \d .*, and the others were stopped", said), said


def hung(run: Run) -> None:
    """The other one ends itself and names it; torchrun then kills it."""
    process, _, second = run.begun()
    os.kill(second, signal.SIGSTOP)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 1, said
    cause = str(status.read(run.folder).cause)
    assert "no progress for 0.35 minutes (health.hang_minutes)" in cause
    assert f"rank 1 (process {second} on " in cause


def test_whatever_happens_to_a_rank_the_run_goes_on_to_the_same_bits(small_corpus: Path, tmp_path: Path) -> None:
    """All at once: each spends most of its time in imports and in waiting."""
    (tmp_path / "tiny.yaml").write_text(RECIPE.format(corpus=small_corpus), encoding="utf-8")
    python = [sys.executable, "-m", "sagebwd.cli", "prepare", "tiny.yaml"]
    subprocess.run(python, cwd=tmp_path, check=True, capture_output=True)
    whole = Run(tmp_path, "whole")
    stories: dict[Callable[[Run], None], Run] = {
        stopped: Run(tmp_path, "stopped"),
        killed: Run(tmp_path, "killed"),
        hung: Run(tmp_path, "hung", ("health.hang_minutes=0.35",)),
    }

    def told(story: Callable[[Run], None]) -> None:
        story(stories[story])
        stories[story].to_the_end()

    with ThreadPoolExecutor(4) as pool:
        tries = [pool.submit(whole.to_the_end), *(pool.submit(told, story) for story in stories)]
        failures = [error for each in tries if (error := each.exception())]
    if failures:
        raise ExceptionGroup("of the runs", failures)
    last = Path("checkpoints") / checkpoint.name(STEPS)
    end = [checkpoint.read(run.folder / last).files for run in (whole, *stories.values())]
    for run, files in zip(stories.values(), end[1:], strict=True):
        assert journal(run.folder) == journal(whole.folder), run.name
        assert files == end[0], run.name
