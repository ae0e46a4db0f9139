"""`sagebwd probe`: the error of every attention tensor in a trained model, layer by layer and rule by rule.

What the rules are judged on is what the model computed: q, k, v and dO of each layer's core attention, from a forward
and backward over validation sequences. The truth is attention in FP64 on these tensors (`sagebwd.attention.errors`).
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from tqdm import tqdm

from sagebwd.attention import QuantConfig, captured
from sagebwd.attention.error_table import RULES
from sagebwd.attention.errors import Tally, measure
from sagebwd.errors import UserError
from sagebwd.probe import plot, report
from sagebwd.probe.findings import Findings
from sagebwd.probe.model import TrainedModel, trained_model
from sagebwd.tokenizer import prepare
from sagebwd.training import checkpoint
from sagebwd.training.recipe import Recipe

logger = logging.getLogger(__name__)
LINES = 4  # of progress, where there is no terminal for a bar


def probe(folder: Path, *, sequences: int, data: Path, out: Path | None, save: Path | None) -> Path:
    """Probe the newest checkpoint of an arm's run folder, or a checkpoint's folder; returns where the results are.

    sequences: how many of the validation set's, from its first on. data: where prepared data lies. out: the results'
    folder, else probe/<step>/ in the arm's folder. save: a file for the captured tensors (`captured`).
    Raises UserError: no checkpoint there, a damaged one, other data than the model's, more sequences than there are.
    """
    manifest = _checkpoint(folder)
    prepared = prepare(manifest.run.recipe.data, data)
    if prepared.digest != manifest.run.data_digest:
        raise UserError(
            f"the data in {prepared.folder} are not those of {manifest.folder}: prepare them with the versions that "
            "the run used (its meta.json names them), or give their folder by --data"
        )
    arm_folder = manifest.folder.parent.parent
    target = out or arm_folder / "probe" / manifest.folder.name
    with trained_model(manifest, prepared, sequences) as model:
        findings = _findings(model, arm_folder.name, manifest, save)
    target.mkdir(parents=True, exist_ok=True)
    report.write(target, findings)
    plot.draw(target / report.PICTURE, findings)
    print(
        f"{report.summary(findings)}\nReport: {target / report.TEXT}   Picture: {target / report.PICTURE}", flush=True
    )
    return target


def rules(recipe: Recipe) -> dict[str, QuantConfig]:
    """What is compared: docs/numerics.md's rules, and the arm's own if it is another."""
    own = recipe.attention.quant.config()
    if recipe.attention.kind == "fpa" or own in RULES.values():
        return RULES
    return {report.OWN: own, **RULES}


def _checkpoint(folder: Path) -> checkpoint.Manifest:
    """A whole one: the folder's own, or an arm's newest."""
    if (folder / checkpoint.MANIFEST).is_file():
        try:
            manifest = checkpoint.read(folder)
            checkpoint.verify(manifest)
        except checkpoint.Damaged as damage:
            raise UserError(f"the checkpoint {folder} is damaged: {damage}: give another") from None
        return manifest
    newest = checkpoint.newest_whole(folder, logger.warning)
    if newest:
        return newest
    arms = sorted(path.parent.parent for path in folder.glob(f"*/{checkpoint.FOLDER}/{checkpoint.LATEST}"))
    if arms:
        raise UserError(f"{folder} holds several arms: name one, such as {arms[0]}")
    raise UserError(f"{folder} holds no checkpoint: give an arm's run folder, such as runs/small/fpa")


def _findings(model: TrainedModel, arm: str, manifest: checkpoint.Manifest, save: Path | None) -> Findings:
    recipe, step = manifest.run.recipe, manifest.position.step
    compared = rules(recipe)
    tallies = [{config: Tally() for config in compared.values()} for _ in range(recipe.model.layers)]
    kept: list[list[captured.Document]] = [[] for _ in tallies]
    tokens = documents = 0
    scale = recipe.model.dim**-0.5
    with tqdm(total=model.sequences * len(tallies), unit="layer", disable=not sys.stderr.isatty()) as bar:
        for number, layers in enumerate(model.captured(), start=1):
            tokens += sum(document[0].shape[-2] for document in layers[0])
            documents += len(layers[0])
            for layer, found in enumerate(layers):
                for document in found:
                    measure(*(x.to(model.device) for x in document), softmax_scale=scale, tallies=tallies[layer])
                if save:
                    kept[layer] += found
                bar.update()
            if bar.disable and number % max(1, model.sequences // LINES) == 0:
                logger.info("probed sequence %d of %d", number, model.sequences)
    if save:
        description = (
            f"{recipe.name}/{arm}, step {step}, {recipe.train.precision}: {model.sequences} x {recipe.data.context} "
            f"tokens, {len(kept)} layers of {recipe.model.heads} heads of {recipe.model.dim}"
        )
        captured.write(save, kept, softmax_scale=scale, description=description)
        print(f"captured tensors: {save} ({save.stat().st_size / 1e6:.1f} MB)", flush=True)
    errors = [{name: of_layer[config].errors() for name, config in compared.items()} for of_layer in tallies]
    return Findings(arm, step, recipe, tokens, documents, model.device_name, errors)
