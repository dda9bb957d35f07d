"""The house stands: who may import whom, and where torch begins.

The oracle is the table below, which is the design's; the imports are read from the source.
"""

import ast
import re
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest
from clean_process import EXTRA_FILES, EXTRAS, FILES, PACKAGE, ROOT, modules, room_of, run

pytestmark = pytest.mark.floor
# The order in which README says to read the core.
READING_ORDER = ("sequence", "block_manager", "scheduler", "engine", "batch", "ops", "layers",
                 "model", "sampler", "config", "controls", "model_runner", "hooks", "llm")
# Bottom up: a file may import what its row allows, and a row allows only files before it.
MAY_IMPORT = {
    "rules": [],
    "turns": [],
    "model_config": [],
    "config": ["model_config", "rules"],
    "sequence": ["config"],
    "hooks": ["sequence", "rules"],
    "block_manager": ["sequence", "hooks"],
    "scheduler": ["config", "sequence", "hooks", "block_manager"],
    "detokenizer": ["config"],
    "request": ["config", "sequence", "detokenizer"],
    "inputs": ["config", "detokenizer", "model_config", "request", "sequence"],
    "progress": [],
    "batch": ["sequence"],
    "ops": ["batch", "sequence"],
    "build": [],
    "device": ["config", "model_config", "sequence"],
    "cpu": ["batch", "ops", "build", "device"],
    "triton_fused": [],
    "triton_sampling": ["ops", "triton_fused"],
    "triton_attention": ["batch", "ops", "triton_fused", "triton_sampling"],
    "graphs": ["batch", "sequence"],
    "self_test": ["batch", "build", "config", "cpu", "device", "graphs", "model_config", "ops",
                  "sequence", "triton_attention"],
    "parallel": ["turns"],
    "loader": ["model_config"],
    "layers": ["ops", "parallel", "model_config"],
    "model": ["batch", "graphs", "layers", "model_config", "sequence"],
    "controls": ["sequence", "config"],
    "sampler": ["sequence", "batch", "controls"],
    "model_runner": ["batch", "config", "controls", "device", "graphs", "layers", "loader",
                     "model", "model_config", "parallel", "sampler", "self_test", "sequence"],
    "engine": ["config", "hooks", "inputs", "model_runner", "progress", "request", "scheduler",
               "sequence", "turns"],
    "llm": ["config", "detokenizer", "device", "engine", "hooks", "inputs", "loader",
            "model_config", "model_runner", "parallel", "progress", "request", "self_test"],
}
BOTTOM_UP = [*MAY_IMPORT]
# Late, inside a function, because only who asks for it needs it.
LATE = {"self_test": ["triton_attention", "cpu"]}
# Bottom up: an idea may import the engine, and of other ideas those in its row.
IDEAS = {
    "base": [],  # what all of them share
    "structured": [], "lora": [], "pooling": [], "quantization": [], "block_store": [],
    "multimodal": ["foreign"], "recurrent": ["foreign"], "drafts": ["foreign"], "trace": [],
    "few_rows": [],
    "engine_args": [],  # all records of options
    "foreign": ["quantization", "pooling"],
    "forgetting": [],
    "new_weights": ["foreign", "block_store"],
    "thinking": ["server"], "logits_processors": [],
    "layer_plan": ["new_weights", "foreign"],
    "server": ["trace", "structured", "pooling", "lora", "layer_plan"],
    "tools": ["block_store", "quantization", "server"],
    "combinations": ["block_store", "drafts", "foreign", "forgetting", "layer_plan", "lora",
                     "multimodal", "new_weights", "pooling", "quantization", "recurrent",
                     "structured", "thinking"],
}

# Can be read, run and tested without torch, in seconds.
PURE = ["model_config", "config", "sequence", "hooks", "block_manager",
        "scheduler", "progress", "inputs", "rules",
        "turns"]
# A package that only these files may import.
HOMES = {"safetensors": ["loader"],
         "triton": ["triton_attention", "triton_fused", "triton_sampling"],
         "transformers": ["detokenizer", "model_config"],
         "huggingface_hub": ["loader"]}


def read(name: str, package: Path = PACKAGE) -> str:
    return (package / f"{name}.py").read_text(encoding="utf-8")


def imports_of(tree: ast.AST, package: Path = PACKAGE) -> set[str]:
    """The files of a package that a tree imports anywhere, by their names.

    `from nanoserve import ops` and `from nanoserve.ops import x` are both "ops"; a name that is
    imported from the package itself and is no file (`from nanoserve import LLM`) is "".
    """
    dotted = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import)
              for alias in node.names]
    # What is behind `import` may be a file, too: `from nanoserve import ops`.
    dotted += [f"{node.module}.{alias.name}" for node in ast.walk(tree)
               if isinstance(node, ast.ImportFrom) for alias in node.names]
    return {file_of(parts, package) for root, *parts in (name.split(".") for name in dotted)
            if root == package.name}


def file_of(parts: list[str], package: Path) -> str:
    """The longest beginning of a dotted name that is a file of the package."""
    beginnings = ["/".join(parts[:end]) for end in range(len(parts), 0, -1)]
    return next((name for name in beginnings if (package / f"{name}.py").exists()), "")


@cache
def imports(package: Path = PACKAGE) -> dict[str, set[str]]:
    return {name: imports_of(ast.parse(read(name, package)), package)
            for name in (FILES if package is PACKAGE else EXTRA_FILES)}


def is_in(name: str, patterns: list[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def top_level_imports(name: str) -> set[str]:
    tree = ast.parse(read(name))
    tree.body = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    return imports_of(tree)


def outside_imports(tree: ast.AST) -> set[str]:
    """The packages that are not ours."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import of {node.module}"
            names.add(node.module.partition(".")[0])
    return names - {"nanoserve", "nanoserve_extras"}


@pytest.mark.parametrize("name", FILES)
def test_imports_follow_the_table(name):
    at_top = top_level_imports(name)
    may = MAY_IMPORT[name]
    for other in imports()[name]:
        late = other in LATE.get(name, [])
        assert other and (other in may), f"{name} imports {other or 'nanoserve'}"
        assert (other in at_top) != late, f"{name} imports {other} in the wrong place"
    for package in outside_imports(ast.parse(read(name))):
        assert is_in(name, HOMES.get(package, ["*"])), f"{name} imports {package}"
    assert "TYPE_CHECKING" not in read(name)


def free_of_circles(imports: dict[str, set[str]]) -> None:
    """By the imports themselves, whatever the tables say, late ones included."""
    left = {name: others & set(imports) for name, others in imports.items()}
    while left:
        free = [name for name, others in left.items() if not others & set(left)]
        assert free, f"a circle among {sorted(left)}"
        for name in free:
            del left[name]


def test_there_is_no_circle():
    free_of_circles(imports())
    free_of_circles(imports(EXTRAS))


def test_the_engine_imports_the_extras_in_two_places_and_late():
    """And then the package alone, whose tables find the rest."""
    places = set()
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text("utf-8"))
        for node in ast.walk(tree):
            names = ([alias.name for alias in node.names] if isinstance(node, ast.Import) else
                     [node.module] if isinstance(node, ast.ImportFrom) else [])
            if named := [name for name in names if name.startswith("nanoserve_extras")]:
                assert named == ["nanoserve_extras"] and node not in tree.body, path
                assert path.stem not in places, path
                places.add(path.stem)
    assert places == {"__init__", "__main__"}


def test_no_idea_imports_another_but_by_its_row():
    rooms = {name: name.partition("/")[0] for name in EXTRA_FILES}
    assert set(rooms.values()) == set(IDEAS)
    for name, others in imports(EXTRAS).items():
        found = {rooms[other] for other in others if other} - {rooms[name], "base", "engine_args"}
        assert found <= set(IDEAS[rooms[name]]), name
    free_of_circles({idea: set(others) for idea, others in IDEAS.items()})


def test_the_engine_is_flat_and_stands_from_the_bottom_up():
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir()}
    assert folders - {"__pycache__"} == {"assets"}
    assert sorted(BOTTOM_UP) == FILES
    for i, name in enumerate(BOTTOM_UP):
        assert not set(MAY_IMPORT[name]) & set(BOTTOM_UP[i:]), name


def files_listed_on(page: str, folder: str) -> list[str]:
    """In a table or a list. folder: from the page's place to the package."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^(?:\||-) \[`\w+`\]\({folder}/([\w/]+)\.py\)", text, re.M)


def by_room(names: list[str]) -> list[str]:
    return sorted(names, key=lambda name: (room_of(name), name))


def test_the_maps_name_every_file_in_order():
    """README the core, in reading order; docs/architecture.md the engine from the bottom up, then
    the extras."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    block = readme.split("<!-- the core, in reading order -->\n```\n")[1].split("```")[0]
    assert [line.split()[0] for line in block.splitlines()] == [*READING_ORDER]
    assert files_listed_on("docs/architecture.md", "../nanoserve") == BOTTOM_UP
    assert files_listed_on("docs/architecture.md", "../nanoserve_extras") == by_room(EXTRA_FILES)


def test_no_file_imports_what_a_wheel_does_not_have():
    for name, package in [(name, PACKAGE) for name in FILES] + [
            (name, EXTRAS) for name in EXTRA_FILES]:
        packages = outside_imports(ast.parse(read(name, package)))
        assert not packages & {"bench", "benchmarks", "example", "tests"}, name


def test_packages_import_nothing():
    for path in [*PACKAGE.rglob("__init__.py"), *EXTRAS.rglob("__init__.py")]:
        if path.parent not in (PACKAGE, EXTRAS):
            assert not [node for node in ast.walk(ast.parse(path.read_text()))
                        if isinstance(node, (ast.Import, ast.ImportFrom))], path


@pytest.mark.parametrize("name", EXTRA_FILES)
def test_extras_use_no_private_name(name):
    """They stand on what the core promises. A name of their own with an underscore is theirs."""
    for node in ast.walk(ast.parse(read(name, EXTRAS))):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("nanoserve"):
            private = [alias.name for alias in node.names if alias.name.startswith("_")]
            assert not private, f"{name} imports {private}"


def test_the_pure_files_leave_torch_out():
    """A learner without torch installed, or without the seconds it takes, can run the scheduler."""
    run("import sys; " + "; ".join(f"import {name}" for name in modules(PURE)) + (
        "; import nanoserve; nanoserve.SamplingParams(); nanoserve.EngineConfig(model='x')"
        "; heavy = {'torch', 'transformers', 'triton', 'numpy'} & set(sys.modules)"
        "; assert not heavy, heavy"))
