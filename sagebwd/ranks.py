"""`python -m sagebwd.ranks`: torchrun, whose end says what happened to the ranks in one line and by its exit code.

It takes torchrun's arguments. torchrun itself ends with 1 and a stack trace of its own whatever a rank died of, below
the sentence that the rank has printed. Here the exit code is that of the rank that failed first on this node (2: it met
a mistake of the user's), 128 + the signal's number where one killed it, or where one ended this process.
"""

from __future__ import annotations

import signal
import sys

from torch.distributed import run
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

USER_ERROR = 2


def main(arguments: list[str]) -> int:
    try:
        run.run(run.parse_args(arguments))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        if code != USER_ERROR:  # that rank has said what is wrong
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            print(f"error: rank {rank} {how}, and the others were stopped", file=sys.stderr)
        return 128 - code if code < 0 else code
    except SignalException as error:
        print(f"error: the ranks were stopped by {error.sigval.name}", file=sys.stderr)
        return 128 + error.sigval
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
