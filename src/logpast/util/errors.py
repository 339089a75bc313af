"""The one exception for mistakes a person can mend: its text is a single line that names what was wrong and the fix."""

import difflib
import errno
import re

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)  # a disk, or one's share of it


class UserError(ValueError):
    """Bad input, a bad setting or a damaged file. The command line prints it without a traceback and exits with 2."""


class Diverged(UserError):
    """Training went to infinity; other settings may not."""


def suggest(name: str, known: list[str]) -> str:
    """The end of an error about an unknown name: what may have been meant."""
    cased = {each.lower(): each for each in reversed(known)}
    near = difflib.get_close_matches(name.lower(), cased, n=1)
    return f"did you mean {cased[near[0]]}?" if near else f"known: {', '.join(known)}"


def one_line(error: Exception, before: str = "") -> str:
    """What a parser of options found wrong, in a line; `before` stands before an option's name."""
    text = " ".join(str(error).split())
    wrong = re.search(r'Parser key "([^"]+)".*(?:Given|Got) value: (.*)', text)
    if not wrong:
        return text
    choices = re.search(r"(?:one of|Literal)\s*[(\[]([^)\]]+)[)\]]", text)
    a_list = "list[str]" in text or ("<class 'list'>" in text and re.fullmatch(r"[-+.,\deE ]+", wrong[2]))
    instead = f"; it may be {choices[1]}" if choices else f'; write "[{wrong[2]}]"' if a_list else ""
    return f"{before}{wrong[1]} cannot be {wrong[2]!r}{instead}"
