"""A GGUF file's metadata, translated to entries of transformers' configs.

    qwen3.rope.freq_base = 1000000     ──►  "rope_parameters": {"rope_theta": 1000000, ...}
    tokenizer.ggml.eot_token_id = 258  ──►  "eos_token_id": [256, 258]

One table (FIELDS) is enough, because a name means the same in each architecture; an architecture
that differs has a row in ALWAYS_OF or LEFT_OUT. (transformers' own reader is not used: it ignores
some entries, which then get the defaults of its classes.)

The file is mapped, and walked through once: each entry has its length in front of it, and tensors
are slices of the mapping. (llama.cpp's package makes three arrays of each of a vocabulary's words,
which takes longer than all of the weights.)

Invariant: an entry that is not known, or that the network's class has no field for, is an error.
What a file leaves out has llama.cpp's default and not the class's.
"""

import math
import mmap
import re
import struct
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from tokenizers import AddedToken, Regex, decoders, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from nanoserve.model_config import make_rope

# An entry of the network, and its field in transformers' classes; where they have several names for
# it, the first that a class has.
FIELDS = {
    "vocab_size": "vocab_size", "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers", "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim", "attention.value_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps norm_eps",
    "attention.layer_norm_epsilon": "norm_epsilon norm_eps",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping", "expert_weights_norm": "norm_topk_prob",
    "expert_count": "num_experts", "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "leading_dense_block_count": "num_dense_layers", "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier", "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling", "shortconv.l_cache": "conv_L_cache",
    "ssm.conv_kernel": "linear_conv_kernel_dim", "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads", "ssm.time_step_rank": "linear_num_value_heads",
    "ssm.inner_size": "linear_value_head_dim"}
NEEDED = ("block_count", "context_length", "embedding_length", "attention.head_count")
BY_TENSOR = {"attention_bias": "attn_q.bias", "conv_bias": "shortconv.in_proj.bias"}
# Entries that need no field: sizes that the tensors' shapes confirm, values that are 0 or usual.
SHOWN = ("attention.head_count_kv", "attention.key_length", "attention.value_length",
         "feed_forward_length")
OFF = re.compile("attention.(sliding_window|max_alibi_bias|clamp_kqv|scale)|.*logit_softcapping|"
                 "expert_.*(count|scale|func)|leading_dense_block_count|logit_scale|pooling_type")
SOFTMAX, SIGMOID = 1, 2  # llama.cpp's numbers of what makes a router's weights
AS_ALWAYS = {"attention.causal": True, "expert_weights_scale": 1.0, "expert_gating_func": SOFTMAX}
# Where an architecture differs: in what is as always, and in what a file leaves out.
ALWAYS_OF = {"lfm2moe": {"expert_gating_func": SIGMOID}}
LEFT_OUT = {"gemma2": {"attention.sliding_window": 4096}}
# By architecture and number of layers, Gemma's 27B. llama.cpp knows them by that, too.
SCALED_BY_HIDDEN = (("gemma2", 46), ("gemma3", 62))
ROPE = re.compile(r"rope\.(freq_base(_swa)?|dimension_count|scale_linear|scaling\.(type|factor|"
                  "attn_factor|original_context_length|finetuned|"
                  "yarn_(attn_factor|log_multiplier|beta_fast|beta_slow)))")
TOKENIZER = re.compile(
    r"tokenizer\.(ggml\.(model|pre|tokens|token_type|scores|merges|suppress_tokens|"
    "add_((bos|eos)_token|space_prefix)|"
    "(bos|eos|eot|eom|unknown|seperator|padding|mask|cls|fim_...|prefix|suffix|middle)_token_id)|"
    r"chat_templates?|chat_template\..+|huggingface\.json)")
SAMPLING = {f"general.sampling.{ours}": theirs for ours, theirs in dict(
    temp="temperature", top_k="top_k", top_p="top_p", min_p="min_p",
    penalty_repeat="repetition_penalty").items()}
# Tokens that end a text by their spelling, as in llama.cpp, whatever type the file gives them: many
# files of ChatML's fine-tunes call <|im_end|> a user's token, and another one EOS. Of the marks of
# infilling, by what they are for, those that end one.
ENDS = set("""<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn>
    <|endoftext|> </s> <|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance>
    <eos> <turn|> <|tool_response> <\uff5cend\u2581of\u2581sentence\uff5c> [e~[""".split())
INFILLING = {"fim_pad": "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]".split(),
             "fim_rep": "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>".split(),
             "fim_sep": ["<|file_sep|>"]}
# Ways to split text before merging: by GPT-2's pattern, and as Llama 3, where a word of the
# vocabulary needs no merges and BOS comes first.
AS_GPT2 = {"gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling"}
AS_LLAMA3 = {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0",
             "lfm2", "jina-v5-nano", "tekken"}
AS_LLAMA3S_SPLIT = {"glm4", "chatglm-bpe"}
# As GPT-2, behind a cut around each digit.
BY_DIGITS = {"starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"}


# The file's kinds of values by their numbers, as `struct` calls them.
KINDS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
TEXT, ARRAY = 8, 9
LENGTH = struct.Struct("<Q")  # in front of a text: a vocabulary has some 300,000
VERSIONS = (2, 3)


class Stored(NamedTuple):
    """A tensor of the file."""

    name: str
    shape: tuple[int, ...]  # in torch's order
    tensor_type: Any  # gguf's GGMLQuantizationType
    data: np.ndarray  # uint8, (..., bytes of a row)


class Walk:
    """A parser of a mapped file, from its beginning."""

    def __init__(self, memory: mmap.mmap):
        self.memory, self.at = memory, 0

    def numbers(self, kinds: str) -> tuple:
        found = struct.unpack_from(f"<{kinds}", self.memory, self.at)
        self.at += struct.calcsize(f"<{kinds}")
        return found

    def text(self) -> str:
        (length,) = LENGTH.unpack_from(self.memory, self.at)
        self.at += LENGTH.size + length
        return self.memory[self.at - length:self.at].decode()

    def value(self, kind: int) -> Any:
        if kind == TEXT:
            return self.text()
        if kind != ARRAY:
            return self.numbers(KINDS[kind])[0]
        kind, count = self.numbers("IQ")
        if kind in KINDS:
            return [*self.numbers(f"{count}{KINDS[kind]}")]
        return [self.value(kind) for _ in range(count)]

    def tensors(self, count: int) -> Iterator[tuple[str, tuple[int, ...], int, int]]:
        for _ in range(count):
            name, (dims,) = self.text(), self.numbers("I")
            yield name, self.numbers(f"{dims}Q")[::-1], *self.numbers("IQ")


def read_file(file: Path) -> tuple[dict, list[Stored]]:
    """Its entries and its tensors. Raises errors of many kinds for a file that is cut off, or newer
    than the package gguf."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    with file.open("rb") as opened:
        walk = Walk(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
    _, version, num_tensors, num_entries = walk.numbers("4sIQQ")
    if version not in VERSIONS:
        raise ValueError(f"it is of GGUF's version {version}, and {VERSIONS} are read")
    entries, tensors = {}, []
    for _ in range(num_entries):
        name = walk.text()
        if name in entries:
            raise ValueError(f"{name} comes twice")
        entries[name] = walk.value(*walk.numbers("I"))
    found = [*walk.tensors(num_tensors)]
    alignment = entries.get("general.alignment", 32)
    first = -(-walk.at // alignment) * alignment
    for name, shape, number, start in found:
        kind = GGMLQuantizationType(number)
        numbers, size = GGML_QUANT_SIZES[kind]
        rows = (*shape[:-1], shape[-1] // numbers * size)
        data = np.frombuffer(walk.memory, np.uint8, math.prod(rows), first + start).reshape(rows)
        tensors.append(Stored(name, shape, kind, data))
    return entries, tensors


def check_names(entries: dict) -> list[str]:
    """The entries that are ignored: those of other tools, some for sampling, further templates.

    Raises `ValueError` for a file that is not a whole text model, and for an entry of the tokenizer
    that is not known."""
    if entries.get("general.architecture") == "clip":
        raise ValueError("it is the tower for images (mmproj) of a model: convert the model's own "
                         "file, which writes text; images need the checkpoint in safetensors")
    if entries.get("general.type", "model") != "model" or entries.get("split.count", 1) > 1:
        raise ValueError(f"general.type={entries.get('general.type')!r}, split.count="
                         f"{entries.get('split.count')!r}: convert the file of a whole text model; "
                         "parts are joined by llama-gguf-split --merge")
    for name, value in entries.items():
        if name.startswith("tokenizer.") and value and not TOKENIZER.fullmatch(name):
            raise ValueError(f"{name}={value!r:.80} is not known")
    ours = ("GGUF", "general", "split", "quantize", "tokenizer", entries["general.architecture"])
    return [name for name in entries if name.split(".")[0] not in ours or name not in SAMPLING
            and name.startswith(("general.sampling.", "tokenizer.chat_template."))]


class Said(dict):
    """The network's entries, by their names without the architecture's."""

    def __init__(self, entries: dict):
        self.arch = entries["general.architecture"]
        start = f"{self.arch}."
        super().__init__((name.removeprefix(start), value) for name, value in entries.items()
                         if name.startswith(start))

    @property
    def even_head(self) -> int:
        """A head's size where the heads of a layer are as wide as the network."""
        return self["embedding_length"] // self["attention.head_count"]

    def refuse(self, name: str, why: str) -> NoReturn:
        raise ValueError(f"{self.arch}.{name}={self.get(name)!r:.80}: {why}")


def read_network(entries: dict, names: Container[str], usual: object, factors: dict) -> dict:
    """The fields of the network's config. names: of the file's tensors; usual: the class's config,
    with its defaults; factors: RoPE's tensors.

    Raises a `ValueError` that names the entry and its value if the class has no field for it.
    """
    said, known = Said(entries), usual.to_dict().keys() | usual.attribute_map.keys()
    check_needed(said)
    sections = said.pop("rope.dimension_sections", None)
    fields = dict(vocab_size=len(entries["tokenizer.ggml.tokens"]),
                  tie_word_embeddings="output.weight" not in names)
    for field, tensor in BY_TENSOR.items():
        if field in known:
            fields[field] = any(f"blk.{i}.{tensor}" in names for i in range(said["block_count"]))
    said["block_count"] -= said.pop("nextn_predict_layers", 0)  # drafts' layers are left out
    fields |= read_layer_types(said)
    fill_in(said)
    rope = read_ropes(said, usual, factors, sections)
    fields |= read_fields(said, known, type(usual).__name__)
    fields |= read_attention(said, known, fields) | dict(rope_parameters=rope)
    for ours, theirs in dict(bos="bos", eos="eos", pad="padding").items():
        fields[f"{ours}_token_id"] = entries.get(f"tokenizer.ggml.{theirs}_token_id")
    return fields


def check_needed(said: Said) -> None:
    """Raises `ValueError` for an entry that every network has, and this one has not."""
    norms = [name for name in said if name.startswith("attention.layer_norm_")]
    for name in (*NEEDED, *(norms or ["attention.layer_norm_rms_epsilon"])):
        if name not in said:
            said.refuse(name, "every network has it")


def read_layer_types(said: Said) -> dict:
    """Which layers attend: every so many-th, or those with heads for keys (of LFM2, whose others
    convolve). Any other entry must be the same for all layers."""
    kinds, heads = {}, said.get("attention.head_count_kv")
    if (interval := said.pop("full_attention_interval", None)) is not None:
        kinds["layer_types"] = ["linear_attention" if (i + 1) % interval else "full_attention"
                                for i in range(said["block_count"])]
    if isinstance(heads, list) and said.arch.startswith("lfm2"):
        kinds["layer_types"] = ["full_attention" if one else "conv" for one in heads]
        said["attention.head_count_kv"] = [one for one in heads if one]
    for name, value in said.items():
        if isinstance(value, list):
            if len({*value}) != 1:
                said.refuse(name, "layers differ in it")
            said[name] = value[0]
    return kinds


def fill_in(said: Said) -> None:
    """llama.cpp's defaults; and a head's size, where the file has that of all heads."""
    usually = {"attention.head_count_kv": said["attention.head_count"],
               "attention.key_length": said.even_head, "attention.sliding_window": 0}
    if said.arch == "granite":
        usually["attention.scale"] = said.even_head ** -0.5
    said.update(usually | LEFT_OUT.get(said.arch, {}) | said)
    if "ssm.inner_size" in said:
        said["ssm.inner_size"] //= said["ssm.time_step_rank"]


def read_fields(said: Said, known: set[str], kind: str) -> dict:
    """Each entry's field, by the tables above; RoPE's are read elsewhere."""
    always, fields = AS_ALWAYS | ALWAYS_OF.get(said.arch, {}), {}
    if {said["attention.key_length"], said.get("attention.value_length")} - {None, said.even_head}:
        known = known | {"head_dim"}  # all classes read it; some don't list it
    for name, value in said.items():
        if ROPE.fullmatch(name):
            continue
        if not value and OFF.fullmatch(name):
            value = None
        field = next((one for one in FIELDS.get(name, "").split() if one in known), None)
        if field is not None and fields.setdefault(field, value) != value:
            said.refuse(name, f"another entry says {field}={fields[field]!r}")
        if field is None and name not in SHOWN and value not in (None, always.get(name)):
            said.refuse(name, f"transformers' {kind} has no place for it")
    return fields


def read_attention(said: Said, known: Container[str], fields: dict) -> dict:
    """What follows for the classes that want more: the scale, and which layers have a window."""
    layers, more = said["block_count"], {}
    if "query_pre_attn_scalar" in known:
        is_by_hidden = (said.arch, layers) in SCALED_BY_HIDDEN
        more["query_pre_attn_scalar"] = (
            said.even_head if is_by_hidden else said["attention.key_length"])
    if "use_sliding_window" in known:
        more |= dict(use_sliding_window=bool(fields["sliding_window"]), max_window_layers=0)
    elif "layer_types" in known and not fields.get("sliding_window", True):
        more |= dict(layer_types=["full_attention"] * layers, sliding_window=said["context_length"])
    return more


def read_ropes(said: Said, usual: object, factors: dict, sections: list | None) -> dict:
    """`rope_parameters`. sections: of Qwen's positions in time, height and width, padded with 0."""
    rope = read_rope(said, factors)
    if said.arch == "granite" and not said.get("rope.scaling.finetuned", True):
        said.refuse("rope.scaling.finetuned", "it leaves RoPE out")
    if sections:
        rope |= dict(mrope_section=[n for n in sections if n], mrope_interleaved=True)
    if "llama_4_scaling_beta" in usual.rope_parameters:
        rope["llama_4_scaling_beta"] = said.pop("attention.temperature_scale")
    local = dict(rope_type="default", rope_theta=said.get("rope.freq_base_swa", 1e4))
    if "sliding_attention" in usual.rope_parameters:  # Gemma 3 stretches no window
        return dict(full_attention=rope, sliding_attention=local)
    if "rope.freq_base_swa" in said and local["rope_theta"] != rope["rope_theta"]:
        said.refuse("rope.freq_base_swa", "the class has one base for all layers")
    return rope


def read_rope(said: Said, factors: dict) -> dict:
    """One object of `rope_parameters`. factors: by which each pair's wavelength is multiplied."""
    head_dim = said["attention.key_length"]
    rope = dict(rope_type="default", rope_theta=said.get("rope.freq_base", 10000.0))
    if (turned := said.get("rope.dimension_count", head_dim)) != head_dim:
        rope["partial_rotary_factor"] = turned / head_dim
    factor = said.get("rope.scaling.factor", said.get("rope.scale_linear")) or 1.0
    kind = said.get("rope.scaling.type", "linear" if factor != 1 else "none")
    trained = said.get("rope.scaling.original_context_length", said["context_length"])
    sharp = (said.get("rope.scaling.attn_factor", 1.0)
             * said.get("rope.scaling.yarn_attn_factor", 1.0))
    match kind, *sorted(factors):
        case "none" | "longrope", "rope_factors_long.weight", "rope_factors_short.weight":
            return rope | dict(
                rope_type="longrope", original_max_position_embeddings=trained,
                factor=said["context_length"] / trained, attention_factor=sharp,
                **{f"{name}_factor": factors[f"rope_factors_{name}.weight"].tolist()
                   for name in ("long", "short")})
        case "none", "rope_freqs.weight" if sharp == 1:
            return rope | llama3(rope["rope_theta"], factors["rope_freqs.weight"])
        case ("yarn",):
            return rope | dict(
                rope_type="yarn", factor=factor, original_max_position_embeddings=trained,
                beta_fast=said.get("rope.scaling.yarn_beta_fast", 32.0),
                beta_slow=said.get("rope.scaling.yarn_beta_slow", 1.0),
                attention_factor=sharp * (0.1 * math.log(factor) + 1) / (
                    0.1 * said.get("rope.scaling.yarn_log_multiplier", 0) * math.log(factor) + 1))
        case ("linear",) if sharp == 1:
            return rope | dict(rope_type="linear", factor=factor)
        case ("none",) if sharp == 1:
            return rope
    said.refuse("rope.scaling.type",
                f"not known together with {', '.join(factors) or 'attn_factor'}")


def llama3(theta: float, factors) -> dict:
    """The recipe that makes these factors, (head_dim / 2,). Published ones blend between one and
    four turns in training, and their numbers are powers of 2."""
    def frequencies(**recipe) -> torch.Tensor:
        return torch.tensor(make_rope(LlamaConfig(  # longer than all of the recipes' lengths
            head_dim=2 * len(factors), max_position_embeddings=2 ** 21,
            rope_parameters=recipe | dict(rope_theta=theta))).frequencies)

    factors, plain = torch.from_numpy(factors.copy()), frequencies(rope_type="default")
    for factor in (float(factors.max()), *(2.0 ** i for i in range(1, 7))):
        for length in (2 ** i for i in range(3, 21)):
            recipe = dict(rope_type="llama3", factor=factor, low_freq_factor=1.0,
                          high_freq_factor=4.0, original_max_position_embeddings=length)
            if torch.allclose(plain / frequencies(**recipe), factors, rtol=1e-5):
                return recipe
    raise ValueError(f"rope_freqs.weight: no recipe makes {factors.tolist()!s:.80}")


def read_generation(entries: dict) -> dict:
    """For generation_config.json: how to sample, the tokens that end a text, and those that never
    come."""
    sampling = {theirs: entries[name] for name, theirs in SAMPLING.items() if name in entries}
    never = [int(i) for i in entries.get("tokenizer.ggml.suppress_tokens", ())]
    return sampling | dict(eos_token_id=read_ends(entries) or None, suppress_tokens=never or None,
                           do_sample=bool(sampling) or None)


def read_ends(entries: dict) -> list[int]:
    """The tokens that end a text: by name, or spelled like one."""
    tokens = entries.get("tokenizer.ggml.tokens", [])
    at = {text: i for i, text in enumerate(tokens)}

    def named(name: str) -> int | None:
        token_id = entries.get(f"tokenizer.ggml.{name}_token_id", len(tokens))
        return token_id if token_id < len(tokens) else None

    found = [*map(named, ("eos", "eot", "eom")), *sorted(at[text] for text in ENDS & at.keys())]
    for name, spellings in INFILLING.items():
        spelled = min((at[text] for text in spellings if text in at), default=None)
        found.append(spelled if named(name) is None else named(name))
    ends = {tokens[i]: i for i in found if i is not None}
    if {"<|return|>", "<|call|>"} <= ends.keys() or (
            "<|flush|>" in ends and {"<|call|>", "<|calls|>"} & ends.keys()):
        ends.pop("<|end|>", None)  # here it ends a message and not the turn
    if "<|tool_response>" in ends:
        ends.pop("</s>", None)
    return list(ends.values())


def read_tokenizer(entries: dict) -> PreTrainedTokenizerFast:
    """The tokenizer, as by `from_pretrained(gguf_file=...)`, which would read the file again."""
    from transformers.integrations.gguf import gguf_tokenizer_mapping as mapping
    fields, options = ({ours: entries[f"tokenizer.{name}"] for name, ours in names.items()
                        if f"tokenizer.{name}" in entries}
                       for names in map(mapping.GGUF_TOKENIZER_MAPPING.get, (
                           "tokenizer", "tokenizer_config")))
    if fields.get("tokenizer_type") == "llama":
        options.setdefault("add_bos_token", True)
    for name, end in dict(bos="bos", eos="eos", unk="unknown", pad="padding").items():
        number = entries.get(f"tokenizer.ggml.{end}_token_id")
        options[f"{name}_token"] = None if number is None else fields["tokens"][number]
    made, more = mapping.convert_gguf_tokenizer(entries["general.architecture"], fields)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, **options | more)
    mend_tokenizer(tokenizer, entries)
    return tokenizer


def mend_tokenizer(tokenizer, entries: dict) -> None:
    """Apply settings that transformers ignores: llama.cpp's defaults, special tokens that end a
    text, and that no space is put in front.

    Raises `ValueError` for a pre-tokenizer that transformers doesn't know: it would use GPT-2's."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    kind, pre = (entries.get(f"tokenizer.ggml.{name}") for name in ("model", "pre"))
    backend = tokenizer.backend_tokenizer
    ends = [entries["tokenizer.ggml.tokens"][i] for i in read_ends(entries)]
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ends
                                if backend.token_to_id(text) is not None])
    if kind == "gpt2" and pre in BY_DIGITS:
        backend.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False)])
    elif kind == "gpt2" and pre in AS_LLAMA3S_SPLIT:
        backend.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS["llama3"]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    elif kind == "gpt2" and pre not in {*GGUF_PRE_TOKENIZER_SPLITS, *AS_GPT2}:
        raise ValueError(f"tokenizer.ggml.pre={pre!r}: the way it splits text is not known")
    if kind == "gpt2" and pre in AS_LLAMA3:
        backend.model.ignore_merges = True
    if kind == "llama" and entries.get("tokenizer.ggml.add_space_prefix") is False and (
            tokenizer.tokenize("a") != ["a"]):
        backend.normalizer = None
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
        backend.decoder = decoders.Sequence([
            decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    if kind in ("gpt2", "llama"):
        tokenizer.add_bos_token = tokenizer.bos_token is not None and entries.get(
            "tokenizer.ggml.add_bos_token", kind == "llama" or pre in AS_LLAMA3)
