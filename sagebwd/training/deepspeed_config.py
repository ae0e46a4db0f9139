"""What DeepSpeed is told: launch/deepspeed/zero<stage>.json, and of the recipe what it needs besides."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from sagebwd.errors import UserError
from sagebwd.training.recipe import Positive, Recipe, Section


class _Zero(Section):
    stage: Literal[0, 1, 2, 3]
    overlap_comm: bool | None = None
    contiguous_gradients: bool | None = None
    reduce_scatter: bool | None = None
    reduce_bucket_size: Positive | None = None
    use_multi_rank_bucket_allreduce: bool | None = None
    allgather_partitions: bool | None = None
    allgather_bucket_size: Annotated[int, Field(gt=0, le=10**15, multiple_of=2)] | None = None
    sub_group_size: Positive | None = None
    stage3_prefetch_bucket_size: Positive | None = None
    stage3_param_persistence_threshold: Annotated[int, Field(ge=0, le=10**15)] | None = None
    stage3_max_live_parameters: Positive | None = None
    stage3_max_reuse_distance: Positive | None = None


class _Throughput(Section):
    enabled: bool | None = None
    synchronized: bool | None = None


class _Timers(Section):
    throughput: _Throughput


class _File(Section):
    """What may stand in the file: it decides about speed and memory. Anything else would be a second place for what
    the recipe says, or change the numerics behind its back."""

    zero_optimization: _Zero
    timers: _Timers | None = None
    wall_clock_breakdown: bool | None = None
    memory_breakdown: bool | None = None


def check(recipe: Recipe, *, gpu: bool = False) -> None:
    """Before anything starts. Raises UserError: what engine deepspeed would have to approximate, or a file as below.

    gpu: whether it would train on one, where train.precision auto is bf16.
    """
    if recipe.parallel.engine != "deepspeed":
        return
    _file(recipe.parallel.zero_stage)
    precision = recipe.train.precision
    if recipe.parallel.zero_stage == 0 and (precision == "bf16" or (gpu and precision == "auto")):
        said = "bf16" if precision == "bf16" else "auto, on a GPU bf16"
        raise UserError(
            f"parallel.zero is 0 and train.precision is {said}, where DeepSpeed adds gradients up in bf16: set "
            "parallel.zero to 1, which adds them up in fp32"
        )


def load(recipe: Recipe, accumulation: int, replicas: int, *, pin_memory: bool) -> dict[str, Any]:
    """The configuration, complete. Raises UserError: the file cannot be read, or holds what is not its to say.

    recipe: with train.precision resolved. accumulation: micro-batches of a step on each of `replicas` ranks
    that hold the same weights. pin_memory: of offloaded state.
    """
    stage = recipe.parallel.zero_stage
    said = _file(stage)
    if recipe.parallel.offload == "cpu":
        said["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": pin_memory}
    bf16 = recipe.train.precision == "bf16"
    return said | {
        "train_micro_batch_size_per_gpu": recipe.train.micro_batch,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": recipe.train.micro_batch * accumulation * replicas,
        "gradient_clipping": recipe.optimizer.clip if stage else 0.0,  # without ZeRO it does not tell the norm
        "bf16": {"enabled": bf16},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",  # sums over the ranks too
        "zero_force_ds_cpu_optimizer": False,  # torch's AdamW needs no compiler
    }


def _file(stage: int) -> dict[str, Any]:
    with resources.as_file(resources.files("sagebwd.deepspeed") / f"zero{stage}.json") as path:
        try:
            said = _File.model_validate_json(path.read_text(encoding="utf-8"), strict=True)
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path} cannot be read ({error}): mend it") from None
        except ValidationError as error:
            raise UserError(_sentence(error, path)) from None
    if said.zero_optimization.stage != stage:
        raise UserError(f"zero_optimization.stage in {path} is {said.zero_optimization.stage}: set it to {stage}")
    return said.model_dump(exclude_unset=True)


def _sentence(error: ValidationError, path: Path) -> str:
    first = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return (
            f"{key} in {path} is not for this file, which holds DeepSpeed's settings of speed and memory: remove it, "
            "and say in the recipe what is to be trained"
        )
    return f"{key or 'the file'} in {path}: {first['msg'].replace('Input should be', 'it must be')}"
