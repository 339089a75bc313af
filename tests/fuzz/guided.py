"""atheris: bytes that reach code which no input before has reached.

    python -m fuzz.guided NAME COUNT SEED FILE

gives a target of `fuzz.raw` this many inputs and writes what became of them to FILE. libFuzzer ends the process.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["logpast", "yaml"]):
    from fuzz.harness import Counts, check, warm_up
    from fuzz.raw import RAW
    from logpast.util.files import atomic_write

LONGEST = 4000  # bytes of an input


def main(name: str, count: int, seed: int, file: Path) -> None:
    home, seeds = Path(tempfile.mkdtemp(dir=file.parent)), Path(tempfile.mkdtemp(dir=file.parent))
    os.chdir(home)
    target, contents = RAW[name](home)
    for number, content in enumerate(contents):
        (seeds / str(number)).write_bytes(content)
    warm_up()
    counts = Counts()

    def check_bytes(content: bytes) -> None:
        check(target, content, counts)
        if counts.inputs % 100 == 0 or counts.inputs >= count:
            atomic_write(file, json.dumps(counts.to_dict()))

    limits = [f"-runs={count}", f"-seed={seed + 1}", f"-max_len={LONGEST}", "-rss_limit_mb=0", "-print_final_stats=0"]
    atheris.Setup([sys.argv[0], *limits, "-verbosity=0", f"-artifact_prefix={seeds}/", str(seeds)], check_bytes)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]).absolute())
