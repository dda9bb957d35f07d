"""Annexes can be deleted, and everything else still works."""

import shutil

from clean_process import ANNEXES, CORE, PACKAGE, modules, run


def test_the_core_runs_without_annexes(tmp_path, qwen3):
    """Annexes are optional by construction: delete them, and everything else still works."""
    shutil.copytree(PACKAGE, tmp_path / "nanoserve", ignore=shutil.ignore_patterns(
        *ANNEXES, "__pycache__"))
    names = "; ".join(f"import {name}" for name in modules(CORE)
                      if "kernels" not in name)  # they need triton: for GPUs alone
    (tmp_path / "config.json").write_text('{"architectures": ["OPTForCausalLM"]}')
    run(f"""{names}; from nanoserve import *
import sys; import nanoserve; assert not hasattr(nanoserve, "PoolingParams")
out = LLM({str(qwen3)!r}).generate([1, 2, 3], SamplingParams(max_tokens=4))
assert len(out[0].outputs[0].token_ids) == 4
ours = [name.split(".") for name in sys.modules if name.startswith("nanoserve")]
assert not [parts for parts in ours if set(parts) & {set(ANNEXES)}]
assert sys.modules["nanoserve"].__file__.startswith({str(tmp_path)!r})
try:
    LLM({str(tmp_path)!r})
except ValueError as error:
    assert "OPTForCausalLM is not supported: choose one of Llama" in str(error)
else:
    assert False""", tmp_path)


def test_the_core_runs_without_the_extras_that_no_option_asks_for(tmp_path, qwen3):
    """A reader may delete a single idea, and not the folder alone."""
    shutil.copytree(PACKAGE, tmp_path / "nanoserve", ignore=shutil.ignore_patterns(
        "structured*.py", "foreign.py", "__pycache__"))
    (tmp_path / "config.json").write_text('{"architectures": ["OPTForCausalLM"]}')
    run(f"""from nanoserve import LLM, SamplingParams
out = LLM({str(qwen3)!r}).generate([1, 2, 3], SamplingParams(max_tokens=4))
assert len(out[0].outputs[0].token_ids) == 4
for refused, words in ((lambda: LLM({str(tmp_path)!r}), "OPTForCausalLM is not supported: choose"),
                       (lambda: SamplingParams(structured_outputs=dict(regex="a")),
                        "extras/structured.py was deleted")):
    try:
        refused()
    except ValueError as error:
        assert words in str(error)
    else:
        assert False""", tmp_path)
