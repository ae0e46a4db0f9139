"""`python -m sagebwd.job_copy RECIPE FOLDER`: this code and that recipe as they are now, for a job that starts later.

FOLDER gets code/ (the packages as pip would install them, for PYTHONPATH), the commit in it, and the recipe as one file
of the same name, its base merged in. Edits and checkouts after that change nothing for the job.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

import sagebwd.deepspeed
import sagebwd.kernels
import sagebwd.tokenizer
from sagebwd import machine
from sagebwd.errors import UserError, one_line
from sagebwd.training import recipe_file


def take(recipe: Path, folder: Path) -> None:
    """Fill `folder`, which must not exist. Raises UserError: a recipe that cannot be read."""
    text = recipe_file.merged(recipe)
    without_caches = shutil.ignore_patterns("__pycache__", "results")
    code = folder / "code" / "sagebwd"
    shutil.copytree(Path(sagebwd.__file__).parent, code, ignore=without_caches)
    for package in (sagebwd.deepspeed, sagebwd.kernels, sagebwd.tokenizer):  # in a repository they lie elsewhere
        into = code / package.__name__.rpartition(".")[2]
        shutil.copytree(Path(package.__file__).parent, into, ignore=without_caches, dirs_exist_ok=True)
    (code / machine.COMMIT).write_text(f"{machine.commit() or ''}\n", encoding="utf-8")
    (folder / recipe.name).write_text(text, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m sagebwd.job_copy", description=__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("folder", type=Path, help="where the copy goes; it must not exist")
    arguments = parser.parse_args()
    try:
        take(arguments.recipe, arguments.folder)
    except UserError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
