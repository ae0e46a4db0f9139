"""A child's output is seen and kept, its bar works on a terminal, and it ends when we do."""

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

PARENT = """
import os, sys
from pathlib import Path
from sagebwd import terminal
sys.exit(terminal.run([sys.executable, "-c", sys.argv[2]], Path(sys.argv[1]), os.environ))
"""
BAR = r"""
import sys
print("terminal" if sys.stderr.isatty() else "pipe", flush=True)
for step in range(3):
    sys.stderr.write(f"\r\x1b[32m{step} of 2\x1b[0m")
sys.stderr.write("\n")
sys.exit(7)
"""


def test_through_a_pipe(tmp_path: Path) -> None:
    log = tmp_path / "new" / "log.txt"
    for _ in range(2):
        answer = subprocess.run([sys.executable, "-c", PARENT, log, BAR], capture_output=True, check=False)
        assert answer.returncode == 7
        assert answer.stdout == b"pipe\n\r\x1b[32m0 of 2\x1b[0m\r\x1b[32m1 of 2\x1b[0m\r\x1b[32m2 of 2\x1b[0m\n"
    assert log.read_text() == "pipe\n2 of 2\n" * 2  # appended; of a line that was drawn over, its last state


def test_on_a_terminal(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", PARENT, tmp_path / "log.txt", BAR], stdout=theirs) as process:
        os.close(theirs)
        seen = b""
        while chunk := _read(ours):
            seen += chunk
    os.close(ours)
    assert process.returncode == 7
    assert seen.startswith(b"terminal\r\n\r\x1b[32m0 of 2")
    assert b"\r\r\n" not in seen
    assert (tmp_path / "log.txt").read_text() == "terminal\n2 of 2\n"


def test_the_child_ends_with_us(tmp_path: Path) -> None:
    waiting = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", PARENT, tmp_path / "log.txt", waiting])
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 256 - signal.SIGTERM  # the child's own end, as a shell sees it
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text()}").exists()


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 4096)
    except OSError:
        return b""
