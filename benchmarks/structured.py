"""What structured output costs and saves: steps with forced tokens as drafts, and a step's masks.

    python -m benchmarks.structured
    python -m benchmarks.structured MODEL --rounds 5

Where a grammar leaves one text possible, its tokens are drafts that are always right, so a request
takes fewer steps. Forced tokens use rows that other sequences leave free in a step, so an engine
with `max_num_seqs=1` has no such drafts: it is compared with an engine of 64. The engines take
turns; the median of the pairs' ratios of CPU seconds, which leave out other programs, is the gain.

The second table is about the price. For each row the library computes a mask on the host; then the
masks go to the device, where every bit becomes a logit that stays or turns -inf. The vocabulary is
made up, as large as Qwen3's, and the logits are noise: what is measured depends on neither.
"""

import argparse
import random
import statistics
import time

import torch
from tokenizers import Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from nanoserve import LLM
from nanoserve.config import SamplingParams
from nanoserve.controls import gather_edits
from nanoserve.llm import BUNDLED_MODEL
from nanoserve.sampler import put
from nanoserve.sequence import CoreRequest, Sequence
from nanoserve_extras.structured.structured import Grammars

PROMPT = "Once upon a time there was a"
WORD = {"type": "string", "pattern": "^[a-z]{3,8}$"}
HERO = dict(type="object", additionalProperties=False, required=["hero", "age", "animals"],
            properties=dict(hero=WORD, age=dict(type="integer", minimum=1, maximum=99),
                            animals=dict(type="array", items=WORD, minItems=3, maxItems=3)))
FORM = dict(type="object", additionalProperties=False, properties={
    name: dict(type="boolean") for name in (
        "has_a_princess", "has_a_dragon", "is_set_in_a_forest", "ends_happily", "has_a_moral")})
FORM["required"] = list(FORM["properties"])
WISHES = {"a hero, an age, animals": {"json": HERO}, "a form of five yes or no": {"json": FORM},
          "a choice of endings": {"choice": ["and they lived happily ever after.",
                                             "and that was the end of it."]},
          "letters, nothing forced": {"regex": "[a-z ]{60}"}}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", default=str(BUNDLED_MODEL))
    parser.add_argument("--rounds", type=int, default=5, help="how often both take turns")
    parser.add_argument("--rows", type=int, default=64, help="rows that have a mask")
    parser.add_argument("--vocab-size", type=int, default=152_000)
    args = parser.parse_args(arguments)
    print(steps_table(args.model, args.rounds))
    print()
    print(mask_table(args.rows, args.vocab_size, args.rounds))


# ------------------------------------------------------------------------- steps


def steps_table(model: str, rounds: int) -> str:
    """One request at a time, greedy, in an engine without room for drafts and in one with."""
    one, many = (LLM(model, dtype="float32", max_num_seqs=rows, max_num_batched_tokens=256,
                     max_model_len=512, num_gpu_blocks_override=32, enable_prefix_caching=False)
                 for rows in (1, 64))
    lines = [f"{'one request':27}{'tokens':>7}{'steps':>7}{'with drafts':>13}{'gain':>7}"]
    for name, asked in WISHES.items():
        params = SamplingParams(temperature=0, max_tokens=200, structured_outputs=asked)
        runs = {one: [], many: []}
        for i in range(rounds + 1):  # the first is for caches
            for llm in (one, many)[::1 if i % 2 else -1]:
                runs[llm].append(measure(llm, params))
        (tokens, steps, _), (same, fewer, _) = runs[one][0], runs[many][0]
        pairs = list(zip(runs[one], runs[many], strict=True))
        gain = statistics.median(a[2] / b[2] for a, b in pairs[1:] or pairs)
        note = "" if tokens == same else "  another text: a near-tie?"
        lines.append(f"{name:27}{len(tokens):7}{steps:7}{fewer:13}{gain:6.2f}x{note}")
    return "\n".join(lines)


def measure(llm: LLM, params: SamplingParams) -> tuple[list[int], int, float]:
    """The text's tokens, and the steps and CPU seconds that they took."""
    num_steps, start = llm.metrics.num_steps, time.process_time()
    output, = llm.generate(PROMPT, params, use_tqdm=False)
    seconds = time.process_time() - start
    return output.outputs[0].token_ids, llm.metrics.num_steps - num_steps, seconds


# ------------------------------------------------------------------------- masks


def made_up_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """All bytes, and words of them, with and without a space in front."""
    rng, words = random.Random(0), dict.fromkeys(sorted(ByteLevel.alphabet()))
    while len(words) < vocab_size - 1:
        letters = "".join(rng.choices("etaoinshrdlucmfwypvbgkqjxz0123456789\"{}:,",
                                      k=rng.randint(2, 7)))
        words[rng.choice(("", "Ġ")) + letters] = None
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def mask_table(num_rows: int, vocab_size: int, rounds: int) -> str:
    """CPU microseconds of a step whose rows are in the middle of a text."""
    tokenizer = made_up_tokenizer(vocab_size)
    grammars = Grammars(tokenizer, vocab_size)
    logits = torch.randn(num_rows, vocab_size)
    device = torch.device("cpu")
    lines = [f"{f'{num_rows} rows, {vocab_size:,} tokens':27}{'masks':>9}{'applied':>9}  CPU µs"]
    for name, asked, output in (("in a string", {"json": HERO}, '{"hero": "a'),
                                ("at a number", {"json": HERO}, '{"hero": "ann", "age": '),
                                ("any JSON object", {"json_object": True}, '{"a": [1, "')):
        grammar = grammars.compile(asked, frozenset({tokenizer.eos_token_id}))
        ids = tokenizer.encode(output, add_special_tokens=False)
        core = CoreRequest("r", SamplingParams(structured_outputs=asked))
        seqs = [Sequence(core, [1]) for _ in range(num_rows)]
        constraints = {seq: grammar.fresh() for seq in seqs}
        made, applied = [], []
        for token_ids in (ids[:-1], *[ids] * rounds):  # the first is for the library's own caches
            for seq in seqs:
                seq.token_ids, seq.num_unknown_tokens = [1, *token_ids], 1
            start = time.process_time()
            edits = gather_edits([(i, seq, ()) for i, seq in enumerate(seqs)],
                                 constraints, lambda values, dtype=torch.float32: put(
                                     values, dtype, device=device))
            made.append(time.process_time() - start)
            start = time.process_time()
            edits.apply(logits.clone())
            applied.append(time.process_time() - start)
        lines.append(f"{name:27}{1e6 * statistics.median(made[1:]):9,.0f}"
                     f"{1e6 * statistics.median(applied[1:]):9,.0f}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
