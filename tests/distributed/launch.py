"""Starts `program` on a number of ranks of this machine: layouts that need as many share one start."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from sagebwd.tokenizer import Prepared
from sagebwd.training.recipe import Data, Recipe
from tests.distributed.layouts import Layout
from tests.training.runs import changed, tiny_recipe

STEPS, SEQUENCES = 20, 128
ROOT = Path(__file__).parents[2]
# What the kernels take, and large enough for all GPUs to have something to do
ON_GPU = {
    "model": {"layers": 4, "hidden": 512, "ffn": 1536, "heads": 8, "kv_heads": 4},
    "evaluation": {"tokens": 65_536, "every_steps": STEPS},
    "train": {"precision": "bf16"},
}


def recipe(data: Data, layout: Layout, arm: str, *, gpu: bool = False) -> Recipe:
    """STEPS steps of SEQUENCES sequences, 32 a micro-batch unless the layout says otherwise."""
    kind, _, variant = arm.partition("-")
    data = data.model_copy(update={"pack": variant == "packed"})
    # What differs in the last bit can round to another integer of 8: noise of some 1e-6 in SageBwd's loss over so many
    # tokens, and more over fewer. It does not grow from step to step.
    base = tiny_recipe(data, kind, steps=STEPS, tokens_per_step=SEQUENCES * data.context, micro_batch=32)
    base = changed(base, ON_GPU if gpu else {"evaluation": {"tokens": 1024}})  # a long sequence for two ranks
    if variant == "bf16":
        base = changed(base, {"train": {"precision": "bf16"}})
    made = changed(base, {"parallel": layout.parallel, "train": layout.train, "data": layout.data})
    return changed(made, {"optimizer": {"warmup_tokens": 4 * made.train.tokens_per_step}})


def torchrun(
    program: list[str], *, ranks: int, timeout: float, without: tuple[str, ...] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    """`program`, a file or -m and a module with its arguments, on so many ranks here, in the repository's root.

    environment, without: variables that are set beside this process's own, and those that are not passed on. Raises
    AssertionError, with what was said until then, when it takes more than `timeout` seconds.
    """
    inherited = {name: value for name, value in os.environ.items() if name not in without}
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *program],
        env=inherited | {"OMP_NUM_THREADS": "1"} | environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its ranks
        output, errors = process.communicate()
        raise AssertionError(f"not done in {timeout:g} s: {output[-5000:]}\n{errors[-10000:]}") from None
    except BaseException:
        process.terminate()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def launch(
    prepared: Prepared,
    runs: Path,
    wanted: dict[Path, Recipe],
    *,
    ranks: int,
    gpus: str = "",
    link: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Train recipes one after another, each into its folder in `runs`.

    gpus: what the ranks see of them, as in CUDA_VISIBLE_DEVICES; nothing: they train on CPUs, in FP32. link: a file for
    how fast the ranks sum.
    """
    with tempfile.TemporaryDirectory() as recipes:
        for folder, each in wanted.items():
            path = Path(recipes) / folder.with_name(f"{folder.name}.json")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(each.model_dump_json())
        arguments = [recipes, str(prepared.folder), str(runs), *([str(link)] if link else [])]
        program = ["-m", "tests.distributed.program", *arguments]
        return torchrun(program, ranks=ranks, timeout=900, CUDA_VISIBLE_DEVICES=gpus)
