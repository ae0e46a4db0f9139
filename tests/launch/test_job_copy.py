"""What a job takes with it: code that runs by itself, and a recipe that means the same without its base."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sagebwd import job_copy, machine
from sagebwd.training.recipe_file import load_experiment

RECIPES = [path for path in (Path(__file__).parents[2] / "recipes").glob("*.yaml") if not path.stem.startswith("base")]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_the_recipe_means_the_same(recipe: Path, tmp_path: Path) -> None:
    job_copy.take(recipe, tmp_path / "copy")
    ours, theirs = load_experiment(tmp_path / "copy" / recipe.name), load_experiment(recipe)
    assert (ours.name, dict(ours.arms), dict(ours.variants)) == (theirs.name, dict(theirs.arms), dict(theirs.variants))


def test_all_code_is_the_copy_s_and_it_knows_its_commit(tmp_path: Path) -> None:
    job_copy.take(RECIPES[0], tmp_path / "copy")
    program = (
        "import sys, sagebwd.cli, sagebwd.tokenizer, sagebwd.kernels.forward, sagebwd.machine, sagebwd.deepspeed\n"
        "print(*{m.__file__ for n, m in sys.modules.items() if n.partition('.')[0] == 'sagebwd'})\n"
        "print(sagebwd.machine.commit())"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(tmp_path / "copy" / "code")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    files, commit = answer.stdout.splitlines()
    assert len(files.split()) > 10
    assert all(Path(file).is_relative_to(tmp_path / "copy" / "code") for file in files.split())
    assert commit == str(machine.commit())
    assert {path.name for path in (tmp_path / "copy/code/sagebwd/deepspeed").glob("*.json")} == {
        f"zero{stage}.json" for stage in range(4)
    }
