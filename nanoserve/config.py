"""What can be chosen: `EngineConfig`, the options of `LLM(...)`, and `SamplingParams` of a request.

Names, defaults and meaning are vLLM's. Both are records; each field has a default and a *rule*,
which says what a value must be and in which form it is kept (rules.py).

    block_size: int = option(16, rules.COUNT)       16 by default; a whole number of at least 1

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

import warnings
from dataclasses import MISSING, dataclass, fields, replace
from enum import Enum
from functools import partial

from nanoserve import rules
from nanoserve.model_config import ModelConfig
from nanoserve.rules import Options, choice, number, option

KERNELS = ("auto", "triton", "cpu", "torch")
POLICIES = ("fcfs", "priority", "shortest")  # see Scheduler.order
MIN_TEMPERATURE = 0.01  # with less, logits / temperature overflows half precision
MAX_TEMPERATURE = 1e30  # all tokens are equally likely then; with inf, -inf / inf would be NaN
MAX_SAMPLES = 16384  # vLLM's bound: a request makes the sequences of all samples at once


class RequestOutputKind(Enum):
    """What each output of a running request carries (vLLM's names)."""

    CUMULATIVE = 0  # everything generated so far
    DELTA = 1  # only what is new since the last output
    FINAL_ONLY = 2  # one output, when the request has finished


OUTPUT_KIND = rules.instance(RequestOutputKind, "a RequestOutputKind")

# ------------------------------------------------------------------- options


@dataclass(frozen=True, kw_only=True)
class EngineConfig(Options):
    """An engine's options. Raises `ValueError` for what can't work, naming field and remedy."""

    model: str = option(MISSING, rules.MODEL)
    revision: str | None = option(None, rules.TEXT)  # a branch, a tag or a commit of a hub id
    tokenizer: str | None = option(None, rules.FOLDER)
    skip_tokenizer_init: bool = option(False, rules.FLAG)
    dtype: str = option("auto", rules.DTYPE)  # "auto": the checkpoint's own
    load_format: str = option("auto", rules.LOAD_FORMAT)  # "dummy": random weights, no files
    tensor_parallel_size: int = option(1, rules.COUNT)  # ranks that share the model
    pipeline_parallel_size: int = option(1, rules.COUNT)  # stages, each of that many ranks
    expert_parallel: bool = option(False, rules.FLAG)  # each rank has whole experts
    seed: int = option(0, rules.WHOLE)
    max_model_len: int | None = option(None, rules.COUNT)  # prompt plus output, in tokens
    max_num_batched_tokens: int | None = option(None, rules.COUNT)  # the token budget of one step
    max_num_seqs: int | None = option(None, rules.COUNT)  # sequences running at the same time
    gpu_memory_utilization: float = option(0.9, rules.SHARE)  # share of a GPU for weights and KV
    kv_cache_memory_bytes: int | None = option(None, rules.COUNT)  # the KV cache's size, if given
    kv_cache_dtype: str = option("auto", rules.KV_DTYPE)  # "auto": the dtype of the model
    num_gpu_blocks_override: int | None = option(None, rules.COUNT)  # the KV cache's size in blocks
    block_size: int = option(16, rules.COUNT)  # tokens per KV block
    enable_prefix_caching: bool = option(True, rules.FLAG)
    enable_chunked_prefill: bool = option(True, rules.FLAG)
    scheduling_policy: str = option("fcfs", choice(*POLICIES))  # see Scheduler.order
    enforce_eager: bool = option(False, rules.FLAG)  # no CUDA graphs
    hf_overrides: dict | None = option(None, rules.OVERRIDES)  # replaces entries of config.json
    # "auto": a request without parameters takes those of the checkpoint's generation_config.json;
    # "vllm": it takes the defaults of `SamplingParams`.
    generation_config: str = option("auto", choice("auto", "vllm"))
    trust_remote_code: bool = option(False, rules.FLAG)  # code of a tokenizer; a model's never runs
    device: str = option("auto", rules.DEVICE)
    kernels: str = option("auto", choice(*KERNELS))  # the backend of ops: see self_test.py
    async_scheduling: bool | None = option(None, rules.FLAG)  # step n+1 is scheduled while n runs

    def __post_init__(self):
        super().__post_init__()
        # Each decoding sequence takes one token of a step: the budget has to cover all of them.
        num_tokens, num_seqs = self.max_num_batched_tokens, self.max_num_seqs
        if num_tokens is not None and num_seqs is not None and num_tokens < num_seqs:
            raise ValueError(f"max_num_batched_tokens={num_tokens} is less than max_num_seqs="
                             f"{num_seqs}: raise the first or lower the second")

        if ":" in self.device and (ranks := self.num_ranks) > 1:
            raise ValueError(f"device={self.device!r} names one GPU, and {ranks} ranks take one "
                             'each, from 0 on: use device="cuda"')

    def resolved(self, device: str, model_config: ModelConfig,
                 generates: bool = True) -> "EngineConfig":
        """A copy in which open options have values. device: "cpu", "cuda" or "cuda:1", say.
        generates: whether requests write text. Raises `ValueError` for what this model can't do."""
        longest = model_config.max_position_embeddings
        max_model_len = self.max_model_len or longest
        if max_model_len > longest:
            raise ValueError(f"max_model_len={max_model_len} is above the model's own maximum of "
                             f"{longest} (max_position_embeddings): lower it, or override "
                             "max_position_embeddings with hf_overrides if the model was trained "
                             "so")
        if generates and max_model_len < 2:
            raise ValueError("max_model_len=1 leaves no room for an answer behind a prompt: raise "
                             "it, and the model's max_position_embeddings if that is 1, too")
        if self.expert_parallel and not any(model_config.moe_layers):
            raise ValueError(f"expert_parallel=True, but {model_config.architecture} has no "
                             "experts: leave it out")
        dtype = model_config.dtype if self.dtype == "auto" else self.dtype
        if dtype not in rules.DTYPES[1:]:
            raise ValueError(f"config.json: dtype={dtype!r} is not supported: choose one of "
                             f"{', '.join(rules.DTYPES[1:])} with the option dtype")
        on_gpu = device != "cpu"
        num_tokens, num_seqs = self._resolved_sizes(on_gpu, max_model_len)
        kernels = "triton" if on_gpu else "cpu"
        return replace(
            self, device=device, max_model_len=max_model_len, max_num_batched_tokens=num_tokens,
            max_num_seqs=num_seqs, dtype=dtype,
            kernels=kernels if self.kernels == "auto" else self.kernels,
            async_scheduling=on_gpu if self.async_scheduling is None else self.async_scheduling)

    def _resolved_sizes(self, on_gpu: bool, max_model_len: int) -> tuple[int, int]:
        """Tokens and sequences of a step. A budget that was asked for pulls the number of sequences
        down with it: `max_num_batched_tokens=1` alone runs one sequence."""
        num_tokens, num_seqs = (8192, 256) if on_gpu else (2048, 64)
        if self.max_num_batched_tokens is not None:
            num_tokens = self.max_num_batched_tokens
        else:
            whole_prompt = 0 if self.enable_chunked_prefill else max_model_len
            num_tokens = max(num_tokens, self.max_num_seqs or 0, whole_prompt)
        if not self.enable_chunked_prefill and num_tokens < max_model_len:
            raise ValueError("enable_chunked_prefill=False needs a step that holds the longest "
                             f"prompt: raise max_num_batched_tokens={num_tokens} to at least "
                             f"max_model_len={max_model_len}, or lower max_model_len")
        return num_tokens, self.max_num_seqs or min(num_seqs, num_tokens)

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def steps_at_once(self) -> int:
        """How many steps run at the same time, one in each pipeline stage. With several stages, a
        sequence is in one of these steps only."""
        return self.pipeline_parallel_size if self.async_scheduling else 1


# ------------------------------------------------------------------ requests

control = partial(option, control=True)  # an option that changes logits: see controls.py


@dataclass(kw_only=True)
class SamplingParams:
    """How to turn logits into tokens and when to stop. Raises `ValueError` as `EngineConfig` does.

    logits ─ processors ─ allowed tokens, bad words, ─ penalties ─ temperature ─ filters ─ draw
                          min_tokens, logit_bias                     min_p, top_k, top_p
    """

    n: int = option(1, number(1, MAX_SAMPLES, whole=True))  # samples of one prompt
    presence_penalty: float = control(0.0, rules.PENALTY)  # subtracted for tokens of the output
    frequency_penalty: float = control(0.0, rules.PENALTY)  # subtracted once per occurrence
    repetition_penalty: float = control(1.0, rules.FACTOR)  # divides; for tokens of the prompt, too
    temperature: float = option(1.0, number(0))  # 0: greedy
    top_p: float = option(1.0, rules.SHARE)  # nucleus: likeliest tokens whose sum reaches this
    top_k: int = option(0, number(-1, whole=True))  # keep the k likeliest; 0 or -1: all
    min_p: float = option(0.0, number(0, 1))  # drop tokens below this share of the likeliest
    seed: int | None = option(None, rules.WHOLE)  # None: from the engine's seed and the arrival
    stop: str | list[str] | None = option(None, rules.TEXTS)
    stop_token_ids: list[int] | None = option(None, rules.TOKEN_IDS)
    ignore_eos: bool = option(False, rules.FLAG)
    max_tokens: int | None = option(16, rules.COUNT_OR_NONE)  # None: up to max_model_len
    min_tokens: int = control(0, rules.SIZE)  # before them no EOS, stop token, stop string
    logprobs: int | None = option(None, rules.COUNT_OR_ALL)  # of each token and of the k likeliest
    prompt_logprobs: int | None = option(None, rules.COUNT_OR_ALL)  # the same for the prompt
    detokenize: bool = option(True, rules.FLAG)
    skip_special_tokens: bool = option(True, rules.FLAG)
    include_stop_str_in_output: bool = option(False, rules.FLAG)
    output_kind: RequestOutputKind = option(RequestOutputKind.CUMULATIVE, OUTPUT_KIND)
    logit_bias: dict[int, float] | None = control(None, rules.BIASES)  # added to the logits
    allowed_token_ids: list[int] | None = control(None, rules.ONE_TOKEN_ID)  # only these
    bad_words: list[str] | None = control(None, rules.WORDS)  # with or without a space in front
    logits_processors: list | None = control(None, rules.FUNCTIONS)  # called first
    # After this many tokens of a thought its closing mark is forced: nanoserve_extras/thinking.py.
    thinking_token_budget: int | None = control(None, rules.COUNT_OR_ALL)
    structured_outputs: object = control(None, rules.ANYTHING)  # nanoserve_extras/structured
    stack_level = 3  # no field: how far above a warning is the line that made the object

    def __post_init__(self):
        self.stop = [self.stop] if isinstance(self.stop, str) else self.stop
        rules.check_fields(self)
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

    def clone(self) -> "SamplingParams":
        """A copy that shares nothing with this one: the rules copy lists and dicts."""
        return replace(self)

    def controls(self) -> set[str]:
        """Which of `CONTROLS` are used."""
        return {name for name, unused in CONTROLS.items()
                if getattr(self, name) not in (unused, None, [], {})}


# The fields that are made with `control`, each with the value that changes nothing.
CONTROLS = {one.name: one.default for one in fields(SamplingParams) if one.metadata["control"]}
