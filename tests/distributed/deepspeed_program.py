"""What the test of engine deepspeed starts as processes of their own: many runs, one after the other.

Arguments: a file of jobs (JSON), the prepared data, the folder for the runs. A job: name, recipe; from: another job's
name, from whose checkpoint of step `at` it goes on; sick: the numbers of training micro-batches whose loss is NaN on
the last rank; spike: of those whose loss is 5 nats higher on all; stop: of the one at which the last rank gets SIGTERM,
whereupon it is started again; rehearse: whether it does first what is done on a GPU to compile kernels.
"""

import contextlib
import json
import math
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, distributed

from sagebwd.tokenizer import Prepared, load_prepared
from sagebwd.training import checkpoint, run_folder, train, world
from sagebwd.training.engine import losses
from sagebwd.training.recipe import Recipe


def main(jobs: Path, prepared: Path, runs: Path) -> None:
    data = load_prepared(prepared)
    # once for all: torchrun's store serves no second time
    with world.process_group(world.own_device(), timedelta(minutes=10)):
        _train(json.loads(jobs.read_text()), data, runs)


def _train(jobs: list[dict[str, Any]], data: Prepared, runs: Path) -> None:
    first, last = distributed.get_rank() == 0, distributed.get_rank() == distributed.get_world_size() - 1
    for job in jobs:
        folder, recipe = runs / job["name"], Recipe.model_validate(job["recipe"])
        if first and "from" in job:
            shutil.copytree(runs / job["from"] / checkpoint.FOLDER, folder / checkpoint.FOLDER)
            (folder / checkpoint.FOLDER / checkpoint.LATEST).write_text(checkpoint.name(job["at"]))
        distributed.barrier()
        if first:
            print(job["name"], flush=True)
        with _tampered(job, last), _rehearsed(job.get("rehearse", False)):
            end = train.run(recipe, job["name"], folder, data)
            if end == "preempted":
                assert run_folder.meta(folder)["step"] < 20
                train.run(recipe, job["name"], folder, data)
        if first:
            (folder / "facts.json").write_text(json.dumps({"end": end, "deepspeed": "deepspeed" in sys.modules}))


@contextlib.contextmanager
def _tampered(job: dict[str, Any], last: bool) -> Iterator[None]:
    original, count = losses.sums, [0]

    def sums(mask: Tensor, of_each: Tensor) -> tuple:
        if of_each.requires_grad:
            if last and count[0] in job.get("sick", ()):
                of_each = of_each * math.nan
            if count[0] in job.get("spike", ()):
                of_each = of_each + 5.0
            if last and count[0] == job.get("stop"):
                os.kill(os.getpid(), signal.SIGTERM)
            count[0] += 1
        return original(mask, of_each)

    with mock.patch.object(losses, "sums", sums):
        yield


@contextlib.contextmanager
def _rehearsed(wanted: bool) -> Iterator[None]:
    if not wanted:
        yield
        return
    from sagebwd.training.engine.deepspeed import DeepSpeedEngine

    begin = DeepSpeedEngine.begin

    def begun(self: DeepSpeedEngine, plan: Any) -> None:
        begin(self, plan)
        tokens = torch.arange(32 * 32).view(32, 32) % 512
        batch = {"tokens": tokens, "labels": tokens, "position_ids": torch.arange(32).expand(32, -1)}
        self.rehearse(batch | {"loss_mask": torch.ones(32, 32)})

    with mock.patch.object(DeepSpeedEngine, "begin", begun):
        yield


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
