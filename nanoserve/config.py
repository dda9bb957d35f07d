"""What can be chosen: `EngineConfig`, the options of `LLM(...)` in vLLM's words.

A frozen record, checked once and handed down by value. It is what a user asks for; `resolved()`
settles what was left open and depends on the device or the model. What is `None` after that is not
wanted (a trace, speculation), the checkpoint's own (tokenizer, pooling), or measured elsewhere (the
KV cache's size).
What a checkpoint *is* can't be chosen: that is `model_config.ModelConfig`.

Invariant: a config is never written to after construction. What is only known later (how many KV
blocks fit into memory) is a return value of whoever measured it, and a *new* config is made.

Not known here: torch, devices, memory. Everything up to the scheduler runs without torch, so that
anyone can read, run and test it in a second. Road not taken: groups of options (one record for the
cache, one for the scheduler, ...) as in larger engines; twenty-odd fields fit on one screen.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from nanoserve.checkpoint.model_config import ModelConfig

DTYPES = ("auto", "float32", "float16", "bfloat16")
DTYPE_ALIASES = {"half": "float16", "float": "float32"}
LOAD_FORMATS = ("auto", "safetensors", "dummy")
SCHEDULING_POLICIES = ("fcfs", "priority")
DEVICES = ("auto", "cpu", "cuda")
KERNELS = ("auto", "triton", "cpu", "onednn", "torch")
RUNNERS = ("auto", "generate", "pooling")
CONVERSIONS = ("auto", "none", "embed", "classify")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What the user chose, in vLLM's words. `None` means "the engine decides" (see `resolved`).

    Raises `ValueError` for a value that can't work, naming the field and the remedy.
    """

    model: str
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    dtype: str = "auto"  # "auto": the checkpoint's own
    load_format: str = "auto"  # "dummy": random weights from config.json alone
    tensor_parallel_size: int = 1  # ranks that share the model; started here, or by torchrun
    expert_parallel: bool = False  # ranks share out whole experts, not a part of each
    seed: int = 0
    max_model_len: int | None = None  # prompt plus output, in tokens
    max_num_batched_tokens: int | None = None  # the token budget of one step
    max_num_seqs: int | None = None  # sequences running at the same time
    gpu_memory_utilization: float = 0.9  # share of the GPU's memory for weights and KV together
    kv_cache_memory_bytes: int | None = None  # says the KV cache's size outright
    num_gpu_blocks_override: int | None = None  # the same in blocks, on any device
    block_size: int = 16  # tokens a KV block
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    scheduling_policy: str = "fcfs"
    enforce_eager: bool = False  # no CUDA graphs
    hf_overrides: dict | None = None  # entries laid over config.json
    trust_remote_code: bool = False  # passed on to the tokenizer; no model code is ever loaded
    device: str = "auto"
    kernels: str = "auto"  # who computes between matrix products: see device/choice.py
    async_scheduling: bool | None = None  # step n+1 is scheduled while n runs; None: on a GPU
    runner: str = "auto"  # "auto": what the checkpoint is made for, by its architecture's name
    convert: str = "auto"  # what a generator's checkpoint becomes when it pools
    pooler_config: object = None  # a dict, or extras.pooling.PoolerConfig
    speculative_config: dict | None = None  # who guesses what comes: extras/speculative.py
    trace: str | None = None  # a .html or .json file in which every step is recorded

    def __post_init__(self):
        # torch.float32 and vLLM's "half" are welcome, too: one spelling from here on.
        dtype = str(self.dtype).removeprefix("torch.")
        object.__setattr__(self, "dtype", DTYPE_ALIASES.get(dtype, dtype))
        self._check_choice("dtype", DTYPES)
        self._check_choice("load_format", LOAD_FORMATS)
        self._check_choice("scheduling_policy", SCHEDULING_POLICIES)
        self._check_choice("device", DEVICES)
        self._check_choice("kernels", KERNELS)
        self._check_choice("runner", RUNNERS)
        self._check_choice("convert", CONVERSIONS)
        for name in ("max_model_len", "max_num_batched_tokens", "max_num_seqs", "block_size",
                     "kv_cache_memory_bytes", "num_gpu_blocks_override", "tensor_parallel_size"):
            value = getattr(self, name)
            if value is None and getattr(type(self), name) is None:  # the engine decides
                continue
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        if type(self.seed) is not int:
            raise ValueError(f"seed must be a whole number, got {self.seed!r}")
        for name in ("skip_tokenizer_init", "expert_parallel", "enable_prefix_caching",
                     "enable_chunked_prefill", "enforce_eager", "trust_remote_code"):
            self._check_choice(name, (True, False))
        self._check_choice("async_scheduling", (None, True, False))
        share = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
            raise ValueError(f"gpu_memory_utilization must be in (0, 1], got {share!r}")
        if self.hf_overrides is not None and not isinstance(self.hf_overrides, dict):
            raise ValueError(f"hf_overrides must be a dict laid over config.json, got "
                             f"{self.hf_overrides!r}")
        if self.trace is not None and (not isinstance(self.trace, (str, Path))
                                       or Path(self.trace).suffix not in (".html", ".json")
                                       or not Path(self.trace).parent.is_dir()):
            raise ValueError(f"trace={self.trace!r} must name a file in a folder that exists, "
                             "ending in .html (a page to look at) or .json (for Perfetto)")
        if not isinstance(self.speculative_config, (dict, type(None))):
            raise ValueError("speculative_config must be a dict such as {'method': 'ngram', "
                             f"'num_speculative_tokens': 5}}, got {self.speculative_config!r}")
        self._check_budget(self.max_num_batched_tokens, self.max_num_seqs)

    @property
    def num_drafts(self) -> int:
        """How many tokens a step may guess for a row."""
        return (self.speculative_config or {}).get("num_speculative_tokens", 0)

    @property
    def draft_model(self) -> str | None:
        """The folder or hub id of the network that guesses, if one does."""
        return (self.speculative_config or {}).get("model")

    def _check_choice(self, name: str, choices: tuple[str, ...]) -> None:
        if getattr(self, name) not in choices:
            raise ValueError(f"{name}={getattr(self, name)!r} is not supported: choose one of "
                             f"{', '.join(map(str, choices))}")

    @staticmethod
    def _check_budget(num_tokens: int | None, num_seqs: int | None) -> None:
        """A decoding sequence takes one token a step: the budget has to cover all of them."""
        if num_tokens is not None and num_seqs is not None and num_tokens < num_seqs:
            raise ValueError(f"max_num_batched_tokens={num_tokens} is less than max_num_seqs="
                             f"{num_seqs}: raise the first or lower the second")

    def check_ranks(self, model_config: ModelConfig) -> None:
        """Raises `ValueError` if the ranks can't share this model. Shares may be uneven, but each
        rank needs a head, and KV heads that several ranks keep must be kept equally often."""
        size, kv_heads = self.tensor_parallel_size, model_config.num_key_value_heads
        heads = model_config.num_attention_heads
        if self.expert_parallel and not any(model_config.moe_layers):
            raise ValueError(f"expert_parallel=True, but {model_config.architecture} has no "
                             "experts: leave it out")
        sizes = [n for n in range(1, heads + 1) if n <= kv_heads or n % kv_heads == 0]
        if size not in sizes:
            raise ValueError(
                f"tensor_parallel_size={size} can't share {heads} attention heads with {kv_heads} "
                f"KV heads: choose one of {', '.join(map(str, sizes))}")

    def resolved(self, device: str, model_config: ModelConfig) -> "EngineConfig":
        """A copy with what was left open settled, for `device` "cpu" or "cuda". Raises `ValueError`
        for what this model can't do.

        A GPU wants large steps to stay busy; a CPU is busy with few tokens, and small steps keep
        the time between two tokens short. An explicit budget pulls the number of sequences down
        with it rather than being an error: `max_num_batched_tokens=1` alone runs one sequence.
        """
        max_model_len = self.max_model_len or model_config.max_position_embeddings
        if max_model_len > model_config.max_position_embeddings:
            raise ValueError(
                f"max_model_len={max_model_len} is above the model's own maximum of "
                f"{model_config.max_position_embeddings} (max_position_embeddings): lower it, or "
                "override max_position_embeddings with hf_overrides if the model was trained so")
        default_tokens, default_seqs = (8192, 256) if device == "cuda" else (2048, 64)
        num_tokens = self.max_num_batched_tokens
        if num_tokens is None:
            num_tokens = max(default_tokens, self.max_num_seqs or 0)
            if not self.enable_chunked_prefill:
                num_tokens = max(num_tokens, max_model_len)
        if not self.enable_chunked_prefill and num_tokens < max_model_len:
            raise ValueError(
                f"enable_chunked_prefill=False needs a step that holds the longest prompt: raise "
                f"max_num_batched_tokens={num_tokens} to at least max_model_len={max_model_len}, "
                "or lower max_model_len")
        num_seqs = self.max_num_seqs or min(default_seqs, num_tokens)
        dtype = model_config.dtype if self.dtype == "auto" else self.dtype
        if dtype not in DTYPES[1:]:
            raise ValueError(f"config.json: dtype={dtype!r} is not supported: choose one of "
                             f"{', '.join(DTYPES[1:])} with the option dtype")
        runner = self._resolve_runner(model_config)
        if runner == "generate" and max_model_len < 2:
            raise ValueError("max_model_len=1 leaves no room for an answer behind a prompt: raise "
                             "it, and the model's max_position_embeddings if that is 1, too")
        on_gpu = device == "cuda"
        kernels = self.kernels if self.kernels != "auto" else "triton" if on_gpu else "cpu"
        overlap = on_gpu if self.async_scheduling is None else self.async_scheduling
        return replace(
            self, device=device, max_model_len=max_model_len, max_num_batched_tokens=num_tokens,
            max_num_seqs=num_seqs, dtype=dtype, kernels=kernels, async_scheduling=overlap,
            runner=runner)

    def _resolve_runner(self, model_config: ModelConfig) -> str:
        """The checkpoint decides, or the user. A missing LM head can't be made up for."""
        runner = self.runner
        if runner == "auto":
            runner = "pooling" if model_config.pools else "generate"
        if runner == "generate" and not model_config.architecture.endswith("ForCausalLM"):
            raise ValueError(f"runner='generate', but {model_config.architecture} has no LM head: "
                             "use runner='pooling', or a ...ForCausalLM checkpoint")
        for name, default in (("convert", "auto"), ("pooler_config", None)):
            if runner == "generate" and getattr(self, name) != default:
                raise ValueError(f"{name}={getattr(self, name)!r} has no effect on a generator: "
                                 "add runner='pooling', or leave it out")
        return runner

    def fit_to_cache(self, num_blocks: int,
                     asked: int | None) -> tuple["EngineConfig", list[str]]:
        """Lower `max_model_len` to what the KV cache holds; returns what to say about it, too.
        asked: the user's own, which raises `ValueError` instead; so does a cache of one token, if
        it should hold a prompt and an answer."""
        capacity = num_blocks * self.block_size
        assert self.max_model_len is not None, "a resolved config has a length"
        if self.max_model_len <= capacity:
            return self, []
        remedy = "raise kv_cache_memory_bytes (or gpu_memory_utilization, num_gpu_blocks_override)"
        if self.runner == "generate" and capacity < 2:
            raise ValueError("a KV cache of one token has no room for an answer behind a prompt: "
                             f"{remedy}")
        if asked is not None:
            raise ValueError(
                f"max_model_len={asked} does not fit in the KV cache of {capacity} tokens "
                f"({num_blocks} blocks of {self.block_size}): lower it, or {remedy}")
        said = (f"max_model_len is lowered from {self.max_model_len:,} to {capacity:,}, what the "
                f"KV cache holds; {remedy} for more")
        return replace(self, max_model_len=capacity), [said]
