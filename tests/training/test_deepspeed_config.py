"""What DeepSpeed is told: from the file and the recipe, and neither may contradict or hide anything."""

import json
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from sagebwd.errors import UserError
from sagebwd.training import budget, deepspeed_config, recipe_file
from sagebwd.training.recipe import Recipe

HERE = Path(__file__).parents[2]


def recipe(*overrides: str) -> Recipe:
    chosen = ("parallel.engine=deepspeed", *overrides)
    return recipe_file.load_experiment(HERE / "recipes/small.yaml", chosen).arms["sagebwd"]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That of ZeRO-2, in a folder of its own."""
    monkeypatch.setattr(resources, "files", lambda package: tmp_path)
    path = tmp_path / "zero2.json"
    path.write_text((HERE / "launch/deepspeed/zero2.json").read_text())
    return path


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("stage", range(4))
def test_the_repository_has_a_file_for_every_stage(stage: int) -> None:
    said = json.loads((HERE / f"launch/deepspeed/zero{stage}.json").read_text())
    config = deepspeed_config.load(recipe(f"parallel.zero={stage}"), 1, 2, pin_memory=False)
    assert config["zero_optimization"] == said["zero_optimization"]
    assert config["zero_optimization"]["stage"] == stage


def test_the_recipe_fills_in_what_is_trained(file: Path) -> None:
    edit(file, wall_clock_breakdown=True)
    wanted = ("parallel.zero=2", "parallel.offload=cpu", "train.precision=bf16", "optimizer.clip=0.5")
    config = deepspeed_config.load(recipe(*wanted, "train.micro_batch=4"), 3, 8, pin_memory=True)
    assert config["wall_clock_breakdown"] is True
    assert config["train_batch_size"] == 4 * 3 * 8
    assert (config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]) == (4, 3)
    assert config["bf16"] == {"enabled": True}
    assert config["data_types"] == {"grad_accum_dtype": "fp32"}
    assert config["communication_data_type"] == "fp32"
    assert config["gradient_clipping"] == 0.5
    assert config["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": True}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gradient_clipping": 2.0}, r"gradient_clipping in .*zero2\.json is not for this file"),
        ({"optimizer": {"type": "Adam"}}, r"optimizer in .* say in the recipe"),
        ({"fp16": {"enabled": True}}, r"fp16 in .* is not for this file"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {}}}, r"zero_optimization\.offload_optimizer in "),
        ({"zero_optimization": {"stage": 3}}, r"zero_optimization\.stage in .* is 3: set it to 2"),
        ({"zero_optimization": []}, r"zero_optimization in .*zero2\.json: "),
        (
            {"zero_optimization": {"stage": 2, "reduce_bucket_size": "5e8"}},
            r"bucket_size in .* must be a valid int",
        ),
        ({"zero_optimization": {"stage": 2, "allgather_bucket_size": 7}}, r"must be a multiple of 2"),
    ],
)
def test_a_file_that_would_contradict_the_recipe_is_refused(file: Path, changes: dict, message: str) -> None:
    edit(file, **changes)
    for refuse in (
        lambda: budget.plan(recipe("parallel.zero=2"), 1),  # before anything starts
        lambda: deepspeed_config.load(recipe("parallel.zero=2"), 1, 1, pin_memory=False),
    ):
        with pytest.raises(UserError, match=message):
            refuse()


@pytest.mark.parametrize("text", ["", "{", "[1]", "[" * 100_000, '{"zero_optimization": 1'])
def test_a_file_that_cannot_be_read_is_refused(file: Path, text: str) -> None:
    file.write_text(text)
    with pytest.raises(UserError, match=r"in .*zero2\.json: ."):
        budget.plan(recipe("parallel.zero=2"), 1)


def test_a_missing_file_is_refused(file: Path) -> None:
    with pytest.raises(UserError, match=r"zero3\.json cannot be read"):
        budget.plan(recipe("parallel.zero=3"), 1)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("parallel.engine=megatron", "parallel.zero=1"),
            "zero is 1, which engine megatron does not read: set engine to deepspeed",
        ),
        (("parallel.engine=megatron", "parallel.zero=0"), "zero is 0, which engine megatron does not read"),
        (("parallel.engine=megatron", "parallel.offload=cpu"), "offload is cpu, which engine megatron does not read"),
        (("parallel.pipeline=2",), "pipeline is 2, which engine deepspeed does not read"),
        (("parallel.context=2",), "context is 2, which engine deepspeed does not read"),
        (("parallel.distributed_optimizer=true",), "distributed_optimizer is true, which .* zero: 1 does the same"),
        (("parallel.overlap_grad_reduce=false",), r"set overlap_comm in launch/deepspeed/zero1\.json"),
        (("parallel.zero=4",), "parallel.zero is 4"),
        (("parallel.zero=0", "parallel.offload=cpu"), "set zero to 1, 2 or 3"),
        (("parallel.zero=0", "train.precision=bf16"), "set parallel.zero to 1"),
    ],
)
def test_keys_that_would_be_ignored_or_approximated_are_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        budget.plan(recipe(*overrides), 1)


def test_without_zero_a_gpu_would_train_in_bf16() -> None:
    """`sagebwd recipe` says so before it starts the ranks, and a dry run for a GPU."""
    chosen = Recipe(name="r", parallel={"engine": "deepspeed", "zero": 0})
    deepspeed_config.check(chosen)
    with pytest.raises(UserError, match=r"train\.precision is auto, on a GPU bf16, .* set parallel.zero to 1"):
        deepspeed_config.check(chosen, gpu=True)


def test_zero_1_is_what_deepspeed_does_unless_told_otherwise() -> None:
    assert recipe().parallel.zero_stage == 1
    assert deepspeed_config.load(recipe(), 1, 1, pin_memory=False)["zero_optimization"]["stage"] == 1
