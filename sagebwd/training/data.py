"""Micro-batches from a prepared corpus, through Megatron's GPTDataset.

Samples have one order, decided by the seed alone. Sample number g of a run (0, 1, 2, ...) belongs to step
g // sequences_per_step; neither the number of ranks, nor the micro-batch, nor the step a run resumes from, nor its
token budget changes what g is. An epoch is a GPTDataset of its own, shuffled with a seed of its own, in which every
token of the corpus occurs once (but the last few, too few for a sample). Documents follow one another in the token
stream, each ended by eod, and samples are cut from it: a sample may hold the end of one and the beginning of another.
data.pack changes no sample, only the positions in it: they restart after each eod.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from megatron.core import __version__ as megatron_version
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import Split

from sagebwd.errors import UserError
from sagebwd.tokenizer import Prepared
from sagebwd.training import index_files
from sagebwd.training.budget import plan
from sagebwd.training.recipe import Data, Recipe
from sagebwd.whole_folder import make_whole

logger = logging.getLogger(__name__)

Batch = dict[str, torch.Tensor]
"""CPU tensors of one micro-batch, each [sequences, context]: tokens, labels (the tokens one ahead) and position_ids
(from 0 in a sequence; with data.pack in a document, or the part of one that a sequence holds) int64, loss_mask float32
(1 where the label counts)."""


def train_batches(
    recipe: Recipe,
    prepared: Prepared,
    *,
    dp_rank: int,
    dp_size: int,
    start_step: int = 0,
    steps: int | None = None,
    ahead: int = 0,
) -> Iterator[Batch]:
    """The training micro-batches of one data-parallel rank: `accumulation` a step, until the budget is spent.

    start_step: optimizer steps already done; the first micro-batch is that of the step after them. steps: the last one;
    None: as the budget says. ahead: samples left out so far, which every sample's number is higher by (or lower: a run
    whose tokens_per_step was raised on the way).
    Every rank must call this at the same time if torch.distributed is initialised: rank 0 builds the indices while the
    others wait. Raises UserError for a batch that does not divide, and a corpus of another vocabulary or too small.
    """
    _check_vocabulary(recipe, prepared)
    schedule = plan(recipe, dp_size)
    context, micro_batch, in_step = recipe.data.context, recipe.train.micro_batch, schedule.sequences_per_step
    last_step = schedule.steps if steps is None else steps
    per_epoch = _samples(prepared.train_tokens, context)
    if per_epoch == 0:
        raise UserError(
            f"the training split holds {prepared.train_tokens} tokens, less than a sequence of data.context {context} "
            "and its next token: lower data.context, or bring more text"
        )
    first, last = (step * in_step + ahead for step in (start_step, last_step))
    epochs = range(first // per_epoch, -(-last // per_epoch))
    logger.info(
        "training data: %s tokens of %s, %.2f epochs of %s sequences",
        f"{last * context:,}",
        f"{prepared.train_tokens:,}",
        last / per_epoch,
        f"{per_epoch:,}",
    )
    seeds = [_epoch_seed(recipe.seed, epoch) for epoch in epochs]
    epoch_data = _datasets(recipe.data, prepared, Split.train, seeds)

    def micro_batches() -> Iterator[Batch]:
        for step in range(start_step, last_step):
            for accumulated in range(schedule.accumulation):
                begin = step * in_step + ahead + (accumulated * dp_size + dp_rank) * micro_batch
                places = (divmod(number, per_epoch) for number in range(begin, begin + micro_batch))
                yield _stack(epoch_data(epoch - epochs.start)[index] for epoch, index in places)

    return micro_batches()


def validation_batches(recipe: Recipe, prepared: Prepared, *, dp_rank: int, dp_size: int) -> list[Batch]:
    """One data-parallel rank's share of the validation set: the same each time, for every arm and every seed.

    The set is evaluation.tokens, rounded down to whole sequences and to as many for every rank. The last micro-batch
    of a rank is shorter than the others where micro_batch does not divide its share.
    Every rank must call this at the same time, as with train_batches. Raises UserError if the validation split, or
    evaluation.tokens, is too small.
    """
    _check_vocabulary(recipe, prepared)
    context, micro_batch = recipe.data.context, recipe.train.micro_batch
    share = recipe.evaluation.tokens // context // dp_size
    if share == 0:
        raise UserError(
            f"evaluation.tokens {recipe.evaluation.tokens} is less than one sequence of data.context {context} for "
            f"each of {dp_size} data-parallel ranks: set it to {context * dp_size} or more"
        )
    available = _samples(prepared.validation_tokens, context)
    if share * dp_size > available:
        fit = available // dp_size * dp_size * context
        raise UserError(
            f"the validation split holds {prepared.validation_tokens} tokens, too few for evaluation.tokens "
            f"{recipe.evaluation.tokens}: {f'lower it to {fit}, or ' if fit else ''}raise data.validation_fraction "
            f"above {recipe.data.validation_fraction}"
        )
    dataset = _datasets(recipe.data, prepared, Split.valid, [_epoch_seed(recipe.data.split_seed, 0)])(0)
    mine = range(dp_rank * share, (dp_rank + 1) * share)
    return [_stack(dataset[index] for index in mine[at : at + micro_batch]) for at in range(0, share, micro_batch)]


@dataclass(frozen=True)
class _Tokenizer:
    """As much of a tokenizer as GPTDataset asks for."""

    vocab_size: int
    eod: int
    pad: int
    unique_identifiers: dict[str, str]


def _check_vocabulary(recipe: Recipe, prepared: Prepared) -> None:
    if recipe.data.vocab_size != prepared.vocab_size:
        raise UserError(
            f"the data in {prepared.folder} were made with a vocabulary of {prepared.vocab_size}, but data.vocab_size "
            f"is {recipe.data.vocab_size}: prepare the data of this recipe"
        )


def _samples(tokens: int, context: int) -> int:
    """Sequences in a stream of `tokens`: each is `context` long, and the last needs one token more as its label."""
    return max(tokens - 1, 0) // context


def _epoch_seed(seed: int, epoch: int) -> int:
    """A seed for numpy's RandomState (32 bits), which is all that GPTDataset takes."""
    return int(np.random.SeedSequence((seed, epoch)).generate_state(1)[0])


def _datasets(data: Data, prepared: Prepared, split: Split, seeds: list[int]) -> Callable[[int], GPTDataset]:
    """The passes over the split, one a seed, by number. Rank 0 builds the index files, then all ranks read them."""
    context = data.context
    prefix = prepared.train_prefix if split is Split.train else prepared.validation_prefix
    held = prepared.train_tokens if split is Split.train else prepared.validation_tokens
    tokens = index_files.open_tokens(prefix, held, prepared.vocab_size)
    folders = [
        prepared.folder / "indices" / f"{prefix.name}-context{context}-seed{seed}-megatron{megatron_version}"
        for seed in seeds
    ]

    def dataset(seed: int, folder: Path) -> GPTDataset:
        return GPTDataset(
            tokens,
            f"{prepared.digest}/{prefix.name}",  # goes into the index files' names: a path would tie them to this place
            np.arange(len(tokens), dtype=np.int32),
            None,  # as many samples as one pass gives
            split,
            GPTDatasetConfig(
                random_seed=seed,
                sequence_length=context,
                blend_per_split=[([str(prepared.train_prefix)], None), ([str(prepared.validation_prefix)], None), None],
                path_to_cache=str(folder),
                tokenizer=_Tokenizer(prepared.vocab_size, prepared.eod_id, prepared.pad_id, {"data": prepared.digest}),
                reset_position_ids=data.pack,
                reset_attention_mask=False,
                eod_mask_loss=False,
                create_attention_mask=False,  # causal, which the attention module knows
            ),
        )

    def build(seed: int, folder: Path) -> None:
        dataset(seed, folder)
        index_files.seal(folder)

    distributed = torch.distributed.is_initialized()
    if not distributed or torch.distributed.get_rank() == 0:
        for seed, folder in zip(seeds, folders, strict=True):
            make_whole(folder, lambda unfinished, seed=seed: build(seed, unfinished))
    if distributed:
        torch.distributed.barrier()
    for folder in folders:
        index_files.check_seal(folder)

    @lru_cache(maxsize=2)  # the pass at hand and the next: each holds files open, and there may be thousands
    def opened(number: int) -> GPTDataset:
        return dataset(seeds[number], folders[number])

    return opened


def _stack(samples: Iterable[dict[str, torch.Tensor]]) -> Batch:
    rows = list(samples)
    return {key: torch.stack([row[key] for row in rows]) for key in ("tokens", "labels", "position_ids", "loss_mask")}
