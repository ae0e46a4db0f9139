"""The exceptions whose message is for a person: the command line prints it as one sentence, without a stack trace."""


class UserError(ValueError):
    """A mistake that the user can mend; exit code 2. The message says what is wrong, where, and the remedy, in one
    line."""


class RunError(RuntimeError):
    """What ended a run though nobody made a mistake: a full disk, too little memory, a rank that hangs; exit code 1."""


def one_line(error: Exception) -> str:
    """Its message with every character that would break the line or steer the terminal spelled out."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(error))
