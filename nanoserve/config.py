"""What can be chosen: `EngineConfig` for the engine, `ModelConfig` for the network.

Two frozen records, read once and handed down by value. `EngineConfig` is what a user asks for; its
`resolved()` fills in what was left open, so that nothing behind it ever meets a `None`.
`ModelConfig` is what a checkpoint *is*. Hugging Face's `config.json` comes in dialects (old and
new spellings of the RoPE settings, `torch_dtype` or `dtype`, sizes that are left out when they can
be derived): every dialect is absorbed here, and the rest of the engine sees one set of flags.

Invariant: a config is never written to after construction. What is only known later (how many KV
blocks fit into memory) is a return value of whoever measured it, and a *new* config is made.

Not known here: torch, devices, memory. Modules 1 to 4 (config, sequence, block_manager, scheduler)
run without torch, so that anyone can read, run and test them in a second.

Road not taken: transformers' own `AutoConfig`. It would spare us the dialects and cost an import of
several seconds, and a feature that we do not implement would pass through it without a word. A
reader that names what it does not know is worth more here than one that accepts everything.
"""

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path

DTYPES = ("auto", "float32", "float16", "bfloat16")
DTYPE_ALIASES = {"half": "float16", "float": "float32"}
LOAD_FORMATS = ("auto", "safetensors", "dummy")
SCHEDULING_POLICIES = ("fcfs", "priority")
DEVICES = ("auto", "cpu", "cuda")


# ---------------------------------------------------------------- the engine


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
    tensor_parallel_size: int = 1
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
    enforce_eager: bool = False
    hf_overrides: dict | None = None  # entries laid over config.json
    trust_remote_code: bool = False  # passed on to the tokenizer; no model code is ever loaded
    device: str = "auto"
    async_scheduling: bool | None = None  # step n+1 is scheduled while n runs; None: not (yet)

    def __post_init__(self):
        # torch.float32 and vLLM's "half" are welcome, too: one spelling from here on.
        dtype = str(self.dtype).removeprefix("torch.")
        object.__setattr__(self, "dtype", DTYPE_ALIASES.get(dtype, dtype))
        self._check_choice("dtype", DTYPES)
        self._check_choice("load_format", LOAD_FORMATS)
        self._check_choice("scheduling_policy", SCHEDULING_POLICIES)
        self._check_choice("device", DEVICES)
        for name in ("max_model_len", "max_num_batched_tokens", "max_num_seqs", "block_size",
                     "kv_cache_memory_bytes", "num_gpu_blocks_override", "tensor_parallel_size"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        if type(self.seed) is not int:
            raise ValueError(f"seed must be a whole number, got {self.seed!r}")
        for f in fields(self):
            if f.type == "bool" or f.type is bool:
                self._check_choice(f.name, (True, False))
        share = self.gpu_memory_utilization
        if not isinstance(share, (int, float)) or not 0 < share <= 1:
            raise ValueError(f"gpu_memory_utilization must be in (0, 1], got {share!r}")
        if self.hf_overrides is not None and not isinstance(self.hf_overrides, dict):
            raise ValueError(f"hf_overrides must be a dict laid over config.json, got "
                             f"{self.hf_overrides!r}")
        if self.tensor_parallel_size != 1:
            raise ValueError(f"tensor_parallel_size={self.tensor_parallel_size} is not supported "
                             "yet: use tensor_parallel_size=1")
        self._check_budget(self.max_num_batched_tokens, self.max_num_seqs)

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

    def resolved(self, device: str, model_config: "ModelConfig") -> "EngineConfig":
        """A copy without open choices, for `device` "cpu" or "cuda".

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
        return replace(
            self, device=device, max_model_len=max_model_len, max_num_batched_tokens=num_tokens,
            max_num_seqs=num_seqs, dtype=dtype, async_scheduling=bool(self.async_scheduling))


# ----------------------------------------------------------------- the model


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: "default", or "llama3" which stretches the low frequencies."""

    theta: float = 10000.0
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def find_model(model: str | Path) -> Path:
    """The folder of a model: a local one, or a hub id's (fetched, or from the offline cache).

    Raises `ValueError` when it is neither.
    """
    if not isinstance(model, (str, Path)) or not str(model).strip():
        raise ValueError(f"model={model!r}: name a folder or a hub id")
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ValueError(f"model={str(model)!r} is a file: name the folder that holds config.json")
    # Imported here because only a hub id needs it: a local folder works without the package.
    from huggingface_hub import snapshot_download
    try:
        return Path(snapshot_download(str(model), allow_patterns=HUB_FILES))
    except Exception as error:  # a network can fail in a dozen ways; the remedy is the same
        reason = (str(error).strip() or "no reason given").splitlines()[0]
        raise ValueError(f"model={str(model)!r} is not a local folder, and as a hub id it could "
                         f"not be fetched: {type(error).__name__}: {reason}") from error


# What each family's config.json may leave out (the defaults of its class in transformers) and
# what it never says because it is always so. Everything else about a family is read from the file.
FAMILIES: dict[str, dict] = {
    "LlamaForCausalLM": dict(qk_norm=False, head_dim=None, max_position_embeddings=2048),
    "Qwen3ForCausalLM": dict(qk_norm=True, head_dim=128, max_position_embeddings=32768),
}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One decoder-only network, as flags and sizes. Read it with `from_folder` or `from_dict`."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int  # fewer than the attention heads: grouped-query attention
    head_dim: int  # need not be hidden_size / num_attention_heads
    intermediate_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool  # the LM head is the embedding matrix
    attention_bias: bool  # biases on the q, k, v and output projections
    mlp_bias: bool
    qk_norm: bool  # RMSNorm over each head of q and k before RoPE (Qwen3)
    dtype: str  # the checkpoint's own
    eos_token_ids: tuple[int, ...]  # every one of them ends a sequence
    generation_defaults: dict  # the sampling entries of generation_config.json

    @classmethod
    def from_folder(cls, folder: str | Path, overrides: dict | None = None) -> "ModelConfig":
        """Read `config.json` and, where there is one, `generation_config.json`.

        Raises `ValueError` naming the file, the architecture or the entry that is not supported.
        """
        folder, overrides = Path(folder), overrides or {}
        config = _read_json(folder / "config.json", required=True) | overrides
        if config.get("rope_parameters") and "rope_parameters" not in overrides:
            # An override in the old spelling must win over a file in the new one.
            new = dict(overrides.get("rope_scaling") or {})
            if "rope_scaling" in overrides:
                new["rope_type"] = new.get("rope_type", new.get("type", "default"))
            if "rope_theta" in overrides:
                new["rope_theta"] = overrides["rope_theta"]
            config["rope_parameters"] = config["rope_parameters"] | new
        if "torch_dtype" in overrides:
            config["dtype"] = overrides["torch_dtype"]
        generation = _read_json(folder / "generation_config.json")
        return cls.from_dict(config, generation | {
            name: overrides[name] for name in ("eos_token_id",) if name in overrides})

    @classmethod
    def from_dict(cls, config: dict, generation: dict | None = None) -> "ModelConfig":
        """The same from the files' contents."""
        architecture = config.get("architectures") or config.get("model_type", "unknown")
        if isinstance(architecture, list):
            architecture = architecture[0]
        if architecture not in FAMILIES:
            raise ValueError(f"the architecture {architecture} is not supported: choose one of "
                             f"{', '.join(FAMILIES)}")
        config = FAMILIES[architecture] | {k: v for k, v in config.items() if v is not None}
        _refuse_what_is_not_implemented(config)
        num_heads = _size(config, "num_attention_heads")
        hidden_size = _size(config, "hidden_size")
        sizes = dict(
            vocab_size=_size(config, "vocab_size"),
            hidden_size=hidden_size,
            num_hidden_layers=_size(config, "num_hidden_layers"),
            num_attention_heads=num_heads,
            num_key_value_heads=_size(config, "num_key_value_heads", num_heads),
            head_dim=_size(config, "head_dim", hidden_size // num_heads),
            intermediate_size=_size(config, "intermediate_size"),
            max_position_embeddings=_size(config, "max_position_embeddings"))
        if num_heads % sizes["num_key_value_heads"]:
            raise ValueError(f"num_attention_heads={num_heads} is not a multiple of "
                             f"num_key_value_heads={sizes['num_key_value_heads']} in config.json")
        if sizes["head_dim"] % 2:
            raise ValueError(f"head_dim={sizes['head_dim']} in config.json is odd: RoPE turns "
                             "pairs of dimensions")
        generation = generation or {}
        eos = generation.get("eos_token_id")
        return cls(
            architecture=architecture, **sizes,
            rms_norm_eps=_number("rms_norm_eps", config.get("rms_norm_eps", 1e-6)),
            rope=_read_rope(config),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=config["qk_norm"],
            dtype=_read_dtype(config),
            eos_token_ids=_as_ids(config.get("eos_token_id") if eos is None else eos),
            generation_defaults=generation)

    @property
    def kv_width(self) -> int:
        """Numbers one token keeps in one layer's KV cache: a key and a value per KV head."""
        return 2 * self.num_key_value_heads * self.head_dim


def _read_json(path: Path, required: bool = False) -> dict:
    if not path.exists() and not required:
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist: a model folder needs its config.json") from None
    except (json.JSONDecodeError, UnicodeDecodeError, OSError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def _size(config: dict, name: str, default: int | None = None) -> int:
    value = config.get(name, default)
    if value is None:
        value = default
    if type(value) is not int or value < 1:
        raise ValueError(f"config.json: {name} must be a whole number of at least 1, got {value!r}")
    return value


def _as_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """`eos_token_id` is a number, a list of numbers, or absent."""
    ids = () if value is None else tuple(value) if isinstance(value, (list, tuple)) else (value,)
    if any(type(i) is not int for i in ids):
        raise ValueError(f"eos_token_id={value!r} must be a token id or a list of them: see "
                         "config.json and generation_config.json")
    return ids


def _read_dtype(config: dict) -> str:
    """transformers 5 writes `dtype`, earlier versions `torch_dtype`; neither means float32."""
    return str(config.get("dtype", config.get("torch_dtype", "float32"))).removeprefix("torch.")


def _read_rope(config: dict) -> RopeConfig:
    """Both spellings of the RoPE settings.

    transformers 5:  "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8, ..}
    before:          "rope_theta": 5e5, "rope_scaling": {"type": "llama3", "factor": 8, ..} or null
    """
    entries = _rope_entries(config)
    rope_type = entries.get("rope_type", entries.get("type", "default"))
    if rope_type not in ("default", "llama3"):
        raise ValueError(f"config.json: RoPE scaling {rope_type!r} is not supported: only default "
                         "and llama3 are")
    theta = _number("rope_theta", entries.get("rope_theta", config.get("rope_theta", 10000.0)))
    if rope_type == "default":
        return RopeConfig(theta=theta)
    scaling = {f.name: entries.get(f.name) for f in fields(RopeConfig) if f.name not in
               ("theta", "rope_type")}
    missing = [name for name, value in scaling.items() if value is None]
    if missing:
        raise ValueError(f"config.json: llama3 RoPE scaling lacks {', '.join(missing)}")
    return RopeConfig(theta=theta, rope_type=rope_type,
                      **{name: _number(name, value) for name, value in scaling.items()})


def _rope_entries(config: dict) -> dict:
    entries: dict = {}
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(config.get(name) or {}, dict):
            raise ValueError(f"config.json: {name}={config[name]!r} must be an object")
        entries |= config.get(name) or {}
    return entries


def _number(name: str, value: object) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise ValueError(f"config.json: {name} must be a number, got {value!r}")
    return value


def _refuse_what_is_not_implemented(config: dict) -> None:
    """A feature we would silently leave out gives fluent wrong text; better no text at all.

    Each entry is named with the values that mean "off" or "as we do it"; an absent one means that.
    """
    rope = _rope_entries(config)
    if "partial_rotary_factor" in rope:  # transformers 5 writes it there
        config = config | {"partial_rotary_factor": rope["partial_rotary_factor"]}
    expected = {"hidden_act": ("silu", "swish"), "use_sliding_window": (False,),
                "partial_rotary_factor": (1, 1.0)}
    for name, accepted in expected.items():
        if config.get(name, accepted[0]) not in accepted:
            raise ValueError(f"config.json: {name}={config[name]!r} is not supported: only "
                             f"{accepted[0]!r} is")
    if "quantization_config" in config:
        raise ValueError("config.json: quantization_config: quantised checkpoints are not "
                         "supported; use the unquantised one")
