"""Recipe files: precedence, arms, and mistakes that are named with their remedy."""

from pathlib import Path

import pytest

from sagebwd.attention import QuantConfig
from sagebwd.errors import UserError
from sagebwd.training.budget import plan
from sagebwd.training.recipe import Recipe
from sagebwd.training.recipe_file import differences, dump, load_config, load_experiment

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))
ARMS = "arms: {fpa: {attention.kind: fpa}, sagebwd: {}}\n"


@pytest.fixture
def write(tmp_path: Path):
    def write(text: str, name: str = "mine.yaml") -> Path:
        (tmp_path / name).write_text(text, encoding="utf-8")
        return tmp_path / name

    return write


def refused(path: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as error:
        load_experiment(path, overrides)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_each_later_source_wins(write) -> None:
    write("model: {layers: 2, heads: 2, hidden: 128}\noptimizer.lr: 1e-2\nseed: 1\n", "base.yaml")
    text = "extends: base.yaml\nmodel: {layers: 3}\noptimizer: {lr: 2e-3}\n"
    arms = (
        "arms: {fpa: {attention.kind: fpa, optimizer.clip: 2}, sagebwd: {optimizer.lr: 3e-3, optimizer: {clip: 0.5}}}\n"
    )
    experiment = load_experiment(write(text + arms), ["model.layers=5", "model={qk_norm: false}"])
    fpa, sagebwd = experiment.arms.values()
    assert list(experiment.arms) == ["fpa", "sagebwd"]
    assert (fpa.model.ffn, fpa.model.heads, fpa.seed) == (768, 2, 1)  # the schema's, the base's, the base's
    assert (fpa.optimizer.lr, sagebwd.optimizer.lr) == (2e-3, 3e-3)  # the file's, the arm's
    assert (fpa.optimizer.clip, sagebwd.optimizer.clip) == (2, 0.5)
    assert (fpa.model.layers, sagebwd.model.layers) == (5, 5)  # the command line's
    assert not fpa.model.qk_norm


def test_arms_of_the_base_are_merged_by_name(write) -> None:
    write("arms: {fpa: {attention.kind: fpa}, sagebwd: {attention.quant.delta: matched}}\n", "base.yaml")
    text = (
        "extends: base.yaml\narms: {sagebwd: {attention.quant.block_q: 32}, tile: {attention.quant.granularity: tile}}"
    )
    arms = load_experiment(write(text)).arms
    assert list(arms) == ["fpa", "sagebwd", "tile"]
    assert (arms["sagebwd"].attention.quant.delta, arms["sagebwd"].attention.quant.block_q) == ("matched", 32)


def test_a_recipe_never_inherits_its_name(write) -> None:
    write("name: base-name\ndescription: the base's\n", "base.yaml")
    recipe = load_experiment(write("extends: base.yaml\n" + ARMS, "child.yaml")).arms["fpa"]
    assert (recipe.name, recipe.description) == ("child", "")
    assert load_experiment(write("extends: base.yaml\nname: own\n" + ARMS)).name == "own"
    assert load_experiment(write(ARMS), ["name=given"]).name == "given"


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("model.layer=2", "unknown key 'model.layer' in the command line: did you mean 'model.layers'?"),
        ("train.lr=1", "unknown key 'train.lr' in the command line: did you mean 'optimizer.lr'?"),
        ("attention.quant.granularty=row", "did you mean 'attention.quant.granularity'?"),
        ("model.layers.x=2", "unknown key 'model.layers.x' in the command line: did you mean 'model.layers'?"),
        ("zzzz=2", "unknown key 'zzzz' in the command line: choose from name, description, seed, model, attention"),
        ("model.layers=four", "model.layers is 'four' in the command line: it must be a valid integer"),
        ("model.layers=0", "model.layers is 0 in the command line: it must be greater than 0"),
        ("model.layers=2.5", "model.layers is 2.5 in the command line"),
        ("model.layers=true", "model.layers is True in the command line"),
        ("model.qk_norm=yes", "model.qk_norm is 'yes' in the command line: it must be a valid boolean"),
        ("model=3", "model in the command line is 3, but it is a section with the keys layers, hidden"),
        ("model.hidden=250", "hidden 250 is not a multiple of heads 4"),
        ("optimizer.min_lr=5", "min_lr 5.0 is above lr 0.001"),
        ("optimizer.lr=1e999", "optimizer.lr is inf in the command line: it must be a finite number"),
        ("attention.kind=flash", "attention.kind is 'flash' in the command line: it must be 'fpa' or 'sagebwd'"),
        ("attention.quant.block_q=48", "block_q is 48: choose one of (16, 32, 64, 128)"),
        ("attention.quant.products=score", "attention.quant.products is 'score' in the command line: it must be 'all'"),
        (
            "attention.quant={products: scores, delta: matched}",
            "delta is 'matched', which has no meaning with products='scores', where only Q K^T is INT8: leave it at "
            "'stale', or set products to 'all'",
        ),
        ("name=../x", "name is '../x'"),
        ("layers", "the override 'layers' must be key=value"),
        ("data.files=[a", "the override 'data.files=[a'"),
    ],
)
def test_a_wrong_override_is_named_with_the_remedy(write, override: str, complaint: str) -> None:
    assert complaint in refused(write(ARMS), override)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("model: {layer: 2}\n" + ARMS, "unknown key 'model.layer' in {path}: did you mean 'model.layers'?"),
        ("optimizer: {lr: fast}\n" + ARMS, "optimizer.lr is 'fast' in {path}: it must be a valid number"),
        ("arm: {}\n", "unknown key 'arm' in {path}: did you mean 'arms'?"),
        ("arms: {fpa: {attention.kind: fpa, model.hiden: 3}}", "unknown key 'model.hiden' in arm fpa of {path}"),
        ("arms: {report: {}}", "'report' cannot name an arm"),
        ("arms: {a/b: {}}", "'a/b' cannot name an arm"),
        ("arms: {a: 3}", "arm a of {path} is 3: it must be a mapping"),
        ("arms: [a]", "arms is ['a']: it must be a mapping"),
        ("seed: 3\n", "{path} has no arms"),
        ("", "{path} is no recipe"),
        ("seed: 3\nseed: 4\n" + ARMS, "{path}, line 2: the key 'seed' stands there twice"),
        ("model.layers: 3\nmodel: {layers: 4}\n" + ARMS, "model.layers stands twice in {path}"),
        ("extends: mine.yaml\n" + ARMS, "break the circle"),
        ("extends: [a, b]\n" + ARMS, "it must be the path of one file"),
        ("extends: mina.yaml\n" + ARMS, "did you mean '{path}'?"),
        (
            "arms: {fpa: {attention.kind: fpa, attention.quant.delta: stale}}",
            "attention.quant.delta in arm fpa of {path}",
        ),
        ("arms: {a: {}, b: {seed: 5}}", "the arms a and b differ in seed (1234 and 5)"),
        ("arms: {a: {}, b: {data.context: 128}}", "the arms a and b differ in data.context"),
    ],
)
def test_a_wrong_file_is_named_with_the_remedy(write, text: str, complaint: str) -> None:
    path = write(text)
    assert complaint.format(path=path) in refused(path)


def test_full_precision_does_not_take_on_keys_of_the_other_arms(write) -> None:
    plain = load_experiment(write(ARMS)).arms["fpa"]
    arms = load_experiment(write(ARMS), ["attention.quant.granularity=tile"]).arms
    assert arms["sagebwd"].attention.quant.granularity == "tile"
    assert arms["fpa"] == plain
    only = write("arms: {fpa: {attention.kind: fpa}}", "only.yaml")
    assert "would be ignored, since every arm has attention.kind fpa" in refused(only, "attention.quant.delta=stale")


def test_config_round_trip(write, tmp_path: Path) -> None:
    overrides = [
        "data.files=[a.txt, b.txt]",
        "data.corpus=files",
        "model.kv_heads=2",
        "optimizer.eps=1e-8",
        "name='1e-3'",
    ]
    for recipe in load_experiment(write(ARMS), overrides).arms.values():
        (tmp_path / "config.yaml").write_text(dump(recipe))
        assert load_config(tmp_path / "config.yaml") == recipe


def test_differences_are_the_keys_that_can_change_a_run() -> None:
    left = Recipe(name="a", description="x")
    right = Recipe(name="a", description="y", attention={"quant": {"delta": "matched"}})
    assert differences(left, right) == {"attention.quant.delta": ("stale", "matched")}


@pytest.mark.parametrize("path", [path for path in RECIPES if not path.stem.startswith("base")], ids=lambda p: p.stem)
def test_the_recipes_of_the_repository_load(path: Path) -> None:
    experiment = load_experiment(path)
    for name, recipe in experiment.arms.items():
        arm, quant = experiment.variants.get(name, name), recipe.attention.quant
        assert recipe.attention.kind == ("fpa" if arm == "fpa" else "sagebwd")
        if arm == "sagebwd":
            assert quant.config() == QuantConfig()
        if arm == "sagebwd-paper":
            assert quant.config() == QuantConfig(granularity="tile", delta="stale")
    for cell in {name.removesuffix(arm) for name, arm in experiment.variants.items()} or {""}:
        assert f"{cell}fpa" in experiment.arms  # what the others are compared with
    told = (path.parent / "README.md").read_text()
    assert f"[{path.name}]({path.name})" in told


def test_the_papers_recipes_are_what_it_states() -> None:
    for name, size, steps, warmup in (("260k", 262_144, 300_000, 7500), ("2m", 2_097_152, 37_500, 1000)):
        arms = load_experiment(RECIPES[0].parent / f"llama-325m-{name}.yaml").arms
        assert len(arms) == 6
        recipe = arms["noqk-sagebwd-paper"]
        assert (plan(recipe, 8).steps, plan(recipe, 8).warmup_steps) == (steps, warmup)
        assert (recipe.train.tokens_per_step, recipe.data.context, recipe.optimizer.lr) == (size, 4096, 3e-5)
        assert not recipe.model.qk_norm
