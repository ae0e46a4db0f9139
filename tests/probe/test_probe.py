"""`sagebwd probe` on real runs: what it captures is what went through attention, and mistakes are one sentence."""

import csv
import json
import shutil
from pathlib import Path

import pytest
import torch

from sagebwd import probe
from sagebwd.attention import captured
from sagebwd.attention.error_table import RULES
from sagebwd.attention.errors import TENSORS
from sagebwd.errors import UserError
from sagebwd.probe import report
from sagebwd.probe.model import trained_model
from sagebwd.tokenizer import prepare
from sagebwd.training import checkpoint, train
from sagebwd.training.recipe import Data
from tests.attention.helpers import rel_l2, truth
from tests.training.runs import on_cpu, tiny_recipe

pytest_plugins = ("tests.small_corpus",)
pytestmark = on_cpu


@pytest.fixture(scope="module")
def runs(small_data: Data, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """fpa/, sagebwd/ (in bf16) and packed/, each trained for eight steps, and data/. Do not write into it."""
    folder = tmp_path_factory.mktemp("runs")
    for arm, kind, pack in (("fpa", "fpa", False), ("sagebwd", "sagebwd", False), ("packed", "sagebwd", True)):
        data = small_data.model_copy(update={"pack": pack})
        recipe = tiny_recipe(data, kind, steps=8, tokens_per_step=256, micro_batch=4)
        if kind == "sagebwd":
            quant = recipe.attention.quant.model_copy(update={"block_q": 16, "delta": "matched"})
            recipe = recipe.model_copy(update={"attention": recipe.attention.model_copy(update={"quant": quant})})
        if arm == "sagebwd":
            recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"precision": "bf16"})})
        train.run(recipe, arm, folder / arm, prepare(data, folder / "data"))
    return folder


def probed(runs: Path, arm: str, out: Path, sequences: int = 3) -> tuple[list[dict[str, str]], captured.Reader]:
    save = out / "captured.safetensors"
    probe.probe(runs / arm, sequences=sequences, data=runs / "data", out=out, save=save)
    with (out / report.TABLE).open(encoding="utf-8") as file:
        return list(csv.DictReader(file)), captured.Reader(save)


@pytest.mark.parametrize("arm", ["fpa", "sagebwd"])
def test_a_probe_measures_every_layer_tensor_and_rule(runs: Path, tmp_path: Path, capsys, arm: str) -> None:
    rows, found = probed(runs, arm, tmp_path / "out")
    kept = {tensor.dtype for document in found.documents(0, torch.device("cpu")) for tensor in document}
    assert kept == {torch.float32 if arm == "fpa" else torch.bfloat16}
    rules = [*RULES] if arm == "fpa" else [report.OWN, *RULES]
    assert [(row["layer"], row["rule"], row["tensor"]) for row in rows] == [
        (str(layer), rule, tensor) for layer in range(2) for rule in rules for tensor in TENSORS
    ]
    assert all(0 <= float(row["rel_l2"]) < 0.5 and float(row["cos_sim"]) > 0.9 for row in rows)
    text = (tmp_path / "out" / report.TEXT).read_text(encoding="utf-8")
    assert "96 validation tokens in 3 sequence(s)" in text
    worst = text.splitlines()[2].removeprefix("- ")
    assert worst.startswith(report.PAPER)
    assert worst in capsys.readouterr().out
    assert (tmp_path / "out" / report.PICTURE).read_bytes().startswith(b"\x89PNG")


def test_the_captured_tensors_are_those_of_the_models_attention(runs: Path, small_data: Data, tmp_path: Path) -> None:
    """Attention in FP64 on them gives the gradients that the model's own backward sends on to q, k and v."""
    _, found = probed(runs, "fpa", tmp_path, sequences=1)
    manifest = checkpoint.newest_whole(runs / "fpa", print)
    with trained_model(manifest, prepare(small_data, runs / "data"), 1) as model:
        seen = {}
        for layer, block in enumerate(model.module.decoder.layers):
            core = block.self_attention.core_attention
            core.register_full_backward_hook(lambda _, into, __, layer=layer: seen.update({layer: into}))
        list(model.captured())
        for layer in range(2):
            ((q, k, v, do),) = found.documents(layer, torch.device("cpu"))
            _, *grads = truth(q, k, v, do, causal=True, scale=found.softmax_scale)
            for ours, theirs in zip(grads, seen[layer][:3], strict=True):
                assert rel_l2(ours, theirs.permute(1, 2, 0, 3)) < 1e-5


def test_packed_documents_are_measured_one_by_one(runs: Path, tmp_path: Path) -> None:
    _, found = probed(runs, "packed", tmp_path, sequences=8)
    lengths = [q.shape[-2] for q, *_ in found.documents(0, torch.device("cpu"))]
    assert sum(lengths) == 8 * 32
    assert len(lengths) > 8


def test_the_results_go_beside_the_checkpoints(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "fpa", tmp_path / "fpa")
    older = tmp_path / "fpa" / "checkpoints" / "step_00000004"
    target = probe.probe(older, sequences=1, data=runs / "data", out=None, save=None)
    assert target == tmp_path / "fpa" / "probe" / "step_00000004"
    assert "step 4" in (target / report.TEXT).read_text(encoding="utf-8")


def test_mistakes_are_one_sentence(runs: Path, tmp_path: Path) -> None:
    def refused(folder: Path, said: str, **options: object) -> None:
        with pytest.raises(UserError, match=said) as raised:
            probe.probe(folder, **{"sequences": 1, "data": runs / "data", "out": None, "save": None} | options)
        assert "\n" not in str(raised.value)

    refused(tmp_path, "holds no checkpoint")
    refused(runs, r"several arms: name one, such as .*/fpa")
    refused(runs / "fpa", "--sequences is 10000, but the validation split holds", sequences=10_000)
    shutil.copytree(runs / "fpa", tmp_path / "fpa")
    checkpoints = tmp_path / "fpa" / "checkpoints"
    for file in checkpoints.glob("step_*/manifest.json"):
        manifest = json.loads(file.read_text()) | {"data_digest": "0" * 64}
        del manifest["checksum"]
        file.write_text(json.dumps(manifest | {"checksum": checkpoint._digest(manifest)}))
    refused(tmp_path / "fpa", "are not those of")
    (checkpoints / "step_00000008" / "tp_00.safetensors").write_bytes(b"x")
    refused(checkpoints / "step_00000008", "step_00000008 is damaged: tp_00.safetensors has 1 bytes")
