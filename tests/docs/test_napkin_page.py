"""docs/napkin.md: every line is worked out again, and it is about the real models."""

import re

import torch
from pages import block_after, read
from transformers import AutoModelForCausalLM, Qwen3Config

from nanoserve import LLM

PAGE = read("docs/napkin.md")


def napkins() -> list[tuple[str, str, float, int]]:
    """(the line, its left side, its result, decimals) of every line."""
    lines = []
    for at in re.finditer("<!-- napkin -->", PAGE):
        for line in block_after(PAGE, "<!-- napkin -->", at.start()).strip().splitlines():
            words, right = line[16:].split(" = ")
            number = right.split()[0]
            lines.append((line, words, float(number.replace(",", "")),
                          len(number.partition(".")[2])))
    return lines


def numbers_in(text: str) -> list[float]:
    return [float(n.replace(",", "")) for n in re.findall(r"\d[\d,]*(?:\.\d+)?", text)]


def test_the_napkins_are_right():
    """Each line is worked out from left to right; what is printed is that, rounded."""
    lines = napkins()
    assert len(lines) == 9
    for line, words, result, decimals in lines:
        numbers, signs = numbers_in(words), re.findall(" ([×/]) ", words)
        value = numbers[0]
        for sign, number in zip(signs, numbers[1:], strict=True):
            value = value * number if sign == "×" else value / number
        assert round(value, decimals) == result, f"{line}: {value}"
    assert round(989 / 4800 * 1000) == 206 and "989 / 4,800 × 1,000 = 206 tokens" in PAGE


def test_the_napkins_are_about_the_real_thing():
    """The bundled model's line is what its engine allocates; a gigabyte's is how the engine counts;
    and the parameters are those of the model that transformers makes from Qwen3-0.6B's sizes."""
    lines = [(numbers_in(words), result) for _, words, result, _ in napkins()]
    with LLM(dtype="float32", kv_cache_memory_bytes=2 ** 24) as llm:
        c = llm.model_config
        assert lines[1] == ([2, c.num_hidden_layers, c.num_key_value_heads, c.head_dim, 4],
                            llm.runner.block_bytes / 16)
        assert llm.scheduler.blocks.num_blocks == int(2 ** 24 / lines[1][1] / 16)
    _, layers, kv_heads, head_dim, _ = map(int, lines[0][0])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Qwen3Config(
            vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_attention_heads=16,
            num_hidden_layers=layers, num_key_value_heads=kv_heads, head_dim=head_dim,
            tie_word_embeddings=True))
    count = sum(parameter.numel() for parameter in model.parameters())
    assert re.search(rf"{count:,}\sparameters", PAGE)
    assert round(count / 1e6, 2) == lines[4][0][0] and round(count / 1e9, 5) == lines[8][0][2]
    assert lines[6][0][2] == lines[0][1] / 1e6
