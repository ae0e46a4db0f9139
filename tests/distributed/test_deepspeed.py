"""Engine deepspeed against engine megatron: the same losses, norms and checkpoints, and what a run survives."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sagebwd.tokenizer import prepare
from sagebwd.training import checkpoint, run_folder, status
from sagebwd.training.recipe import Data, Recipe
from tests.distributed.launch import torchrun
from tests.training.runs import changed, journal, logged, tiny_recipe

pytest_plugins = ("tests.small_corpus",)
STEPS, HALF = 20, 10
PROGRAM = Path(__file__).with_name("deepspeed_program.py")
STAGES = (0, 1, 2, 3)
TP2 = "tp2_sp_zero1"
SAME_LAYOUT = (*(f"zero{stage}" for stage in STAGES), TP2, "offload")  # of two ranks, data parallel but for TP2
ELSEWHERE = {"megatron": "zero3", "zero3": "megatron", "zero2": TP2, TP2: "zero0"}  # resumed from -> in the layout of
BF16 = ("zero1", "zero2", "zero3", "offload")
COMPILED = "extensions"  # where DeepSpeed's C++ and CUDA operators would be built


def recipes(data: Data) -> dict[str, Recipe]:
    # A norm above the limit, so that clipping is compared too
    base = tiny_recipe(data, "fpa", steps=STEPS, tokens_per_step=4096, micro_batch=32)
    base = changed(base, {"optimizer": {"clip": 0.2}, "evaluation": {"every_steps": 10}})

    def deepspeed(zero: int, **keys: Any) -> Recipe:
        return changed(base, {"parallel": {"engine": "deepspeed", "zero": zero, **keys}})

    found = {"megatron": base} | {f"zero{stage}": deepspeed(stage) for stage in STAGES}
    found |= {TP2: deepspeed(1, tensor=2, sequence=True), "offload": deepspeed(2, offload="cpu")}
    for name in ("megatron", "zero3"):
        found[f"{name}_sagebwd"] = shorter(changed(found[name], {"attention": {"kind": "sagebwd"}}), HALF)
    return found


def shorter(recipe: Recipe, steps: int, **changes: dict) -> Recipe:
    total = steps * recipe.train.tokens_per_step
    change = {
        "train": {"total_tokens": total},
        "optimizer": {"warmup_tokens": 0},
        "checkpoint": {"every_steps": 1, "keep_last": 4},
    }
    return changed(changed(recipe, change), changes)


def jobs(data: Data) -> list[dict[str, Any]]:
    known = recipes(data)
    # megatron first, of which deepspeed is not imported; the others do what is done on a GPU to compile kernels
    found = [{"name": name, "recipe": recipe, "rehearse": name in SAME_LAYOUT} for name, recipe in known.items()]
    for name in SAME_LAYOUT:
        found.append({"name": f"{name}_resumed", "recipe": known[name], "from": name, "at": HALF})
    for name, there in ELSEWHERE.items():
        found.append({"name": f"{name}_to_{there}", "recipe": known[there], "from": name, "at": HALF})
    for name in ("megatron", *BF16):
        change = {
            "train": {"precision": "bf16"},
            "optimizer": {"clip": 0.0},
        }  # its rounding would hide the rest
        found.append({"name": f"{name}_bf16", "recipe": shorter(known[name], 4, **change)})
    for stage in STAGES:  # two micro-batches a step: the fourth step is sick
        found.append({"name": f"zero{stage}_sick", "recipe": shorter(known[f"zero{stage}"], 4), "sick": [7]})
    back = shorter(known["zero3"], 12, health={"rewind": True})  # from a spike at step 10 to the checkpoint of step 9
    found.append({"name": "zero3_rewound", "recipe": back, "spike": [18, 19]})
    found.append({"name": "zero3_calm", "recipe": back})
    found.append({"name": "zero2_stopped", "recipe": known["zero2"], "stop": 2 * HALF + 4})
    ill = shorter(known["zero2"], 4, health={"bad_steps": 2})
    found.append({"name": "zero2_ill", "recipe": ill, "sick": [*range(5, 99)]})
    return [job | {"recipe": job["recipe"].model_dump(mode="json")} for job in found]


@pytest.fixture(scope="module")
def runs(small_data: Data, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of them, in one start of two ranks."""
    root = tmp_path_factory.mktemp("deepspeed")
    prepared = prepare(small_data, root / "data")
    (root / "jobs.json").write_text(json.dumps(jobs(small_data)))
    arguments = [str(root / "jobs.json"), str(prepared.folder), str(root)]
    environment = {"CUDA_VISIBLE_DEVICES": "", "TORCH_EXTENSIONS_DIR": str(root / COMPILED)}
    answer = torchrun([str(PROGRAM), *arguments], ranks=2, timeout=400, **environment)
    assert answer.returncode == 0, f"{answer.stdout}\n{answer.stderr}"
    return root


def same(ours: Path, theirs: Path, steps: int = STEPS, *, norm: bool = True) -> None:
    mine, other = logged(ours), logged(theirs)
    assert [step for step, _ in mine.scalars["train/loss"]] == list(range(1, steps + 1))
    assert mine.values("train/loss")[-1] == pytest.approx(other.values("train/loss")[-1], abs=1e-5)
    assert mine.values("validation/loss")[-1] == pytest.approx(other.values("validation/loss")[-1], abs=1e-5)
    assert mine.values("train/grad_norm") == pytest.approx(other.values("train/grad_norm"), rel=1e-4)


@pytest.mark.parametrize("name", SAME_LAYOUT)
def test_losses_and_gradient_norms_are_those_of_megatron(runs: Path, name: str) -> None:
    same(runs / name, runs / "megatron")
    assert logged(runs / name).values("train/loss") == pytest.approx(
        logged(runs / "megatron").values("train/loss"), abs=2e-6
    )


def test_clipping_was_at_work(runs: Path) -> None:
    assert min(logged(runs / "megatron").values("train/grad_norm")) > 0.2


def test_sagebwd_too(runs: Path) -> None:
    mine, other = logged(runs / "zero3_sagebwd"), logged(runs / "megatron_sagebwd")
    assert mine.values("train/loss")[-1] == pytest.approx(other.values("train/loss")[-1], abs=1e-5)
    assert mine.values("train/grad_norm")[-1] == pytest.approx(other.values("train/grad_norm")[-1], rel=1e-4)


@pytest.mark.parametrize("name", BF16)
def test_bf16_has_fp32_master_weights_and_sums(runs: Path, name: str) -> None:
    mine, other = logged(runs / f"{name}_bf16"), logged(runs / "megatron_bf16")
    assert mine.values("train/loss") == pytest.approx(other.values("train/loss"), abs=1e-5)
    assert mine.values("train/grad_norm") == pytest.approx(other.values("train/grad_norm"), rel=1e-5)
    folder = runs / f"{name}_bf16" / "checkpoints" / checkpoint.name(4)
    saved = [load_file(folder / file) for file in files(runs / f"{name}_bf16", 4)]
    weights = torch.cat([tensor.flatten() for part in saved for key, tensor in part.items() if key[:7] == "weight/"])
    assert (weights != weights.bfloat16().float()).float().mean() > 0.9


def files(folder: Path, step: int) -> dict[str, Any]:
    return checkpoint.read(folder / "checkpoints" / checkpoint.name(step)).files


@pytest.mark.parametrize("name", SAME_LAYOUT)
def test_a_resumed_run_is_the_unbroken_one_bitwise(runs: Path, name: str) -> None:
    """Which rehearsed before its first step: that leaves no trace."""
    resumed = journal(runs / f"{name}_resumed")
    assert resumed == [line for line in journal(runs / name) if line["step"] > HALF]
    assert len([line for line in resumed if "train/loss" in line]) == STEPS - HALF
    assert files(runs / f"{name}_resumed", STEPS) == files(runs / name, STEPS)


def test_a_stopped_run_goes_on_bitwise(runs: Path) -> None:
    assert json.loads((runs / "zero2_stopped" / "facts.json").read_text())["end"] == "preempted"
    assert files(runs / "zero2_stopped", STEPS) == files(runs / "zero2", STEPS)
    assert status.read(runs / "zero2_stopped").state == "finished"


@pytest.mark.parametrize(("there", "here"), ELSEWHERE.items())
def test_a_run_goes_on_under_another_engine_stage_or_layout(runs: Path, there: str, here: str) -> None:
    folder = runs / f"{there}_to_{here}"
    points, whole = logged(folder).scalars["train/loss"], logged(runs / "megatron").scalars["train/loss"]
    assert [step for step, _ in points] == list(range(HALF + 1, STEPS + 1))
    assert [loss for _, loss in points] == pytest.approx([loss for _, loss in whole[HALF:]], abs=2e-6)
    assert {change["key"] for change in run_folder.meta(folder)["changes"]} <= {
        *("parallel.engine", "parallel.zero", "parallel.tensor", "parallel.sequence")
    }


def test_zero_shares_out_the_checkpoint(runs: Path) -> None:
    """Each rank writes its part alone; weights and both moments in FP32."""
    elements = {}
    for name in ("megatron", "zero1", "zero2", "zero3"):
        folder = runs / name / "checkpoints" / checkpoint.name(STEPS)
        held = {file: load_file(folder / file) for file in files(runs / name, STEPS)}
        parts = [{k: t for k, t in tensors.items() if not k.startswith("rng/")} for tensors in held.values()]
        assert {tensor.dtype for part in parts for tensor in part.values()} == {torch.float32}
        elements[name] = sorted(sum(tensor.numel() for tensor in part.values()) for part in parts)
    (whole,) = elements.pop("megatron")
    for of_ranks in elements.values():
        assert len(of_ranks) == 2
        assert sum(of_ranks) == whole
        assert max(of_ranks) < 0.51 * whole


@pytest.mark.parametrize("stage", STAGES)
def test_a_sick_step_changes_nothing(runs: Path, stage: int) -> None:
    sick = runs / f"zero{stage}_sick"
    assert run_folder.meta(sick)["skipped_steps"] == 1
    lines = [line for line in journal(sick) if "train/loss" in line]
    assert [line.get("skipped", False) for line in lines] == [False, False, False, True]
    assert files(sick, 4) == files(sick, 3) != files(sick, 2)
    assert checkpoint.read(sick / "checkpoints" / checkpoint.name(4)).position.adam_step == 3


def test_a_run_that_stays_sick_is_diagnosed(runs: Path) -> None:
    told = status.read(runs / "zero2_ill")
    assert (told.state, told.skipped) == ("failed", 2)
    assert run_folder.meta(runs / "zero2_ill")["status"] == "diverged"
    found = json.loads((runs / "zero2_ill" / run_folder.SICK).read_text())
    assert (found["rank"], found["first"]) == (1, "the gradient of the output of the model (PaddedVocabGPT)")


def test_a_spike_is_gone_back_from(runs: Path) -> None:
    """What it goes on with is the checkpoint's state, so that the losses are on the old curve again."""
    (told,) = run_folder.meta(runs / "zero3_rewound")["rewinds"]
    assert (told["from"], told["to"]) == (10, 9)
    points, calm = (logged(runs / name).scalars["train/loss"] for name in ("zero3_rewound", "zero3_calm"))
    assert points[:9] == calm[:9]
    assert [step for step, _ in points] == list(range(1, 13))
    assert [loss for _, loss in points[9:]] == pytest.approx([loss for _, loss in calm[9:]], abs=0.05)


def test_what_the_run_says_of_its_engine(runs: Path) -> None:
    meta = run_folder.meta(runs / "zero3")
    assert meta["engine"] == "deepspeed"
    assert meta["deepspeed"]["zero_optimization"]["stage"] == 3
    assert meta["deepspeed"]["train_batch_size"] == 4096 // 32
    assert run_folder.meta(runs / "megatron")["engine"] == "megatron"


def test_nothing_is_compiled_at_the_start(runs: Path) -> None:
    assert not (runs / COMPILED).exists()


def test_deepspeed_is_not_imported_unless_it_is_chosen(runs: Path) -> None:
    imported = [json.loads((runs / name / "facts.json").read_text())["deepspeed"] for name in ("megatron", "zero0")]
    assert imported == [False, True]
