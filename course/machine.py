"""Runs the four experiments of machine.md.

    python -m course.machine           all of them
    python -m course.machine keys      one: ranks, recording, drafts or keys
"""

import sys

from transformers import AutoTokenizer

from course import chained_keys, drafting, recording, two_ranks
from nanoserve.llm import BUNDLED_MODEL
from nanoserve_extras.base.command import command

PARTS = {"ranks": two_ranks.main, "recording": recording.main, "drafts": drafting.main,
         "keys": chained_keys.main}


def main(names: list[str]) -> None:
    if unknown := [name for name in names if name not in PARTS]:
        raise ValueError(f"there is no part {unknown[0]!r}: choose one of {', '.join(PARTS)}")
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    for name in names or PARTS:
        print(f"{name}\n")
        PARTS[name](tokenizer)
        print()


if __name__ == "__main__":
    with command():
        try:
            main(sys.argv[1:])
        except ValueError as error:
            sys.exit(str(error))
