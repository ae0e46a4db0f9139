"""The parity suite: every layout and arm trained, compared with one rank, and a report of it.

    python -m tests.distributed.parity [--cpu] [--layouts tp2,dp2] [--out DIR]

On a machine with two GPUs or more: NCCL and bf16. Elsewhere, or with --cpu: gloo and FP32. Exit code 1 if a layout
differs by more than it may, or fails.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import torch
from tqdm import tqdm

from sagebwd.side_by_side import VISIBLE, gpu_shares
from sagebwd.tokenizer import Prepared, prepare
from sagebwd.training import run_folder
from sagebwd.training.recipe import Data, Recipe
from tests.distributed import parity_report
from tests.distributed.launch import launch, recipe
from tests.distributed.layouts import ALONE, CONTROLS, FPA, LAYOUTS, SAGEBWD, Layout
from tests.small_corpus import small_documents
from tests.training.runs import logged

ARMS = (FPA, SAGEBWD)
RESULTS = Path(__file__).with_name("results")
# documents, vocabulary, context
CORPUS = {False: (60, 512, 32), True: (1500, 1024, 512)}
AT_ONCE = 3  # processes on a GPU, of each number of ranks


def main() -> int:
    parser = argparse.ArgumentParser(description=sys.modules[__name__].__doc__.splitlines()[0])
    parser.add_argument("--cpu", action="store_true", help="gloo and FP32, also where there are GPUs")
    parser.add_argument("--layouts", metavar="A,B", help=f"of {', '.join(LAYOUTS)} [all]")
    parser.add_argument("--out", metavar="DIR", type=Path, help=f"the report's folder [{RESULTS.name}/MACHINE]")
    arguments = parser.parse_args()
    gpus = 0 if arguments.cpu else torch.cuda.device_count()
    gpu = gpus > 1
    names = arguments.layouts.split(",") if arguments.layouts else list(LAYOUTS)
    if unknown := set(names) - set(LAYOUTS):
        parser.error(f"no layout {', '.join(sorted(unknown))}: choose from {', '.join(LAYOUTS)}")
    compared_with = [LAYOUTS[name].like for name in names]
    layouts = {name: LAYOUTS[name] for name in dict.fromkeys([ALONE, *compared_with, *names])}
    if gpu:
        layouts |= {name: control for name, control in CONTROLS.items() if control.like in layouts}
    fitting = {name: layout for name, layout in layouts.items() if not gpu or layout.ranks <= gpus}
    out = arguments.out or RESULTS / parity_report.machine_name(gpus if gpu else 0)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="parity-") as scratch:
        data, prepared = _prepare(Path(scratch), gpu=gpu)
        runs = Path(scratch) / "runs"
        failures = _train(data, prepared, runs, fitting, gpu=gpu)
        done = [(name, arm) for name in fitting for arm in ARMS if (name, arm) not in failures]
        found = {each: logged(runs.joinpath(*each)) for each in done}
        rows = parity_report.judge(found, fitting, ARMS, failures, gpu=gpu)
        left_out = [name for name in layouts if name not in fitting]
        attention = parity_report.same_attention(runs, ARMS) if "tp2" in fitting else {}
        seconds = time.monotonic() - begin
        parity_report.write(out, rows, attention, left_out, gpus=gpus if gpu else 0, seconds=seconds)
    print(f"{(out / parity_report.REPORT).read_text()}\nin {out}")
    return 0 if all(row.passed for row in rows) and all(attention.values()) else 1


def _prepare(scratch: Path, *, gpu: bool) -> tuple[Data, Prepared]:
    documents, vocabulary, context = CORPUS[gpu]
    corpus = scratch / "corpus.jsonl"
    lines = (json.dumps({"text": text}) + "\n" for text in small_documents(documents))
    corpus.write_text("".join(lines), encoding="utf-8")
    data = Data(corpus="files", files=(str(corpus),), vocab_size=vocabulary, context=context, validation_fraction=0.2)
    return data, prepare(data, scratch / "data")


def _train(
    data: Data, prepared: Prepared, runs: Path, layouts: dict[str, Layout], *, gpu: bool
) -> dict[tuple[str, str], str]:
    """Returns why the runs failed that did. On GPUs, which models of this size leave idle, many are trained at once."""
    failures: dict[tuple[str, str], str] = {}
    with tqdm(total=len(layouts) * len(ARMS), unit="run", desc="parity") as bar:
        launches = []
        for ranks in sorted({layout.ranks for layout in layouts.values()}):
            wanted = [
                (Path(name, arm), recipe(data, layout, arm, gpu=gpu))
                for name, layout in layouts.items()
                if layout.ranks == ranks
                for arm in ARMS
            ]
            places = _places(ranks) if gpu else [""]
            for at, gpus in enumerate(places):
                launches.append((ranks, dict(wanted[at :: len(places)]), gpus))
        stopped = Event()
        # torchrun gets it too, and ends; `timeout` sends it twice. What was trained is still reported.
        before = signal.signal(signal.SIGINT, lambda *_: stopped.set())
        try:
            with ThreadPoolExecutor(len(launches) if gpu else 1) as pool:
                list(pool.map(lambda each: _launch_all(prepared, runs, bar, failures, stopped, *each), launches))
        finally:
            signal.signal(signal.SIGINT, before)
    return failures | {folder.parts: "interrupted before its end" for _, left, _ in launches for folder in left}


def _places(ranks: int) -> list[str]:
    """The GPUs of each launch of so many ranks: AT_ONCE on every GPU."""
    gpus = torch.cuda.device_count()
    return [share[VISIBLE] for share in gpu_shares(gpus // ranks, ranks, gpus)] * AT_ONCE


def _launch_all(
    prepared: Prepared,
    runs: Path,
    bar: tqdm,
    failures: dict[tuple[str, str], str],
    stopped: Event,
    ranks: int,
    left: dict[Path, Recipe],
    gpus: str,
) -> None:
    """Until none is left, or it is stopped: when one fails, those after it are launched again."""
    while left and not stopped.is_set():
        answer = launch(prepared, runs, left, ranks=ranks, gpus=gpus)
        done = [folder for folder in left if run_folder.finished(runs / folder)]
        for folder in done:
            del left[folder]
        bar.update(len(done))
        if answer.returncode and left and not stopped.is_set():
            sick = min(left)  # the program goes by name
            failures[sick.parts] = _cause(answer.stderr)
            tqdm.write(f"{sick}: {answer.stdout[-2000:]}\n{answer.stderr[-4000:]}", file=sys.stderr)
            del left[sick]
            bar.update()


def _cause(errors: str) -> str:
    """The first line that says what went wrong; torchrun's own come after it."""
    lines = [line.strip() for line in errors.splitlines() if "Error" in line or line.startswith("error:")]
    return lines[0] if lines else "it ended without a word"


if __name__ == "__main__":
    sys.exit(main())
