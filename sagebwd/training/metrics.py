"""What a run tells the world: TensorBoard scalars, a progress bar or sparse lines, and meta.json. Rank 0 only."""

from __future__ import annotations

import json
import math
import os
import platform
import resource
import sys
import threading
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from sagebwd import machine
from sagebwd.training.budget import Plan
from sagebwd.training.journal import Journal
from sagebwd.training.run_folder import EVENTS, META

LINES = 20  # log lines of a run, where there is no terminal for a bar


@dataclass(frozen=True)
class StepResult:
    """One optimizer step. loss: nats per token, mean over the global batch before the update. seconds: wall time;
    loading: how much of it the first rank waited for micro-batches. skipped: loss or gradient norm are not finite, and
    nothing was changed.
    """

    step: int
    loss: float
    learning_rate: float
    grad_norm: float
    seconds: float
    loading: float = 0.0
    skipped: bool = False


@dataclass(frozen=True)
class Cost:
    """What turns tokens into FLOPs and nats into bits per byte.

    flops_per_token: size.flops_per_token. peak_flops: of all ranks together, FLOP/s in bf16; None: not known, or the
    run is not in bf16, so there is no MFU. bytes_per_token: of the validation text.
    """

    flops_per_token: float
    peak_flops: float | None
    bytes_per_token: float

    def describe(self, device: torch.device) -> str:
        """One line for a log."""
        text = f"{self.flops_per_token / 1e9:.3f} GFLOPs a token (6 a matrix parameter, causal attention halved)"
        if self.peak_flops is not None:
            return f"{text}, MFU against {self.peak_flops / 1e12:,.0f} TFLOP/s"
        what = "the CPU" if device.type == "cpu" else f"{torch.cuda.get_device_name(device)} in this precision"
        return f"{text}, no MFU: the peak of {what} is not in the table"


class Recorder(AbstractContextManager):
    """Writes events into the arm's folder and shows progress on standard error's terminal, or as lines."""

    def __init__(
        self, folder: Path, plan: Plan, *, start_step: int, device: torch.device, cost: Cost, tokens_ahead: int = 0
    ) -> None:
        """start_step: the step of the checkpoint that the run goes on from, 0 for a fresh one. tokens_ahead: tokens by
        which it is ahead of its steps, where tokens_per_step was changed on the way.

        Points that an earlier process wrote after that checkpoint are purged, so that none overlap.
        """
        self.plan, self.device, self.cost, self.tokens_ahead = plan, device, cost, tokens_ahead
        self.tokens_per_step = plan.tokens // plan.steps
        _wait_for_another_second(folder)
        threading.excepthook = _told_elsewhere
        self.writer = SummaryWriter(str(folder), purge_step=start_step + 1 if start_step else 0)
        self.journal = Journal(folder, last_step=start_step if start_step else -1)
        self.bar = tqdm(
            total=plan.steps,
            initial=start_step,
            unit="step",
            dynamic_ncols=True,
            disable=not sys.stderr.isatty(),
        )

    def __exit__(self, *error: Any) -> None:
        self.close()

    def close(self) -> None:
        self.bar.close()
        self.writer.close()
        threading.excepthook = threading.__excepthook__
        self.journal.close()

    def say(self, text: str) -> None:
        """A line for a person, above the progress bar if there is one."""
        if self.bar.disable:
            print(text, flush=True)
        else:
            self.bar.write(text)

    def train(self, result: StepResult, *, last_word: bool = False) -> None:
        """last_word: the run ends here, and shows what with: also the loss of a step that was skipped."""
        speed = self.tokens_per_step / result.seconds
        flops = speed * self.cost.flops_per_token
        mfu = None if self.cost.peak_flops is None else flops / self.cost.peak_flops
        scalars = {
            "train/loss": result.loss,
            "train/learning_rate": result.learning_rate,
            "train/grad_norm": result.grad_norm,
            "train/consumed_tokens": result.step * self.tokens_per_step + self.tokens_ahead,
            "perf/tokens_per_second": speed,
            "perf/step_time": result.seconds,
            "perf/memory_gib": self._memory_gib(),
            "perf/model_tflops": flops / 1e12,
            "perf/data_fraction": result.loading / result.seconds,
        } | ({} if mfu is None else {"perf/mfu": mfu})
        self.journal.write(result.step, **scalars, **({"skipped": True} if result.skipped else {}))
        for tag, value in scalars.items():
            # A step that changed nothing has no loss to compare: the journal alone tells what it was.
            if last_word or not (result.skipped and tag in ("train/loss", "train/grad_norm")):
                self.writer.add_scalar(tag, value, result.step)
        pace = f"{speed:,.0f} tokens/s" + ("" if mfu is None else f", MFU {mfu:.1%}")
        self.bar.set_postfix_str(f"loss {result.loss:.4f}, {pace}", refresh=False)
        self.bar.update()
        every = max(1, self.plan.steps // LINES)
        if self.bar.disable and (result.step % every == 0 or result.step in (1, self.plan.steps)):
            self.say(
                f"step {result.step}/{self.plan.steps}: loss {result.loss:.4f}, lr {result.learning_rate:.2e}, "
                f"gradient norm {result.grad_norm:.3f}, {pace}, data {result.loading / result.seconds:.1%}"
            )

    def validation(self, step: int, loss: float) -> None:
        bits = loss / math.log(2) / self.cost.bytes_per_token
        self.journal.write(step, **{"validation/loss": loss, "validation/bits_per_byte": bits})
        self.writer.add_scalar("validation/loss", loss, step)
        self.writer.add_scalar("validation/bits_per_byte", bits, step)
        self.say(f"step {step}/{self.plan.steps}: validation loss {loss:.4f}, {bits:.4f} bits a byte")

    def flush(self) -> None:
        """All points so far on disk: called before a checkpoint, so that a resumed run has every point up to it."""
        self.writer.flush()

    def _memory_gib(self) -> float:
        """Peak memory of this process so far: allocated on its GPU, or resident where there is none."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 2**30
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts KiB


def _told_elsewhere(args: threading.ExceptHookArgs) -> None:
    """TensorBoard's writing thread keeps its error (a full disk) for the next point, which raises it where it is told
    in a sentence: a stack trace of the thread would come first."""
    if type(args.thread).__module__.startswith("tensorboard.") and isinstance(args.exc_value, OSError):
        return
    threading.__excepthook__(args)


def _wait_for_another_second(folder: Path) -> None:
    """Event files are named, and so read, by the second they were begun in: ours must come after an earlier process's.

    Not for long: the clocks of two machines that differ by more are not waited for.
    """
    begun = [int(path.name.split(".")[3]) for path in folder.glob(EVENTS) if path.name.split(".")[3].isdigit()]
    until = time.monotonic() + 5
    while begun and time.time() < max(begun) + 1 and time.monotonic() < until:
        time.sleep(0.05)


def environment(device: torch.device) -> dict[str, Any]:
    """Where and with what a run runs, for meta.json and the report."""
    return {
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name(),
        "versions": machine.versions() | {"torch": torch.__version__},  # a PyPI build hides CUDA in its metadata
        "commit": machine.commit(),
    }


def write_meta(folder: Path, meta: dict[str, Any]) -> None:
    """meta.json, replaced whole: a reader never sees half of it."""
    beside = folder / f".{META}.{os.getpid()}"
    beside.write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
    beside.replace(folder / META)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
