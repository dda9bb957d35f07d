"""The structure holds: who may import whom, where torch begins, and that extras stay optional.

The oracle is the table below, which is the design's; the imports are read from the source.
"""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "nanoserve"

# Bottom up: a module may import only what its row allows.
MAY_IMPORT = {
    "rope_config": [],
    "model_config": ["rope_config"],
    "config": ["model_config"],
    "sampling_params": [],
    "sequence": ["sampling_params"],
    "block_manager": ["sequence"],
    "scheduler": ["model_config", "config", "sequence", "block_manager"],
    "batch": ["sequence"],
    "kernels_fused": [],
    "kernels": ["batch", "kernels_fused"],
    "packing": [],
    "kv_cache": ["batch", "packing"],
    "attention": ["batch", "packing", "kv_cache"],
    "ops": ["kv_cache", "attention"],
    "parallel": [],
    "layers": ["rope_config", "parallel", "ops", "packing"],
    "model": ["model_config", "batch", "attention", "parallel", "layers"],
    "loader": ["model_config", "layers"],
    "controls": ["sampling_params", "sequence"],
    "sampler": ["sampling_params", "sequence", "batch", "controls"],
    "graphs": ["batch"],
    "memory": ["config", "sampling_params", "sequence"],
    "turns": [],
    "processes": ["parallel", "turns"],
    "model_runner": ["model_config", "config", "sampling_params", "sequence", "batch",
                     "ops", "kernels", "parallel", "layers", "model", "loader", "sampler", "graphs",
                     "memory"],
    "detokenizer": ["config", "sampling_params", "sequence"],
    "logprobs": ["sampling_params", "sequence"],
    "request": ["model_config", "config", "sampling_params", "sequence", "detokenizer", "logprobs"],
    "metrics": ["sequence", "scheduler"],
    "llm": ["model_config", "config", "sampling_params", "sequence", "scheduler", "parallel", "turns",
            "processes", "model_runner", "detokenizer", "request", "metrics", "extras"],
}
PURE = ["rope_config", "model_config", "config", "sampling_params", "sequence", "block_manager", "scheduler",
        "metrics"]
# A package that only these modules may import.
HOMES = {"safetensors": ["loader"], "triton": ["kernels", "kernels_fused"]}
# May be imported inside a function: needed for hub ids alone; with its triton, on GPUs alone.
OPTIONAL = {"huggingface_hub", "nanoserve.device.kernels"}


def modules() -> list[Path]:
    return [path for path in sorted(PACKAGE.glob("*.py")) if path.stem != "__init__"]


def imports(tree: ast.AST) -> list[tuple[str, ast.stmt]]:
    """Every imported module's dotted name, wherever in the file the import stands."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import of {node.module}"
            if node.module == "nanoserve":
                found += [(f"nanoserve.{alias.name}", node) for alias in node.names]
            else:
                found.append((node.module, node))
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda path: path.stem)
def test_imports_follow_the_reading_order(path):
    tree = ast.parse(path.read_text())
    allowed = MAY_IMPORT[path.stem]
    for name, node in imports(tree):
        parts = name.split(".")
        if parts[0] == "nanoserve":
            assert len(parts) > 1 and parts[1] in allowed, f"{path.name} imports {name}"
            assert parts[1] != "extras" or node not in tree.body, f"{path.name} needs {name}"
        assert path.stem in HOMES.get(parts[0], [path.stem]), f"{path.name} imports {name}"
        if parts[0] == "torch":
            assert path.stem not in PURE, f"{path.name} stands above the torch line"
    assert "TYPE_CHECKING" not in path.read_text()
    top_level = {node for node in tree.body}
    for name, node in imports(tree):
        optional = {name, name.split(".")[0]} & OPTIONAL or name.startswith("nanoserve.extras.")
        assert node in top_level or optional, (
            f"{path.name}:{node.lineno} imports {name} inside a function")


def test_every_module_has_a_row_and_no_cycle_is_allowed():
    assert {path.stem for path in modules()} == set(MAY_IMPORT)
    order = [*MAY_IMPORT, "extras"]
    for module, allowed in MAY_IMPORT.items():
        for other in set(allowed) - {"extras"}:
            assert order.index(other) < order.index(module)


def test_the_pure_modules_leave_torch_out():
    """A learner without torch installed, or without the seconds it takes, can run the scheduler."""
    code = "import sys; " + "; ".join(f"import nanoserve.{name}" for name in PURE) + (
        "; import nanoserve; nanoserve.SamplingParams(); nanoserve.EngineConfig(model='x')"
        "; heavy = {'torch', 'transformers', 'triton', 'numpy'} & set(sys.modules)"
        "; assert not heavy, heavy")
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parent)


def test_the_core_runs_without_extras(tmp_path, qwen3):
    """Extras are optional by construction: delete them, and everything else still works."""
    shutil.copytree(PACKAGE, tmp_path / "nanoserve", ignore=shutil.ignore_patterns(
        "extras", "assets", "__pycache__"))
    names = "; ".join(f"import nanoserve.{path.stem}" for path in modules()
                      if "kernels" not in path.stem)  # they need triton: for GPUs alone
    code = (f"{names}; from nanoserve import *; "
            f"out = LLM({str(qwen3)!r}).generate([1, 2, 3], SamplingParams(max_tokens=4)); "
            "assert len(out[0].outputs[0].token_ids) == 4; "
            "import sys; import nanoserve; assert not hasattr(nanoserve, 'PoolingParams'); "
            "assert not [m for m in sys.modules if 'extras' in m and 'nanoserve' in m]; "
            f"assert sys.modules['nanoserve'].__file__.startswith({str(tmp_path)!r})")
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True,
                            text=True)
    assert result.returncode == 0, result.stderr


def test_every_public_name_is_there():
    """Those of extras stand in `__all__` as well, and a star takes only what is there."""
    here = (PACKAGE / "extras").exists()
    code = ("import nanoserve; from nanoserve import *; "
            "assert all(name in globals() for name in nanoserve.__all__); "
            f"assert ('PoolingParams' in globals()) == {here}")
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parent)


@pytest.mark.parametrize("path", modules(), ids=lambda path: path.stem)
def test_every_file_explains_itself(path):
    """A module docstring of 8 to 30 lines, lines of at most 100 columns, and not too many."""
    text = path.read_text()
    docstring = ast.get_docstring(ast.parse(text)) or ""
    assert 8 <= len(docstring.splitlines()) <= 30, f"{path.name}: {len(docstring.splitlines())}"
    limit = 500 if path.stem in (
        "kernels", "kernels_fused", "model_runner", "llm") else 380
    assert len(text.splitlines()) <= limit, f"{path.name} has {len(text.splitlines())} lines"
    too_long = [i for i, line in enumerate(text.splitlines(), 1) if len(line) > 100]
    assert not too_long, f"{path.name}: lines {too_long} are wider than 100 columns"
