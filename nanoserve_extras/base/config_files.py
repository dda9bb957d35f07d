"""config.json in the forms in which checkpoints are published: each is normalised, or refused.

The engine's own `ModelConfig` reads a file of one of its families as transformers writes it. Files
in other forms are read here:

    wrappings               the text network inside (wrappings.py)
    other endings           LlamaModel, Qwen3ForSequenceClassification: the family's layers
    overrides               in one spelling of RoPE, over a file in the other
    nulls                   the default, except for the entries where null means "off"
    quantised weights       the entry is kept for quantization/formats.py
    YaRN of a model card    the original length times a factor gives the context length

Invariant: a file means here what it means to transformers. Sizes that no network can have, or that
the weight files can't hold, are refused by the name of their entry. Otherwise a network of such a
size would fill the memory, or take years, before a tensor is found not to fit.

Not known here: tensors, and the engine's flags, which `ModelConfig` reads.
"""

import json
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from nanoserve import model_config as plain
from nanoserve.model_config import FAMILIES, KINDS, NEEDED, known_entries, read_generation
from nanoserve_extras.base.wrappings import TEXTS, WRAPPINGS, flatten, stored_names

RECIPE_NUMBERS = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow",
                  "original_max_position_embeddings", "attention_factor")
# The end of an architecture's name tells its head. The layers below are those of ...ForCausalLM.
ENDINGS = ("Model, EmbeddingModel, ForSequenceClassification, ForRewardModel, ForRewardModeling, "
           "ForProcessRewardModel")
HEAD = re.compile(rf"(Text)?(ForCausalLM|{ENDINGS.replace(', ', '|')})$")
# transformers runs these by Llama's class, and files that it saves name that class, but their
# entries and tensors have other names.
LIKE_LLAMA = ("exaone", "internlm3", "iquestcoder")
SUPPORTED = f"one of {', '.join(FAMILIES)}, or with another ending that pools: {ENDINGS}"
# Entries where null means "off", or "as many as heads"; in all others it means the default, as if
# the entry were left out.
MEANT_NULLS = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping",
               "num_key_value_heads")
# Entries which say that the weights are quantised; the second name is MLX's.
QUANTIZED = ("quantization_config", "quantization")
# The numbers in these entries are no sizes: GPTQ's `group_size` is -1 if a whole row is one group.
NO_NETWORKS = (*QUANTIZED, "compression_config", "attn_config", "rope_scaling", "rope_parameters")
WHOLE = (*NEEDED, "num_key_value_heads", "head_dim", "max_position_embeddings", "sliding_window",
         "sliding_window_pattern", "max_window_layers", "num_experts", "num_local_experts",
         "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step")
# The lower bound of each number, exclusive.
BOUNDS = dict.fromkeys((*WHOLE, *RECIPE_NUMBERS, "rms_norm_eps", "query_pre_attn_scalar",
                        "attn_logit_softcapping", "final_logit_softcapping"), 0) | {
    "max_window_layers": -1, "rope_theta": 1, "rope_local_base_freq": 1}

# Entries that count layers (the first group), tokens, or rows of weights.
SIZE = re.compile(r"^(n\w*_\w*layers?|\w+coder_layers|depth)$|_(window)$"
                  r"|_(?:size|dim|heads?|experts|inner|embd)$|^d_")
MOST_LAYERS, MOST_WEIGHTS, MOST_NESTED = 1000, 2 ** 32, 64  # the second: without files


@dataclass(frozen=True, kw_only=True)
class ModelConfig(plain.ModelConfig):
    """The config of any checkpoint that the extras serve. Read it with `from_folder` or
    `from_dict`. `from nanoserve import ModelConfig` gives this class."""

    pools: bool = False  # made for pooling, not for generation, as far as its files tell
    has_towers: bool = False  # for images or sound: a wrapping, whose text network alone is run
    sees: bool = False  # a wrapping whose vision tower is run as well
    keeps_states: bool = False  # some layers are recurrent
    quantization: dict | None = None  # how weights are stored, if they are quantised

    @classmethod
    def from_folder(cls, folder: str | Path, overrides: dict | None = None) -> Self:
        """Read `config.json` and, where there is one, `generation_config.json`.

        Raises `ValueError` naming the file, the architecture or the entry that is not supported.
        """
        folder, overrides = Path(folder), overrides or {}
        config = read_flat(folder, overrides)
        override_new_spelling(config, overrides)
        if "torch_dtype" in overrides:
            config["dtype"] = overrides["torch_dtype"]
        found = cls.from_dict(config, read_generation(folder, overrides))
        # sentence-transformers leaves its own file beside the architecture of a generator.
        return replace(found, pools=found.pools or (folder / "modules.json").exists())

    @staticmethod
    def is_known(folder: str | Path, overrides: dict | None = None) -> bool:
        """Whether the engine's own decoder runs this architecture. The decoder is causal, so it
        can't run EmbeddingGemma, a Gemma 3 with bidirectional attention."""
        config = read_flat(Path(folder), overrides or {})
        kind, _ = find_family(config) or (None, {})
        return kind is not None and not (
            kind == "gemma3_text" and config.get("use_bidirectional_attention"))

    @classmethod
    def from_dict(cls, config: dict, generation: dict | None = None) -> Self:
        """Read the contents of the two files."""
        architecture, family = read_architecture(config), find_family(config)
        if family is None:
            raise ValueError(f"the architecture {architecture} is not supported: choose "
                             f"{SUPPORTED}")
        kind, flags = family
        is_wrapping, quantization = architecture in WRAPPINGS, read_quantization(config)
        entries = without_nulls({k: v for k, v in config.items() if k not in QUANTIZED})
        if not is_wrapping:
            entries = dict.fromkeys(NEEDED) | entries
            if kind == "mistral" and "layer_types" in entries:
                kind = "ministral"  # as transformers does, but for the text of a wrapping
        found = cls.of_family(architecture, kind, flags, checked(kind, entries), generation or {})
        return replace(
            found, has_towers=is_wrapping, quantization=quantization,
            pools=not architecture.endswith(("ForCausalLM", "ForConditionalGeneration")))

    @property
    def has_lm_head(self) -> bool:
        """Whether the checkpoint can generate. "LMHeadModel" is the older ending, as in GPT-2."""
        return self.architecture.endswith(("ForCausalLM", "LMHeadModel",
                                           "ForConditionalGeneration"))


# ------------------------------------------------------------- which network to run


def read_architecture(config: dict) -> str:
    """The architecture. `architectures` is a list of one name; files of old tools leave it out."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else names
    if not isinstance(name, str) or not name:
        raise ValueError(
            f"config.json: architectures={names!r} names no network (its model_type is "
            f"{config.get('model_type')!r}): add the entry, or give it with hf_overrides="
            f"{{'architectures': [...]}}; choose {SUPPORTED}")
    return name


def read_flat(folder: Path, overrides: dict) -> dict:
    """config.json with overrides. Of a wrapping the result describes the text network inside."""
    config = read_config(folder)
    architecture = read_architecture(config | overrides)
    names = stored_names(folder) if architecture in WRAPPINGS else []
    return flatten(architecture, config, overrides, names)


def find_family(config: dict) -> tuple[str, dict] | None:
    """The row of `FAMILIES` for a config (for a wrapping: flattened). None if the engine's own
    decoder does not support it."""
    architecture, kind = read_architecture(config), str(config.get("model_type"))
    if architecture in WRAPPINGS:
        return (kind, FAMILIES[TEXTS[kind]][1]) if kind in TEXTS else None
    if kind in LIKE_LLAMA:
        return None
    return FAMILIES.get(HEAD.sub("", architecture) + "ForCausalLM")


# ------------------------------------------------------------------- the file


def read_config(folder: Path) -> dict:
    """Read config.json. Raises `ValueError` for sizes that the weight files can't hold: a network
    of such sizes would fill the memory, or take years, before a tensor is found not to fit."""
    if any(folder.glob("*.gguf")) and not (folder / "config.json").exists():
        raise ValueError(f"{folder} has no config.json: name the GGUF file itself, as "
                         "FOLDER/FILE.gguf or FOLDER:Q4_K_M")
    config = read_json(folder / "config.json", required=True)
    # Model Optimizer's own file: before its version 0.30 config.json lacked the entry.
    stored = read_json(folder / "hf_quant_config.json").get("quantization")
    if isinstance(stored, dict) and config.get("quantization_config") is None:
        config["quantization_config"] = stored | dict(quant_method="modelopt")
    num_bytes = sum(file.stat().st_size for place in ("*", "*/*") for file in folder.glob(place)
                    if file.suffix in (".safetensors", ".bin") and file.is_file())
    parts = [part for name, part in config.items() if name not in NO_NETWORKS]
    for part in filter(lambda part: isinstance(part, dict), (config, *parts)):
        width = part.get("hidden_size", part.get("n_embd"))
        for name, size in part.items():
            if type(size) is int and (found := SIZE.search(name)):
                wide = 1 if found.lastindex else width if type(width) is int else 64
                most = MOST_LAYERS if found[1] else max(4 * num_bytes, MOST_WEIGHTS)
                if size < 0 or size * wide > most:  # 2 bits a weight, at least
                    raise ValueError(f"{folder}: config.json: {name}={size}, with a width of "
                                     f"{width}, is below 0, or more than {num_bytes:,} bytes hold")
    return config


def read_json(path: Path, required: bool = False) -> dict:
    """As the engine's function, which does not know that transformers 5 writes an infinity as
    {"__float__": "Infinity"}. Refuses deep nesting, which would end in a RecursionError later."""
    content = plain.read_json(path, required)
    level = [content]
    for _ in range(MOST_NESTED):
        level = [one for each in level if isinstance(each, (dict, list))
                 for one in (each.values() if isinstance(each, dict) else each)]
    if level:
        raise ValueError(f"{path} is nested more than {MOST_NESTED} deep")

    def number(entry: dict) -> dict | float:
        return float(entry["__float__"]) if entry.keys() == {"__float__"} else entry

    try:
        return json.loads(json.dumps(content), object_hook=number)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None


def override_new_spelling(config: dict, overrides: dict) -> None:
    """Overrides in one spelling win over a file in the other; rope_scaling replaces a recipe."""
    if "rope_parameters" in overrides and "rope_scaling" not in overrides:
        config.pop("rope_scaling", None)
    rope = config.get("rope_parameters")
    if not isinstance(rope, dict) or not rope or "rope_parameters" in overrides:
        return
    new = overrides.get("rope_scaling") or {}
    if not isinstance(new, dict):
        raise ValueError(f"hf_overrides: rope_scaling={new!r} must be an object")
    new = dict(new)
    both = isinstance(rope.get("full_attention"), dict)  # for each kind of layer (Gemma 3)
    old, local = rope["full_attention"] if both else rope, rope.get("sliding_attention") or {}
    if "rope_scaling" in overrides:
        del config["rope_scaling"]
        new["rope_type"] = new.get("rope_type", new.get("type", "default"))
        old = {k: v for k, v in old.items() if k in ("rope_theta", "partial_rotary_factor")}
    if "rope_theta" in overrides:
        new["rope_theta"] = overrides["rope_theta"]
    if "rope_local_base_freq" in overrides:
        local = local | dict(rope_theta=overrides["rope_local_base_freq"])
    new = old | new
    config["rope_parameters"] = dict(full_attention=new, sliding_attention=local) if both else new


def read_quantization(config: dict) -> dict | None:
    """The entry, unchanged. An entry without a method (in Gemma's QAT checkpoints it tells how they
    were trained) describes no tensor: then the weights must be plain, or are refused."""
    if config.get("quantization") is not None:
        raise ValueError(f"config.json: quantization={str(config['quantization'])[:60]}: MLX's "
                         "quantised checkpoints are not supported, use the unquantised one")
    entry = config.get("quantization_config")
    if entry is not None and not isinstance(entry, dict):
        raise ValueError(f"config.json: quantization_config={entry!r:.60} must be an object")
    return entry if entry and entry.get("quant_method") is not None else None


# ------------------------------------------------------------------ its entries


def without_nulls(entries: dict) -> dict:
    """A copy without the nulls that mean the default."""
    return {name: without_nulls(value) if isinstance(value, dict) else value
            for name, value in entries.items() if value is not None or name in MEANT_NULLS}


def checked(kind: str, entries: dict) -> dict:
    """Check the entries that the config class of this model_type has, and set the context length
    that YaRN gives. Raises a `ValueError` that names the entry."""
    from transformers import CONFIG_MAPPING

    made_by: Any = CONFIG_MAPPING[kind]
    known = known_entries(made_by)
    of_network = {name: value for name, value in entries.items() if name in known}
    check_numbers(of_network)
    check_ropes(of_network)
    return entries | dict(max_position_embeddings=max(
        stretched_length(of_network),
        entries.get("max_position_embeddings", made_by.max_position_embeddings)))


def check_numbers(entries: dict) -> None:
    """Check all numbers, those in RoPE's objects included. `true`, in Python equal to 1, is no
    number."""
    for name, value in entries.items():
        if isinstance(value, dict):
            check_numbers(value)
        elif name in BOUNDS and not (value is None and name in MEANT_NULLS):
            bound, types = BOUNDS[name], (int,) if name in WHOLE else (int, float)
            if type(value) not in types or not bound < value < math.inf:
                raise ValueError(f"config.json: {name} must be a {'whole ' * (name in WHOLE)}number"
                                 f" above {bound}, got {value!r}")


def check_ropes(config: dict) -> None:
    """Raises a `ValueError` that names a malformed recipe of RoPE. Its numbers are checked already.
    """
    check_recipe(config)
    for name in ("rope_scaling", "rope_parameters"):
        entries = config.get(name, {})
        kinds = [kind for kind in KINDS if isinstance(entries, dict) and kind in entries]
        for recipe in [entries[kind] for kind in kinds] or [entries]:
            if not isinstance(recipe, dict):
                raise ValueError(f"config.json: {name}={entries!r:.80}: {recipe!r:.80} must be an "
                                 "object")
            check_recipe(recipe)


def check_recipe(recipe: dict) -> None:
    """Check one recipe: an object of the file, or the entries beside it."""
    if not isinstance(truncate := recipe.get("truncate", True), bool):
        raise ValueError(f"config.json: truncate must be true or false, got {truncate!r}")
    low, high = recipe.get("low_freq_factor"), recipe.get("high_freq_factor")
    if low is not None and high is not None and low >= high:
        raise ValueError(f"config.json: low_freq_factor={low} must be below "
                         f"high_freq_factor={high}")


def stretched_length(config: dict) -> int:
    """The context length that YaRN gives. Model cards name the original length and the factor, and
    leave max_position_embeddings as it was: 32,768 times 4 is 131,072. Returns 0 for other recipes,
    and if the file does not name the original length."""
    recipe = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if recipe.get("rope_type", recipe.get("type")) != "yarn":
        return 0
    name = "original_max_position_embeddings"  # transformers prefers the one beside the object
    return int(config.get(name, recipe.get(name, 0)) * recipe.get("factor", 1))
