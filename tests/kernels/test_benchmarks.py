"""The benchmark's report, on made-up times; the measurement itself needs a GPU."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from matplotlib.image import imread

from sagebwd.kernels.benchmarks import context, gate, measure, plot, report
from sagebwd.kernels.benchmarks.measure import Measurement
from sagebwd.kernels.benchmarks.peers import CUDNN, FLASH, PORTABLE, SAGE, Attention
from sagebwd.kernels.benchmarks.shapes import TOKENS, WIDTH, Shape, shapes
from sagebwd.kernels.hopper import SWITCH
from tests.conftest import HAS_GPU

BENCH = [sys.executable, "-m", "sagebwd.kernels.benchmarks.bench"]


def measured(attention: str, shape: Shape, ms: float) -> Measurement:
    return Measurement(shape, attention, ms / 3, 2 * ms / 3, ms, 1 << 20, shape.batch * shape.length * 100)


def test_all_are_timed_in_turn_and_each_gets_its_own_times(monkeypatch):
    """A GPU that grows hot is slower for all of them, not for the last one."""
    calls = []

    class Event:
        def __init__(self, enable_timing):
            pass

        def record(self):
            self.at = sum(calls)

        def elapsed_time(self, end):
            return float(end.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    runs = [(Attention(SAGE, None), lambda ms=ms: calls.append(ms)) for ms in (5, 7, 9)]
    assert measure.medians_ms(runs, torch.zeros(1)) == [5.0, 7.0, 9.0]
    assert calls[:6] == 2 * [5, 7, 9]
    assert calls[6:18] == 2 * [5, 7, 9, 9, 7, 5]
    assert len(calls) == 6 + 3 * measure.ROUNDS[0]


def table(ours: dict[int, float], flash: dict[int, float]) -> report.Table:
    kind = Shape(64, True, 1, 0)
    pairs = [(SAGE, ours), (FLASH, flash)]
    return report.Table([measured(name, kind._replace(length=n), ms) for name, of in pairs for n, ms in of.items()])


@pytest.mark.parametrize(
    ("ours", "expected"),
    [
        ({512: 2.0, 1024: 1.0, 2048: 1.0}, "1,024"),
        ({512: 0.9, 1024: 0.9, 2048: 0.9}, "512"),
        ({512: 0.9, 1024: 1.1, 2048: 0.9}, "2,048"),  # being faster below a length where it is slower does not count
        ({512: 2.0, 1024: 2.0, 2048: 2.0}, report.NEVER),
    ],
)
def test_break_even_is_the_length_from_which_on_it_is_at_least_as_fast(ours, expected):
    made_up = table(ours, dict.fromkeys(ours, 1.0))
    (kind,) = made_up.kinds().values()
    assert made_up.break_even(FLASH, kind) == expected
    assert made_up.break_even(CUDNN, kind) == "n/a"
    assert made_up.break_even(FLASH, kind, PORTABLE) == "n/a"
    of_path = report.Table([*made_up.measurements, *(m._replace(attention=PORTABLE) for m in made_up.measurements[:3])])
    assert of_path.break_even(FLASH, kind, PORTABLE) == expected


def test_the_files_hold_every_shape_and_say_what_is_missing(tmp_path):
    grid = shapes(quick=False)
    names = (SAGE, PORTABLE, FLASH, CUDNN)
    made_up = [measured(a, s, 1.0 + i) for s in grid for i, a in enumerate(names) if (a, s.group) != (CUDNN, 4)]
    full = report.Table(made_up)
    gates = [gate.Result(grid[0], a, dict.fromkeys(gate.NAMES, 1e-3), None, "", "") for a in names]
    report.write_csv(tmp_path / "r.csv", full)
    with (tmp_path / "r.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(made_up)
    assert float(rows[0]["saved_bytes_per_token"]) == 100
    text = report.markdown(
        full, gates, {"GPU": "Test GPU", "SageBwd": "products=all", "commit": "abc"}, {"flash-attn-4": "not installed"}
    )
    assert "- flash-attn-4: not installed." in text
    assert text.count("### D=") == 2 * 8  # the portable kernels have tables of their own, and are no peer
    assert text.count(report.BREAK_EVEN) == 2
    assert all(f"peak {name}, MiB" in text for name in names)
    assert full.peers() == [FLASH, CUDNN]
    assert "n/a" in text
    assert "| commit | abc |" in text
    assert text.count("products=all") == 2  # on top, and among the facts
    plot.draw(tmp_path / "p.png", full, "title", "subtitle")
    assert imread(tmp_path / "p.png").shape[1] == 1800


def test_each_path_is_timed_as_users_have_it_and_checked_with_the_kernels_of_long_shapes(monkeypatch):
    monkeypatch.setenv(SWITCH, "as it was")
    chosen = {}
    for name in (SAGE, PORTABLE):
        attention = Attention(name, lambda *_: torch.empty(0))
        with attention.as_timed():
            timed = os.environ.get(SWITCH)
        with attention.as_checked():
            chosen[name] = timed, os.environ.get(SWITCH)
    assert chosen == {SAGE: (None, "1"), PORTABLE: ("0", "0")}
    assert os.environ[SWITCH] == "as it was"


def test_shapes_hold_the_same_work():
    """A figure at one length is comparable with one at another."""
    for shape in shapes(quick=False):
        assert shape.heads * shape.dim == WIDTH
        assert shape.heads == shape.kv_heads * shape.group
        assert shape.batch * shape.length == max(TOKENS, shape.length)
    assert set(shapes(quick=True)) < set(shapes(quick=False))


@pytest.mark.skipif(HAS_GPU, reason="a GPU is here")
def test_without_a_gpu_one_sentence():
    answer = subprocess.run([*BENCH, "--quick"], capture_output=True, text=True, check=False)
    assert answer.returncode == 2
    assert answer.stderr == "error: the benchmark needs an NVIDIA GPU, and torch sees none here\n"
    assert answer.stdout == ""


def test_the_gate_names_what_is_off():
    limits = dict.fromkeys(gate.NAMES, 1e-2)
    assert gate._over(dict.fromkeys(gate.NAMES, 1e-3), limits, "x") == ""
    assert "dk" in gate._over({"o": 1e-3, "dq": 0.0, "dk": torch.nan, "dv": 1e-3}, limits, "x")  # NaN is no pass


def test_the_report_on_context_parallelism_says_what_int8_and_a_ring_would_save(tmp_path: Path) -> None:
    rows = [
        context.Row("SDPA cuDNN", 4, 32768, 1, 4.0, 8.0, 1 << 30),
        context.Row("SDPA cuDNN", 4, 32768, 2, 2.4, 4.6, 1 << 29, 0.4, 67_000_000),
        context.Row(context.SAGE, 4, 32768, 1, 4.0, 8.0, 1 << 30),
        context.Row(context.SAGE, 4, 32768, 2, 2.0, 4.0, 1 << 29, 0.15, 34_000_000),
    ]
    context._write(tmp_path, rows, {"GPUs": "2 x made up"})
    lines = (tmp_path / "context.md").read_text().splitlines()
    assert "| SageBwd | 4 | 32,768 | 2 | 2.00 | 4.00 | 2.00 | 0.50 | 0.15 (8%) | 34 |" in lines
    assert "| 4 | 32,768 | 0.15 | 0.40 | 0.25 | 6.2% |" in lines
    with (tmp_path / "context.csv").open() as file:
        assert [row["gather_ms"] for row in csv.DictReader(file)] == ["", "0.4", "", "0.15"]
