"""The training program: one arm of an experiment, on CPU with gloo or on GPUs with NCCL.

Read it top to bottom: `run`, then what `_Arm` builds, its loop, one step, the validation.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from torch import Tensor, distributed

from sagebwd.megatron.core_attention import backend_that_ran
from sagebwd.megatron.documents import packed_documents
from sagebwd.megatron.model import build_model, parameter_counts
from sagebwd.tokenizer import Prepared
from sagebwd.training import budget, checkpoint, metrics, run_folder, world
from sagebwd.training.checkpoint import State
from sagebwd.training.data import train_batches, validation_batches
from sagebwd.training.optimizer import build_optimizer
from sagebwd.training.recipe import Recipe
from sagebwd.training.world import World

logger = logging.getLogger(__name__)
Batch = dict[str, Tensor]


def run(recipe: Recipe, arm: str, folder: Path, prepared: Prepared) -> None:
    """Train one arm to the end of its budget; called on every rank, also without torchrun (then a world of one).

    folder: the arm's, with its event files, meta.json and checkpoints. A run that stopped goes on from its latest
    checkpoint; one that is done or has diverged is not run again. A loss or gradient norm that is NaN or infinite ends
    the run with status "diverged". Raises UserError: a layout or budget that cannot be, a checkpoint of another run.
    """
    plan = budget.plan(recipe, budget.data_parallel_size(recipe, world.size()))
    dtype = resolve_dtype(recipe)
    precision = "bf16" if dtype is torch.bfloat16 else "fp32"
    recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"precision": precision})})
    owner = checkpoint.Run(recipe, prepared.digest, prepared.vocab_size)
    manifest = checkpoint.latest(folder, owner)
    if run_folder.finished(folder):
        print(f"arm {arm}: {run_folder.meta(folder)['status']} already, in {folder}", flush=True)
        return
    with world.join(recipe.parallel.tensor, recipe.seed) as here:
        _Arm(recipe, arm, folder, prepared, plan, dtype, owner, here).train(manifest)


def resolve_dtype(recipe: Recipe) -> torch.dtype:
    """Of weights and activations: train.precision, where auto means bf16 on a GPU and fp32 on a CPU."""
    bf16 = torch.cuda.is_available() if recipe.train.precision == "auto" else recipe.train.precision == "bf16"
    return torch.bfloat16 if bf16 else torch.float32


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
    ) -> None:
        self.recipe, self.arm, self.folder, self.prepared = recipe, arm, folder, prepared
        self.plan, self.owner, self.here = plan, owner, here
        model = build_model(recipe, prepared.vocab_size, dtype)
        config = model.config
        if dtype is torch.bfloat16:
            model = Float16Module(config, model)
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)  # FP32 sums, whatever the weights' dtype
        model = DistributedDataParallel(config, ddp, model.to(here.device))
        model.broadcast_params()
        config.finalize_model_grads_func = finalize_model_grads
        optimizer, schedule = build_optimizer(
            recipe.optimizer, model, dtype, steps=plan.steps, warmup_steps=plan.warmup_steps
        )
        self.state = State(model, optimizer, schedule)
        self.forward_backward = get_forward_backward_func()
        self.data_group = parallel_state.get_data_parallel_group()
        self.validation = list(validation_batches(recipe, prepared, dp_rank=here.data_rank, dp_size=here.data_size))
        self.host = torch.empty(2, dtype=torch.float64, pin_memory=here.device.type == "cuda")
        self.recorder: metrics.Recorder | None = None
        self.meta: dict[str, Any] = {}

    def train(self, manifest: checkpoint.Manifest | None) -> None:
        """From the checkpoint, or from the start, to the end or to divergence."""
        start = 0
        self.spent, self.since = 0.0, time.monotonic()
        if manifest is not None:
            checkpoint.load(manifest, self.state, self.here)
            start, self.spent = manifest.step, manifest.wall_seconds
        with contextlib.ExitStack() as stack:
            if self.here.first:
                self.recorder = stack.enter_context(
                    metrics.Recorder(self.folder, self.plan, start_step=start, device=self.here.device)
                )
            self._begin(start)
            batches = train_batches(
                self.recipe,
                self.prepared,
                dp_rank=self.here.data_rank,
                dp_size=self.here.data_size,
                start_step=start,
            )
            for step in range(start + 1, self.plan.steps + 1):
                result = self._step(step, batches)
                if self.recorder:
                    self.recorder.train(result)
                if not (math.isfinite(result.loss) and math.isfinite(result.grad_norm)):
                    self._diverged(result)
                    return
                last = step == self.plan.steps
                if last or step % self.recipe.evaluation.every_steps == 0:
                    self._validate(step)
                if last or step % self.recipe.checkpoint.every_steps == 0:
                    self._save(step)
            self._write_meta(status="done")
            self._say(f"arm {self.arm}: done, {self.plan.steps} steps in {self._seconds():.0f} s, in {self.folder}")

    def _begin(self, start: int) -> None:
        """Say what starts; the validation loss before the first step, unless an earlier process has measured it."""
        counts = parameter_counts(self.recipe, self.prepared.vocab_size)
        self._say(
            f"arm {self.arm}: {counts['total'] / 1e6:.2f}M parameters ({counts['non_embedding'] / 1e6:.2f}M without "
            f"embeddings), {self.recipe.train.precision}, {self.plan.steps} steps of "
            f"{self.recipe.train.tokens_per_step:,} tokens, tensor {self.here.tensor_size} x "
            f"data {self.here.data_size} on {self.here.device.type}"
            + (f", going on after step {start}" if start else "")
        )
        self.meta = run_folder.meta(self.folder)
        if start == 0:
            self.meta = {"start_loss": self._validate(0)}
        if self.recorder:
            self.meta |= {
                "arm": self.arm,
                **metrics.environment(self.here.device),
                "world_size": self.here.size,
                "tensor": self.here.tensor_size,
                "precision": self.recipe.train.precision,
                "parameters": counts,
                "unigram_entropy": self.prepared.unigram_entropy,
                "data_digest": self.prepared.digest,
                "steps": self.plan.steps,
            }
        self._write_meta(status="running")

    def _step(self, step: int, batches: Iterator[Batch]) -> metrics.StepResult:
        """One optimizer step over the global batch. The host waits for the device once: for the gradient norm."""
        begin = time.perf_counter()
        model, optimizer, schedule = self.state.model, self.state.optimizer, self.state.schedule
        model.zero_grad_buffer()
        optimizer.zero_grad()
        sums = self.forward_backward(
            forward_step_func=self._forward,
            data_iterator=batches,
            model=[model],
            num_microbatches=self.plan.accumulation,
            seq_length=self.recipe.data.context,
            micro_batch_size=self.recipe.train.micro_batch,
        )
        total = torch.stack(sums).sum(0)
        distributed.all_reduce(total, group=self.data_group)
        # Queued before the gradient norm, which the optimizer waits for: once it returns, the copy has arrived.
        self.host.copy_(total, non_blocking=True)
        schedule.step(1)
        _, grad_norm, _ = optimizer.step()
        grad_norm = float(grad_norm)
        loss_sum, tokens = self.host.tolist()
        return metrics.StepResult(
            step=step,
            loss=loss_sum / tokens,
            learning_rate=optimizer.param_groups[0]["lr"],
            grad_norm=grad_norm,
            seconds=time.perf_counter() - begin,
        )

    def _forward(self, batches: Iterator[Batch], model: DistributedDataParallel) -> tuple[Tensor, Any]:
        losses, mask = self._losses(model, next(batches))
        return losses, partial(_loss, mask)

    def _losses(self, model: DistributedDataParallel, batch: Batch) -> tuple[Tensor, Tensor]:
        """Every token's loss and its mask: [sequences, context], or [1, tokens] where documents are packed."""
        packed = None
        if self.recipe.data.pack:
            packed = packed_documents(batch["position_ids"], self.here.device)
            batch = {name: value.view(1, -1) for name, value in batch.items()}
        batch = self._to_device(batch)
        tokens, positions, labels = batch["tokens"], batch["position_ids"], batch["labels"]
        losses = model(tokens, positions, None, labels=labels, packed_seq_params=packed)
        return losses, batch["loss_mask"]

    def _to_device(self, batch: Batch) -> Batch:
        if self.here.device.type == "cpu":
            return batch
        return {name: value.pin_memory().to(self.here.device, non_blocking=True) for name, value in batch.items()}

    @torch.no_grad()
    def _validate(self, step: int) -> float:
        """Mean loss over the validation set, in nats per token."""
        model = self.state.model
        model.eval()
        total = torch.zeros(2, dtype=torch.float64, device=self.here.device)
        for batch in self.validation:
            losses, mask = self._losses(model, batch)
            total += _loss(mask, losses)[2]
        distributed.all_reduce(total, group=self.data_group)
        model.train()
        loss_sum, tokens = total.tolist()
        if self.recorder:
            self.recorder.validation(step, loss_sum / tokens)
        return loss_sum / tokens

    def _save(self, step: int) -> None:
        if self.recorder:
            self.recorder.flush()
        checkpoint.save(self.folder, step, self._seconds(), self.state, self.owner, self.here)
        self._write_meta(status="running", step=step)

    def _diverged(self, result: metrics.StepResult) -> None:
        self._write_meta(status="diverged", step=result.step)
        self._say(
            f"arm {self.arm}: DIVERGED at step {result.step}: loss {result.loss}, gradient norm {result.grad_norm}. "
            f"It stops here; what it logged is in {self.folder}"
        )

    def _write_meta(self, **changed: Any) -> None:
        if self.recorder:
            self.meta |= {"wall_seconds": self._seconds(), "backend": backend_that_ran(self.state.model), **changed}
            metrics.write_meta(self.folder, self.meta)

    def _seconds(self) -> float:
        """Wall time of the run so far, over all its processes."""
        return self.spent + time.monotonic() - self.since

    def _say(self, text: str) -> None:
        if self.recorder:
            self.recorder.say(text)


def _loss(mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of a micro-batch's losses [batch, tokens]: their sum, for the gradient; the tokens counted; both, for the log.

    Megatron divides the gradients by the tokens of the global batch (calculate_per_token_loss).
    """
    total, tokens = (losses * mask).sum(), mask.sum()
    return total, tokens.to(torch.int), torch.stack((total.detach().double(), tokens.double()))
