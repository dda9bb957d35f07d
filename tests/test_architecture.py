"""The house stands: who may import whom, and where torch begins.

The oracle is the table below, which is the design's; the imports are read from the source.
"""

import ast
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest
from clean_process import modules, run
from house_files import FILES

from nanoserve.tools.house import ANNEXES, DOORS, PACKAGE, File, imports_of

pytestmark = pytest.mark.floor
CONFIG_FILES = ["checkpoint/model_config", "checkpoint/rope_config"]
# Bottom up: a file may import what its row allows; a pattern stands for several files.
MAY_IMPORT = {
    "words/*": [],
    "checkpoint/hub": [],
    "checkpoint/rope_config": [],
    "checkpoint/rope_frequencies": ["checkpoint/rope_config"],
    "checkpoint/model_config": ["checkpoint/rope_config"],
    "checkpoint/tokenizers": ["checkpoint/hub"],
    "parallel/*": ["parallel/*"],
    "config": [*CONFIG_FILES, "words/*"],
    "sequence": ["config"],
    "block_manager": ["sequence"],
    "scheduler": ["config", "sequence", "block_manager"],
    "batch": ["sequence"],
    "ops": ["batch"],
    "device/*": ["batch", "ops", "config", "sequence", "device/*"],
    "layers": ["ops", "parallel/*", "checkpoint/rope_frequencies", *CONFIG_FILES],
    "model": ["layers", "batch", *CONFIG_FILES],
    "controls": ["sequence", "batch", "config", "ops"],
    "sampler": ["sequence", "batch", "config", "ops", "controls"],
    "checkpoint/loader": CONFIG_FILES,
    "model_runner": ["checkpoint/*", "parallel/*", "device/*", "config", "sequence", "batch", "ops",
                     "layers", "model", "controls", "sampler"],
    "frontend/*": ["config", "sequence", "scheduler", "checkpoint/*", "words/*", "frontend/*"],
    "engine": ["scheduler", "model_runner", "frontend/metrics", "frontend/outputs",
               "frontend/prompts", "frontend/request", "config", "sequence", "parallel/turns"],
    "llm": ["engine", "model_runner", "scheduler", "frontend/*", "checkpoint/*", "parallel/*",
            "device/*", "words/*", "config", "sequence"],
}
# Late, inside a function, because only who asks for it needs it.
LATE = {"device/choice": ["device/kernels", "device/cpu", "device/onednn"],
        "llm": ["extras/*", "tools/recorder"], "frontend/inputs": ["extras/structured"]}

# Can be read, run and tested without torch, in seconds.
PURE = ["checkpoint/hub", "checkpoint/rope_config", "checkpoint/model_config",
        "words/vllm", "words/rules", "config", "sequence", "block_manager",
        "scheduler", "frontend/command", "frontend/metrics", "frontend/prompts", "parallel/turns"]
# A package that only these files may import.
HOMES = {"safetensors": ["checkpoint/loader"], "triton": ["device/kernels", "device/kernels_fused"],
         "transformers": ["checkpoint/tokenizers"], "huggingface_hub": ["checkpoint/hub"]}

CORE = [file for file in FILES if file.room not in ANNEXES]


def path_of(file: File) -> Path:
    return PACKAGE / f"{file.name}.py"


def allowed(name: str, table: dict[str, list[str]]) -> list[str]:
    """All that the rows of `table` allow a file."""
    return [other for row, others in table.items() if fnmatch(name, row) for other in others]


def is_in(name: str, patterns: list[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def top_level_imports(file: File) -> set[str]:
    tree = ast.parse(path_of(file).read_text())
    tree.body = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    return set(imports_of(tree))


def outside_imports(tree: ast.AST) -> set[str]:
    """The packages that are not ours."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import of {node.module}"
            names.add(node.module.partition(".")[0])
    return names - {"nanoserve"}


@pytest.mark.parametrize("file", CORE, ids=lambda file: file.name)
def test_imports_follow_the_table(file):
    at_top = top_level_imports(file)
    may = allowed(file.name, MAY_IMPORT)
    assert any(fnmatch(file.name, row) for row in MAY_IMPORT), "has no row"
    for other in file.imports:
        late = is_in(other, allowed(file.name, LATE))
        assert other and (is_in(other, may) or late), f"{file.name} imports {other or 'nanoserve'}"
        assert (other in at_top) != late, f"{file.name} imports {other} in the wrong place"
    for package in outside_imports(ast.parse(path_of(file).read_text())):
        assert is_in(file.name, HOMES.get(package, ["*"])), f"{file.name} imports {package}"
    assert "TYPE_CHECKING" not in path_of(file).read_text()


def test_there_is_no_circle():
    """By the imports themselves, whatever the table says, late ones included."""
    imports = {file.name: {*file.imports} & {other.name for other in FILES} for file in FILES}
    while imports:
        free = [name for name, others in imports.items() if not others & set(imports)]
        assert free, f"a circle among {sorted(imports)}"
        for name in free:
            del imports[name]


def test_packages_import_nothing():
    for path in PACKAGE.rglob("__init__.py"):
        if path.parent != PACKAGE:
            assert not [node for node in ast.walk(ast.parse(path.read_text()))
                        if isinstance(node, (ast.Import, ast.ImportFrom))], path


@pytest.mark.parametrize("file", [file for file in FILES if file.room in ANNEXES],
                         ids=lambda file: file.name)
def test_annexes_use_no_private_name(file):
    """They stand on what the core promises. A name of their own with an underscore is theirs."""
    tree = ast.parse(path_of(file).read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("nanoserve"):
            private = [alias.name for alias in node.names if alias.name.startswith("_")]
            assert not private, f"{file.name} imports {private}"


def test_the_pure_files_leave_torch_out():
    """A learner without torch installed, or without the seconds it takes, can run the scheduler."""
    run("import sys; " + "; ".join(f"import {name}" for name in modules(PURE)) + (
        "; import nanoserve; nanoserve.SamplingParams(); nanoserve.EngineConfig(model='x')"
        "; heavy = {'torch', 'transformers', 'triton', 'numpy'} & set(sys.modules)"
        "; assert not heavy, heavy"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_file_explains_itself(file):
    """A module docstring that begins with one sentence, and lines of at most 100 columns."""
    text = path_of(file).read_text()
    docstring = ast.get_docstring(ast.parse(text)) or ""
    assert len(docstring.splitlines()) >= 8, f"{file.name} has hardly a docstring"
    assert re.match(r"[^\n]{20,98}[.:]\n\n", docstring), f"{file.name} begins with no sentence"
    too_long = [i for i, line in enumerate(text.splitlines(), 1) if len(line) > 100]
    assert not too_long, f"{file.name}: lines {too_long} are wider than 100 columns"


def test_doors_are_short():
    """What makes a folder a package, or a package a command, holds no idea."""
    for door in DOORS:
        for path in PACKAGE.rglob(f"{door}.py"):
            assert len(path.read_text().splitlines()) < 60, path
