"""What saving in the background costs: `python -m sagebwd.training.save_cost recipes/llama-125m.yaml --arm sagebwd`.

Trains the arm in a temporary folder, without a save and then with one every few steps, and compares the steps' mean
time: so what a save costs, whatever it is that it slows down, and the share of training at one every five minutes.
One process; no torchrun.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from sagebwd.errors import UserError, one_line
from sagebwd.training import recipe_file

MINUTES = 5
WARM_UP = 5  # steps that compile, and fill caches


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m sagebwd.training.save_cost", description=__doc__)
    parser.add_argument("file", type=Path, metavar="FILE", help="the recipe")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--arm", required=True)
    parser.add_argument("--steps", type=int, default=65)
    parser.add_argument("--every", type=int, default=20, help="steps between two saves [20]")
    parser.add_argument("--data", type=Path, default=Path("data"), help="where prepared data lies [data]")
    parser.add_argument("--folder", type=Path, help="where checkpoints go [the system's temporary folder]")
    arguments = parser.parse_intermixed_args()  # overrides may stand anywhere
    recipe = (
        recipe_file.load_experiment(arguments.file, arguments.overrides).select([arguments.arm]).arms[arguments.arm]
    )
    tokens = recipe.train.tokens_per_step

    from sagebwd import tokenizer
    from sagebwd.training import checkpoint, train

    prepared = tokenizer.prepare(recipe.data, arguments.data)
    seconds, size = {}, 0
    with tempfile.TemporaryDirectory(dir=arguments.folder) as root:
        for saves in (False, True):
            changes = {
                "train": recipe.train.model_copy(update={"total_tokens": arguments.steps * tokens}),
                "optimizer": recipe.optimizer.model_copy(update={"warmup_tokens": 0}),
                "evaluation": recipe.evaluation.model_copy(update={"every_steps": 10 * arguments.steps}),
                "checkpoint": recipe.checkpoint.model_copy(
                    update={"every_steps": arguments.every if saves else None, "every_minutes": None}
                ),
            }
            folder = Path(root) / ("with" if saves else "without")
            train.run(recipe.model_copy(update=changes), arguments.arm, folder, prepared)
            seconds[saves] = _seconds(folder)
            files = checkpoint.read(folder / checkpoint.FOLDER / checkpoint.name(arguments.steps)).files
            size = sum(file["bytes"] for file in files.values())
    steps = arguments.steps - WARM_UP
    number = (arguments.steps - 1) // arguments.every
    lost = (seconds[True] - seconds[False]) / number
    print(
        f"a step takes {seconds[False] / steps * 1e3:.1f} ms without saves, {seconds[True] / steps * 1e3:.1f} ms with "
        f"one every {arguments.every} steps, of {size / 2**30:.2f} GiB: {lost:.3f} s a save, "
        f"{100 * lost / (60 * MINUTES):.3f} % of training at one every {MINUTES} minutes"
    )
    return 0


def _seconds(folder: Path) -> float:
    """From the end of the warm-up to the last step."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    times = {line["step"]: line["time"] for line in lines if "train/loss" in line}
    return times[max(times)] - times[WARM_UP]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        sys.exit(2)
