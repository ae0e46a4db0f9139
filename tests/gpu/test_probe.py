"""The measured errors on a GPU: those that a CPU measures, on tensors that the GPU's kernels gave."""

from pathlib import Path

import pytest
import torch

from sagebwd import probe
from sagebwd.attention import QuantConfig, captured, errors
from sagebwd.tokenizer import prepare
from sagebwd.training import train
from sagebwd.training.recipe import Data
from tests.training.runs import tiny_recipe

pytest_plugins = ("tests.small_corpus",)
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("kind", ["fpa", "sagebwd"])
def test_a_probe_on_a_gpu(small_data: Data, tmp_path: Path, kind: str, pack: bool) -> None:
    data = small_data.model_copy(update={"pack": pack})
    tiny = tiny_recipe(data, kind, steps=8, tokens_per_step=1024, micro_batch=8)
    recipe = tiny.model_copy(update={"model": tiny.model.model_copy(update={"hidden": 256, "ffn": 512})})
    train.run(recipe, kind, tmp_path / kind, prepare(data, tmp_path / "data"))
    save = tmp_path / "captured.safetensors"
    probe.probe(tmp_path / kind, sequences=4, data=tmp_path / "data", out=None, save=save)

    found = captured.Reader(save)
    measured = {}
    for device in ("cpu", "cuda"):
        tallies = {config: errors.Tally() for config in (QuantConfig(), QuantConfig(granularity="tile"))}
        for document in found.documents(0, torch.device(device)):
            errors.measure(*document, softmax_scale=found.softmax_scale, tallies=tallies)
        measured[device] = [tally.errors() for tally in tallies.values()]
    for here, there in zip(measured["cuda"], measured["cpu"], strict=True):
        for name in errors.TENSORS:
            assert here[name].rel_l2 == pytest.approx(there[name].rel_l2, rel=0.05, abs=1e-6), name
            assert here[name].rms == pytest.approx(there[name].rms, rel=1e-6), name
