"""The `recipe` command: prepare the data, train every arm in its own process, compare."""

from __future__ import annotations

import itertools
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sagebwd import device, side_by_side, terminal
from sagebwd.errors import UserError
from sagebwd.training import budget, deepspeed_config, run_folder, status
from sagebwd.training.recipe_file import Experiment

USER_ERROR = 2  # the exit code of a process that has printed a UserError


@dataclass(frozen=True)
class Settings:
    """How to run an experiment: nothing here changes a result, but for rounding between numbers of ranks.

    overrides: as given, handed on to the arms' processes. nproc: ranks of an arm. runs, data: folders. at_once: arms
    that train at the same time, each on GPUs of its own.
    """

    overrides: Sequence[str]
    nproc: int
    runs: Path
    data: Path
    at_once: int = 1


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

    0; 1 if an arm's process failed; 2 if the first arm met a mistake of the user's; 75 if an arm under way was asked to
    stop (SIGTERM or SIGUSR1, to this process or to one of the arm's). A failed arm stops neither the others nor the
    comparison, and the same command resumes it from its last checkpoint.
    """
    folder = settings.runs / experiment.name
    for arm, recipe in experiment.arms.items():  # every mistake that can be seen now is seen before the first step
        budget.plan(recipe, budget.data_parallel_size(recipe, settings.nproc))
        run_folder.check(folder / arm, recipe)
    found = device.probe()
    found.check(settings.nproc)
    for recipe in experiment.arms.values():
        deepspeed_config.check(recipe, gpu=found.gpus > 0)
    side_by_side.gpu_shares(settings.at_once, settings.nproc, found.gpus)
    _say(f"recipe {experiment.name}: {_listed(experiment)}, on {found.describe(settings.nproc)}")

    from sagebwd import tokenizer  # imports torch; `--print-config` and mistakes need not wait for it

    first = next(iter(experiment.arms.values()))
    prepared = tokenizer.prepare(first.data, settings.data)
    tokens = f"{prepared.train_tokens:,} training and {prepared.validation_tokens:,} validation tokens"
    _say(f"data: {tokens} in {prepared.folder}")

    run_folder.record(folder, experiment, shlex.join(["sagebwd", *sys.argv[1:]]))
    arms = _unfinished(experiment, folder)
    if settings.at_once > 1:
        failures = _train_side_by_side(experiment, arms, folder, settings, found.gpus)
    else:
        failures = _train_in_turn(experiment, arms, folder, settings)
        if failures and (failures[0].arm, failures[0].code) == (arms[0], USER_ERROR):
            return USER_ERROR  # the arm has said what is wrong
    stopped = [failure.arm for failure in failures if failure.stopped]
    if stopped:
        which = f"arm {stopped[0]} was" if len(stopped) == 1 else f"arms {', '.join(stopped)} were"
        print(f"stopped: {which} asked to; the same command goes on from there", file=sys.stderr)
        return status.RESUMABLE

    from sagebwd import compare

    if any(run_folder.meta(folder / arm) for arm in experiment.arms):
        compare.compare(folder)
    if failures:
        for failure in failures:
            print(f"error: {failure}", file=sys.stderr)
        print("error: what was trained is kept; the same command resumes from the last checkpoint", file=sys.stderr)
    return 1 if failures else 0


def _listed(experiment: Experiment) -> str:
    names = list(experiment.arms)
    return ", ".join(names) if len(names) <= 6 else f"{len(names)} arms, {names[0]} to {names[-1]}"


def train_command(experiment: Experiment, arm: str, settings: Settings) -> list[str]:
    """The command line of one arm's training: plain Python for one rank, torchrun for more."""
    python = [sys.executable]
    if settings.nproc > 1:
        python += ["-m", "sagebwd.ranks", "--standalone", f"--nproc-per-node={settings.nproc}"]
    places = ["--runs", str(settings.runs), "--data", str(settings.data)]
    return [*python, "-m", "sagebwd.cli", "train", str(experiment.path), "--arm", arm, *places, *settings.overrides]


def _unfinished(experiment: Experiment, folder: Path) -> list[str]:
    """The arms with something left to do; says which have not."""
    arms = []
    for arm in experiment.arms:
        if run_folder.finished(folder / arm):
            _say(f"arm {arm}: {run_folder.meta(folder / arm)['status']} already, in {folder / arm}")
        else:
            arms.append(arm)
    return arms


def _train_in_turn(experiment: Experiment, arms: list[str], folder: Path, settings: Settings) -> list[Failure]:
    failures = []
    for number, arm in enumerate(arms, 1):
        run_folder.claim(folder / arm, experiment.arms[arm])
        _say(f"arm {arm} ({number} of {len(arms)}): in {folder / arm}")
        failure = _train(experiment, arm, folder / arm, settings)
        if failure:
            failures.append(failure)
            if failure.stopped or (failure.code == USER_ERROR and number == 1):
                break  # of a mistake the next one would say the same
            _say(f"error: {failure}")
    return failures


def _train_side_by_side(
    experiment: Experiment, arms: list[str], folder: Path, settings: Settings, gpus: int
) -> list[Failure]:
    from tqdm import tqdm

    failures, ends = [], itertools.count(1)
    bar = tqdm(total=len(arms), unit="arm", dynamic_ncols=True, disable=not sys.stderr.isatty())

    def began(job: side_by_side.Job, share: Mapping[str, str]) -> None:
        place = f"GPU {share[side_by_side.VISIBLE]}" if gpus else f"{share['OMP_NUM_THREADS']} thread(s) a rank"
        tqdm.write(f"arm {job.name}: begins on {place}, its output is in {job.log}", file=sys.stdout)

    def ended(job: side_by_side.Job, code: int, asked: bool) -> None:
        failure = _failure(job.name, code, folder / job.name, asked)
        seconds = run_folder.meta(folder / job.name).get("wall_seconds", 0.0)
        line = f"arm {job.name}: {_status(folder / job.name)} in {seconds:,.0f} s"
        if failure:
            failures.append(failure)
            line = f"arm {job.name}: stopped, as asked" if failure.stopped else f"error: {failure}"
        tqdm.write(f"{line} ({next(ends)} of {len(arms)})", file=sys.stdout)
        bar.update()

    jobs = []
    for arm in arms:
        run_folder.claim(folder / arm, experiment.arms[arm])
        jobs.append(side_by_side.Job(arm, train_command(experiment, arm, settings), folder / arm / run_folder.LOG))
    shares = side_by_side.gpu_shares(settings.at_once, settings.nproc, gpus)
    with bar:
        side_by_side.run(jobs, shares, began, ended, lambda child, job: _ask_to_stop(child, folder / job.name))
    return failures


def _status(folder: Path) -> str:
    return run_folder.meta(folder).get("status", "not begun")


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
    return _failure(arm, code, folder, asked)


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


def _failure(arm: str, code: int, folder: Path, asked: bool = False) -> Failure | None:
    """asked: this process has asked the arm's to stop."""
    if code == 0 and run_folder.finished(folder):
        return None
    stopped = asked or (code in (0, status.RESUMABLE) and _preempted(folder))
    return Failure(arm, code, folder / run_folder.LOG, stopped)


def _say(line: str) -> None:
    print(line, flush=True)
