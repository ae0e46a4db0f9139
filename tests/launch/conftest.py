"""A recipe of seconds for the launch scripts, and the environment that they get."""

import os
import sys
from pathlib import Path

import pytest

RECIPE = """
model: {{layers: 1, hidden: 32, heads: 2, ffn: 64}}
data: {{corpus: files, files: ["{corpus}"], vocab_size: 512, context: 32, validation_fraction: 0.2}}
train: {{tokens_per_step: 256, total_tokens: 3072, micro_batch: 4}}
optimizer: {{lr: 1e-2, min_lr: 1e-3}}
evaluation: {{every_steps: 4, tokens: 512}}
checkpoint: {{every_steps: 4}}
arms: {{fpa: {{attention.kind: fpa}}, sagebwd: {{attention.kind: sagebwd}}}}
"""


@pytest.fixture
def place(small_corpus: Path, tmp_path: Path) -> Path:
    """A folder with tiny.yaml in it: two arms, 12 steps, a checkpoint every 4."""
    (tmp_path / "tiny.yaml").write_text(RECIPE.format(corpus=small_corpus), encoding="utf-8")
    return tmp_path


@pytest.fixture
def environment() -> dict[str, str]:
    """CPU ranks of one thread, with this Python."""
    return os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
