"""A copy of the project that may be broken: with bodies taken out of it, or with a bug put into it.

Exercises and bugs stand on two pages, exercises.md and museum.md, as a learner reads them; here
they are read. Functions are found by name and lines by their text, never by number, so both survive
changes elsewhere in a file. Where one no longer applies, a test says so. In an exercise's copy git
knows the original: `git diff` is the solution. In a bug's copy git knows only the bug.
"""

import ast
import re
import shutil
import subprocess
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
    names: list[str]  # of functions
    checks: list[str]  # pytest's arguments
    old: str = ""  # the bug: these lines ...
    new: str = ""  # ... become these

    def apply(self, root: Path) -> None:
        """Change the file. Raises `ValueError` if a function is not there, or the bug's lines are
        not in it, or not once."""
        path = root / self.file
        for name in self.names:
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            node = find(ast.parse("".join(lines)), name)
            start = node.lineno - 1
            if self.kind == "exercise":  # signature and docstring stay
                first = node.body[0]
                start = first.end_lineno if ast.get_docstring(node) else first.lineno - 1
                new = (f'{" " * first.col_offset}raise NotImplementedError('
                       f'"exercise {self.number}: write {name}")\n')
            else:
                source = "".join(lines[start:node.end_lineno])
                if source.count(self.old) != 1:
                    raise ValueError(f"{self.file}, {name}, does not have once:\n{self.old}")
                new = source.replace(self.old, self.new)
            lines[start:node.end_lineno] = new
            ast.parse("".join(lines))
            path.write_text("".join(lines), encoding="utf-8")


def find(tree: ast.Module, name: str) -> ast.FunctionDef:
    """A function, or "Class.method", by its name."""
    node = tree
    for part in name.split("."):
        node = next((one for one in node.body if getattr(one, "name", None) == part), None)
        if node is None:
            raise ValueError(f"there is no {name}")
    return node


def tasks(kind: str, suffix: str = ".md") -> dict[str, Task]:
    """Those of a page, by number."""
    page = HERE / ({"exercise": "exercises", "bug": "museum"}[kind] + suffix)
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
    """The scratch copy."""
    if place.exists():
        raise ValueError(f"{place} is there already: go on in it, or delete it to begin anew")
    place.mkdir(parents=True)
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, place)
    if task.kind == "bug":
        task.apply(place)
    for command in ("init --quiet", "add --all",
                    "-c user.name=course -c user.email=course commit --quiet -m start"):
        subprocess.run(["git", *command.split()], cwd=place, check=True)
    if task.kind == "exercise":
        task.apply(place)
