"""The parity suite's judgement, and the scaling estimate, on made-up figures."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch

from sagebwd.training.recipe import Data, Recipe
from tests.distributed import parity, parity_report
from tests.distributed.layouts import ALONE, CONTROLS, FPA, LAYOUTS
from tests.distributed.scaling_estimate import Measured
from tests.training.runs import Logged

LAYOUT = {ALONE: LAYOUTS[ALONE], "tp2": LAYOUTS["tp2"], "dp2": LAYOUTS["dp2"]}


def run(*offsets: float, norm: float = 1.0) -> Logged:
    """Losses of 5, each with an offset."""
    losses = [(step, 5.0 + offset) for step, offset in enumerate(offsets, 1)]
    return Logged(
        {"train/loss": losses, "train/grad_norm": [(step, norm) for step, _ in losses], "validation/loss": losses[-1:]}
    )


def verdicts(found: dict[str, Logged], *, gpu: bool, failures: dict[str, str] | None = None) -> dict[str, bool]:
    layouts = {
        name: layout for name, layout in (LAYOUT | CONTROLS).items() if name in found or name in (failures or {})
    }
    rows = parity_report.judge(
        {(name, FPA): logged for name, logged in found.items()},
        layouts,
        (FPA,),
        {(name, FPA): why for name, why in (failures or {}).items()},
        gpu=gpu,
    )
    return {row.layout: row.passed for row in rows}


def test_in_fp32_the_last_step_decides() -> None:
    one = run(0, 0, 0)
    assert verdicts({ALONE: one, "tp2": run(0, 9e-5, 9e-6)}, gpu=False)["tp2"]
    assert not verdicts({ALONE: one, "tp2": run(0, 0, 1.1e-5)}, gpu=False)["tp2"]
    assert not verdicts({ALONE: one, "tp2": run(0, 0, 0, norm=1.0002)}, gpu=False)["tp2"]


def test_in_bf16_three_times_the_noise_is_the_bar() -> None:
    control = dict.fromkeys(CONTROLS, run(0, 1e-3, 0, norm=1.01))
    found = verdicts({ALONE: run(0, 0, 0), "tp2": run(0, 2.9e-3, 0), "dp2": run(0, 3.1e-3, 0)} | control, gpu=True)
    assert found["tp2"]
    assert not found["dp2"]
    assert found["tp1-micro"]  # what is measured with is not judged


def test_a_run_that_failed_fails(tmp_path: Path) -> None:
    assert verdicts({ALONE: run(0)}, gpu=False, failures={"tp2": "no memory"}) == {ALONE: True, "tp2": False}
    rows = parity_report.judge({}, LAYOUT, (FPA,), {(name, FPA): "no memory" for name in LAYOUT}, gpu=False)
    assert not any(row.passed for row in rows)
    parity_report.write(tmp_path, rows, {"fpa dQ": False}, ["tp2-dp2"], gpus=0, seconds=1)
    report = (tmp_path / parity_report.REPORT).read_text()
    said = ("0 of 2 runs pass", "is from one rank: `tp1`.", "**FAIL**: no memory", "differ: fpa dQ", "of GPUs: tp2-dp2")
    assert [each for each in said if each not in report] == []


def test_on_gpus_every_run_is_launched_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    launched: list[tuple[Path, int, str]] = []

    def launch(prepared: None, runs: Path, wanted: dict[Path, Recipe], *, ranks: int, gpus: str) -> CompletedProcess:
        launched.extend((folder, ranks, gpus) for folder in wanted)
        return CompletedProcess([], 0)

    monkeypatch.setattr(parity, "launch", launch)
    monkeypatch.setattr(parity.run_folder, "finished", lambda folder: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    layouts = {name: layout for name, layout in (LAYOUTS | CONTROLS).items() if layout.ranks <= 2}
    assert parity._train(Data(), None, tmp_path, layouts, gpu=True) == {}
    assert sorted(folder for folder, *_ in launched) == sorted(
        Path(name, arm) for name in layouts for arm in parity.ARMS
    )
    assert {gpus for _, ranks, gpus in launched if ranks == 1} == {"4", "6"}
    assert {gpus for _, ranks, gpus in launched if ranks == 2} == {"4,6"}


def test_what_was_trained_before_an_interrupt_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def launch(*arguments: object, **options: object) -> CompletedProcess:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)
        return CompletedProcess([], 1, "", "Error")

    monkeypatch.setattr(parity, "launch", launch)
    monkeypatch.setattr(parity.run_folder, "finished", lambda folder: folder.parts[-2:] == (ALONE, FPA))
    found = parity._train(Data(), None, tmp_path, LAYOUT, gpu=False)
    every = {(name, arm) for name in LAYOUT for arm in parity.ARMS}
    assert found == dict.fromkeys(every - {(ALONE, FPA)}, "interrupted before its end")


def test_the_estimate_gives_back_what_was_measured() -> None:
    measured = Measured(tokens=131_072, micro_tokens=32_768, one=0.40, two=0.21, gradients=1.3e9, bandwidth=300e9)
    assert measured.seconds(1, 131_072) == pytest.approx(0.40)
    assert measured.seconds(2, 131_072) == pytest.approx(0.21)
    assert measured.fixed == pytest.approx(0.02 - measured.exposed(2, 131_072, measured.divided), abs=1e-3)


def test_more_gpus_and_a_slower_link_cost_what_they_should() -> None:
    measured = Measured(tokens=131_072, micro_tokens=32_768, one=0.40, two=0.21, gradients=1.3e9, bandwidth=300e9)
    speedups = [measured.speedup(gpus, 2_097_152) for gpus in (1, 2, 8, 64)]
    assert speedups == sorted(speedups)
    assert speedups[0] == 1
    assert 32 < speedups[-1] < 64
    slow = Measured(tokens=131_072, micro_tokens=32_768, one=0.40, two=0.21, gradients=1.3e9, bandwidth=3e9)
    assert slow.speedup(8, 262_144) < measured.speedup(8, 262_144)
