"""The training program: one arm of an experiment, on CPU with gloo or on GPUs with NCCL.

Read it top to bottom: `run`, then what `_Arm` builds, its loop, one step, the validation, and how it ends.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Generator, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import distributed

from sagebwd import gpus
from sagebwd.errors import RunError
from sagebwd.megatron.core_attention import backend_that_ran
from sagebwd.tokenizer import Prepared
from sagebwd.training import (
    budget,
    checkpoint,
    deepspeed_config,
    determinism,
    endings,
    engine,
    health,
    lock,
    metrics,
    run_folder,
    size,
    snapshot,
    status,
    warmup,
    world,
)
from sagebwd.training.checkpoint import Manifest, Position
from sagebwd.training.data import train_batches, validation_batches
from sagebwd.training.engine import Batch
from sagebwd.training.preemption import Preemption
from sagebwd.training.prefetch import prefetch
from sagebwd.training.recipe import Recipe
from sagebwd.training.saver import Outcome, Saver
from sagebwd.training.watchdog import Watchdog
from sagebwd.training.world import World

End = Literal["done", "diverged", "preempted"]


def run(recipe: Recipe, arm: str, folder: Path, prepared: Prepared) -> End:
    """Train one arm to the end of its budget; called on every rank, also without torchrun (then a world of one).

    folder: the arm's, with its event files, meta.json, status.json and checkpoints. A run that stopped goes on from its
    newest whole checkpoint; one that is done or has diverged is not run again. Returns how it ended: "preempted" after
    SIGTERM or SIGUSR1 on any rank, with a checkpoint of the step that was under way; "diverged" after health.bad_steps
    losses or gradient norms in a row that are NaN or infinite.

    Raises UserError: a layout or budget that cannot be, a checkpoint of another run, none that is whole, a folder that
    another process trains in. Raises RunError: no memory, no disk, a save that failed at the end.
    """
    plan = budget.plan(recipe, budget.data_parallel_size(recipe, world.size()))
    if run_folder.finished(folder):
        found = run_folder.meta(folder)["status"]
        print(f"arm {arm}: {found} already, in {folder}", flush=True)
        status.settle(folder, "finished" if found == "done" else "failed")
        return found
    dtype = resolve_dtype(recipe)
    resolved = resolve(recipe)
    deepspeed_config.check(resolved)
    owner = checkpoint.Run(resolved, prepared.digest, prepared.vocab_size)
    minutes = recipe.health.hang_minutes
    with (
        determinism.active(recipe.train.deterministic),
        world.join(
            recipe.parallel.tensor,
            recipe.seed,
            minutes + 1,  # the watchdog is first, and says more
            context=recipe.parallel.context,
            pipeline=recipe.parallel.pipeline,
        ) as here,
        contextlib.ExitStack() as stack,
    ):
        folder.mkdir(parents=True, exist_ok=True)
        report: list[status.Reporter] = []  # the first rank's

        def begin() -> None:
            stack.enter_context(lock.held(folder))
            report.append(status.Reporter(folder, plan.steps))

        here.agreed(begin)
        preemption = Preemption(here)
        stack.enter_context(preemption.listening())
        watchdog = stack.enter_context(Watchdog(here, minutes, partial(status.fail, folder, hung=True)))
        with endings.told(folder, here):
            training = _Arm(resolved, arm, folder, prepared, plan, dtype, owner, here, preemption, watchdog)
            training.report = report[0] if report else None
            manifest = here.agreed(training.find)
            if here.first:
                run_folder.update_config(folder, recipe)
            return training.train(manifest)


def resolve(recipe: Recipe) -> Recipe:
    """The recipe with what "auto" means on this machine: it can change a result, so a checkpoint holds it resolved."""
    fusion = recipe.train.fusion
    if fusion == "auto":
        fusion = "on" if torch.cuda.is_available() else "off"
    precision = "bf16" if resolve_dtype(recipe) is torch.bfloat16 else "fp32"
    return recipe.model_copy(
        update={"train": recipe.train.model_copy(update={"precision": precision, "fusion": fusion})}
    )


def resolve_dtype(recipe: Recipe) -> torch.dtype:
    """Of weights and activations: train.precision, where auto means bf16 on a GPU and fp32 on a CPU."""
    bf16 = torch.cuda.is_available() if recipe.train.precision == "auto" else recipe.train.precision == "bf16"
    return torch.bfloat16 if bf16 else torch.float32


class _Rewind(Exception):
    """A spike, and a checkpoint from before it."""


class _Arm:
    """One arm in the making, on one rank."""

    def __init__(
        self,
        recipe: Recipe,
        arm: str,
        folder: Path,
        prepared: Prepared,
        plan: budget.Plan,
        dtype: torch.dtype,
        owner: checkpoint.Run,
        here: World,
        preemption: Preemption,
        watchdog: Watchdog,
    ) -> None:
        self.recipe, self.arm, self.folder, self.prepared = recipe, arm, folder, prepared
        self.plan, self.owner, self.here = plan, owner, here
        self.preemption, self.watchdog = preemption, watchdog
        self.engine = engine.build(recipe, prepared.vocab_size, dtype, here, plan)
        self.validation = list(validation_batches(recipe, prepared, dp_rank=here.data_rank, dp_size=here.data_size))
        # Loss sum, tokens, ranks that were asked to stop, whether a checkpoint is due by the clock: of all ranks; and
        # the latter two of this one
        cuda = here.device.type == "cuda"
        self.host = torch.zeros(4, dtype=torch.float64, pin_memory=cuda)
        self.mine = torch.zeros(2, dtype=torch.float64, pin_memory=cuda)
        self.saver = Saver(folder, owner, here)
        self.position = Position()
        self.batches: Generator[Batch, None, None] | None = None
        self.loading = 0.0  # seconds of the step under way that were spent waiting for micro-batches
        self.recorder: metrics.Recorder | None = None
        self.report: status.Reporter | None = None
        self.probe: health.Probe | None = None
        self.meta: dict[str, Any] = {}
        self.saved: int | None = None  # the newest whole checkpoint's step
        self.spent, self.since = 0.0, time.monotonic()
        self.last_save = self.since

    def find(self, below: int | None = None) -> Manifest | None:
        """On the first rank: the checkpoint to go on from, whole and of this run; None to start from the beginning."""
        if below is None:
            checkpoint.clean(self.folder)
        manifest = checkpoint.newest_whole(self.folder, self._say, below)
        if manifest is not None:
            checkpoint.accept(manifest, self.owner)
        return manifest

    def train(self, manifest: Manifest | None) -> End:
        """From the checkpoint, or from the start, to the end, to divergence or until it is asked to stop."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._close)
            self._restore(manifest)
            self._begin()
            self._compile()
            while True:
                try:
                    return self._loop()
                except _Rewind:
                    self._rewind()

    def _restore(self, manifest: Manifest | None) -> None:
        """State and position of a checkpoint; what is left of the budget follows from them."""
        if manifest is not None:
            self.position = manifest.position
            self.saved = manifest.position.step
            self.spent = manifest.position.wall_seconds
            for change in checkpoint.accept(manifest, self.owner):
                told = {"step": self.saved, "key": change.key, "from": change.there, "to": change.here}
                self.position.changes = [*self.position.changes, told]
                self._say(
                    f"arm {self.arm}: from step {self.saved} on {change.key} is {change.here!r}, not {change.there!r}"
                )
        at, tokens_per_step = self.position, self.recipe.train.tokens_per_step
        steps = at.step + max(self.recipe.train.total_tokens - at.tokens, 0) // tokens_per_step
        self.plan = replace(self.plan, steps=steps, tokens=steps * tokens_per_step)
        self.engine.begin(self.plan)
        if manifest is not None:
            snapshot.restore(manifest, self.engine, self.here)
        self._open()

    def _open(self) -> None:
        """Logs and data from the position on."""
        at, tokens_per_step = self.position, self.recipe.train.tokens_per_step
        self._close()
        if self.here.first:
            self.recorder = metrics.Recorder(
                self.folder,
                self.plan,
                start_step=at.step,
                device=self.here.device,
                cost=self._cost(),
                tokens_ahead=at.tokens - at.step * tokens_per_step,
            )
        self.batches = prefetch(self._batches())

    def _close(self) -> None:
        if self.batches:
            self.batches.close()
            self.batches = None
        if self.recorder:
            self.recorder.close()
            self.recorder = None

    def _batches(self, before: int = 0) -> Iterator[Batch]:
        """Micro-batches of the steps after the position, or after the `before` steps before it."""
        start = self.position.step - before
        return train_batches(
            self.recipe,
            self.prepared,
            dp_rank=self.here.data_rank,
            dp_size=self.here.data_size,
            start_step=start,
            steps=self.plan.steps,
            ahead=self.position.samples - self.position.step * self.plan.sequences_per_step,
        )

    def _cost(self) -> metrics.Cost:
        """What a token of this run computes and stands for."""
        device, spec = self.here.device, None
        if device.type == "cuda" and self.recipe.train.precision == "bf16":
            spec = gpus.spec(torch.cuda.get_device_name(device))
        return metrics.Cost(
            flops_per_token=size.flops_per_token(self.recipe, self.prepared.vocab_size),
            peak_flops=None if spec is None else spec.tflops * 1e12 * self.here.size,
            bytes_per_token=self.prepared.bytes_per_token,
        )

    def _begin(self) -> None:
        """Say what starts, and write down what the report will tell of it."""
        cost, counts = self._cost(), size.parameter_counts(self.recipe, self.prepared.vocab_size)
        start = self.position.step
        self._say(
            f"arm {self.arm}: {counts['total'] / 1e6:.2f}M parameters ({counts['non_embedding'] / 1e6:.2f}M without "
            f"embeddings), {self.recipe.train.precision}, {self.plan.steps} steps of "
            f"{self.recipe.train.tokens_per_step:,} tokens, {budget.layout(self.recipe, self.here.size)} "
            f"on {self.here.device.type}" + (f", going on after step {start}" if start else "")
        )
        self._say(f"arm {self.arm}: {cost.describe(self.here.device)}")
        if self.here.first:
            self.meta = {
                "arm": self.arm,
                **metrics.environment(self.here.device),
                "world_size": self.here.size,
                "layout": budget.layout(self.recipe, self.here.size),
                "precision": self.recipe.train.precision,
                **self.engine.facts,
                "parameters": counts,
                "fusion": self.recipe.train.fusion,
                "unigram_entropy": self.prepared.unigram_entropy,
                "bytes_per_token": self.prepared.bytes_per_token,
                "flops_per_token": cost.flops_per_token,
                "peak_flops": cost.peak_flops,
                "data_digest": self.prepared.digest,
                "steps": self.plan.steps,
            }
        if self.report:
            at = self.position
            counted = {"spikes": at.spikes, "skipped": at.skipped}
            self.report.tell(step=at.step, of=self.plan.steps, tokens=at.tokens, checkpoint=self.saved, **counted)

    def _compile(self) -> None:
        """On a GPU: compile what a step launches, before the first step, and say how long it took."""
        if self.here.device.type != "cuda":
            return
        sample = {
            name: value[:1].repeat(self.recipe.train.micro_batch, 1) for name, value in self.validation[0].items()
        }
        self.watchdog.beat("the kernels' compilation")
        seconds = warmup.compile_kernels(self.engine, sample)
        self._say(f"arm {self.arm}: kernels compiled, or found compiled, in {seconds:.0f} s")
        self.watchdog.beat(f"step {self.position.step + 1}")

    def _loop(self) -> End:
        position, settings = self.position, self.recipe.checkpoint
        due = False
        if position.step == 0 and position.start_loss is None:
            position.start_loss = self._validate()
            if position.start_loss is None:
                return self._preempted()
        elif not position.validated and not self._validate_if_due():
            return self._preempted()
        self._write_meta(status="running")
        while position.step < self.plan.steps:
            if self._stopping():
                return self._preempted()
            result = self._step()
            self._after(result)
            if position.bad_in_row >= self.recipe.health.bad_steps:
                return self._diverged(result)
            if not self._validate_if_due():
                return self._preempted()
            by_steps = settings.every_steps is not None and position.step % settings.every_steps == 0
            due = due or by_steps or bool(self.host[3] > 0)
            if due and not position.bad_in_row:  # a state that may be ruined displaces no good checkpoint
                due = False
                self._save()
        self._save_now()
        return self._done()

    def _stopping(self) -> bool:
        """Whether any rank was asked to stop, as of the last step; the same on every rank."""
        return bool(self.host[2] > 0)

    def _step(self) -> metrics.StepResult:
        """One optimizer step over the global batch. The host waits for the device once: for the gradient norm."""
        begin, self.loading = time.perf_counter(), 0.0
        total = self.engine.gradients(self._taken(self.batches))
        self.mine[0] = self.preemption.heard()
        self.mine[1] = self._due_by_the_clock()
        total = torch.cat((total, self.mine.to(self.here.device, non_blocking=True)))
        # Over all ranks, for the flags' sake: of a tensor-parallel group each counts loss and tokens once more, and the
        # mean stays the same.
        distributed.all_reduce(total)
        # Queued before the gradient norm, which the optimizer waits for: once it returns, the copy has arrived.
        self.host.copy_(total, non_blocking=True)
        grad_norm = self.engine.update(self._sound)
        self.position.step += 1
        self.position.samples += self.plan.sequences_per_step
        self.position.tokens += self.recipe.train.tokens_per_step
        self.watchdog.beat(f"step {self.position.step + 1}")
        return metrics.StepResult(
            step=self.position.step,
            loss=self._mean_loss(),
            learning_rate=self.engine.learning_rate,
            grad_norm=grad_norm,
            seconds=time.perf_counter() - begin,
            loading=self.loading,
            skipped=not health.sound(self._mean_loss(), grad_norm),
        )

    def _mean_loss(self) -> float:
        loss_sum, tokens, *_ = self.host.tolist()
        return loss_sum / tokens

    def _sound(self, grad_norm: float) -> bool:
        return health.sound(self._mean_loss(), grad_norm)

    def _due_by_the_clock(self) -> bool:
        minutes = self.recipe.checkpoint.every_minutes
        return bool(self.here.first and minutes and time.monotonic() - self.last_save >= 60 * minutes)

    def _taken(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The micro-batches, as the engine takes them."""
        while True:
            begin = time.perf_counter()
            batch = next(batches, None)
            self.loading += time.perf_counter() - begin
            if batch is None:
                return
            if self.probe:
                self.probe.micro_batch += 1
            yield batch

    def _after(self, result: metrics.StepResult) -> None:
        """Judge the step, log it, and look after the save that is under way. Raises _Rewind."""
        position = self.position
        verdict = health.judge(self.recipe.health, position, result.loss, result.grad_norm)
        if self.recorder:
            self.recorder.train(result, last_word=verdict == "stop")
        if verdict == "spike":
            self._say(f"arm {self.arm}: SPIKE at step {result.step}: loss {result.loss:.4f}")
        elif result.skipped:
            self._say(
                f"arm {self.arm}: SKIPPED step {result.step}: loss {result.loss}, gradient norm {result.grad_norm}; "
                f"weights and optimizer are as before ({position.bad_in_row} in a row, {position.skipped} in all)"
            )
        self._tell_of(self.saver.poll())
        if self.report:
            rate = self.recipe.train.tokens_per_step / result.seconds
            at = {"step": position.step, "tokens": position.tokens, "rate": rate}
            self.report.tell(now=verdict != "well", spikes=position.spikes, skipped=position.skipped, **at)
        if verdict == "spike" and self.recipe.health.rewind:
            self._tell_of(self.saver.wait())
            if self.saved is None or len(position.rewinds) >= self.recipe.health.max_rewinds:
                why = "there is no checkpoint yet" if self.saved is None else "health.max_rewinds is reached"
                self._say(f"arm {self.arm}: it does not go back, since {why}")
            else:
                raise _Rewind

    def _validate_if_due(self) -> bool:
        """False: asked to stop while it validated, and nothing came of it."""
        position = self.position
        due = position.step == self.plan.steps or position.step % self.recipe.evaluation.every_steps == 0
        position.validated = not due or self._validate() is not None
        return position.validated

    @torch.no_grad()
    def _validate(self) -> float | None:
        """Mean loss over the validation set, in nats per token; None if a rank was asked to stop meanwhile."""
        step = self.position.step
        self.engine.evaluating(True)
        total = torch.zeros(2, dtype=torch.float64, device=self.here.device)
        self.preemption.begin()
        for batch in self.validation:
            if self.preemption.poll():
                self.engine.evaluating(False)
                return None
            total += self.engine.loss(batch)
            self.watchdog.beat(f"validation after step {step}")
        distributed.all_reduce(total)
        self.engine.evaluating(False)
        loss_sum, tokens = total.tolist()
        self.watchdog.beat(f"step {step + 1}")
        if self.recorder:
            self.recorder.validation(step, loss_sum / tokens)
        return loss_sum / tokens

    def _save(self) -> None:
        """Take a snapshot now, once the save before is written; it is written while training goes on."""
        self.watchdog.beat(f"the checkpoint of step {self.position.step}")
        self._tell_of(self.saver.wait())
        if self.recorder:
            self.recorder.flush()  # so that a run that goes on from here has every point up to it
        self.position.adam_step = self.engine.updates
        self.position.wall_seconds = self._seconds()
        self.saver.save(self.engine, replace(self.position))
        self.last_save = time.monotonic()
        self.watchdog.beat(f"step {self.position.step + 1}")

    def _save_now(self) -> None:
        """Save and wait for it. Raises RunError: it could not be written."""
        self._tell_of(self.saver.wait())
        if self.saved == self.position.step:
            return
        self._save()
        outcome = self.saver.wait()
        self._tell_of(outcome)
        if outcome.error:
            last = "there is none before it" if self.saved is None else f"the last good one is of step {self.saved}"
            raise RunError(
                f"the checkpoint of step {outcome.step} could not be written ({outcome.error}), and {last}: mend that, "
                "and the same command resumes"
            )

    def _tell_of(self, outcome: Outcome | None) -> None:
        """What became of a save. One that failed is said, and training goes on: the checkpoint before it is good."""
        if outcome is None:
            return
        if outcome.error is None:
            self.saved = outcome.step
            self._write_meta(status="running", step=outcome.step)
            if self.report:
                self.report.tell(checkpoint=outcome.step, cause=None)
            return
        last = "there is none before it" if self.saved is None else f"the last good one is of step {self.saved}"
        sentence = f"the checkpoint of step {outcome.step} could not be written ({outcome.error}); {last}"
        self._say(f"arm {self.arm}: WARNING: {sentence}; training goes on")
        if self.report:
            self.report.tell(cause=sentence)

    def _rewind(self) -> None:
        """Back to the last checkpoint before the spike; the samples since are left out."""
        spike = self.position
        manifest = self.here.agreed(lambda: self.find(below=spike.step))
        if manifest is None:
            self._say(f"arm {self.arm}: it does not go back, since no checkpoint is from before the spike")
            return
        snapshot.restore(manifest, self.engine, self.here)
        told = {
            "from": spike.step,
            "to": manifest.position.step,
            "samples_left_out": spike.samples - manifest.position.samples,
        }
        self.position = replace(
            manifest.position,
            samples=spike.samples,
            spikes=spike.spikes,
            skipped=spike.skipped,
            changes=spike.changes,
            rewinds=[*spike.rewinds, told],
        )
        self.saved = manifest.position.step
        self._open()
        self._say(
            f"arm {self.arm}: REWOUND from step {told['from']} to the checkpoint of step {told['to']}; "
            f"{told['samples_left_out']} samples are left out"
        )

    def _done(self) -> End:
        self._write_meta(status="done")
        if self.report:
            self.report.tell(state="finished", step=self.position.step, cause=None)
        self._say(f"arm {self.arm}: done, {self.plan.steps} steps in {self._seconds():.0f} s, in {self.folder}")
        return "done"

    def _preempted(self) -> End:
        """Asked to stop, all ranks at one step boundary: save, unless nothing is trained yet, and end."""
        if self.position.step:
            self._save_now()
        if self.recorder:
            self.recorder.flush()
        self._write_meta(status="running", step=self.saved)
        cause = "asked to stop (SIGTERM or SIGUSR1)"
        if self.report:
            self.report.tell(state="preempted", step=self.position.step, tokens=self.position.tokens, cause=cause)
        self._say(
            f"arm {self.arm}: {cause} after step {self.position.step} of {self.plan.steps}; "
            "the same command goes on from there"
        )
        return "preempted"

    def _diverged(self, result: metrics.StepResult) -> End:
        self._tell_of(self.saver.wait())
        said = self._diagnose(result)
        self._write_meta(status="diverged", step=result.step)
        first = f"the first that is not finite: {said['first']} on rank {said['rank']}"
        cause = (
            f"{self.position.bad_in_row} steps in a row with a loss or gradient that is not finite; at step "
            f"{result.step} {first}; its samples are in {run_folder.SICK}"
        )
        if self.report:
            self.report.tell(state="failed", step=self.position.step, cause=cause)
        self._say(
            f"arm {self.arm}: DIVERGED at step {result.step}: loss {result.loss}, gradient norm {result.grad_norm}; "
            f"{first}. It stops here; what it logged is in {self.folder}"
        )
        return "diverged"

    def _diagnose(self, result: metrics.StepResult) -> dict[str, Any]:
        """Do the step again, looking at every module, and write down where it begins and with which samples."""
        self.probe = health.Probe()
        with self.probe.on(self.engine.megatron):
            self.engine.gradients(self._taken(self._batches(before=1)))
        self.probe.gradients(self.engine.megatron)
        begin = self.position.samples - self.plan.sequences_per_step
        mine = self.probe.finding(self.here, begin, self.recipe.train.micro_batch)
        of_all: list[Any] = [None] * self.here.size
        distributed.all_gather_object(of_all, mine)
        worst = health.first_of(of_all)
        if self.here.first:
            facts = {
                "step": result.step,
                "loss": str(result.loss),
                "gradient_norm": str(result.grad_norm),
                **worst,
                "samples_of_the_step": [begin, self.position.samples - 1],
                "seed": self.recipe.seed,
                "data_digest": self.prepared.digest,
            }
            (self.folder / run_folder.SICK).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
        return worst

    def _write_meta(self, **changed: Any) -> None:
        if self.here.first:
            at = self.position
            self.meta |= {"wall_seconds": self._seconds(), "backend": backend_that_ran(self.engine.megatron), **changed}
            self.meta |= {"start_loss": at.start_loss, "skipped_steps": at.skipped, "spikes": at.spikes}
            self.meta |= {"changes": at.changes, "rewinds": at.rewinds}
            metrics.write_meta(self.folder, self.meta)

    def _seconds(self) -> float:
        """Wall time of the run so far, over all its processes."""
        return self.spent + time.monotonic() - self.since

    def _say(self, text: str) -> None:
        if self.recorder:
            self.recorder.say(text)
        elif self.here.first:
            print(text, flush=True)
