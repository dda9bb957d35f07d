"""The line at the start is short and hides nothing slow; `describe()` tells the rest."""

import pytest

from nanoserve import LLM


@pytest.mark.parametrize("options, words", [
    (dict(kernels="torch"), ["kernels='torch'"]), (dict(quantization="int8"), ["int8"]),
    (dict(kv_cache_dtype="int8"), ["int8 keys and values"]),
    (dict(runner="pooling", convert="embed"), ["embed"])])
def test_the_line_fits_a_terminal_and_names_what_is_slow_or_rounded(options, words, capsys):
    with LLM(num_gpu_blocks_override=40, max_model_len=256, dtype="float32", **options) as llm:
        line = capsys.readouterr().err.strip()
        assert len(line) <= 120 and "\n" not in line
        for word in ("storyteller, cpu", "float32", *words):
            assert word in line
        told = llm.describe()
    for word in ("Qwen3ForCausalLM by nanoserve", "40 blocks of 16", "640 tokens", "no graphs",
                 "64 sequences a step, overlap 0"):
        assert word in told


def test_a_long_name_is_shortened(tmp_path, capsys):
    from nanoserve.llm import BUNDLED_MODEL
    link = tmp_path / ("a-very-long-name-" * 8)
    link.symlink_to(BUNDLED_MODEL)
    with LLM(str(link), num_gpu_blocks_override=40, max_model_len=256):
        assert len(capsys.readouterr().err.strip()) <= 120
