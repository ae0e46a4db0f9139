"""The token budget: steps and accumulation, and sizes that do not divide."""

import pytest

from sagebwd.errors import UserError
from sagebwd.training.budget import Plan, data_parallel_size, layout, plan
from sagebwd.training.recipe import Recipe


def recipe(**sections: dict) -> Recipe:
    return Recipe(name="r", **sections)


def test_plan() -> None:
    budget = recipe(
        data={"context": 100},
        train={"tokens_per_step": 2400, "total_tokens": 25_000, "micro_batch": 2},
        optimizer={"warmup_tokens": 2401},
    )
    assert plan(budget, 3) == Plan(steps=10, sequences_per_step=24, accumulation=4, warmup_steps=2, tokens=24_000)
    assert plan(budget, 12).accumulation == 1


@pytest.mark.parametrize(
    ("tokens_per_step", "dp_size", "named"),
    [(2500, 3, "2400 or 3000"), (2399, 1, "2200 or 2400"), (100, 1, "set it to 200"), (2400, 5, "2000 or 3000")],
)
def test_the_nearest_tokens_per_step_are_named_and_do_divide(tokens_per_step: int, dp_size: int, named: str) -> None:
    train = {"tokens_per_step": tokens_per_step, "total_tokens": 100_000, "micro_batch": 2}
    with pytest.raises(UserError, match=rf"train.tokens_per_step is {tokens_per_step}, .*{named}$"):
        plan(recipe(data={"context": 100}, train=train), dp_size)
    for size in [int(word) for word in named.split() if word.isdecimal()]:
        assert plan(recipe(data={"context": 100}, train=train | {"tokens_per_step": size}), dp_size).steps > 0


def test_a_budget_below_one_step_and_a_warm_up_without_an_end() -> None:
    with pytest.raises(UserError, match="less than one step of 8192 tokens"):
        plan(recipe(train={"total_tokens": 8191}), 1)
    train = {"tokens_per_step": 8192, "total_tokens": 81_920}
    with pytest.raises(UserError, match=r"10 of 10 steps.*set it below 73729") as error:
        plan(recipe(train=train, optimizer={"warmup_tokens": 73_729}), 1)
    assert "\n" not in str(error.value)
    assert plan(recipe(train=train, optimizer={"warmup_tokens": 73_728}), 1).warmup_steps == 9


@pytest.mark.parametrize(
    ("tensor", "model", "world", "complaint"),
    [
        (3, {}, 3, "parallel.tensor is 3, but model.heads is 4, .* set parallel.tensor to 2, or model.heads to 3 or 6"),
        (4, {"kv_heads": 2}, 4, "model.kv_heads is 2, .* set parallel.tensor to 2"),
        (4, {"ffn": 770}, 4, "model.ffn is 770"),
        (2, {}, 3, r"3 rank\(s\) are no multiple of it: start a multiple of 2"),
    ],
)
def test_tensor_parallel_sizes_that_do_not_divide(tensor: int, model: dict, world: int, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        data_parallel_size(recipe(model=model, parallel={"tensor": tensor}), world)


@pytest.mark.parametrize(
    ("parallel", "context", "complaint"),
    [
        ({"sequence": True}, 256, "parallel.sequence is true, but parallel.tensor is 1, .* raise parallel.tensor"),
        ({"sequence": True, "tensor": 2}, 255, "data.context is 255, .* set data.context to 254 or 256"),
    ],
)
def test_sequences_that_cannot_be_shared(parallel: dict, context: int, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        data_parallel_size(recipe(parallel=parallel, data={"context": context}), 2)


@pytest.mark.parametrize(
    ("sections", "complaint"),
    [
        ({"data": {"context": 256}}, "data.context 256 does not make 4 chunks of a multiple of 128 .* to 512, or"),
        ({"data": {"context": 1100}}, "set data.context to 1024 or 1536, or parallel.context to 1"),
        ({"data": {"context": 511}, "attention": {"kind": "fpa"}}, "does not make 4 chunks: set data.context to 508"),
        ({"data": {"context": 512, "pack": True}}, "data.pack is true, .* set data.pack to false, or parallel.context"),
        ({"attention": {"quant": {"smooth_q": True}}}, "set attention.quant.smooth_q to false, or parallel.context to"),
        ({"attention": {"quant": {"project": True}}}, "set attention.quant.project to false, or parallel.context to 1"),
        (
            {"attention": {"quant": {"products": "scores"}}},
            "quant.products is scores, .* set attention.quant.products to all",
        ),
    ],
)
def test_sequences_that_context_ranks_cannot_share(sections: dict, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        data_parallel_size(recipe(**{"data": {"context": 512}} | sections, parallel={"context": 2}), 2)


def test_tokens_of_a_context_rank_that_sequence_parallelism_cannot_share() -> None:
    sections = {"attention": {"kind": "fpa"}, "data": {"context": 12}}
    complaint = r"no multiple of parallel.tensor \* parallel.context 8: set data.context to 8 or 16"
    with pytest.raises(UserError, match=complaint):
        data_parallel_size(recipe(**sections, parallel={"sequence": True, "tensor": 4, "context": 2}), 8)


def test_what_is_sagebwd_s_alone_does_not_keep_full_precision_from_context_ranks() -> None:
    attention = {"kind": "fpa", "quant": {"smooth_q": True}}
    assert data_parallel_size(recipe(attention=attention, data={"context": 8}, parallel={"context": 2}), 4) == 2


@pytest.mark.parametrize(
    ("parallel", "layers", "world", "complaint"),
    [
        ({"pipeline": 3}, 4, 3, "parallel.pipeline is 3, but model.layers is 4, .* to 2, or model.layers to 3 or 6"),
        ({"pipeline": 8}, 4, 8, "parallel.pipeline is 8, but model.layers is 4, .* to 4, or model.layers to 8"),
        (
            {"pipeline": 2, "tensor": 2},
            4,
            6,
            r"parallel.tensor \* parallel.pipeline is 4, but 6 rank\(s\) .* start a multiple of 4 ranks .*, or lower",
        ),
    ],
)
def test_pipelines_that_cannot_be(parallel: dict, layers: int, world: int, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        data_parallel_size(recipe(model={"layers": layers}, parallel=parallel), world)


def test_a_layout_in_words() -> None:
    parallel = {"tensor": 2, "sequence": True, "pipeline": 2, "distributed_optimizer": True}
    said = "tensor 2 (and sequence) x pipeline 2 x data 2 (sharing the optimizer)"
    assert layout(recipe(parallel=parallel), 8) == said
    assert layout(recipe(), 3) == "tensor 1 x data 3"
    shared = {"context": 2, "distributed_optimizer": True}
    said = "tensor 1 x context 2 x data 1 (sharing the optimizer)"
    assert layout(recipe(parallel=shared, data={"context": 512}), 2) == said


def test_a_vocabulary_that_does_not_divide() -> None:
    with pytest.raises(UserError, match=r"parallel.tensor 3 does not divide the padded vocabulary of 4096"):
        data_parallel_size(recipe(model={"heads": 3, "hidden": 24}, parallel={"tensor": 3}), 3)


def test_data_parallel_size() -> None:
    assert data_parallel_size(recipe(parallel={"tensor": 2}), 8) == 4
    assert data_parallel_size(recipe(parallel={"tensor": 2, "pipeline": 2}), 8) == 2
    parallel = {"tensor": 2, "pipeline": 2, "context": 2}
    assert data_parallel_size(recipe(parallel=parallel, data={"context": 512}), 8) == 1
