"""DeepSpeed's own launcher in torchrun's place, on CPUs."""

import json
import os
import subprocess
import sys
from pathlib import Path

from sagebwd.training import run_folder, status

pytest_plugins = ("tests.small_corpus",)
RECIPE = """
name: tiny
model: {layers: 1, hidden: 32, ffn: 64, heads: 4, kv_heads: 2}
data: {corpus: files, files: [CORPUS], vocab_size: 512, context: 32, validation_fraction: 0.2}
train: {tokens_per_step: 256, total_tokens: 1024, micro_batch: 4}
evaluation: {tokens: 128}
parallel: {engine: deepspeed, zero: 2}
arms: {sagebwd: {}}
"""


def launch(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    launcher = ["deepspeed.launcher.runner", "--num_gpus", "2", "--no_local_rank", "--module", "sagebwd.cli"]
    return subprocess.run(
        [sys.executable, "-m", *launcher, "train", str(folder / "tiny.yaml"), "--arm", "sagebwd", *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_a_run_is_trained_by_deepspeeds_launcher(small_corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(RECIPE.replace("CORPUS", str(small_corpus)))
    mistake = launch(tmp_path, "parallel.zero=7")
    assert mistake.returncode != 0
    assert "parallel.zero is 7" in mistake.stderr
    assert not (tmp_path / "runs").exists()

    answer = launch(tmp_path)
    assert answer.returncode == 0, f"{answer.stdout}\n{answer.stderr}"
    folder = tmp_path / "runs" / "tiny" / "sagebwd"
    assert (status.read(folder).state, run_folder.meta(folder)["world_size"]) == ("finished", 2)
    assert run_folder.meta(folder)["layout"] == "tensor 1 x data 2 (DeepSpeed's ZeRO-2)"
    manifest = json.loads((folder / "checkpoints" / "step_00000004" / "manifest.json").read_text())
    assert set(manifest["files"]) == {"tp_00_dp_0000.safetensors", "tp_00_dp_0001.safetensors"}
