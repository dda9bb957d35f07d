"""Check the engine on *this* checkpoint: compare its text with transformers', in every mode.

    python -m nanoserve verify                   the bundled model
    python -m nanoserve verify Qwen/Qwen3-0.6B --prompts prompts.txt
    python -m nanoserve verify folder --tensor-parallel-size 2
    python -m nanoserve verify folder --model-impl transformers
    python -m nanoserve verify model.gguf --text book.txt        its perplexity, as it is served

The scheduler may change *when* a token is computed, never *which* token comes out. So transformers
writes greedily, one prompt at a time, once; then the engine has to write the same in each mode, a
row of the table: alone and batched, in chunks, from the prefix cache, preempted and so on. Both
compute in float32: in bfloat16 so many choices are within rounding errors that only large errors
would show. A second table has the effect of bfloat16 and fewer bits (verify_served.py).

A token that differs is a bug or a near-tie. The same numbers added in another order round
differently, which decides where two logits are almost equal. The `gap` tells them apart: how far
our token's logit lies below the best one in transformers' logits. Rounding errors are relative, so
a near-tie is a gap of at most `--near-tie` times the largest |logit| there. Correct engines were
1e-6 apart by that measure on a trained model and 9e-6 on 28 layers of random weights; the default
is 2e-5, which is 6e-4 for a logit of 30. After a near-tie the two texts go on differently, so the
rest of that text isn't compared.

The reference is a plain loop and not `generate`, because generation_config.json may ask for
penalties; with `--dense` it has no KV cache either, so that a bug of transformers' cache is not
taken for ours. Prompts and output tokens are counted from 0. A bug that both engines have is not
found.
"""

import argparse
import sys
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from nanoserve.config import KERNELS, RequestOutputKind, SamplingParams
from nanoserve.detokenizer import load_tokenizer
from nanoserve.hooks import Extra
from nanoserve.parallel import check_shares
from nanoserve.sequence import Step
from nanoserve_extras import choose
from nanoserve_extras.base.checkpoint import find_folder
from nanoserve_extras.base.config_files import ModelConfig, read_architecture, read_json
from nanoserve_extras.base.device import pick_device
from nanoserve_extras.base.llm import LLM
from nanoserve_extras.block_store.block_store import BlockStore
from nanoserve_extras.engine_args import EngineArgs
from nanoserve_extras.tools.verify_served import (
    WINDOW,
    Served,
    compare_kinds,
    read_text,
    read_windows,
    reference_answers,
)

NEAR_TIE = 2e-5  # the default
CONDITIONAL = "ForConditionalGeneration"  # how the names of wrappings end
NEVER = " (never!)"  # marks a mode that did not do what it is for
NUM_RIVALS = 20  # the likeliest tokens of a position, whose gaps are kept
EXIT_CODES = """exit code: 0, the same text in every mode but for near-ties; 1, a real difference or
a mode that failed; 2, wrong use, or a model that can't be loaded, here or in transformers; 130,
interrupted, and no difference so far"""

PROMPTS = Path(__file__).with_suffix(".txt")
# To how many tokens these are cut: around one and two blocks of 16, and many blocks.
LENGTHS = [1, 15, 16, 17, 41, 31, 32, 48, 33, 64, 48, 70]


@dataclass(frozen=True)
class Mode:
    """A way to run the engine: a row of the table."""

    name: str
    options: dict = field(default_factory=dict)
    n: int = 1  # samples of a prompt; above 1 with top_k=1, which leaves only the greedy text
    rounds: int = 1  # the second one finds its prompts in the prefix cache
    tiny: bool = False  # KV blocks for the longest text and no more: others must make way
    restarts: bool = False  # then another engine, which finds the first one's blocks in a folder
    loses: bool = False  # steps are lost on the way, and computed again


UNCACHED = dict(enable_prefix_caching=False)
BATCHED = Mode("batched", UNCACHED)
PREEMPTED = Mode("preempted", tiny=True)
POOLED = Mode("offloaded", dict(kv_offload_bytes=2 ** 28), rounds=2, tiny=True)
MODES = [
    Mode("alone", UNCACHED | dict(max_num_seqs=1)),
    BATCHED,
    Mode("chunks of 7", UNCACHED | dict(max_num_batched_tokens=7)),
    Mode("chunks of 33", UNCACHED | dict(max_num_batched_tokens=33)),
    Mode("prefix-cached", rounds=2),
    PREEMPTED,
    Mode("overlap", dict(async_scheduling=True)),
    Mode("a step is lost", dict(async_scheduling=True), rounds=2, loses=True),
    Mode("n=3", n=3),
    Mode("blocks of 5", dict(block_size=5)),
    Mode("blocks of 32", dict(block_size=32)),
    Mode("all at once", dict(block_size=5, max_num_batched_tokens=33, async_scheduling=True),
         n=3, rounds=2, tiny=True),
    POOLED,
    Mode("restarted from disk", restarts=True),
    Mode("plain operators", dict(kernels="torch"))]  # the specification itself
GPU_MODES = [  # the features of a GPU, switched off one after the other
    Mode("no overlap", dict(async_scheduling=False)),
    Mode("no graphs", dict(enforce_eager=True))]
PARALLEL_MODES = [  # run over several ranks, too
    BATCHED, Mode("chunked, cached", dict(max_num_batched_tokens=33), rounds=2), PREEMPTED, POOLED,
    Mode("restarted", restarts=True), Mode("overlap", dict(async_scheduling=True))]


def modes_for(config: ModelConfig) -> list[Mode]:
    """Recurrent states have no second place (recurrent/recurrent.py)."""
    return [mode for mode in MODES if not config.keeps_states or not (
        mode.restarts or "kv_offload_bytes" in mode.options)]


@dataclass
class Text:
    """transformers' text after a prompt, and by position how close each choice was."""

    prompt: list[int]
    token_ids: list[int] = field(default_factory=list)
    gaps: list[dict[int, float]] = field(default_factory=list)  # for the likeliest tokens
    near: list[float] = field(default_factory=list)  # the largest gap of a near-tie

    def compare(self, token_ids: list[int]) -> tuple[int, str, bool]:
        """How many of our tokens are equal up to the first that isn't, what is different there (""
        for nothing), and whether that is a near-tie. A text that stops early or runs on differs at
        its end, which never is one."""
        for i, (ours, theirs) in enumerate(zip_longest(token_ids, self.token_ids)):
            if ours is None or theirs is None:
                names = ("the end" if token is None else token for token in (ours, theirs))
                return i, "token {}: {} for {}".format(i, *names), False
            if ours != theirs:  # a token that is not among the likeliest is at least as far
                gap, near = self.gaps[i].get(ours, max(self.gaps[i].values())), self.near[i]
                return i, (f"token {i}: {ours} for {theirs}, gap {gap:.1e} (near-ties: up to "
                           f"{near:.1e})"), gap <= near
        return len(token_ids), "", False


@dataclass
class Outcome:
    """The result of one mode: a line, and one for the first difference of each kind."""

    name: str
    num_texts: int = 0
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    num_tokens: int = 0
    num_equal: int = 0
    near_ties: list[str] = field(default_factory=list)
    differ: list[str] = field(default_factory=list)  # a failure, too

    COLUMNS = "{:24}{:>7}{:>11}{:>9}{:>9}{:>9}{:>11}{:>9}"
    HEADER = COLUMNS.format("mode", "texts", "preempted", "cached", "tokens", "equal", "near-ties",
                            "differ")

    def __str__(self) -> str:
        equal = self.num_equal if self.near_ties or self.differ else "all"
        line = self.COLUMNS.format(
            self.name, self.num_texts, self.num_preemptions, self.num_cached_tokens,
            self.num_tokens, equal, len(self.near_ties), len(self.differ))
        return "\n    ".join([line, *self.differ[:1], *self.near_ties[:1]])


def read_prompts(path: Path, tokenizer, count: int, longest: int) -> list[list[int]]:
    """Token ids of up to `count` prompts, one a line; the bytes of the line where there is no
    tokenizer. Raises `ValueError` for none, or one that is too long."""
    lines = [line for line in read_text(path).splitlines() if line.strip()][:count]
    prompts = [tokenizer.encode(line) if tokenizer else list(line.encode()) for line in lines]
    if path == PROMPTS:
        return [prompt[:min(length, longest)]
                for prompt, length in zip(prompts, LENGTHS, strict=False)]
    for i, prompt in enumerate(prompts):
        if not 0 < len(prompt) <= longest:
            raise ValueError(f"{path}: prompt {i} has {len(prompt)} tokens, and the model has room "
                             f"for {longest} before --max-tokens more: shorten either")
    if not prompts:
        raise ValueError(f"{path} is empty: write one prompt a line")
    return prompts


def load_reference(folder: Path):
    """transformers' model in float32. A wrapping is whole, with the towers that the engine leaves
    out."""
    try:
        wraps = read_architecture(read_json(folder / "config.json")).endswith(CONDITIONAL)
        auto = AutoModelForImageTextToText if wraps else AutoModelForCausalLM
        if wraps:
            print("verify: texts are compared, and no images (docs/extras.md says with which "
                  "classes they were)", file=sys.stderr)
        model = auto.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
    except Exception as error:  # transformers raises whatever its parsers raise
        raise ValueError(f"transformers can't load {folder}: {error}") from error
    return model.to(pick_device("auto")).eval()


@torch.inference_mode()
def write_reference(model, prompt: list[int], eos_token_ids: tuple[int, ...], max_tokens: int,
                    near_tie: float, dense: bool = False) -> Text:
    """Greedy, one forward pass a token, to an EOS or `max_tokens`. dense: each pass is over the
    whole text, without a KV cache."""
    text, new, cache = Text(prompt), prompt, None
    while len(text.token_ids) < max_tokens and not set(text.token_ids) & set(eos_token_ids):
        out = model(torch.tensor([prompt + text.token_ids if dense else new], device=model.device),
                    use_cache=not dense, logits_to_keep=1,
                    **({} if dense else dict(past_key_values=cache)))
        cache, logits = out.past_key_values, out.logits[0, -1]  # (vocab_size,)
        best = logits.topk(min(NUM_RIVALS, len(logits)))
        gaps = (best.values[0] - best.values).tolist()
        text.gaps.append(dict(zip(best.indices.tolist(), gaps, strict=True)))
        text.near.append(near_tie * logits.abs().max().item())
        new = [int(logits.argmax())]
        text.token_ids += new
    return text


def run_mode(folder: Path, mode: Mode, texts: list[Text], max_tokens: int, **options) -> Outcome:
    """One engine, one row. An error while it runs is a difference; one at its start (`ValueError`:
    the options don't fit the model) is the caller's."""
    options = dict(block_size=16, dtype="float32") | options | mode.options
    ranks = options["tensor_parallel_size"]
    row = Outcome(mode.name + (f", {ranks} ranks" if ranks > 1 else ""))
    needs = [len(text.prompt) + max_tokens for text in texts]
    blocks = [-(-need // options["block_size"]) for need in needs]
    greedy = dict(temperature=0) if mode.n == 1 else dict(temperature=1.0, top_k=1, n=mode.n)
    params = SamplingParams(**greedy, max_tokens=max_tokens, detokenize=False,
                            output_kind=RequestOutputKind.FINAL_ONLY)
    options["num_gpu_blocks_override"] = max(blocks) if mode.tiny else mode.n * sum(blocks)
    with TemporaryDirectory() as store:
        options |= dict(kv_store=store) if mode.restarts else {}
        for _ in range(1 + mode.restarts):
            with LLM(folder, skip_tokenizer_init=True, max_model_len=max(needs), **options) as llm:
                if mode.loses:
                    llm.add(Loser())
                try:
                    for _ in range(mode.rounds):
                        run_texts(llm, row, texts, params)
                except Exception as error:  # a bug of the engine: other modes may still tell more
                    traceback.print_exc()
                    what = f"failed: {type(error).__name__}: {error}"
                    row.differ.append(what.splitlines()[0][:96])
                kept = llm.extra(BlockStore)
                num_loaded = None if kept is None else kept.num_loaded
    if (mode.tiny and not row.num_preemptions) or num_loaded == 0:
        row.name += NEVER
    return row


class Lost(Exception):
    """A step that failed."""


class Loser(Extra):
    """Every seventh step fails before it is launched: with overlap the one in flight is lost, too,
    and the device has computed it."""

    def launching(self, step: Step) -> None:
        if step.index % 7 == 6:
            raise Lost


def run_texts(llm: LLM, row: Outcome, texts: list[Text], params: SamplingParams) -> None:
    """Run all prompts and count. By hand rather than with `generate`, because a sequence remembers
    what has happened to it."""
    for i, text in enumerate(texts):
        llm.add_request(str(i), text.prompt, params)
    seqs = [seq for request in llm.requests.values() for seq in request.sequences]
    outputs = {}
    while llm.has_unfinished_requests():
        with suppress(Lost):
            outputs |= {int(output.request_id): output for output in llm.step()}
    row.num_texts += len(seqs)
    row.num_preemptions += sum(seq.num_preemptions for seq in seqs)
    row.num_cached_tokens += sum(seq.num_cached_tokens for seq in seqs)
    for i, text in enumerate(texts):
        for sample in outputs[i].outputs:
            num_equal, difference, near_tie = text.compare(sample.token_ids)
            row.num_equal += num_equal
            row.num_tokens += num_equal + bool(difference)
            if difference:
                (row.near_ties if near_tie else row.differ).append(f"prompt {i}, {difference}")


def verify(args: argparse.Namespace) -> Iterator[Outcome | Served]:
    """Yields each row when its engine has run, those of modes first. Raises `ValueError` for what
    can't be run."""
    ranks, max_tokens = args.tensor_parallel_size, args.max_tokens
    options = dict(kernels=args.kernels, model_impl=args.model_impl)
    folder = find_folder(args.model, dtype="float32")  # a file's own numbers
    _, config, _ = choose(EngineArgs(model=args.model, tensor_parallel_size=ranks, **options),
                              folder)
    check_shares(ranks, config.num_attention_heads, config.num_key_value_heads)
    tokenizer = load_tokenizer(folder, optional=True)
    longest = config.max_position_embeddings - max_tokens
    if min(args.num_prompts, max_tokens, longest) < 1:
        raise ValueError(f"--num-prompts and --max-tokens must be at least 1, and the latter below "
                         f"the model's maximum of {config.max_position_embeddings}")
    if not 0 <= args.near_tie < 1:
        raise ValueError(f"--near-tie must be in [0, 1), got {args.near_tie}")
    prompts = [] if args.text else read_prompts(args.prompts, tokenizer, args.num_prompts, longest)
    windows = read_windows(args.text or args.prompts, tokenizer, args.num_prompts,
                           min(WINDOW, config.max_position_embeddings - 1))
    model = load_reference(folder)
    texts = [write_reference(model, prompt, config.eos_token_ids, max_tokens, args.near_tie,
                             args.dense)
             for prompt in tqdm(prompts, "transformers", disable=None, leave=False)]
    theirs = reference_answers(model, windows)
    del model  # the engines may need its memory
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    modes = modes_for(config) + (GPU_MODES if pick_device("auto") == "cuda" else [])
    todo = [(mode, 1) for mode in modes] + [(mode, ranks) for mode in PARALLEL_MODES if ranks > 1]
    todo = todo if texts else []
    for mode, size in (bar := tqdm(todo, unit="mode", disable=None, leave=False)):
        bar.set_description(mode.name)
        yield run_mode(folder, mode, texts, max_tokens, tensor_parallel_size=size, **options)
    yield from compare_kinds(args.model, windows, theirs, tensor_parallel_size=ranks, **options)


def main(argv: list[str] | None = None) -> int:
    """Print the table; returns the exit code."""
    parser = argparse.ArgumentParser(prog="nanoserve verify", epilog=EXIT_CODES,
                                     description=__doc__.split("\n")[0])
    parser.add_argument("model", metavar="MODEL", nargs="?", default="storyteller",
                        help="a folder, a hub id or a GGUF file; default: the bundled model")
    parser.add_argument("--prompts", type=Path, metavar="FILE", default=PROMPTS,
                        help="one prompt a line; default: a dozen in several languages")
    parser.add_argument("--text", type=Path, metavar="FILE", help="only compare the kinds of "
                        "weights, on this text; default: the prompts, behind the table of modes")
    parser.add_argument("--num-prompts", type=int, default=12, help=(
        f"at most, and windows of {WINDOW} tokens of the text; default: 12"))
    parser.add_argument("--max-tokens", type=int, default=24, help="of each text; default: 24")
    parser.add_argument("--kernels", choices=KERNELS, default="auto", help="default: auto")
    parser.add_argument("--model-impl", choices=("auto", "nanoserve", "transformers"),
                        default="auto", help="whose network; default: ours where there is one")
    parser.add_argument("--dense", action="store_true", help="transformers computes the whole text "
                        "anew for each token, without its KV cache: slow")
    parser.add_argument("--near-tie", type=float, metavar="X", default=NEAR_TIE, help=(
        f"the largest gap of a near-tie, as a share of the largest |logit|; default: {NEAR_TIE:g}"))
    parser.add_argument("--tensor-parallel-size", type=int, default=1, metavar="N",
                        help="adds rows that run over N ranks")
    args, rows, served, code = parser.parse_args(argv), [], [], 0
    try:
        for row in verify(args):
            (served if isinstance(row, Served) else rows).append(row)
    except KeyboardInterrupt:
        print("interrupted: these modes were compared", file=sys.stderr)
        code = 130
    except (ValueError, OSError, RuntimeError) as error:
        print(f"verify: error: {error}", file=sys.stderr)
        code = 2
    wrong, near = sum(bool(row.differ) for row in rows), sum(len(row.near_ties) for row in rows)
    if rows:
        print(Outcome.HEADER, *rows, "", sep="\n")
        print(f"{args.model}: {wrong or 'none'} of {len(rows)} modes differ from transformers; "
              f"near-ties: {near}", end="\n\n" if served else "\n")
        if any(row.name.endswith(NEVER) for row in rows):
            print(f"{NEVER.strip()}: no text was preempted there, or no block loaded, so the row "
                  "shows nothing. Take more or longer prompts, or more tokens.")
    moved = sum(row.is_wrong for row in served)
    if served:
        print(Served.HEADER, *served, "", sep="\n")
        print(f"{args.model}: {moved or 'none'} of {len(served) - 1} kinds of weights move more "
              "than is normal")
    return 1 if wrong or moved else code
