"""The exception for mistakes that users can fix, and the wording of its messages."""

import difflib
import errno

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)  # no space on the disk, or the user's quota is used up
OUT_OF_MEMORY = (
    "out of memory; lower batch_size (in training also micro_batch_size), use a smaller model (model.width, "
    "model.layers, model.mlp), or a device with more memory"
)
LOST_PROCESS = (
    "another process of this run has ended or does not answer; end it if it hangs, and resume with --resume auto (the "
    "option timeout says how many seconds to wait for it)"
)


LONGEST = 2000  # characters of a message


class UserError(ValueError):
    """Bad input, a bad setting or a damaged file, with one line that says what is wrong, where, and the fix.

    The command line prints it without a traceback and exits with 2.
    """

    def __str__(self) -> str:
        return one_line(super().__str__())


def one_line(message: str) -> str:
    """A message that may quote anything, in one line that any terminal shows: what cannot be printed is escaped."""
    if len(message) > LONGEST:
        message = f"{message[: LONGEST // 2]} … {message[-LONGEST // 2 :]}"
    return message if message.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in message)


class Diverged(UserError):
    """The loss became infinite or NaN in training; other settings may not diverge."""


def is_out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed. PyTorch has a class for this on GPUs only, and importing it takes seconds."""
    too_large = ("Storage size calculation overflowed", "Overflow when unpacking long")
    texts = ("out of memory", "can't allocate memory", *too_large)
    return isinstance(error, MemoryError) or any(text in str(error) for text in texts)


def is_lost_process(error: Exception) -> bool:
    """Whether another process of a run on several devices has ended, or does not answer.

    Gloo has no error class of its own for this.
    """
    of_torch = any(kind.__name__ == "DistError" for kind in type(error).__mro__)  # importing torch takes seconds
    return of_torch or "/gloo/transport/" in str(error)


def suggest(name: str, known: list[str]) -> str:
    """The end of an error message about an unknown name: the nearest known name, or all of them."""
    cased = {each.lower(): each for each in reversed(known)}
    near = difflib.get_close_matches(name.lower(), cased, n=1)
    return f"did you mean {cased[near[0]]}?" if near else f"known: {', '.join(known)}"


def first_few(names: list[str], most: int = 8) -> str:
    """A list for a message, shortened if it is long: a, b, c and 12 more."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
