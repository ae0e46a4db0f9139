"""The one exception that a user's mistake raises: the command line prints it as one sentence and exits with 2."""


class UserError(ValueError):
    """A mistake that the user can mend. The message says what is wrong, where, and the remedy, in one line."""
