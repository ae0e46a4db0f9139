"""Saves in the background: a step waits for the copy to host memory, and files are written while training goes on."""

from __future__ import annotations

import shutil
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import distributed

from sagebwd.training import checkpoint
from sagebwd.training.checkpoint import Position, Run
from sagebwd.training.engine import Engine
from sagebwd.training.snapshot import Snapshot
from sagebwd.training.world import World


@dataclass(frozen=True)
class Outcome:
    """Of one save, the same on every rank. error: why it failed, in a sentence; None: the checkpoint is there."""

    step: int
    error: str | None


class Saver:
    """One save at a time. Every rank calls `save` at the same step; `poll` and `wait` as it likes.

    Of the ranks that hold the same, the first writes; all tell each other how it went, in a group of their own, so that
    neither training's collectives nor a GPU are disturbed.
    """

    def __init__(self, arm_folder: Path, run: Run, here: World) -> None:
        self.arm_folder, self.run, self.here = arm_folder, run, here
        self.group = distributed.new_group(backend="gloo") if here.size > 1 else None
        self.snapshot = Snapshot(here.device)
        self.thread: threading.Thread | None = None
        self.outcome: Outcome | None = None

    def save(self, engine: Engine, position: Position) -> None:
        """Copy what is to be saved, waiting for the save before first, and write it in the background.

        position: not changed by the caller while it is written. Call `poll` or `wait` before.
        """
        assert self.thread is None, "a save is not over: wait() first"
        shard = engine.shard
        if shard is not None:
            self.snapshot.take(engine)
        self.thread = threading.Thread(target=self._write, args=(position, shard), name="checkpoint", daemon=True)
        self.thread.start()

    def poll(self) -> Outcome | None:
        """The outcome of a save that has ended since it was last asked for."""
        return None if self.thread is None or self.thread.is_alive() else self.wait()

    def wait(self) -> Outcome | None:
        """The outcome of the save under way, when it has ended; None if there is none."""
        if self.thread is None:
            return None
        self.thread.join()
        self.thread = None
        return self.outcome

    def _write(self, position: Position, shard: str | None) -> None:
        error = None
        try:
            files, error = self._own_file(position, shard)
            told = self._gather((files, error))
            error = next((why for _, why in told if why), None)
            if self.here.first:
                error = self._publish(position, {k: v for each, _ in told for k, v in each.items()}, error)
            error = self._gather(error)[0]
        except Exception as failure:  # surfaces in training, as the outcome
            error = _sentence(failure)
        self.outcome = Outcome(position.step, error)

    def _own_file(self, position: Position, shard: str | None) -> tuple[dict[str, Any], str | None]:
        if shard is None:
            return {}, None
        folder = self.arm_folder / checkpoint.FOLDER / f"{checkpoint.name(position.step)}{checkpoint.PARTIAL}"
        path = folder / shard
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.snapshot.wait()
            save_file(self.snapshot.tensors, path)
            checkpoint.to_disk(path)
            return {path.name: checkpoint.seal(path)}, None
        except Exception as failure:
            return {}, _sentence(failure)

    def _publish(self, position: Position, files: dict[str, Any], error: str | None) -> str | None:
        if error is None:
            try:
                checkpoint.publish(self.arm_folder, self.run, position, files)
                return None
            except Exception as failure:
                error = _sentence(failure)
        folder = self.arm_folder / checkpoint.FOLDER / f"{checkpoint.name(position.step)}{checkpoint.PARTIAL}"
        shutil.rmtree(folder, ignore_errors=True)
        return error

    def _gather(self, mine: Any) -> list[Any]:
        if self.group is None:
            return [mine]
        all_of_them: list[Any] = [None] * self.here.size
        distributed.all_gather_object(all_of_them, mine, group=self.group)
        return all_of_them


def _sentence(failure: Exception) -> str:
    return str(failure).splitlines()[0] if str(failure) else type(failure).__name__
