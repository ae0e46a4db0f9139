"""Training processes that are to be hit, forked from one that has imported everything: each starts in moments."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sagebwd.errors import RunError, UserError
from sagebwd.tokenizer import Prepared, load_prepared, prepare
from sagebwd.training import checkpoint, run_folder, status, train
from sagebwd.training.recipe import Data, Recipe
from tests.small_corpus import small_documents
from tests.training.runs import changed, comparable, journal, logged, tiny_recipe

STEPS, EVERY = 40, 3
# What `parallel` says under each engine, and the files of tensors that two of its ranks write.
ENGINES = {"megatron": {}, "deepspeed": {"engine": "deepspeed", "zero": 2}}
TENSORS = {
    "megatron": ("tp_00.safetensors",),
    "deepspeed": ("tp_00_dp_0000.safetensors", "tp_00_dp_0001.safetensors"),
}
Hook = Callable[[], None]


@dataclass(frozen=True)
class Child:
    """A training process and where its output goes."""

    pid: int
    output: Path

    def wait(self) -> int:
        """Its exit code; negative: the signal that it died of."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def ended(self) -> bool:
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def said(self) -> str:
        return self.output.read_text(encoding="utf-8", errors="replace")

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def stopped(self) -> bool:
        """Stand still, until SIGCONT. False: it has ended."""
        self.kill(signal.SIGSTOP)
        found = os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        return found.si_code == os.CLD_STOPPED


class Arena:
    """A folder for runs of one tiny recipe under one engine; `truth` is the unbroken run that all others must equal
    bitwise."""

    def __init__(self, root: Path, engine: str) -> None:
        torch.set_num_threads(1)
        root.mkdir()
        self.root, self.engine = root, engine
        corpus = root / "small.jsonl"
        corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in small_documents()), encoding="utf-8")
        data = Data(corpus="files", files=(str(corpus),), vocab_size=512, context=32, validation_fraction=0.2)
        recipe = tiny_recipe(data, "sagebwd", steps=STEPS, tokens_per_step=256, micro_batch=4)
        often = {"checkpoint": {"every_steps": EVERY}, "evaluation": {"every_steps": 7}}
        self.recipe = changed(recipe, often | {"parallel": ENGINES[engine]})
        self.number = 0
        self.children: list[Child] = []
        # In a process of its own: threads that it starts would not survive a fork.
        home = root / "home"
        assert self.fork(lambda: home.write_text(str(prepare(data, root / "data").folder))).wait() == 0
        self.prepared: Prepared = load_prepared(Path(home.read_text()))
        self.truths: dict[int, Path] = {}

    def truth(self, ranks: int = 1) -> Path:
        if ranks not in self.truths:
            folder = self.folder()
            children = self.start(folder, ranks)
            codes = [child.wait() for child in children]
            assert codes == [0] * ranks, children[0].said()
            self.truths[ranks] = folder
        return self.truths[ranks]

    def folder(self) -> Path:
        self.number += 1
        return self.root / f"run{self.number}"

    def start(
        self, folder: Path, ranks: int = 1, hook: Hook | None = None, recipe: Recipe | None = None
    ) -> list[Child]:
        """Training in `folder`. hook: called in the child before."""
        port = str(_free_port()) if ranks > 1 else ""

        def one(rank: int) -> Child:
            def go() -> None:
                if ranks > 1:
                    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
                    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
                if hook:
                    hook()
                train.run(recipe or self.recipe, "sagebwd", folder, self.prepared)

            return self.fork(go)

        return [one(rank) for rank in range(ranks)]

    def end(self) -> None:
        """Kill what still trains."""
        for child in self.children:
            with contextlib.suppress(ChildProcessError):  # waited for
                if not child.ended():
                    child.kill()
                child.wait()

    def fork(self, work: Callable[[], Any]) -> Child:
        self.number += 1
        output = self.root / f"output{self.number}.txt"
        output.touch()  # a process may be killed before it has opened it
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            self.children.append(Child(pid, output))
            return self.children[-1]
        code = 1
        try:
            for number in (signal.SIGINT, signal.SIGTERM):  # as in a process of its own
                signal.signal(number, signal.SIG_DFL)
            file = os.open(output, os.O_WRONLY)
            os.dup2(file, 1)
            os.dup2(file, 2)
            work()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        except (UserError, RunError) as error:
            print(f"error: {error}")  # as the command line does
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def differences(self, folder: Path, ranks: int = 1) -> list[str]:
        """Of a run that is done, to the unbroken one: its logs, its event files, its weights and moments."""
        truth = self.truth(ranks)
        found = []
        if run_folder.meta(folder).get("status") != "done" or status.read(folder).state != "finished":
            found.append(f"{folder} is not done")
        if journal(folder) != journal(truth):
            found.append(f"{folder}/log.jsonl differs")
        ours, theirs = logged(folder).scalars, logged(truth).scalars
        found += [
            f"{folder}: {tag} differs" for tag in theirs if not tag.startswith("perf/") and ours.get(tag) != theirs[tag]
        ]
        name = checkpoint.name(STEPS)
        if _files(folder, name) != _files(truth, name):
            found.append(f"{folder}: weights, moments or random states differ")
        return found

    def prefix_differences(self, folder: Path, ranks: int = 1) -> list[str]:
        """Of a run that was hit, so far: every line that it logged is the unbroken run's."""
        if not (folder / "log.jsonl").exists():
            return []
        text = (folder / "log.jsonl").read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        ours = [comparable(json.loads(line)) for line in whole.splitlines()]
        theirs = journal(self.truth(ranks))
        return [] if ours == theirs[: len(ours)] else [f"{folder}/log.jsonl differs after a kill"]


def last_step(folder: Path) -> int:
    """The last step that a run logged; 0 before the first."""
    if not (folder / "log.jsonl").exists():
        return 0
    steps = re.findall(r'^\{"step": (\d+)', (folder / "log.jsonl").read_text(encoding="utf-8"), re.MULTILINE)
    return int(steps[-1]) if steps else 0


def reached(folder: Path, child: Child, step: int, seconds: float = 600) -> bool:
    """Wait until this step is logged. False: the process has ended before."""
    until = time.monotonic() + seconds
    while last_step(folder) < step:
        if child.ended():
            return last_step(folder) >= step
        if time.monotonic() > until:
            raise TimeoutError(f"{folder} did not get to step {step}: {child.said()}")
        time.sleep(0.005)
    return True


def went_on_after(child: Child) -> int | None:
    """The step of the checkpoint that a training process started from; None if it did not get so far."""
    said = child.said()
    if "parameters (" not in said:
        return None
    found = re.search(r"going on after step (\d+)", said)
    return int(found[1]) if found else 0


def _files(folder: Path, name: str) -> dict[str, Any]:
    return checkpoint.read(folder / "checkpoints" / name).files


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]
