"""Run a child process whose output is seen at once and kept in a file, its progress bar working where ours would."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import signal
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

GRACE_SECONDS = 30  # what an interrupted child gets to write its last words before it is killed
_COLOUR = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


def run(
    command: list[str],
    log: Path,
    environment: Mapping[str, str],
    stop: Callable[[subprocess.Popen], None] = subprocess.Popen.terminate,
) -> int:
    """Run `command`; its standard output and error appear here and are appended to `log`. Returns its exit code.

    On a terminal the child gets a pseudo-terminal, so that it draws its progress bar; the log keeps the last state of a
    line that was drawn over. When this process is interrupted, the child is terminated and waited for. When it gets
    SIGTERM or SIGUSR1, stop(child) tells the child, which ends in its own time.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file, _channel() as (reading, writing), contextlib.ExitStack() as stack:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=writing, stderr=writing, env=environment)
        os.close(writing)
        try:
            stack.enter_context(_handed_on(lambda: stop(child)))
            _copy(reading, file)
            return child.wait()
        finally:
            if child.poll() is None:
                _stop(child)


@contextlib.contextmanager
def _channel() -> Iterator[tuple[int, int]]:
    """Reading and writing end: a pseudo-terminal as wide as ours, else a pipe. The caller closes writing."""
    reading, writing = pty.openpty() if sys.stdout.isatty() else os.pipe()
    try:
        if os.isatty(writing):
            fcntl.ioctl(writing, termios.TIOCSWINSZ, fcntl.ioctl(sys.stdout, termios.TIOCGWINSZ, b"\0" * 8))
            modes = termios.tcgetattr(writing)
            modes[1] &= ~termios.OPOST  # our terminal turns "\n" into "\r\n"; once is enough
            termios.tcsetattr(writing, termios.TCSANOW, modes)
        yield reading, writing
    finally:
        os.close(reading)


def _copy(reading: int, file: BinaryIO) -> None:
    line = b""
    while True:
        try:
            data = os.read(reading, 65536)
        except OSError:  # how Linux says that a pseudo-terminal's other end is closed
            data = b""
        if not data:
            break
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        *complete, line = (line + data).split(b"\n")
        file.writelines(_last_state(text) + b"\n" for text in complete)
        file.flush()
    if line:
        file.write(_last_state(line) + b"\n")


def _last_state(line: bytes) -> bytes:
    """What a terminal shows of a line in the end: the text after its last carriage return, without colours."""
    states = [state for state in _COLOUR.sub(b"", line).split(b"\r") if state.strip()]
    return states[-1] if states else b""


@contextlib.contextmanager
def _handed_on(stop: Callable[[], None]) -> Iterator[None]:
    before = {number: signal.signal(number, lambda *_: stop()) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(child: subprocess.Popen) -> None:
    child.terminate()
    try:
        child.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
