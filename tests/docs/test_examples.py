"""Every example on a page prints what stands behind it.

README's own is in tests/test_readme.py, the simulated arrivals are in test_arrivals.py.
"""

import os
import re
import subprocess
import sys

import pytest
from pages import ROOT, block_after, read, run

from nanoserve import LLM, SamplingParams

# A page, the marker before its program, and the one before what that prints.
PROGRAMS = [
    ("extras", "<!-- drafts -->", "<!-- printed by the speculative example -->"),
    ("extras", "<!-- a drafter -->", "<!-- printed by the drafter -->"),
    ("extras", "<!-- structured -->", "<!-- printed by the structured example -->"),
    ("extras", "<!-- int8 -->", "<!-- printed by the int8 example -->"),
    ("extras", "<!-- adapters -->", "<!-- printed by the example of adapters -->"),
    ("extras", "<!-- pooling -->", "<!-- printed by the pooling example -->"),
    ("extras", "<!-- two starts -->", "<!-- printed by the example above -->"),
    ("extras", "<!-- two engines -->", "<!-- printed by the two engines -->"),
    ("extras", "<!-- forgetting -->", "<!-- printed by the forgetting example -->"),
    ("extras", "<!-- napkin -->", "<!-- printed by the napkin -->"),
    ("server", "<!-- stories -->", "<!-- printed by the stories -->"),
    ("training", "## A hook on logits", "<!-- printed by the example above -->"),
    ("training", "<!-- with a state -->", "<!-- printed by the example with a state -->"),
]


@pytest.mark.parametrize("name, program, printed", PROGRAMS)
def test_a_program_prints_what_is_shown(name, program, printed):
    page = read(f"docs/{name}.md")
    shown = block_after(page, printed)
    assert run("-c", block_after(page, program)) == shown
    if program == "<!-- two engines -->":
        assert_engines_apart_write_what_one_writes(shown)
    elif program == "<!-- two starts -->":
        assert int(re.search(r"second start: (\d+)", shown)[1]) > 200


def assert_engines_apart_write_what_one_writes(shown: str) -> None:
    """All full blocks but that of the last token came from the first engine, until it was killed.
    """
    tale = "The fisherman told the children a story. " * 8
    prompts = [tale + "It began:", tale + "It ended:", "A bell rang. " * 20]
    with LLM(dtype="float32", enable_prefix_caching=False) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    lengths = [len(output.prompt_token_ids) for output in outputs]
    found = [*((length - 1) // 16 * 16 for length in lengths[:2]), 0]
    assert shown == "".join(
        f"{num_found} of {length} tokens came, then {output.outputs[0].text!r}\n"
        for num_found, length, output in zip(found, lengths, outputs, strict=True))


@pytest.mark.full
def test_verify_prints_what_is_shown():
    """But for the figures of few bits: they depend on how the machine's CPU rounds."""
    page = read("docs/models.md")
    command = re.search(r"`python (-m nanoserve verify nanoserve/.*?)`", page)[1]
    shown = block_after(page, "<!-- printed by: python -m nanoserve verify -->")
    printed = run(*command.split())
    for rounded in ("auto", "int8", "int4", "KV int8"):
        line = re.compile(rf"^{rounded}  +911  .*(up to [\d.]+%)$", re.M)
        assert line.search(printed)[1] == line.search(shown)[1]
        printed, shown = line.sub("", printed), line.sub("", shown)
    assert printed == shown


def test_openais_client_and_the_agent_print_what_is_shown():
    pytest.importorskip("fastapi")
    pytest.importorskip("openai")
    process = subprocess.Popen([sys.executable, "-m", "nanoserve", "serve", "--dtype", "float32",
                                "--port", "0"],
                               stderr=subprocess.PIPE, text=True, cwd=ROOT,
                               env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    try:
        line = next(line for line in process.stderr if "nanoserve: serving" in line)
        address = re.search(r"http://127\.0\.0\.1:\d+", line)[0]
        page = read("docs/server.md")
        for who in ("client", "agent"):
            code = block_after(page, f"<!-- {who} -->").replace("http://127.0.0.1:8000", address)
            shown = block_after(page, f"<!-- printed by the {who} -->")
            assert run("-c", code).strip() == shown.strip()
    finally:
        process.terminate()
        process.communicate()


def test_two_actors_of_ray_write_in_order_what_generate_writes(tmp_path, monkeypatch):
    """The page's program, with a small model in place of a GPU's; it needs the extra `test-full`.
    """
    ray = pytest.importorskip("ray", reason="it is one of the extra 'test-full'")
    prompts = [f"{words} {i}" for i in range(3) for words in ("Once upon a time", "The king")]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts))
    program = block_after(read("docs/server.md"), "<!-- ray -->")
    for theirs, ours in (('"prompts.txt"', repr(str(tmp_path / "prompts.txt"))),
                         ('"Qwen/Qwen3-0.6B"', 'dtype="float32", num_gpu_blocks_override=64'),
                         ("max_tokens=64", "max_tokens=6"), ("batch_size=256", "batch_size=2"),
                         ("num_gpus=1", "num_cpus=0.5")):
        assert theirs in program
        program = program.replace(theirs, ours)
    try:
        printed = run("-c", program)
    finally:
        ray.shutdown()
    with LLM(dtype="float32", num_gpu_blocks_override=64) as llm:
        outputs = llm.generate(prompts, [SamplingParams(max_tokens=6, seed=i) for i in range(6)],
                               use_tqdm=False)
    assert printed == "".join(output.outputs[0].text + "\n" for output in outputs)


def test_the_extra_of_ones_own_refuses_what_it_says():
    names: dict = {}
    exec(block_after(read("CONTRIBUTING.md"), "<!-- an extra of one's own -->"), names)
    with names["llm"] as llm:
        assert llm.generate([5, 6, 7], use_tqdm=False)
        with pytest.raises(ValueError, match="4 tokens.*most=3"):
            llm.generate([5, 6, 7, 8])
