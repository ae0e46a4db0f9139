"""Debian's Chromium without a window, over the two pipes of its DevTools protocol: JSON, each message ended by a 0."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# No GPU, no sandbox (root), nothing that would call home.
CHROMIUM = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
CHROMIUM += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
CHROMIUM += ["--window-size=1400,900", "--remote-debugging-pipe"]


class Page:
    """One tab. Every call waits for its answer."""

    def __init__(self, to: int, answers: Iterator[dict[str, Any]], url: str) -> None:
        self.to, self.answers, self.number, self.session = to, answers, 0, {}
        target = self.call("Target.createTarget", url=url)["targetId"]
        self.session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters, **self.session}
        os.write(self.to, json.dumps(message).encode() + b"\0")
        answer = next(answer for answer in self.answers if answer.get("id") == self.number)  # the others are events
        assert "result" in answer, answer
        return answer["result"]

    def text(self) -> str:
        """What a reader of the page reads."""
        found = self.call("Runtime.evaluate", expression="document.body ? document.body.innerText : ''")
        return found["result"]["value"]

    def picture(self) -> bytes:
        """What a viewer sees, as a PNG file."""
        return base64.b64decode(self.call("Page.captureScreenshot")["data"])


@contextlib.contextmanager
def page(url: str, profile: Path) -> Iterator[Page]:
    theirs, to = os.pipe()
    back, their_out = os.pipe()
    # Chromium reads from descriptor 3 and writes to 4; the shell puts them there.
    shell = ["bash", "-c", f'exec "$@" 3<&{theirs} 4>&{their_out}', "-"]
    command = [*shell, *CHROMIUM, f"--user-data-dir={profile}"]
    with (profile.parent / "chromium.log").open("wb") as log:
        process = subprocess.Popen(command, pass_fds=(theirs, their_out), stdout=log, stderr=log)
    for end in (theirs, their_out):
        os.close(end)
    try:
        yield Page(to, _messages(back), url)
    finally:
        process.terminate()
        process.wait()
        for end in (to, back):
            os.close(end)


def _messages(back: int) -> Iterator[dict[str, Any]]:
    pending = b""
    while data := os.read(back, 1 << 20):
        *whole, pending = (pending + data).split(b"\0")
        yield from map(json.loads, whole)
