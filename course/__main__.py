"""The course's command.

    python -m course                 list the exercises and the bugs
    python -m course 3               begin exercise 3: a copy of the project without some bodies
    python -m course 3 check         run the tests in the copy, and show one failure
    python -m course 3 hint [2]      the first of three hints, or another one
    python -m course plant 7         begin bug 7: a copy of the project with the bug in it
    python -m course plant 7 check   is it repaired?
    python -m course reveal 7        its story, its lines, and the test that catches it
"""

import os
import re
import subprocess
import sys
from pathlib import Path

from course.scratch import ROOT, Task, make, tasks
from nanoserve_extras.base.command import command

STORY = """
from nanoserve import LLM, SamplingParams
llm = LLM(dtype="float32", kernels="torch", device="cpu", num_gpu_blocks_override=12,
          max_num_seqs=3, max_num_batched_tokens=24, max_model_len=128)
params = SamplingParams(temperature=0.7, top_p=0.95, seed=31, max_tokens=60)
prompts = ["Once upon a time", "Once upon a time there was", "The king"]
output = llm.generate(prompts, params, use_tqdm=False)[0]
print("A story by your code, in 12 blocks of memory:", output.prompt + output.outputs[0].text)
"""


def main(words: list[str]) -> int:
    if not words:
        for kind in ("exercise", "bug"):
            print(f"{kind}s", *(f"  {one.number:>2}  {one.title}" for one in tasks(kind).values()),
                  sep="\n")
        print(f"\n{__doc__}")
        return 0
    kind = "bug" if words[0] in ("plant", "reveal") else "exercise"
    number, *rest = words[kind == "bug":] or [""]
    if (task := tasks(kind).get(number)) is None:
        raise ValueError(f"there is no {kind} {number!r}: see python -m course")
    place = ROOT / "scratch" / f"{kind}-{number}"
    match kind, words[0], rest:
        case _, "reveal", []:
            print(plain(f"{task.text}\n\n{task.folded[0]}"))
        case _, _, []:
            print(f"{number}. {task.title}\n\n{plain(task.text)}\n")
            make(task, place)
            print(f"Your copy: {place}")
        case _, _, ["check"]:
            return check(task, place)
        case "exercise", _, ["hint", *which] if which in ([], ["1"], ["2"], ["3"]):
            print(plain(task.folded[int(*which or "1") - 1]))
        case _:
            raise ValueError(__doc__)
    return 0


def plain(page: str) -> str:
    """A page's text as a terminal shows it: without its marks, and with paths in place of links."""
    def path(at):
        words = at[1].strip("`")
        return at[2] if at[2].endswith(words) else f"{words} ({at[2]})"

    page = re.sub(r"\[([^\]]+)\]\((?:\.\./)?([^)]+)\)", path, page)
    page = re.sub(r"(?<![^\s(])\*+(\w[^*]*)\*+(?=[\s.,:;)])", r"\1", page)
    return re.sub(r"^```.*\n?|`", "", page, flags=re.M)


def check(task: Task, place: Path) -> int:
    """Run its tests in its copy; where they pass, let the engine there write a story, and let the
    simulator score it."""
    if not place.exists():
        raise ValueError(f"{place} is not there: begin it first")
    here = dict(cwd=place, env=os.environ | {"PYTHONPATH": str(place)})
    status = subprocess.run([sys.executable, "-m", "course.check", *task.checks], **here).returncode
    if status == 0 and task.kind == "exercise":
        status = subprocess.run([sys.executable, "-c", STORY], **here,
                                stderr=subprocess.DEVNULL).returncode
        if status:
            print("No story: is torch missing? Try python example.py in your copy")
        for scored in re.findall(r"^python (-m nanoserve trace .*)", task.text, re.M):
            subprocess.run([sys.executable, *scored.split()], **here, stderr=subprocess.DEVNULL)
    return status


if __name__ == "__main__":
    with command():
        try:
            sys.exit(main(sys.argv[1:]))
        except ValueError as error:
            sys.exit(str(error))
