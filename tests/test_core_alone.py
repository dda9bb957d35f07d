"""The engine runs without what is handed to it: `nanoserve_extras` deleted, or one idea of it."""

import shutil

from clean_process import EXTRAS, FILES, PACKAGE, modules, needs_extras, run

# As if it had been deleted: an editable installation finds the clone's.
HIDE = "import sys; sys.modules['nanoserve_extras'] = None"


def test_the_engine_runs_without_the_extras(tmp_path, qwen3):
    """With ranks, and a sentence for each thing that an extra would do. (CI runs the two scripts.)
    """
    shutil.copytree(PACKAGE, tmp_path / "nanoserve", ignore=shutil.ignore_patterns("__pycache__"))
    names = "; ".join(f"import {name}" for name in modules(FILES)
                      if "triton" not in name)  # they need it: for GPUs alone
    (tmp_path / "config.json").write_text('{"architectures": ["OPTForCausalLM"]}')
    run(f"""{HIDE}; {names}; from nanoserve import *
import nanoserve; assert not hasattr(nanoserve, "PoolingParams")
llm = LLM({str(qwen3)!r}, tensor_parallel_size=2)
out = llm.generate([1, 2, 3], SamplingParams(max_tokens=4))
assert len(out[0].outputs[0].token_ids) == 4
assert sys.modules["nanoserve"].__file__.startswith({str(tmp_path)!r})
from nanoserve.hooks import Extra
class Seen(Extra):
    def updated(self, step, accepted):
        seen.append(sum(map(len, accepted.values())))
seen = []
with LLM({str(qwen3)!r}, extras=[Seen()]) as watched:
    watched.generate([1, 2, 3], SamplingParams(max_tokens=4))
assert seen == [1, 1, 1, 1]
from nanoserve.__main__ import main
assert main([]) == 0 and main(["serve"]) == 2
for refused, words in (
        (lambda: LLM({str(tmp_path)!r}), "OPTForCausalLM"),
        (lambda: llm.embed("a"), "embed"),
        (lambda: LLM({str(qwen3)!r}, enable_lora=True), "enable_lora"),
        (lambda: LLM({str(qwen3)!r}, pipeline_parallel_size=2), "pipeline_parallel_size"),
        (lambda: LLM({str(qwen3)!r}, extras=[5]), "inherit from Extra, got 5"),
        (lambda: llm.generate([1], lora_request="a"), "lora_request"),
        (lambda: llm.generate([1], prioritty=1), "prioritty"),
        (lambda: SamplingParams(temprature=1), "temprature"),
        (lambda: llm.generate([[1], []], SamplingParams(max_tokens=4)), "prompt 1: "),
        (lambda: llm.generate([[1], [2]], [SamplingParams()]), "1 entries for 2 prompts"),
        (lambda: llm.generate([1], SamplingParams(structured_outputs=dict(regex="a"))),
         "structured_outputs=")):
    try:
        refused()
    except (ValueError, AttributeError, TypeError) as error:
        assert words in str(error), error
    else:
        assert False, words""", tmp_path)


# Where the tables name the idea that is deleted.
LORA = {"__init__.py": ['"LoRARequest": "lora.lora", ', '"lora.lora.LoRA": args.enable_lora,'],
        "engine_args.py": ["LoRAOptions, "]}


@needs_extras
def test_the_rest_runs_without_one_idea(tmp_path, qwen3):
    """A reader may delete a folder with its rows in the tables."""
    for package in (PACKAGE, EXTRAS):
        shutil.copytree(package, tmp_path / package.name, ignore=shutil.ignore_patterns(
            "lora", "server", "__pycache__"))
    for file, rows in LORA.items():
        text = (path := tmp_path / EXTRAS.name / file).read_text()
        for row in rows:
            assert text.count(row) == 1
            text = text.replace(row, "")
        path.write_text(text)
    run(f"""import nanoserve_extras; from nanoserve import LLM, SamplingParams
assert nanoserve_extras.__file__.startswith({str(tmp_path)!r})
out = LLM({str(qwen3)!r}).generate([1, 2, 3], SamplingParams(max_tokens=4))
assert len(out[0].outputs[0].token_ids) == 4""", tmp_path)
