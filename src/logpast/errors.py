"""The one exception for mistakes a person can mend: its text is a single line that names what was wrong and the fix."""


class UserError(ValueError):
    """Bad input, a bad setting or a damaged file. The command line prints it without a traceback and exits with 2."""


class Diverged(UserError):
    """Training went to infinity; other settings may not."""
