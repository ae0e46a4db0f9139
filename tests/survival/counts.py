"""What was counted, kept in a file after every try: a run of hours that is interrupted goes on counting."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass
class Tally:
    """One line of the table. lost: steps that had to be done again, of each try. wrong: what differed, in words."""

    fault: str
    lost: list[int] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def tries(self) -> int:
        return len(self.lost)


class Counts:
    """Tallies by fault, and the seconds spent."""

    def __init__(self, file: Path | None, owner: Mapping[str, object]) -> None:
        """file: None keeps nothing. owner: what the counts are of; a file of another owner's is started anew."""
        self.file, self.owner = file, dict(owner)
        self.tallies: dict[str, Tally] = {}
        self.seconds = 0.0
        if file is not None and file.exists():
            found = json.loads(file.read_text(encoding="utf-8"))
            if found["owner"] == self.owner:
                self.seconds = found["seconds"]
                self.tallies = {tally["fault"]: Tally(**tally) for tally in found["tallies"]}

    @property
    def tries(self) -> int:
        return sum(tally.tries for tally in self.tallies.values())

    def of(self, fault: str) -> Tally:
        return self.tallies.setdefault(fault, Tally(fault))

    def keep(self) -> None:
        if self.file is None:
            return
        found = {"owner": self.owner, "seconds": self.seconds}
        beside = self.file.with_suffix(".partial")
        tallies = [asdict(tally) for tally in self.tallies.values()]
        beside.write_text(json.dumps(found | {"tallies": tallies}), encoding="utf-8")
        beside.replace(self.file)

    def forget(self) -> None:
        if self.file is not None:
            self.file.unlink(missing_ok=True)
