"""A copy of the project that may be broken: with bodies taken out of it, or with a bug put into it.

Exercises and bugs stand on two pages, exercises.md and museum.md, as a learner reads them; here
they are read. Functions are found by name and lines by their text, never by number, so both survive
changes elsewhere in a file. Where one no longer applies, a test says so. In an exercise's copy git
knows the original: `git diff` is the solution. In a bug's copy git knows only the bug.

Several exercises share a file. In a copy for one of them the bodies of the others are *sealed*:
they stand, packed, in a file beside it, and work, but can't be read by accident.
"""

import ast
import json
import re
import shutil
import subprocess
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent.parent if HERE.parent.parent.name == "scratch" else HERE.parent
COPIED = ["nanoserve", "nanoserve_extras", "tests", "course", "benchmarks", "docs", "bench.py",
          "example.py", "pyproject.toml", "README.md", "CONTRIBUTING.md", ".gitignore"]


@dataclass
class Task:
    """A section of a page."""

    kind: str  # "exercise" or "bug"
    number: str
    title: str
    text: str  # without what is folded
    folded: list[str]  # the hints, or the bug's story
    file: str
    names: list[str]  # functions
    checks: list[str]  # pytest's arguments
    old: str = ""  # the bug: these lines ...
    new: str = ""  # ... become these

    def apply(self, root: Path) -> None:
        """Change the file. Raises `ValueError` if a function is not there, or the bug's lines are
        not in it, or not once."""
        path = root / self.file
        if self.kind == "exercise":
            take_out(path, {name: f"exercise {self.number}: write {name}" for name in self.names})
            return
        source, [name] = path.read_text(encoding="utf-8"), self.names
        function = ast.get_source_segment(source, find(ast.parse(source), name))
        if (count := f"{function}\n".count(self.old)) != 1:
            raise ValueError(f"{self.file}, {name}, has {count} times, not once:\n{self.old}")
        changed = source.replace(function, f"{function}\n".replace(self.old, self.new)[:-1])
        path.write_text(changed, encoding="utf-8")

    def seal(self, root: Path) -> None:
        """Pack what other exercises ask for in this file, and have it unpacked by its last line."""
        path = root / self.file
        says = {name: f"sealed: exercise {one.number} asks for it"
                for one in reversed(tasks("exercise").values()) if one.file == self.file
                for name in one.names if name not in self.names}
        packed = json.dumps([list(says), path.read_text(encoding="utf-8")])
        path.with_suffix(".sealed").write_bytes(zlib.compress(packed.encode()))
        take_out(path, says)
        with path.open("a", encoding="utf-8") as file:
            file.write("\n\nfrom course.scratch import unseal\nunseal(__name__)\n")


def take_out(path: Path, says: dict[str, str]) -> None:
    """In place of each function's body an error that says so; signature and docstring stay."""
    for name, words in says.items():
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        node = find(ast.parse("".join(lines)), name)
        first = node.body[0]
        start = first.end_lineno if ast.get_docstring(node) else first.lineno - 1
        lines[start:node.end_lineno] = (
            f'{" " * first.col_offset}raise NotImplementedError("{words}")\n')
        path.write_text("".join(lines), encoding="utf-8")


def unseal(module: str) -> None:
    """Give a module the functions that were sealed in it."""
    owner = sys.modules[module]
    packed = Path(owner.__file__).with_suffix(".sealed").read_bytes()
    names, source = json.loads(zlib.decompress(packed))
    for name in names:
        found, *path, last = {}, *name.split(".")
        function = ast.Module([find(ast.parse(source), name)], [])
        exec(compile(function, "sealed", "exec"), vars(owner), found)
        setattr(getattr(owner, *path) if path else owner, last, found[last])


def find(tree: ast.Module, name: str) -> ast.FunctionDef:
    """A function, or "Class.method", by its name."""
    node = tree
    for part in name.split("."):
        node = next((one for one in node.body if getattr(one, "name", None) == part), None)
        if node is None:
            raise ValueError(f"there is no {name}")
    return node


def tasks(kind: str) -> dict[str, Task]:
    """Those of a page, by number."""
    page = HERE / {"exercise": "exercises.md", "bug": "museum.md"}[kind]
    found = {}
    for part in re.split(r"^## ", page.read_text(encoding="utf-8"), flags=re.M)[1:]:
        head, body = part.split("\n", 1)
        number, _, title = head.partition(". ")
        if not number.isdigit():
            continue
        folded = re.findall(r"<details>.*?</summary>\n\n(.*?)\n\n</details>", body, re.S)
        joined = body.replace("\n  ", " ")  # an item of a list is one line
        file, names = re.search(r"(nanoserve/[\w/]+\.py)[`)]+[:,](.*)", joined).groups()
        task = found[number] = Task(
            kind, number, title, body[:body.index("<details>")].strip(), folded, file,
            re.findall(r"`([\w.]+)`", names),
            re.findall(r"`(.*?)`", re.search(r"`tests/.*", joined)[0]))
        if kind == "bug":
            diff = re.search(r"```diff\n(.*?)```", body, re.S)[1].splitlines(keepends=True)
            task.old, task.new = ("".join(line[1:] for line in diff if line[0] == sign)
                                  for sign in "-+")
    return found


def make(task: Task, place: Path) -> None:
    """The scratch copy, which has its name once it is whole. Raises `ValueError` if it is there."""
    def unwanted(folder, names):  # tests/course knows solutions
        return {*names} - {*COPIED} if Path(folder) == ROOT else {"__pycache__", "course"}
    if place.exists():
        raise ValueError(f"{place} is there already: go on in it, or delete it to begin anew")
    if shutil.which("git") is None:
        raise ValueError("git is not there: install it, because a copy keeps its original in git")
    part = place.with_name(f"{place.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(ROOT, part, ignore=unwanted)
    (task.apply if task.kind == "bug" else task.seal)(part)
    for command in ("init --quiet", "add --all", "-c user.name=course -c user.email=course commit "
                    "--quiet --no-gpg-sign --no-verify -m start"):  # whatever the user's git does
        subprocess.run(["git", *command.split()], cwd=part, check=True)
    if task.kind == "exercise":
        task.apply(part)
    part.rename(place)
