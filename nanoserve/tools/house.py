"""The house in figures: every file with its lines, its share of documentation, and its imports.

    python -m nanoserve.tools.house              the figures, by room
    python -m nanoserve.tools.house --map        README's table of the spine, in Markdown
    python -m nanoserve.tools.house --map all    the table of all files, as docs/map.md has it
    python -m nanoserve.tools.house --write      put both where they belong

The package is a house: a *spine* of files directly in `nanoserve/`, *wings* that the engine needs,
and *annexes* that can be deleted. The design has goals for their sizes (`GOALS`). They are printed
beside the figures and no test fails because a file grew by a line: a limit that breaks the build
is met by deleting comments.

Who may import whom is another matter. That is a test (`tests/test_architecture.py`), which reads
the imports with `imports_of`.

Documentation is docstrings and comments, in lines. A line of code with a comment behind it counts
as documentation, too. Imports inside functions count like all others.

Not known here: what the files do. Nothing is imported or run; files are read as text.
"""

import argparse
import ast
import io
import tokenize
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parent.parent
# What the design asks of each room: (files, lines) at most.
GOALS = {"spine": (13, 3500)}
# The spine from the bottom up: a file imports only files before it.
READING_ORDER = ("config", "sequence", "block_manager", "scheduler", "batch", "ops",
                 "layers", "model", "controls", "sampler", "model_runner", "engine", "llm")
ANNEXES = ("assets", "extras", "server", "tools")
# Files that only make a folder a package, or a package a command: they are in no table.
DOORS = ("__init__", "__main__")


@dataclass
class File:
    """One source file, measured."""

    name: str  # "scheduler", or "device/kernels": a path below the package, without its suffix
    lines: int
    documentation: int  # lines with a docstring or a comment
    imports: list[str]  # names of other files, as above, and of their packages
    teaches: str  # the module docstring's first sentence

    @property
    def room(self) -> str:
        return self.name.partition("/")[0] if "/" in self.name else "spine"


def read_file(path: Path, package: Path = PACKAGE) -> File:
    """Measure one file. Raises `SyntaxError` if it is no Python."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    docstring = ast.get_docstring(tree) or ""
    teaches = docstring.partition("\n\n")[0].replace("\n", " ").rstrip(".")
    return File(path.relative_to(package).with_suffix("").as_posix(), len(text.splitlines()),
                len(documented_lines(text, tree)), imports_of(tree, package), teaches)


def documented_lines(text: str, tree: ast.Module) -> set[int]:
    """Numbers of the lines that hold a comment, or a part of a docstring."""
    found = {token.start[0] for token in tokenize.generate_tokens(io.StringIO(text).readline)
             if token.type == tokenize.COMMENT}
    for node in ast.walk(tree):
        if (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)):
            found.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return found


def imports_of(tree: ast.AST, package: Path = PACKAGE) -> list[str]:
    """The files of `package` that a file imports anywhere, by their names.

    `from nanoserve import ops` and `from nanoserve.ops import x` are both "ops"; a name that is
    imported from the package itself and is no file (`from nanoserve import LLM`) is "".
    """
    found = set()
    for node in ast.walk(tree):
        dotted: list[str] = []
        if isinstance(node, ast.Import):
            dotted = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            # What is behind `import` may be a file, too: `from nanoserve.device import kernels`.
            dotted = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in dotted:
            root, *parts = name.split(".")
            if root == package.name:
                found.add(_file_of(parts, package))
    return sorted(found)


def _file_of(parts: list[str], package: Path) -> str:
    """The longest beginning of a dotted name that is a file of the package."""
    for end in range(len(parts), 0, -1):
        if package.joinpath(*parts[:end]).with_suffix(".py").exists():
            return "/".join(parts[:end])
    return ""


def read_house(package: Path = PACKAGE) -> list[File]:
    """All files but doors: the spine in reading order, then room by room, annexes last."""
    def place(file: File) -> tuple:
        order = READING_ORDER.index(file.name) if file.name in READING_ORDER else 99
        return file.room != "spine", file.room in ANNEXES, file.room, order, file.name

    return sorted((read_file(path, package) for path in package.rglob("*.py")
                   if path.stem not in DOORS), key=place)


def describe(files: list[File]) -> str:
    """The figures as a table, with a line for each room."""
    rows, room = [f"{'file':30}{'lines':>6}{'docs':>6}  imports"], None
    for file in files:
        if file.room != room:
            room = file.room
            rows += ["", _describe_room(room, [other for other in files if other.room == room])]
        share = file.documentation / max(file.lines, 1)
        rows.append(f"{file.name:30}{file.lines:6}{share:6.0%}  {' '.join(file.imports)}".rstrip())
    return "\n".join(rows)


def _describe_room(room: str, files: list[File]) -> str:
    lines = sum(file.lines for file in files)
    share = sum(file.documentation for file in files) / max(lines, 1)
    goal = "" if room not in GOALS else "  goal: {} files, {:,} lines".format(*GOALS[room])
    return f"{f'{room}: {len(files)} files':30}{lines:6}{share:6.0%}{goal}"


def markdown_map(files: list[File], above: str = "") -> str:
    """A table of files in Markdown. above: the way from the page's folder to the clone's."""
    rows = ["| file | lines | teaches |", "|---|---|---|"]
    for file in files:
        rows.append(f"| [`{file.name}`]({above}nanoserve/{file.name}.py) | {file.lines} "
                    f"| {file.teaches} |")
    return "\n".join(rows)


def readme_map(files: list[File]) -> str:
    """The spine, as README has it between its markers."""
    return markdown_map([file for file in files if file.room == "spine"])


def whole_map(files: list[File]) -> str:
    """Every room but the bundled models, as docs/map.md has it between its markers."""
    return markdown_map([file for file in files if file.room != "assets"], above="../")


def write_maps(files: list[File], clone: Path) -> None:
    """Put both tables between the markers of their pages."""
    for page, option, table in (("README.md", "", readme_map), ("docs/map.md", " all", whole_map)):
        marker = f"<!-- printed by: python -m nanoserve.tools.house --map{option} -->\n"
        before, rest = (clone / page).read_text(encoding="utf-8").split(marker)
        behind = rest[rest.index("<!-- end of what it printed -->"):]
        (clone / page).write_text(f"{before}{marker}{table(files)}\n{behind}", encoding="utf-8")


PRINTED = {"spine": readme_map, "all": whole_map}  # with --map


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--map", nargs="?", const="spine", choices=PRINTED, metavar="all",
                        help="print README's table of the spine instead, or that of all files")
    parser.add_argument("--write", action="store_true", help="write both tables into their pages")
    args = parser.parse_args(argv)
    if args.write:
        write_maps(read_house(), PACKAGE.parent)
    else:
        print(PRINTED.get(args.map, describe)(read_house()))


if __name__ == "__main__":
    main()
