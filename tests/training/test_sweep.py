"""A recipe that sweeps: its cells, its arms' names and recipes, the rules that follow the tokens per step."""

from pathlib import Path

import pytest

from sagebwd.errors import UserError
from sagebwd.training.recipe_file import Experiment, differences, load_experiment
from sagebwd.training.sweep import short

FILE = """
optimizer: {lr: 1e-3, min_lr: 1e-4}
train: {total_tokens: 4_194_304, micro_batch: 4}
sweep:
  tokens_per_step: [32_768, 131_072]
  qk_norm: [true, false]
  seed: [1, 2]
  learning_rate: {at: 32_768, power: 0.5, most: 1.5e-3}
  evaluations: 10
  checkpoints: 1
arms: {fpa: {attention.kind: fpa}, sagebwd: {}}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "s.yaml").write_text(FILE)
    return tmp_path / "s.yaml"


def test_the_grid_is_complete_the_seeds_outermost(file: Path) -> None:
    experiment = load_experiment(file)
    names = list(experiment.arms)
    assert len(names) == 2 * 2 * 2 * 2
    assert names[:4] == ["32k-qk-s1-fpa", "32k-qk-s1-sagebwd", "32k-noqk-s1-fpa", "32k-noqk-s1-sagebwd"]
    assert names[4] == "128k-qk-s1-fpa"
    assert all("-s1-" in name for name in names[:8])
    recipe = experiment.arms["128k-noqk-s2-sagebwd"]
    assert (recipe.train.tokens_per_step, recipe.model.qk_norm, recipe.seed) == (131_072, False, 2)
    assert recipe.attention.kind == "sagebwd"
    assert experiment.variants["128k-noqk-s2-sagebwd"] == "sagebwd"


def test_arms_of_a_cell_differ_by_their_own_keys_alone(file: Path) -> None:
    arms = load_experiment(file).arms
    changed = differences(arms["128k-qk-s2-fpa"], arms["128k-qk-s2-sagebwd"])
    assert {key for key in changed if not key.startswith("attention.")} == set()


def test_learning_rate_and_intervals_follow_the_tokens_per_step(file: Path) -> None:
    arms = load_experiment(file).arms
    small, large = arms["32k-qk-s1-fpa"], arms["128k-qk-s1-fpa"]
    assert (small.optimizer.lr, small.optimizer.min_lr) == (1e-3, 1e-4)
    assert (large.optimizer.lr, large.optimizer.min_lr) == (1.5e-3, 1.5e-4)  # 2e-3 by the rule, bounded
    free = load_experiment(file, ["sweep.learning_rate.most=null", "optimizer.lr=2e-3"]).arms
    assert free["128k-qk-s1-fpa"].optimizer.lr == 4e-3
    assert free["128k-qk-s1-fpa"].optimizer.min_lr == 2e-4
    assert (small.evaluation.every_steps, large.evaluation.every_steps) == (13, 4)  # of 128 and 32 steps
    assert (small.checkpoint.every_steps, large.checkpoint.every_steps) == (128, 32)


def test_a_list_left_out_leaves_the_recipes_own_value(file: Path) -> None:
    experiment = load_experiment(file, ["sweep.seed=[]", "sweep.qk_norm=[]", "seed=5"])
    assert list(experiment.arms) == ["32k-fpa", "32k-sagebwd", "128k-fpa", "128k-sagebwd"]
    assert {recipe.seed for recipe in experiment.arms.values()} == {5}


def test_arms_are_chosen_by_name_pattern_and_number(file: Path) -> None:
    experiment = load_experiment(file)
    chosen: Experiment = experiment.select(["32k-*-s1-fpa"])
    assert list(chosen.arms) == ["32k-qk-s1-fpa", "32k-noqk-s1-fpa"]
    in_turn = experiment.select(["32k-qk-*-sagebwd", "32k-qk-*-fpa"])  # pairs stay together
    assert list(in_turn.arms)[:2] == ["32k-qk-s1-fpa", "32k-qk-s1-sagebwd"]
    assert chosen.variants == experiment.variants  # the comparison still knows all of them
    assert experiment.at(3) == "32k-noqk-s1-sagebwd"


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["seed=5"], "seed is set by the command line, but the recipe sweeps it: set sweep.seed instead"),
        (["model.qk_norm=true"], "set sweep.qk_norm instead"),
        (["sweep.seed=[3, 3]"], "seed holds a value twice"),
        (["sweep.seed=[-1]"], r"sweep.seed is \[-1\] in the command line: it must be greater than or equal to 0"),
        (["sweep.seed=3"], "sweep.seed is 3 in the command line"),
        (["sweep.seeds=[3]"], "unknown key 'sweep.seeds' in the command line: did you mean 'sweep.seed'?"),
        (["sweep.learning_rate.at=null"], "sweep.learning_rate .*without `at`"),
    ],
)
def test_a_wrong_sweep_is_named_with_the_remedy(file: Path, overrides: list[str], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint) as error:
        load_experiment(file, overrides)
    assert "\n" not in str(error.value)


def test_an_arm_may_not_set_what_is_swept(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text("sweep: {seed: [1, 2]}\narms: {a: {}, b: {seed: 3}}\n")
    with pytest.raises(UserError, match=r"seed is set by arm b of .*s.yaml, but the recipe sweeps it"):
        load_experiment(tmp_path / "s.yaml")


def test_tokens_per_step_in_a_name_are_exact() -> None:
    assert [short(n) for n in (1024, 131_072, 2_097_152, 1_572_864, 5000)] == ["1k", "128k", "2m", "1536k", "5000"]
