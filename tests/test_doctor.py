"""`sagebwd doctor` as a user runs it, and what its answers rest on."""

import os
import subprocess
import sys

import pytest
import torch

from sagebwd import doctor, selftest
from sagebwd.attention import checks
from sagebwd.kernels import tuning
from sagebwd.kernels.hopper import SWITCH
from tests.conftest import HAS_GPU


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env=clean | environment, check=False
    )


def test_all_is_well():
    answer = run("-m", "sagebwd.cli", "doctor")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    for section in ("Versions", "GPUs", "SageBwd runs on", "Full precision", "Training", "Self-test"):
        assert f"\n{section}" in answer.stdout
    assert f"torch {torch.__version__}" in answer.stdout
    assert answer.stdout.count("  ok ") == len(selftest.cases())
    assert answer.stdout.endswith("All is well.\n")
    if not HAS_GPU:
        assert "any mask: reference\n    not the kernels: no NVIDIA driver here" in answer.stdout


def test_a_failing_self_test_is_told_and_fails():
    """A limit that no floating-point computation can meet."""
    code = "import sys; from sagebwd import selftest; selftest.LIMIT = 0.0; sys.exit(selftest.main())"
    answer = run("-c", code, **({} if HAS_GPU else {"TRITON_INTERPRET": "1"}))
    assert answer.returncode == 1, answer.stderr
    assert '"passed": false' in answer.stdout


def test_a_crash_of_the_self_test_is_told(monkeypatch, capsys):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    monkeypatch.setattr(doctor, "_training", lambda: iter(()))
    assert doctor.run() == 1
    assert "FAILED: the self-test ended with exit code 1: no message" in capsys.readouterr().out


@pytest.mark.parametrize(("capability", "hopper"), [((9, 0), True), ((8, 0), False)])
def test_the_self_test_runs_every_kernel_of_the_gpu(capability, hopper, monkeypatch):
    """Its sequences are short: without being asked for, Hopper's kernels would not run."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    cases = selftest.cases()
    assert {case.hopper for case in cases} == {False, hopper}
    asked = []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: object) -> torch.Tensor:
        asked.append(os.environ[SWITCH])
        return q + k + v

    monkeypatch.setattr(selftest, "sage_attention", attend)
    for case in cases:
        selftest.errors(case, "cpu", 8)
    assert asked == ["1" if case.hopper else "0" for case in cases]


@pytest.mark.parametrize("mask", doctor.MASKS)
def test_answers_are_the_operator_s_own(mask, monkeypatch):
    cpu = torch.device("cpu")
    assert doctor.answer(cpu, torch.float32, 64, mask).backend == "reference"
    refused = doctor.answer(cpu, torch.float64, 64, mask)
    assert not refused.backend
    assert "float64" in refused.reason
    assert "multiple of 8" in doctor.answer(cpu, torch.float32, 60, mask).reason
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert doctor.answer(cpu, torch.float16, 64, mask).backend == "triton-interpreter"
    assert "bfloat16" in doctor.answer(cpu, torch.bfloat16, 64, mask).reason


def test_a_hopper_gpu_s_calls_are_told_in_a_few_lines(monkeypatch):
    """Forward and backward each with its kernels; dims that are treated alike together."""
    from sagebwd.attention import triton_backend

    monkeypatch.delenv(SWITCH)
    monkeypatch.setattr(tuning, "capability", lambda device: 90)
    for module in (doctor, triton_backend):
        monkeypatch.setattr(module, "backend_for", lambda x: "triton")
    lines = list(doctor._dispatch(torch.device("cpu")))
    calls = [line for line in lines if line.startswith("cpu")]
    assert len(calls) == 5
    assert any("head dim 72, 80, 96, 112, full and causal: triton" in line for line in calls)
    at = next(i for i, line in enumerate(lines) if "head dim 64, 128, full and causal" in line)
    assert [line.split(" (")[0] for line in lines[at + 1 : at + 3]] == ["  Hopper's forward", "  Hopper's backward"]
    assert all("portable for short sequences" in line for line in lines[at + 1 : at + 3])
    assert lines[at + 3] == "  with products: scores as well"
    at = next(i for i, line in enumerate(lines) if "head dim 72, 80, 96, 112, full and causal" in line)
    assert lines[at + 1].startswith("  Hopper's forward (")
    assert lines[at + 3].startswith("  with products: scores portable forward (not Hopper's kernels: ")


def test_calls_alike_share_a_line():
    masks = list(doctor.MASKS)
    assert doctor._dims_and_masks({dim: masks for dim in doctor.DIMS}) == "head dim 32 to 256, any mask"
    assert doctor._dims_and_masks({64: masks, 128: ["full"]}) == "head dim 64, any mask; head dim 128, full"


def test_the_gpu_check_refuses_what_cannot_fit(monkeypatch):
    """The dispatch asks `tuning.refusal`: an RTX 4090 has 99 KiB of shared memory a block."""
    from sagebwd.attention import QuantConfig

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 9))
    checks.check_gpu.cache_clear()
    try:
        checks.check_gpu(0, 128, QuantConfig(block_q=128, block_k=128))
        with pytest.raises(ValueError, match=r"block_q=128 and block_k=128 at head dim 256 .* set both to 64"):
            checks.check_gpu(0, 256, QuantConfig(block_q=128, block_k=128))
    finally:
        checks.check_gpu.cache_clear()
