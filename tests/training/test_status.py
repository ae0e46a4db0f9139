"""status.json and `sagebwd status`: what a launch script acts on."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sagebwd.errors import UserError
from sagebwd.training import lock, status
from sagebwd.training.journal import Journal
from sagebwd.training.status import Reporter

AT = {"step": 30, "tokens": 30_000, "rate": 1000.0, "checkpoint": 25, "spikes": 1, "skipped": 2}


def reporter(folder: Path) -> Reporter:
    """Of a run that is at step 30 of 120."""
    found = Reporter(folder, 120)
    found.tell(**AT)
    return found


@pytest.mark.parametrize(
    ("state", "code", "words"),
    [
        ("finished", 0, "finished"),
        ("preempted", 75, "the same command goes on"),
        ("running", 75, "interrupted (its process is gone)"),
        ("failed", 1, "cause       disk full"),
        ("hung", 4, "the same command goes on"),
    ],
)
def test_the_exit_code_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], state: str, code: int, words: str
) -> None:
    if state == "hung":
        reporter(tmp_path)
        status.fail(tmp_path, "no progress", hung=True)
    else:
        reporter(tmp_path).tell(state=state, cause="disk full" if state == "failed" else None)
    assert status.show(tmp_path) == code
    said = capsys.readouterr().out
    assert words in said
    for line in (
        "step 30 of 120 (25.0 %), 30,000 tokens",
        "1,000 tokens/s, 1 min 30 s left",
        "step 25",
        "1 spike(s), 2",
    ):
        assert line in said


def test_a_run_under_way_is_neither(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reporter(tmp_path)
    with lock.held(tmp_path):
        assert status.show(tmp_path) == status.RUNNING
    assert "running" in capsys.readouterr().out
    assert status.exit_code(tmp_path) == status.RESUMABLE


def test_the_first_cause_stands(tmp_path: Path) -> None:
    """Of two ranks that fail, the one that the other fell over; and the first rank's next word does not hide it."""
    first = reporter(tmp_path)
    status.fail(tmp_path, "rank 1 is out of memory")
    status.fail(tmp_path, "rank 0 lost the connection")
    first.tell(step=31)
    found = status.read(tmp_path)
    assert (found.state, found.cause, found.step) == ("failed", "rank 1 is out of memory", 30)
    Reporter(tmp_path, 120)  # the next process
    again = status.read(tmp_path)
    assert (again.state, again.cause, again.step, again.checkpoint) == ("running", None, 30, 25)
    status.fail(tmp_path, "no progress", hung=True)
    assert status.exit_code(tmp_path) == status.HUNG
    Reporter(tmp_path, 120)
    assert not status.read(tmp_path).hung


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"state": "asleep"}', '{"state": "running", "step": "1", "of": 2, "tokens": 3}']
)
def test_what_is_no_status_is_refused(tmp_path: Path, text: str) -> None:
    for nowhere in (tmp_path, tmp_path / "missing", Path(__file__)):
        with pytest.raises(UserError, match="no status"):
            status.read(nowhere)
    (tmp_path / "status.json").write_text(text)
    with pytest.raises(UserError, match="cannot be read"):
        status.read(tmp_path)


def test_the_command_imports_nothing_heavy(tmp_path: Path) -> None:
    reporter(tmp_path).tell(state="preempted")
    program = (
        "import sys; from sagebwd.cli import main\n"
        f"code = main(['status', {str(tmp_path)!r}])\n"
        "assert not {'torch', 'numpy', 'megatron'} & set(sys.modules)\n"
        "sys.exit(code)"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (answer.returncode, answer.stderr) == (75, "")


def test_a_process_that_is_killed_leaves_no_lock(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from sagebwd.training import lock\n"
        f"with lock.held(Path({str(tmp_path)!r})): print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        assert lock.is_held(tmp_path)
        with (
            pytest.raises(UserError, match=rf"another process trains in \S+ \(process {process.pid} on "),
            lock.held(tmp_path),
        ):
            pass
        process.kill()
    assert not lock.is_held(tmp_path)
    with lock.held(tmp_path):
        assert lock.is_held(tmp_path)


def test_the_journal_is_cut_where_the_run_goes_on(tmp_path: Path) -> None:
    first = Journal(tmp_path, last_step=-1)
    for step in range(6):
        first.write(step, loss=float(step) if step else float("nan"))
    first.close()
    path = tmp_path / "log.jsonl"
    path.write_text(path.read_text() + '{"step": 6, "lo')  # killed while it wrote
    second = Journal(tmp_path, last_step=3)
    second.write(4, loss=0.5)
    second.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert [line["loss"] for line in lines] == ["nan", 1.0, 2.0, 3.0, 0.5]
    Journal(tmp_path, last_step=-1).close()
    assert path.read_text() == ""
