"""The kernels compile for every GPU generation, with no GPU; in processes of their own, as Triton interprets here."""

import os
import subprocess
import sys
from dataclasses import fields

import pytest

from sagebwd.attention import QuantConfig
from sagebwd.kernels import compile_check, uniform
from sagebwd.kernels.compile_check import ARCHITECTURES, Job, full, subset


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "sagebwd.kernels.compile_check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles_within_the_limits(arch):
    answer = run("--arch", str(arch))
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert f"{len(subset(arch))} good, 0 refused" in answer.stdout


def test_a_spill_or_too_much_shared_memory_is_an_error():
    """The limits bite: with none to spare, a kernel that needs any is reported by name."""
    code = """
import sys
from sagebwd.kernels import compile_check, tuning
compile_check.tuning.SHARED_LIMIT = {90: 1}
compile_check.tuning.refusal = lambda *_: None
compile_check.tuning._fitting = lambda kernel, capability, dp, config, wanted: wanted
compile_check.subset = lambda arch: list(compile_check.full(arch))[:1]
sys.exit(compile_check.main(["--arch", "90"]))
"""
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert answer.returncode == 1, answer.stdout + answer.stderr
    assert "_forward needs" in answer.stdout
    assert "bytes of shared memory of 1" in answer.stdout


TWO_LOOPS = """
        /*0000*/                   UMOV UR24, UR4 ;
        /*0010*/              @!P1 BRA `(.L_x_2) ;
        /*0020*/                   UIADD3 UR20, UP1, UR24, 0x2, URZ ;
.L_x_1:
        /*0030*/                   IGMMA.64x128x32.S8.S8 R24, gdesc[UR20], RZ, !UPT ;
        /*0040*/               @P1 BRA `(.L_x_1) ;
.L_x_2:
        /*0050*/                   HGMMA.64x64x16.F32.BF16 R88, R124, gdesc[UR20].tnspB, R88 ;
        /*0060*/               @P2 BRA `(.L_x_2) ;
        /*0070*/                   EXIT ;
"""


@pytest.mark.parametrize(
    ("before", "after", "unwritten"),
    [
        ("", "", ["UR4", "UR21", "UR22", "UR23"]),
        ("UMOV UR4, 0x1 ;", "", ["UR21", "UR22", "UR23"]),
        ("UMOV UR4, 0x1 ; /*0000*/ ULDC.64 UR22, c[0x0][0x210] ;", "", ["UR21"]),
        ("UMOV UR4, 0x1 ; /*0000*/ UMOV UR22, UR4 ;", "UMOV UR23, UR4 ;", ["UR21", "UR23"]),
        (
            "UMOV UR4, 0x1 ; /*0000*/ UMOV UR22, UR4 ; /*0000*/ @UP0 UMOV UR23, UR4 ; /*0000*/ UMOV UR9, UR8 ;",
            "UMOV UR21, UR4 ;",
            [],
        ),
        ("UIADD3.64 UR22, UR6, UR4, URZ ;", "UMOV UR21, UR4 ;", ["UR4", "UR5", "UR6", "UR7"]),
    ],
)
def test_registers_that_nothing_has_written_are_found(before, after, unwritten):
    """A product with A in registers reads two of the four; what is written for the first loop alone is missing."""
    text = TWO_LOOPS.replace(".L_x_1:", f"/*0000*/ {after}\n.L_x_1:" if after else ".L_x_1:", 1)
    text = f"/*0000*/ {before}\n{text}" if before else text
    code, labels = uniform._parse(text)
    assert uniform._live_at_entry(code, labels) == {int(name[2:]) for name in unwritten}


def test_the_subset_covers_every_value_of_every_option(monkeypatch):
    """Over the GPU generations, each version compiles every value of every option."""

    def covered(version: str) -> set[tuple]:
        monkeypatch.setattr(compile_check.triton, "__version__", version)
        return {job[1:] for arch in ARCHITECTURES for job in subset(arch)}

    assert covered("3.6.0") == covered("3.7.1")
    jobs = covered("3.6.0")
    every = {job[1:] for job in full(90)}
    for field in range(3):
        assert {job[field] for job in jobs} == {job[field] for job in every}
    for name in (field.name for field in fields(QuantConfig)):
        assert {getattr(job[3], name) for job in jobs} == {getattr(job[3], name) for job in every}
    for form in ("packed", "context"):
        assert {getattr(Job(90, *job), form) for job in jobs} == {True, False}
