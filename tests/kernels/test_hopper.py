"""Which calls Hopper's kernels take. Triton's interpreter does not run them."""

import os
import subprocess
import sys

import pytest
import torch

from sagebwd.attention import QuantConfig, triton_backend
from sagebwd.kernels import hopper


@pytest.mark.parametrize("dim", [40, 64, 72, 80, 96, 112, 128])
@pytest.mark.parametrize("config", [QuantConfig(), QuantConfig(block_q=32, block_k=128), QuantConfig(project=True)])
def test_what_is_taken(dim, config):
    assert hopper.refusal(90, dim, config, window=False, packed=False) is None


@pytest.mark.parametrize(
    ("capability", "dim", "config", "mask", "reason"),
    [
        (80, 128, QuantConfig(), {}, "capability 9.0, and the GPU has 8.0"),
        (100, 128, QuantConfig(), {}, "capability 9.0, and the GPU has 10.0"),
        (90, 32, QuantConfig(), {}, "head dims from 40 to 128"),
        (90, 136, QuantConfig(), {}, "head dims from 40 to 128"),
        (90, 128, QuantConfig(block_k=32), {}, "block_k=64 or 128"),
        (90, 128, QuantConfig(smooth_q=True), {}, "do not smooth Q"),
        (90, 128, QuantConfig(products="scores"), {}, "compute P V in INT8"),
        (90, 128, QuantConfig(), {"window": True}, "no window"),
        (90, 128, QuantConfig(), {"packed": True}, "no packed documents"),
    ],
)
def test_what_is_left_to_the_portable_kernels_and_why(capability, dim, config, mask, reason):
    refusal = hopper.refusal(capability, dim, config, **{"window": False, "packed": False} | mask)
    assert reason in refusal


@pytest.mark.parametrize(
    ("asked", "queries", "keys", "causal", "taken"),
    [
        (None, 4096, 4096, True, True),
        (None, 4096, 4095, True, False),  # 2,047 keys a query, on average
        (None, 2048, 2048, False, True),
        (None, 1, 2047, False, False),
        (None, 1, 4096, True, True),
        ("1", 1, 1, True, True),
        ("0", 1 << 17, 1 << 17, False, False),
    ],
)
def test_short_sequences_are_left_to_the_portable_kernels(monkeypatch, asked, queries, keys, causal, taken):
    monkeypatch.delenv("SAGEBWD_HOPPER")
    if asked:
        monkeypatch.setenv("SAGEBWD_HOPPER", asked)
    assert (hopper.slower(2048, queries, keys, causal) is None) == taken


def test_the_interpreter_runs_the_portable_kernels(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    x = torch.zeros(1, 1, 8, 64, dtype=torch.float16)
    which = triton_backend.forward_kernel(x, QuantConfig(), window=None, packed=None)
    assert which == "portable forward (not Hopper's kernels: Triton's interpreter does not run them)"


def test_the_backend_launches_what_it_says():
    """Compiled for sm_90 and for sm_80, in a process of its own: here Triton interprets."""
    code = """
import torch
from sagebwd.attention import QuantConfig, triton_backend
from sagebwd.kernels.compile_only import compile_only
x = torch.zeros(1, 1, 256, 128, dtype=torch.bfloat16)
for capability in (90, 80):
    for window in (None, 100):
        options = {"config": QuantConfig(), "window": window}
        with compile_only(capability) as compiled:
            which = triton_backend.kernels(x, packed=None, **options)
            _, saved = triton_backend.forward(x, x, x, causal=True, softmax_scale=0.1, **options)
            triton_backend.backward(x, saved, causal=True, softmax_scale=0.1, **options)
        names = dict.fromkeys(c.name for c in compiled if "forward" in c.name or "backward" in c.name)
        print(*names, [c.spilled for c in compiled if c.name == "_hopper_forward"], which)
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert answer.returncode == 0, answer.stderr
    on_hopper, in_a_window, *elsewhere = answer.stdout.splitlines()
    assert on_hopper == ("_hopper_forward hopper_backward_kv hopper_backward_q [0] Hopper's forward; Hopper's backward")
    portable = "_forward _backward_kv _backward_q [] portable forward (not Hopper's kernels: "
    assert in_a_window == (
        f"{portable}they take no window); portable backward (not Hopper's kernels: they know no window)"
    )
    assert len(elsewhere) == 2
    assert all(line.startswith(portable) and "; portable backward (" in line for line in elsewhere)
