"""Jobs side by side: as many as there are shares, each on its own, and all of them stopped with their parent."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sagebwd import side_by_side
from sagebwd.errors import UserError
from sagebwd.side_by_side import Job, gpu_shares


def job(folder: Path, name: str, program: str) -> Job:
    return Job(name, [sys.executable, "-c", program], folder / name / "log.txt")


def test_each_has_its_share_and_log_and_a_failure_stops_no_other(tmp_path: Path) -> None:
    program = "import os, time; print(os.environ['SHARE'], flush=True); time.sleep(0.4); raise SystemExit({})"
    jobs = [job(tmp_path, f"j{number}", program.format(3 if number == 1 else 0)) for number in range(4)]
    running, most, codes, shares = set(), 0, {}, {}

    def began(job: Job, share: dict) -> None:
        nonlocal most
        shares[job.name] = share["SHARE"]
        assert share["SHARE"] not in {shares[name] for name in running}
        running.add(job.name)
        most = max(most, len(running))

    def ended(job: Job, code: int, asked: bool) -> None:
        assert not asked
        running.remove(job.name)
        codes[job.name] = code

    side_by_side.run(jobs, [{"SHARE": "a"}, {"SHARE": "b"}], began, ended, lambda *_: None)
    assert most == 2
    assert codes == {"j0": 0, "j1": 3, "j2": 0, "j3": 0}
    assert {name: (tmp_path / name / "log.txt").read_text().strip() for name in codes} == shares


def test_they_are_asked_to_stop_with_their_parent_and_waited_for(tmp_path: Path) -> None:
    child = (
        "import signal, sys, time\n"
        "def last_words(*_): time.sleep(0.3); print('saved', flush=True); sys.exit(75)\n"
        "signal.signal(signal.SIGTERM, last_words); print('ready', flush=True); time.sleep(60)"
    )
    program = (
        "import sys; from pathlib import Path; from sagebwd.side_by_side import Job, run\n"
        f"jobs = [Job(n, [sys.executable, '-c', {child!r}], Path({str(tmp_path)!r}) / n) for n in 'abc']\n"
        "run(jobs, [{}, {}], lambda *_: None, lambda job, *end: print(job.name, *end), lambda c, job: c.terminate())"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        while not all((tmp_path / name).exists() and "ready" in (tmp_path / name).read_text() for name in "ab"):
            assert parent.poll() is None
            time.sleep(0.05)
        os.kill(parent.pid, signal.SIGTERM)
        output, _ = parent.communicate(timeout=30)
    assert parent.returncode == 0
    assert sorted(output.splitlines()) == ["a 75 True", "b 75 True"]
    assert [(tmp_path / name).read_text() for name in "ab"] == ["ready\nsaved\n"] * 2
    assert not (tmp_path / "c").exists()


def test_gpus_are_dealt_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert gpu_shares(2, 2, 5) == [{"OMP_NUM_THREADS": "3", "CUDA_VISIBLE_DEVICES": gpus} for gpus in ("0,1", "2,3")]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,GPU-1")
    assert [share["CUDA_VISIBLE_DEVICES"] for share in gpu_shares(3, 1, 3)] == ["3", "5", "GPU-1"]
    with pytest.raises(
        UserError, match=r"--at-once 3 arms of 2 rank\(s\) need 6 GPUs, but 5 are visible: .* 2 or less"
    ):
        gpu_shares(3, 2, 5)
    assert len(gpu_shares(3, 1, 0)) == 3


def test_arms_of_one_rank_may_share_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [share["CUDA_VISIBLE_DEVICES"] for share in gpu_shares(6, 1, 2)] == ["0", "1"] * 3
    with pytest.raises(UserError, match=r"2 or less, or to a multiple of 2, which shares the GPUs"):
        gpu_shares(5, 1, 2)
