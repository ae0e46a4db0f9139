"""The `recipe` command: prepare the data, train every arm in its own process, compare."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sagebwd import device, terminal
from sagebwd.errors import UserError
from sagebwd.training import budget, run_folder, status
from sagebwd.training.recipe_file import Experiment

USER_ERROR = 2  # the exit code of a process that has printed a UserError


@dataclass(frozen=True)
class Settings:
    """How to run an experiment: nothing here changes a result, but for rounding between numbers of ranks.

    overrides: as given, handed on to the arms' processes. nproc: ranks of an arm. runs, data: folders.
    """

    overrides: Sequence[str]
    nproc: int
    runs: Path
    data: Path


@dataclass(frozen=True)
class Failure:
    """An arm whose process failed, or was asked to stop (stopped)."""

    arm: str
    code: int
    log: Path
    stopped: bool = False

    def __str__(self) -> str:
        how = f"was killed by signal {-self.code}" if self.code < 0 else f"ended with exit code {self.code}"
        return f"arm {self.arm} failed: its process {how}; its output is in {self.log}"


def run(experiment: Experiment, settings: Settings) -> int:
    """Run the experiment's unfinished arms, then the comparison. Returns the exit code.

    0; 1 if an arm's process failed; 2 if it met a mistake of the user's; 75 if the arm under way was asked to stop
    (SIGTERM or SIGUSR1, to this process or to one of the arm's). A failed arm stops neither the others nor the
    comparison, and the same command resumes it from its last checkpoint.
    """
    folder = settings.runs / experiment.name
    for arm, recipe in experiment.arms.items():  # every mistake that can be seen now is seen before the first step
        budget.plan(recipe, budget.data_parallel_size(recipe, settings.nproc))
        run_folder.check(folder / arm, recipe)
    found = device.probe()
    found.check(settings.nproc)
    _say(f"recipe {experiment.name}: {', '.join(experiment.arms)}, on {found.describe(settings.nproc)}")

    from sagebwd import tokenizer  # imports torch; `--print-config` and mistakes need not wait for it

    first = next(iter(experiment.arms.values()))
    prepared = tokenizer.prepare(first.data, settings.data)
    tokens = f"{prepared.train_tokens:,} training and {prepared.validation_tokens:,} validation tokens"
    _say(f"data: {tokens} in {prepared.folder}")

    _record(folder, experiment)
    failures = []
    for number, (arm, recipe) in enumerate(experiment.arms.items(), 1):
        label = f"arm {arm} ({number} of {len(experiment.arms)})"
        if run_folder.finished(folder / arm):
            _say(f"{label}: {run_folder.meta(folder / arm)['status']} already, in {folder / arm}")
            continue
        run_folder.claim(folder / arm, recipe)
        _say(f"{label}: in {folder / arm}")
        failure = _train(experiment, arm, folder / arm, settings)
        if failure and failure.stopped:
            print(f"stopped: arm {arm} was asked to; the same command goes on from there", file=sys.stderr)
            return status.RESUMABLE
        if failure and failure.code == USER_ERROR:
            return USER_ERROR  # the arm has said what is wrong; the next one would say the same
        if failure:
            _say(f"error: {failure}")
            failures.append(failure)

    from sagebwd import compare

    if any(run_folder.meta(folder / arm) for arm in experiment.arms):
        compare.compare(folder)
    if failures:
        for failure in failures:
            print(f"error: {failure}", file=sys.stderr)
        print("error: what was trained is kept; the same command resumes from the last checkpoint", file=sys.stderr)
    return 1 if failures else 0


def train_command(experiment: Experiment, arm: str, settings: Settings) -> list[str]:
    """The command line of one arm's training: plain Python for one rank, torchrun's module for more."""
    python = [sys.executable]
    if settings.nproc > 1:
        python += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={settings.nproc}"]
    places = ["--runs", str(settings.runs), "--data", str(settings.data)]
    return [*python, "-m", "sagebwd.cli", "train", str(experiment.path), "--arm", arm, *places, *settings.overrides]


def _train(experiment: Experiment, arm: str, folder: Path, settings: Settings) -> Failure | None:
    log = folder / run_folder.LOG
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    if settings.nproc > 1:
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // settings.nproc)))
    asked = False

    def stop(child: subprocess.Popen) -> None:
        nonlocal asked
        asked = True
        _ask_to_stop(child, folder)

    code = terminal.run(train_command(experiment, arm, settings), log, environment, stop)
    if code == 0 and run_folder.finished(folder):
        return None
    return Failure(arm, code, log, asked or (code in (0, status.RESUMABLE) and _preempted(folder)))


def _preempted(folder: Path) -> bool:
    try:
        return status.read(folder).state == "preempted"
    except UserError:
        return False


def _ask_to_stop(child: subprocess.Popen, folder: Path) -> None:
    """The arm's first rank, which tells the others, if there is one by now: torchrun would give all of them thirty
    seconds, and a large checkpoint takes longer."""
    pid = None
    try:
        pid = status.read(folder).pid
        children = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text(encoding="utf-8").split()
    except (UserError, OSError):
        children = []
    if pid is not None and (pid == child.pid or str(pid) in children):
        os.kill(pid, signal.SIGUSR1)
    else:
        child.terminate()


def _record(folder: Path, experiment: Experiment) -> None:
    """What the comparison's report says about how the runs came to be."""
    folder.mkdir(parents=True, exist_ok=True)
    said = {
        "command": shlex.join(["sagebwd", *sys.argv[1:]]),
        "recipe": str(experiment.path),
        "arms": list(experiment.arms),
    }
    (folder / run_folder.EXPERIMENT).write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")


def _say(line: str) -> None:
    print(line, flush=True)
