"""The command line: `sagebwd recipe | arms | prepare | train | status | compare | probe | corpus | doctor`.

It starts quickly: torch, Megatron and matplotlib are imported where a command uses them, never for --help,
--print-config or a mistake in a recipe.
"""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from sagebwd.errors import RunError, UserError, one_line
from sagebwd.training import budget, launcher, recipe_file, run_folder, status
from sagebwd.training.recipe_file import Experiment


class _Parser(argparse.ArgumentParser):
    def __init__(self, **settings: object) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        """One line, as for every other mistake."""
        self.exit(2, f"error: {message.removeprefix('argument ')} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code: 0; 1 when an arm's process or the doctor's self-test failed; 2 for a
    mistake of the user's; 75 when training was asked to stop, and the same command goes on; 141 when whoever read the
    output has left. `status` has its own."""
    parser = _build_parser()
    arguments, rest = parser.parse_known_args(argv)
    # argparse gives up positionals after the first option; overrides may stand anywhere.
    for text in rest:
        if text.startswith("-") or not hasattr(arguments, "overrides"):
            parser.error(f"unknown argument {text!r}")
        arguments.overrides.append(text)
    _log_to_stdout()
    try:
        code = arguments.command(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `| head`; what is still buffered goes nowhere, and nobody is told at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except UserError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    except RunError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: the same command resumes from the last checkpoint", file=sys.stderr)
        return 130


class _LinesAboveTheBar(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm

        tqdm.write(self.format(record), file=sys.stdout)


def _log_to_stdout() -> None:
    """The package's own lines from INFO on, of one rank; other packages' only from WARNING on."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[_LinesAboveTheBar()])
    logging.getLogger("sagebwd").setLevel(logging.INFO if _first_rank() else logging.WARNING)


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="sagebwd", description=sys.modules["sagebwd"].__doc__)
    names = "recipe | arms | prepare | train | status | compare | probe | corpus | doctor"
    commands = parser.add_subparsers(required=True, metavar=names, parser_class=_Parser)

    recipe = _command(commands, "recipe", _recipe, "prepare the data, train every unfinished arm, compare the arms")
    recipe.add_argument("--arms", metavar="A,B", type=_names, help="only these arms; *-s1-* takes all that match")
    recipe.add_argument("--nproc", metavar="N", type=_positive, default=1, help="processes (GPUs) an arm trains on [1]")
    recipe.add_argument(
        "--at-once", metavar="N", type=_positive, default=1, help="arms that train side by side, each on its GPUs [1]"
    )
    _add_runs(recipe)
    _add_data(recipe)
    _add_print_config(recipe)
    recipe.add_argument(
        "--dry-run", action="store_true", help="print parameters, FLOPs, memory and hours of every arm, and stop"
    )
    recipe.add_argument("--gpu", metavar="NAME", help="for --dry-run: the GPU, such as h200 [the one here]")

    _command(commands, "arms", _arms, "print the name of every arm, one a line: what --arm-index counts, from 0")

    prepare = _command(commands, "prepare", _prepare, "train the tokenizer and encode the corpus, unless that is done")
    _add_data(prepare)

    train = _command(commands, "train", _train, "train one arm; under torchrun, one process of it")
    which = train.add_mutually_exclusive_group(required=True)
    which.add_argument("--arm", help="the arm's name")
    which.add_argument("--arm-index", metavar="I", type=_index, help="its place in `sagebwd arms`, from 0")
    _add_runs(train)
    _add_data(train)
    _add_print_config(train)

    text = (
        "how a run stands: exit code 0 finished, 75 stopped and ready to go on, 3 running, 4 failed by a hang, 1 failed"
    )
    stands = commands.add_parser("status", help=text, description=text)
    stands.add_argument("folder", type=Path, metavar="DIR", help="the folder of an arm's run, such as runs/small/fpa")
    stands.set_defaults(command=_status)

    compare = commands.add_parser("compare", help="compare the runs in a folder: a table, a picture, a report")
    compare.add_argument("folder", type=Path, metavar="DIR", help="the folder of a recipe's runs, such as runs/small")
    compare.set_defaults(command=_compare)

    text = "the error of every attention tensor in a trained model, by layer and by rule of the numerics"
    probe = commands.add_parser("probe", help=text, description=text)
    text = "an arm's run folder, such as runs/small/fpa, or a checkpoint's"
    probe.add_argument("folder", type=Path, metavar="DIR", help=text)
    probe.add_argument(
        "--sequences", metavar="N", type=_positive, default=4, help="validation sequences that the model sees [4]"
    )
    probe.add_argument("--out", metavar="DIR", type=Path, help="where the results go [DIR/probe/STEP]")
    probe.add_argument(
        "--save", metavar="FILE", type=Path, help="keep the captured q, k, v and dO in a .safetensors file"
    )
    _add_data(probe)
    probe.set_defaults(command=_probe)

    text = "build a corpus on this machine, for recipes with data.corpus: NAME"
    corpus = commands.add_parser("corpus", help=text, description=text)
    corpus.add_argument(
        "name",
        metavar="NAME",
        choices=["debian-prose"],
        help="debian-prose: some 310 MB of English, half an hour on two cores",
    )
    corpus.add_argument("--mirror", metavar="URL", help="a Debian mirror [http://deb.debian.org/debian]")
    corpus.add_argument("--jobs", metavar="N", type=_positive, help="packages worked on at once [the number of cores]")
    _add_data(corpus)
    corpus.set_defaults(command=_corpus)

    text = "versions, GPUs, which backend a call would get and why; then a self-test of the kernels"
    doctor = commands.add_parser("doctor", help=text, description=text)
    doctor.set_defaults(command=_doctor)
    return parser


def _command(commands: argparse._SubParsersAction, name: str, function: object, text: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=text)
    parser.add_argument("file", type=Path, metavar="FILE", help="the recipe, such as recipes/small.yaml")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="a key of the recipe, such as model.layers=8"
    )
    parser.set_defaults(command=function)
    return parser


def _add_runs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", metavar="DIR", type=Path, default=Path("runs"), help="where runs lie [runs]")


def _add_data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data", metavar="DIR", type=Path, default=Path("data"), help="where prepared data lies [data]"
    )


def _add_print_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--print-config", action="store_true", help="print the resolved recipe of every arm, and stop")


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise argparse.ArgumentTypeError("name at least one arm")
    return names


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return int(text)


def _index(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, 0 for the first arm")
    return int(text)


def _arms(arguments: argparse.Namespace) -> int:
    print(*recipe_file.load_experiment(arguments.file, arguments.overrides).arms, sep="\n")
    return 0


def _recipe(arguments: argparse.Namespace) -> int:
    experiment = recipe_file.load_experiment(arguments.file, arguments.overrides)
    if arguments.arms is not None:
        experiment = experiment.select(arguments.arms)
    if arguments.print_config:
        return _print_config(experiment, arguments.nproc)
    if arguments.gpu is not None and not arguments.dry_run:
        raise UserError("--gpu names the GPU of a --dry-run: add --dry-run, or leave it out")
    if arguments.dry_run:
        from sagebwd import dry_run

        dry_run.run(experiment, gpu=arguments.gpu, nproc=arguments.nproc, at_once=arguments.at_once)
        return 0

    from sagebwd import runner

    settings = runner.Settings(arguments.overrides, arguments.nproc, arguments.runs, arguments.data, arguments.at_once)
    return runner.run(experiment, settings)


def _prepare(arguments: argparse.Namespace) -> int:
    experiment = recipe_file.load_experiment(arguments.file, arguments.overrides)

    from sagebwd import tokenizer

    prepared = tokenizer.prepare(next(iter(experiment.arms.values())).data, arguments.data)
    print(
        f"{prepared.folder}: {prepared.train_tokens:,} training and {prepared.validation_tokens:,} validation tokens, "
        f"{prepared.bytes_per_token:.2f} bytes a token, unigram entropy {prepared.unigram_entropy:.3f} nats a token"
    )
    return 0


def _train(arguments: argparse.Namespace) -> int:
    launcher.watch()
    experiment = recipe_file.load_experiment(arguments.file, arguments.overrides)
    arm = arguments.arm if arguments.arm_index is None else experiment.at(arguments.arm_index)
    experiment = experiment.select([arm])
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if arguments.print_config:
        return _print_config(experiment, ranks)
    (arm,) = experiment.arms
    recipe = experiment.arms[arm]
    budget.plan(recipe, budget.data_parallel_size(recipe, ranks))
    folder = arguments.runs / experiment.name / arm
    if _first_rank():
        run_folder.claim(folder, recipe)
        if experiment.variants and not (folder.parent / run_folder.EXPERIMENT).exists():
            run_folder.record(folder.parent, experiment, shlex.join(["sagebwd", *sys.argv[1:]]))

    _ignore_megatrons_warnings()
    from sagebwd import tokenizer
    from sagebwd.training import train

    end = train.run(recipe, arm, folder, tokenizer.prepare(recipe.data, arguments.data))
    # torchrun takes any other code for a failure; whoever started it reads the status
    return status.RESUMABLE if end == "preempted" and "TORCHELASTIC_RUN_ID" not in os.environ else 0


def _status(arguments: argparse.Namespace) -> int:
    return status.show(arguments.folder)


def _compare(arguments: argparse.Namespace) -> int:
    from sagebwd import compare

    compare.compare(arguments.folder)
    return 0


def _probe(arguments: argparse.Namespace) -> int:
    _ignore_megatrons_warnings()
    from sagebwd import probe

    probe.probe(
        arguments.folder, sequences=arguments.sequences, data=arguments.data, out=arguments.out, save=arguments.save
    )
    return 0


def _corpus(arguments: argparse.Namespace) -> int:
    try:
        from sagebwd.tokenizer.corpora import build, debian
    except ImportError as error:
        raise UserError(f"building a corpus needs the package {error.name}: `pip install {error.name}`") from None

    build.build(arguments.data, mirror=arguments.mirror or debian.MIRROR, jobs=arguments.jobs)
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from sagebwd import doctor

    return doctor.run()


def _ignore_megatrons_warnings() -> None:
    """It warns that it does without Transformer Engine and Apex, as is meant here, and of a default of its own."""
    warnings.filterwarnings("ignore", ".*(Transformer Engine|Apex|full scope).*", UserWarning, r"megatron\.")


def _first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _print_config(experiment: Experiment, ranks: int) -> int:
    for number, (arm, recipe) in enumerate(experiment.arms.items()):
        plan = budget.plan(recipe, budget.data_parallel_size(recipe, ranks))
        print("---" if number else "", end="\n" if number else "")
        print(
            f"# arm {arm}: {plan.steps} steps of {plan.sequences_per_step} sequences on {ranks} rank(s), "
            f"{plan.accumulation} micro-batch(es) a rank and step, {plan.warmup_steps} steps of warm-up"
        )
        print(recipe_file.dump(recipe), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
