"""What can be chosen: `EngineConfig`, the options of `LLM(...)`, and `SamplingParams` of a request.

Names, defaults and meaning are vLLM's. Both are records. The type of a field has a *rule*, which
says what a value must be and in which form it is kept (rules.py).

    block_size: Count = 16       16 by default; a whole number of at least 1

An option that the user left open is `None` or "auto". `EngineConfig.resolved` gives it a value for
a device and a model:

    asked                            a CPU          a GPU
    max_num_batched_tokens=None      2048           8192          tokens per step
    max_num_seqs=None                64             256           sequences at once
    async_scheduling=None            False          True          overlap
    kernels="auto"                   "cpu"          "triton"      or what runs: self_test.py
    dtype, max_model_len             the checkpoint's own

A GPU wants large steps to stay busy; a CPU is busy with few tokens, and small steps keep the time
between two tokens short. A field that stays `None` after that means the checkpoint's own value
(tokenizer), or is measured elsewhere (the KV cache's size).

Invariants: a value that can't be honoured raises. An `EngineConfig` is never written to: a value
that must be measured first, such as the longest sequence that fits, goes into a *new* config.

Not known here: torch, devices, memory, vocabularies. What needs the tokenizer (the tokens of a bad
word) is checked in inputs.py. Road not taken: groups of options as in larger engines (one
record for the cache, one for the scheduler); all options fit on one screen.
"""

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from nanoserve.model_config import ModelConfig
from nanoserve.rules import (
    Anything,
    Count,
    CountOrAll,
    Flag,
    Options,
    Rule,
    Share,
    Size,
    Text,
    Whole,
    check_fields,
    choice,
    instance,
    keep_text,
    list_of,
    number,
    only_if,
)

DTYPES = ("auto", "float32", "float16", "bfloat16")
KERNELS = ("auto", "triton", "cpu", "torch")
MIN_TEMPERATURE = 0.01  # with less, logits / temperature overflows half precision
MAX_TEMPERATURE = 1e30  # all tokens are equally likely then; with inf, -inf / inf would be NaN
MAX_SAMPLES = 16384  # vLLM's bound: a request makes the sequences of all samples at once
RATE = 1000  # policy "shortest": prompt tokens that count as much as one second of waiting


class Policy(NamedTuple):
    """The order of sequences. urgency: a number for a `Sequence`, asked once, when it arrives; the
    smallest is first, and among equal ones the first that came. interrupts: whether a waiting
    sequence preempts a running one that comes after it."""

    urgency: Callable[[Any], float]
    interrupts: bool = False


POLICIES = {
    "fcfs": Policy(lambda seq: 0),  # first come, first served
    "priority": Policy(lambda seq: seq.request.priority, interrupts=True),
    # Shortest job first, with aging: a prompt of 1,000 tokens is as urgent as one of 10 that came
    # 0.99 seconds later. All waiting times grow at the same rate, so the order of two sequences
    # never changes, and no sequence starves.
    "shortest": Policy(lambda seq: seq.request.arrival_time + seq.num_prompt_tokens / RATE),
}

# ------------------------------------------------------------------- options


def keep_dtype(dtype: Any) -> str:
    """One spelling of a dtype: torch.float32 and vLLM's "half" are accepted, too."""
    name = str(dtype).removeprefix("torch.")
    name = {"half": "float16", "float": "float32"}.get(name, name)
    only_if(name in DTYPES, dtype)
    return name


def keep_device(device: Any) -> str:
    known = r"auto|cpu|cuda(:\d{1,3})?"
    return only_if(isinstance(device, str) and bool(re.fullmatch(known, device)), device)


MODEL = "the name of a folder, a hub id or a GGUF file"
Dtype = Annotated[str, Rule(f"one of {', '.join(DTYPES)}", keep_dtype)]
Device = Annotated[str, Rule('auto, cpu, cuda or a GPU by its number ("cuda:1")', keep_device)]


@dataclass(frozen=True, kw_only=True)
class EngineConfig(Options):
    """An engine's options. Raises `ValueError` for what can't work, naming field and remedy."""

    model: Annotated[str, Rule(MODEL, keep_text)]
    revision: Text | None = None  # a branch, a tag or a commit of a hub id
    tokenizer: Annotated[str, instance((str, Path), MODEL)] | None = None
    skip_tokenizer_init: Flag = False
    dtype: Dtype = "auto"  # "auto": the checkpoint's own
    load_format: Annotated[str, Rule(
        "one of auto, safetensors, pt, dummy (a GGUF file is named as the model)",
        choice("auto", "safetensors", "pt", "dummy").keep)] = "auto"
    tensor_parallel_size: Count = 1  # ranks that share the model
    expert_parallel: Flag = False  # each rank has whole experts
    seed: Whole = 0
    max_model_len: Count | None = None  # prompt plus output, in tokens
    max_num_batched_tokens: Count | None = None  # the token budget of one step
    max_num_seqs: Count | None = None  # sequences running at the same time
    gpu_memory_utilization: Share = 0.9  # share of a GPU for weights and KV
    kv_cache_memory_bytes: Count | None = None  # the KV cache's size, if given
    kv_cache_dtype: Annotated[str, choice("auto", "int8")] = "auto"  # "auto": that of the model
    num_gpu_blocks_override: Count | None = None  # the KV cache's size in blocks
    block_size: Count = 16  # tokens per KV block
    enable_prefix_caching: Flag = True
    enable_chunked_prefill: Flag = True
    scheduling_policy: Annotated[str, choice(*POLICIES)] = "fcfs"  # the order of requests
    enforce_eager: Flag = False  # no CUDA graphs
    hf_overrides: Annotated[dict, instance(dict, "a dict laid over config.json")] | None = None
    trust_remote_code: Flag = False  # code of a tokenizer; a model's never runs
    device: Device = "auto"
    kernels: Annotated[str, choice(*KERNELS)] = "auto"  # the backend of ops: see self_test.py
    async_scheduling: Flag | None = None  # step n+1 is scheduled while n runs
    steps_at_once = 1  # no field: more with pipeline stages (nanoserve_extras)

    def __post_init__(self):
        super().__post_init__()
        # Each decoding sequence takes one token of a step: the budget has to cover all of them.
        num_tokens, num_seqs = self.max_num_batched_tokens, self.max_num_seqs
        if num_tokens is not None and num_seqs is not None and num_tokens < num_seqs:
            raise ValueError(f"max_num_batched_tokens={num_tokens} is less than max_num_seqs="
                             f"{num_seqs}: raise the first or lower the second")
        if ":" in self.device and self.num_ranks > 1:
            raise ValueError(f"device={self.device!r} names one GPU, and {self.num_ranks} ranks "
                             'take one each, from 0 on: use device="cuda"')

    def resolved(self, device: str, model_config: ModelConfig,
                 generates: bool = True) -> "EngineConfig":
        """A copy in which open options have values. device: "cpu", "cuda" or "cuda:1", say.
        generates: whether requests write text. Raises `ValueError` for what this model can't do."""
        if self.expert_parallel and not any(model_config.moe_layers):
            raise ValueError(f"expert_parallel=True, but {model_config.architecture} has no "
                             "experts: leave it out")
        max_model_len = self._resolved_length(model_config.max_position_embeddings, generates)
        on_gpu = device != "cpu"
        num_tokens, num_seqs = (8192, 256) if on_gpu else (2048, 64)
        # A step holds a token of each sequence, and a prompt that may not be cut. A budget that was
        # asked for pulls the number of sequences down with it.
        whole_prompt = 0 if self.enable_chunked_prefill else max_model_len
        num_tokens = self.max_num_batched_tokens or max(
            num_tokens, self.max_num_seqs or 0, whole_prompt)
        if num_tokens < whole_prompt:
            raise ValueError("enable_chunked_prefill=False needs a step that holds the longest "
                             f"prompt: raise max_num_batched_tokens={num_tokens} to at least "
                             f"max_model_len={max_model_len}, or lower max_model_len")
        values: dict[str, Any] = dict(
            max_num_batched_tokens=num_tokens, max_num_seqs=min(num_seqs, num_tokens),
            max_model_len=max_model_len, dtype=model_config.dtype,
            kernels="triton" if on_gpu else "cpu", async_scheduling=on_gpu)
        unset = {name: value for name, value in values.items()
                 if getattr(self, name) in (None, "auto")}
        return replace(self, device=device, **unset)

    def _resolved_length(self, longest: int, generates: bool) -> int:
        """The `max_model_len`. longest: what the model was trained for."""
        max_model_len = self.max_model_len or longest
        if max_model_len > longest:
            raise ValueError(f"max_model_len={max_model_len} is above the model's own maximum of "
                             f"{longest} (max_position_embeddings): lower it, or override "
                             "max_position_embeddings with hf_overrides if the model was trained "
                             "so")
        if generates and max_model_len < 2:
            raise ValueError("max_model_len=1 leaves no room for an answer behind a prompt: raise "
                             "it, and the model's max_position_embeddings if that is 1, too")
        return max_model_len

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel_size


# ------------------------------------------------------------------ requests


class RequestOutputKind(Enum):
    """What each output of a running request carries (vLLM's names)."""

    CUMULATIVE = 0  # everything generated so far
    DELTA = 1  # only what is new since the last output
    FINAL_ONLY = 2  # one output, when the request has finished


TOKEN_ID, BIAS = number(0, whole=True), number(-100, 100)  # OpenAI's bounds, and vLLM's


def keep_biases(biases: Any) -> dict[int, float]:
    only_if(isinstance(biases, dict), biases)
    return {TOKEN_ID.keep(token_id): float(BIAS.keep(bias)) for token_id, bias in biases.items()}


def keep_word(word: Any) -> str:
    return only_if(isinstance(word, str) and bool(word.strip()), word)


def class_of(function: Any) -> type | None:
    """The class of which each sequence gets an object of its own, if `function` is one, or a
    `functools.partial` of one. Other functions are shared by all sequences."""
    kind = function.func if isinstance(function, partial) else function
    return kind if isinstance(kind, type) else None


def keep_function(function: Any) -> Any:
    kind = class_of(function)
    has_call = kind is None or any("__call__" in vars(one) for one in kind.__mro__)
    return only_if(callable(function) and has_call, function)


OutputKind = Annotated[RequestOutputKind, instance(RequestOutputKind, "a RequestOutputKind")]
Penalty = Annotated[float, number(-2, 2)]
# The bounds are beyond any use; a logit times or divided by such a factor fits in float32.
Factor = Annotated[float, number(1e-6, 1e6)]
Texts = Annotated[list[str], list_of(keep_text, "non-empty texts in a list")]
Words = Annotated[list[str], list_of(keep_word, "a list of words, none of them empty")]
TokenIds = Annotated[list[int], list_of(
    TOKEN_ID.keep, "a list of token ids, whole numbers of at least 0")]
SomeTokenIds = Annotated[list[int], list_of(
    TOKEN_ID.keep, "a list of at least one token id (None allows all)", 1)]
Biases = Annotated[dict[int, float], Rule(
    "a dict of token ids and numbers in [-100, 100], none twice (allowed_token_ids and bad_words "
    "rule tokens in or out)", keep_biases)]
Functions = Annotated[list, list_of(
    keep_function, "a list of functions f(token_ids, logits) -> logits, or of classes whose "
    "objects are such functions")]
Entries = Annotated[dict, Rule("a dict", lambda given: dict(
    only_if(isinstance(given, dict), given)) or None)]
# The fields that change logits if they have another value than their default: see controls.py.
CONTROLS = ("presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens",
            "logit_bias", "allowed_token_ids", "bad_words", "logits_processors",
            "thinking_token_budget", "structured_outputs")


@dataclass(kw_only=True)
class SamplingParams:
    """How to turn logits into tokens and when to stop. Raises `ValueError` as `EngineConfig` does.

    logits ─ processors ─ allowed tokens, bad words, ─ penalties ─ temperature ─ filters ─ draw
                          min_tokens, logit_bias                     min_p, top_k, top_p
    """

    n: Annotated[int, number(1, MAX_SAMPLES, whole=True)] = 1  # samples of one prompt
    presence_penalty: Penalty = 0.0  # subtracted for tokens of the output
    frequency_penalty: Penalty = 0.0  # subtracted once per occurrence
    repetition_penalty: Factor = 1.0  # divides; for tokens of the prompt, too
    temperature: Annotated[float, number(0)] = 1.0  # 0: greedy
    top_p: Share = 1.0  # nucleus: keep the likeliest tokens that sum to at least this
    top_k: CountOrAll = 0  # keep the k likeliest tokens; 0 or -1: all
    min_p: Annotated[float, number(0, 1)] = 0.0  # drop tokens below this share of the likeliest
    seed: Whole | None = None  # None: from the engine's seed and the arrival
    stop: Texts | str | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: Flag = False
    max_tokens: Count | None = 16  # None: up to max_model_len
    min_tokens: Size = 0  # no EOS, stop token or stop string before that many
    logprobs: CountOrAll | None = None  # for each token: its logprob, and the k likeliest
    prompt_logprobs: CountOrAll | None = None  # likewise for the prompt's tokens
    detokenize: Flag = True
    skip_special_tokens: Flag = True
    include_stop_str_in_output: Flag = False
    output_kind: OutputKind = RequestOutputKind.CUMULATIVE
    logit_bias: Biases | None = None  # added to the logits
    allowed_token_ids: SomeTokenIds | None = None  # no other token may come
    bad_words: Words | None = None  # banned with and without a space in front
    logits_processors: Functions | None = None  # called first
    extra_args: Entries | None = None  # for processors of the engine: nanoserve_extras
    # After this many tokens of a thought its closing mark is forced: nanoserve_extras/thinking.py.
    thinking_token_budget: CountOrAll | None = None
    structured_outputs: Anything = None  # nanoserve_extras/structured
    stack_level = 3  # not a field: frames between a warning and the user's line

    def __post_init__(self):
        self.stop = [self.stop] if isinstance(self.stop, str) else self.stop
        check_fields(self)
        self.stop, self.stop_token_ids = self.stop or [], self.stop_token_ids or []
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}: "
                             "lower the first or raise the second")
        if self.temperature == 0 and self.n > 1:
            raise ValueError(f"n={self.n} with temperature=0: greedy samples would all be equal, "
                             "use n=1 or a temperature above 0")
        if self.stop and not self.detokenize:
            raise ValueError(f"stop={self.stop!r} with detokenize=False: stop strings are found in "
                             "the text, leave detokenize=True or use stop_token_ids")
        if 0 < self.temperature < MIN_TEMPERATURE:
            warnings.warn(f"temperature={self.temperature} is raised to {MIN_TEMPERATURE}: smaller "
                          "values overflow; use 0 for greedy", stacklevel=self.stack_level)
            self.temperature = MIN_TEMPERATURE
        self.temperature = min(self.temperature, MAX_TEMPERATURE)

    def controls(self) -> set[str]:
        """Which of `CONTROLS` are used."""
        return {name for name in CONTROLS
                if getattr(self, name) not in (getattr(SamplingParams, name), None, [], {})}
