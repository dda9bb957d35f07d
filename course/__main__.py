"""The course's command.

    python -m course                 list the exercises and the bugs
    python -m course 3               begin exercise 3: a copy of the project without some bodies
    python -m course 3 check         run the tests in the copy, and show one failure
    python -m course 3 hint [2]      the first of three hints, or another one
    python -m course plant 7         begin bug 7: a copy of the project with the bug in it
    python -m course plant 7 check   is it repaired?
    python -m course reveal 7        its story, its lines, and the test that catches it

The texts are on two pages, exercises.md and museum.md.
"""

import os
import subprocess
import sys
import time

from course.scratch import Task, make, tasks
from nanoserve.frontend.command import command

STORY = """
from nanoserve import LLM, SamplingParams
print("A story by your code, in 12 blocks of memory:")
with LLM(dtype="float32", kernels="torch", device="cpu", num_gpu_blocks_override=12,
         max_num_seqs=3, max_num_batched_tokens=24, max_model_len=128) as llm:
    params = SamplingParams(temperature=0.7, top_p=0.95, seed=31, max_tokens=60)
    for out in llm.generate(["Once upon a time", "Once upon a time there was", "The king"],
                            params, use_tqdm=False)[:1]:
        print(out.prompt + out.outputs[0].text)
"""


def main(words: list[str]) -> int:
    if not words:
        for kind, what in (("exercise", "write a part of the engine"), ("bug", "find the line")):
            print(f"{kind}: {what}")
            print(*(f"  {one.number:>2}  {one.title}" for one in tasks(kind).values()), sep="\n")
        print(f"\n{__doc__.split(chr(10) * 2)[1]}")
        return 0
    kind = "bug" if words[0] in ("plant", "reveal") else "exercise"
    number, *rest = words[kind == "bug":] or [""]
    if number not in (found := tasks(kind)):
        raise ValueError(f"there is no {kind} {number!r}: see python -m course")
    task = found[number]
    match kind, words[0], rest:
        case _, "reveal", []:
            print(f"{task.text}\n\n{task.folded[0]}")
        case _, _, []:
            make(task, task.place)
            print(f"{number}. {task.title}\n\n{task.text}\n\nYour copy: {task.place}")
        case _, _, ["check"]:
            return check(task)
        case "exercise", _, ["hint"]:
            print(task.folded[0])
        case "exercise", _, ["hint", "1" | "2" | "3" as which]:
            print(task.folded[int(which) - 1])
        case _:
            raise ValueError(__doc__)
    return 0


def check(task: Task) -> int:
    """Run its tests in its copy; where they pass, let the engine there write a story."""
    if not task.place.exists():
        raise ValueError(f"{task.place} is not there: begin it first")
    here = dict(cwd=task.place, env=os.environ | {"PYTHONPATH": str(task.place)})
    start = time.monotonic()
    status = subprocess.run([sys.executable, "-m", "course.check", *task.checks], **here).returncode
    if status == 0 and task.kind == "exercise":
        print(f"({time.monotonic() - start:.0f} s)\n", flush=True)
        status = subprocess.run([sys.executable, "-c", STORY], **here,
                                stderr=subprocess.DEVNULL).returncode
        if status:
            print("No story: is torch missing? Try python example.py in your copy")
    return status


if __name__ == "__main__":
    with command():
        try:
            sys.exit(main(sys.argv[1:]))
        except ValueError as error:
            sys.exit(str(error))
