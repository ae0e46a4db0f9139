"""The data order: one for a seed, whatever the ranks, the micro-batch, the resumed step and the budget."""

import json
import shutil
import subprocess
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from sagebwd.errors import UserError
from sagebwd.tokenizer import Prepared, prepare
from sagebwd.training.data import Batch, train_batches, validation_batches
from sagebwd.training.recipe import Data, Evaluation, Recipe, Train

pytest_plugins = ("tests.small_corpus",)
CONTEXT, IN_STEP = 32, 8


@pytest.fixture(scope="module")
def prepared(small_data: Data, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepare(small_data, tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def recipe(small_data: Data) -> Recipe:
    return Recipe(
        name="test",
        data=small_data,
        train=Train(tokens_per_step=IN_STEP * CONTEXT, total_tokens=20 * IN_STEP * CONTEXT, micro_batch=2),
        evaluation=Evaluation(tokens=24 * CONTEXT),
    )


def with_train(recipe: Recipe, **change: int) -> Recipe:
    return recipe.model_copy(update={"train": recipe.train.model_copy(update=change)})


def steps(
    recipe: Recipe, prepared: Prepared, dp_size: int = 1, start_step: int = 0, of: str = "tokens"
) -> list[list[tuple[int, ...]]]:
    """The sequences of each step's global batch, sorted."""
    accumulation = IN_STEP // (recipe.train.micro_batch * dp_size)
    ranks = [
        list(train_batches(recipe, prepared, dp_rank=rank, dp_size=dp_size, start_step=start_step))
        for rank in range(dp_size)
    ]
    assert all(len(batch["tokens"]) == recipe.train.micro_batch for batches in ranks for batch in batches)
    return [
        sorted(
            tuple(row.tolist()) for batches in ranks for batch in batches[at : at + accumulation] for row in batch[of]
        )
        for at in range(0, len(ranks[0]), accumulation)
    ]


def equal(left: Batch, right: Batch) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def test_a_micro_batch_is_what_the_model_takes(recipe: Recipe, prepared: Prepared) -> None:
    for batch in train_batches(recipe, prepared, dp_rank=0, dp_size=1):
        assert {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in batch.items()} == {
            "tokens": (torch.int64, (2, CONTEXT)),
            "labels": (torch.int64, (2, CONTEXT)),
            "position_ids": (torch.int64, (2, CONTEXT)),
            "loss_mask": (torch.float32, (2, CONTEXT)),
        }
        assert torch.equal(batch["labels"][:, :-1], batch["tokens"][:, 1:])
        assert torch.equal(batch["position_ids"], torch.arange(CONTEXT).expand(2, -1))
        assert batch["loss_mask"].min() == 1
        assert batch["tokens"].max() < prepared.vocab_size


@pytest.mark.parametrize(("dp_size", "micro_batch"), [(1, 1), (1, 8), (2, 2), (2, 4), (4, 1), (4, 2), (8, 1)])
def test_the_global_batch_of_a_step_is_the_same_for_any_layout(
    recipe: Recipe, prepared: Prepared, dp_size: int, micro_batch: int
) -> None:
    assert steps(with_train(recipe, micro_batch=micro_batch), prepared, dp_size) == steps(recipe, prepared)


@pytest.fixture(scope="module")
def packed(recipe: Recipe) -> Recipe:
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"pack": True})})


def test_packing_restarts_the_positions_after_each_document_and_changes_nothing_else(
    recipe: Recipe, packed: Recipe, prepared: Prepared
) -> None:
    def batches(recipe: Recipe) -> list[Batch]:
        train = train_batches(recipe, prepared, dp_rank=0, dp_size=1)
        return [*train, *validation_batches(recipe, prepared, dp_rank=0, dp_size=1)]

    documents = 0
    for ours, theirs in zip(batches(packed), batches(recipe), strict=True):
        for tokens, positions in zip(ours["tokens"], ours["position_ids"], strict=True):
            begins = [0] + [at + 1 for at, token in enumerate(tokens[:-1]) if token == prepared.eod_id]
            assert positions.tolist() == [at - max(b for b in begins if b <= at) for at in range(CONTEXT)]
            documents += len(begins) - 1
        assert equal(ours | {"position_ids": theirs["position_ids"]}, theirs)
    assert documents > 5


@pytest.mark.parametrize(("dp_size", "micro_batch"), [(1, 8), (2, 4), (8, 1)])
def test_the_layout_changes_no_position(packed: Recipe, prepared: Prepared, dp_size: int, micro_batch: int) -> None:
    run = with_train(packed, micro_batch=micro_batch)
    assert steps(run, prepared, dp_size, of="position_ids") == steps(packed, prepared, of="position_ids")


@pytest.mark.parametrize("start_step", [1, 7, 19, 20])
def test_resuming_goes_on_where_the_run_stopped(recipe: Recipe, prepared: Prepared, start_step: int) -> None:
    def batches(start: int) -> list[Batch]:
        return list(train_batches(recipe, prepared, dp_rank=1, dp_size=2, start_step=start))

    in_step = IN_STEP // 4
    expected, resumed = batches(0)[start_step * in_step :], batches(start_step)
    assert len(resumed) == (20 - start_step) * in_step
    assert all(map(equal, expected, resumed))


def test_a_larger_budget_goes_on_where_the_smaller_ends(recipe: Recipe, prepared: Prepared) -> None:
    longer = steps(with_train(recipe, total_tokens=400 * IN_STEP * CONTEXT), prepared)
    assert len(longer) == 400
    assert longer[:20] == steps(recipe, prepared)


def test_an_epoch_holds_every_token_once_and_the_next_is_shuffled_anew(recipe: Recipe, prepared: Prepared) -> None:
    per_epoch = (prepared.train_tokens - 1) // CONTEXT
    run = with_train(recipe, total_tokens=3 * prepared.train_tokens, micro_batch=1)
    rows = [batch["tokens"][0].numpy() for batch in train_batches(run, prepared, dp_rank=0, dp_size=1)]
    assert len(rows) > 2 * per_epoch
    corpus = np.bincount(np.fromfile(f"{prepared.train_prefix}.bin", dtype=np.uint16), minlength=prepared.vocab_size)
    epochs = [np.stack(rows[at : at + per_epoch]) for at in (0, per_epoch)]
    for epoch in epochs:
        left_over = corpus - np.bincount(epoch.ravel(), minlength=prepared.vocab_size)
        assert left_over.min() >= 0
        assert 1 <= left_over.sum() <= CONTEXT
    assert not np.array_equal(epochs[0], epochs[1])


def test_the_seed_decides_the_order(recipe: Recipe, prepared: Prepared) -> None:
    other = recipe.model_copy(update={"seed": recipe.seed + 1})
    assert steps(other, prepared) != steps(recipe, prepared)
    assert steps(other, prepared) == steps(other, prepared)
    steps(recipe.model_copy(update={"seed": 2**70}), prepared)  # any that the recipe admits


def test_arms_see_the_same_samples(recipe: Recipe, prepared: Prepared) -> None:
    attention = recipe.attention.model_copy(update={"kind": "fpa"})
    other = recipe.model_copy(update={"attention": attention, "name": "other"})
    assert steps(other, prepared) == steps(recipe, prepared)


def test_validation_is_fixed_and_shared_out_among_the_ranks(recipe: Recipe, prepared: Prepared) -> None:
    whole = validation_batches(recipe, prepared, dp_rank=0, dp_size=1)
    assert [len(batch["tokens"]) for batch in whole] == [2] * 12
    assert all(map(equal, whole, validation_batches(recipe, prepared, dp_rank=0, dp_size=1)))
    reseeded = recipe.model_copy(update={"seed": recipe.seed + 1})
    assert all(map(equal, whole, validation_batches(reseeded, prepared, dp_rank=0, dp_size=1)))
    rows = torch.cat([batch["tokens"] for batch in whole])
    for dp_size in (2, 3, 8):
        shares = [validation_batches(recipe, prepared, dp_rank=rank, dp_size=dp_size) for rank in range(dp_size)]
        assert torch.equal(torch.cat([batch["tokens"] for share in shares for batch in share]), rows)
    odd = validation_batches(with_train(recipe, micro_batch=5), prepared, dp_rank=0, dp_size=1)
    assert [len(batch["tokens"]) for batch in odd] == [5, 5, 5, 5, 4]


def test_validation_is_of_the_validation_split(recipe: Recipe, prepared: Prepared) -> None:
    available = (prepared.validation_tokens - 1) // CONTEXT
    everything = recipe.model_copy(update={"evaluation": Evaluation(tokens=available * CONTEXT)})
    batches = validation_batches(everything, prepared, dp_rank=0, dp_size=1)
    seen = np.bincount(torch.cat([b["tokens"] for b in batches]).flatten().numpy(), minlength=prepared.vocab_size)
    corpus = np.bincount(np.fromfile(f"{prepared.validation_prefix}.bin", dtype=np.uint16), minlength=len(seen))
    assert (corpus - seen).min() >= 0
    assert 1 <= (corpus - seen).sum() <= CONTEXT


def test_a_recipe_that_does_not_fit_the_data_is_refused(recipe: Recipe, prepared: Prepared) -> None:
    def refused(said: str, call=train_batches, dp_size: int = 1, **sections) -> None:
        with pytest.raises(UserError, match=said) as caught:
            call(recipe.model_copy(update=sections), prepared, dp_rank=0, dp_size=dp_size)
        assert "\n" not in str(caught.value)

    vocabulary = recipe.data.model_copy(update={"vocab_size": 1000})
    long = recipe.data.model_copy(update={"context": 10**6})
    refused("made with a vocabulary of 512, but data.vocab_size is 1000", data=vocabulary)
    refused("made with a vocabulary of 512", validation_batches, data=vocabulary)
    refused(
        "less than a sequence of data.context 1000000",
        data=long,
        train=Train(tokens_per_step=8 * 10**6, total_tokens=10**7),
    )
    refused("no multiple of", dp_size=3)
    many = Evaluation(tokens=10**6)
    refused(
        r"validation split holds \d+ tokens, too few .* lower it to \d+, or raise", validation_batches, evaluation=many
    )
    refused("is less than one sequence", validation_batches, dp_size=25)
    refused(r"too few .*1000000: raise data\.validation_fraction", validation_batches, data=long, evaluation=many)


def test_a_damaged_index_is_named(recipe: Recipe, prepared: Prepared, tmp_path: Path) -> None:
    """Megatron would read it with pickle, which may run anything."""
    folder = shutil.copytree(prepared.folder, tmp_path / "copy", ignore=shutil.ignore_patterns("indices"))
    copy = Prepared(**{**vars(prepared), "folder": folder})
    next(train_batches(recipe, copy, dp_rank=0, dp_size=1))
    (index,) = folder.glob("indices/train-*/*-shuffle_index.npy")
    content = index.read_bytes()
    for damage in (lambda: index.write_bytes(content[:-8]), lambda: np.save(index, np.array([print], dtype=object))):
        damage()
        with pytest.raises(UserError, match=r"shuffle_index\.npy is damaged: delete the folder .*indices/train-"):
            train_batches(recipe, copy, dp_rank=0, dp_size=1)
    index.unlink()
    with pytest.raises(UserError, match="is damaged: delete the folder"):
        train_batches(recipe, copy, dp_rank=0, dp_size=1)


def test_many_epochs_hold_few_files_open(recipe: Recipe, prepared: Prepared) -> None:
    steps = 50 * (prepared.train_tokens // recipe.train.tokens_per_step)
    many = recipe.train.model_copy(update={"total_tokens": steps * recipe.train.tokens_per_step})
    open_files = Path("/proc/self/fd")
    before = len(list(open_files.iterdir()))
    for _ in train_batches(recipe.model_copy(update={"train": many}), prepared, dp_rank=0, dp_size=1):
        pass
    assert len(list(open_files.iterdir())) < before + 20


RANK = """
import json, sys
from pathlib import Path
import torch
from sagebwd.tokenizer import load_prepared
from sagebwd.training.data import train_batches, validation_batches
from sagebwd.training.recipe import Recipe

torch.distributed.init_process_group("gloo")
rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
recipe, prepared = Recipe.model_validate_json(sys.argv[1]), load_prepared(Path(sys.argv[2]))
train = train_batches(recipe, prepared, dp_rank=rank, dp_size=size)
validation = validation_batches(recipe, prepared, dp_rank=rank, dp_size=size)
rows = [[batch["tokens"].tolist() for batch in batches] for batches in (train, validation)]
Path(sys.argv[3], f"{rank}.json").write_text(json.dumps(rows))
torch.distributed.destroy_process_group()
"""


def test_two_ranks_start_from_data_without_indices(recipe: Recipe, prepared: Prepared, tmp_path: Path) -> None:
    """Rank 0 builds them and rank 1 waits; each reads what it is given here in one process."""
    folder = shutil.copytree(prepared.folder, tmp_path / "copy", ignore=shutil.ignore_patterns("indices"))
    (tmp_path / "rank.py").write_text(RANK)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = [str(tmp_path / "rank.py"), recipe.model_dump_json(), str(folder), str(tmp_path)]
    subprocess.run([*launcher, *program], check=True, capture_output=True, timeout=300)
    for rank in (0, 1):
        train, validation = json.loads((tmp_path / f"{rank}.json").read_text())
        here = islice(train_batches(recipe, prepared, dp_rank=rank, dp_size=2), len(train))
        assert [batch["tokens"].tolist() for batch in here] == train
        assert len(train) == 40
        here = validation_batches(recipe, prepared, dp_rank=rank, dp_size=2)
        assert [batch["tokens"].tolist() for batch in here] == validation
