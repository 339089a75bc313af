"""The completion script, run in bash."""

import shutil
import subprocess

import pytest

from logpast.completion import completion
from logpast.util.errors import UserError


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("logpast tr", "train"),
        ("logpast data ", "prepare"),
        ("logpast results c", "curves comparison"),
        ("logpast results --pl", "--plot"),
        ("logpast results curves --pa", "--pairs"),
        ("logpast train --config small-cpu --optimizer.b", "--optimizer.beta1 --optimizer.beta2"),
        ("logpast train --model recurrent_memory --model.memory_t", "--model.memory_tokens"),
        ("logpast sweep sweep-toy --dry", "--dry_run"),
        ("logpast nothing --x", ""),
    ],
)
def test_words_are_completed(line: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    completion("bash")
    words = line.split(" ")
    state = f"COMP_WORDS=({' '.join(word or repr('') for word in words)}); COMP_CWORD={len(words) - 1}"
    script = f'{capsys.readouterr().out}\n{state}\n_logpast\necho "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert (done.stdout.strip(), done.stderr) == (expected, "")


def test_zsh_gets_bash_completion(capsys: pytest.CaptureFixture[str]) -> None:
    completion("zsh")
    assert "bashcompinit" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"shell .*'fish'"):
        completion("fish")  # type: ignore[arg-type]
