"""Encoders (BERT and its kin): transformers' network, every token sees all of its own prompt.

Most embedding models and rerankers of a laptop's size are encoders. As with other networks of
transformers' (transformers_model.py), only attention is ours: the step's prompts are concatenated
without padding, and each attends to itself.

    step      [ CLS a a a SEP | CLS b SEP | CLS c c c c SEP ]     no query sees another prompt
    hidden      h0 ...          h0 ...      h0 ...
                CLS, or the mean of a prompt's ─► Dense ─► Normalize     modules.json
                CLS ─► the class's own pooler and classifier             a cross-encoder

Invariant: a prompt is computed in one step, because its first token depends on its last one. So
chunks and the prefix cache are always off. A prompt's results are the same alone and batched, and
equal those of transformers: at load the network runs once with its own attention and once with
ours, and the results must agree.

Known limits: blocks are counted, but hold nothing; the cache is one nominal layer. If a tokenizer
distinguishes a pair's texts (token types), the second text begins after the first separator, so a
text must not contain one. Since prompts are concatenated, they need neither padding nor sorting by
length.
"""

from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from nanoserve.batch import Batch
from nanoserve.detokenizer import load_tokenizer
from nanoserve.layers import Placement
from nanoserve.model import KVCache
from nanoserve.model_config import read_json
from nanoserve.sampler import put
from nanoserve_extras.base.checkpoint import tokenizer_folder
from nanoserve_extras.base.config_files import ModelConfig
from nanoserve_extras.base.words import in_words
from nanoserve_extras.engine_args import EngineArgs, PoolingOptions
from nanoserve_extras.foreign.transformers_model import (
    PAGED,
    PROBED,
    TransformersModel,
    describe,
    load,
    refusal,
)
from nanoserve_extras.pooling.pooler import Pooler
from nanoserve_extras.pooling.sentence_files import is_reranker, longest_text, too_long

# Positions of these families begin after the padding token's id: if that is 1, at 2.
ROBERTAS = ("roberta", "xlm-roberta", "camembert", "data2vec-text", "roberta-prelayernorm", "xmod",
            "xlm-roberta-xl")
# Unused tensors of heads that checkpoints bring along, or that transformers makes.
PASSED_OVER = r"(^|\.)(pooler|cls|lm_head|vocab_\w+|position_ids|decoder|head)\b"
CLASSIFIES = "ForSequenceClassification"


# ----------------------------------------------------------------- attention


@dataclass
class WholePrompts:
    """One step's prompts, for `attend`: each attends to itself."""

    query_lens: list[int]
    windows: list[int | None]  # for each layer, on either side
    looks_ahead: bool = True
    num_calls: int = 0

    def attend(self, layer: int | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
               mask: object, scale: float, window: int | None, softcap: float | None,
               sinks: torch.Tensor | None) -> torch.Tensor:
        """q, k, v: (1, heads, num_tokens, head_dim); returns (1, num_tokens, heads, head_dim).
        Neighbours of the same length are computed together."""
        if mask is not None or softcap is not None or sinks is not None:
            raise ValueError("its attention has a mask of its own, a soft-cap, or sinks")
        window, self.num_calls = self.windows[self.num_calls], self.num_calls + 1
        parts = []
        end = 0
        for length, rows in groupby(filter(None, self.query_lens)):
            start, end = end, end + length * len(list(rows))  # with 5, 5, 3: 0 to 10, and 10 to 13
            some = [x[0, :, start:end].unflatten(1, (-1, length)).transpose(0, 1)
                    for x in (q, k, v)]  # (rows, heads, length, head_dim)
            out = F.scaled_dot_product_attention(
                *some, attn_mask=near(length, window, q.device), scale=scale,
                enable_gqa=q.shape[1] != k.shape[1])
            parts.append(out.transpose(1, 2).flatten(0, 1))
        return torch.cat(parts)[None]


def near(length: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """Which keys a query sees: (length, length), or None for all."""
    if window is None or window >= length:
        return None
    at = torch.arange(length, device=device)
    return (at[:, None] - at).abs() <= window


# --------------------------------------------------------------- the network


class Encoder(TransformersModel):
    """Token ids to hidden states; in a cross-encoder, to class scores from the state of CLS."""

    looks_ahead = True

    def __init__(self, first_position: int, separator: int | None, network: nn.Module,
                 config: ModelConfig, on: Placement, **options):
        self.first_position, self.separator = first_position, separator
        self.classifies = config.architecture.endswith(CLASSIFIES)
        super().__init__(network, config, on, **options)
        self.kv_shapes = [(1, 2)]  # nominal: see the module's docstring

    def run(self, ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor, pages: object,
            **options) -> torch.Tensor:
        """Hidden states, (k, hidden_size)."""
        out = self.layers.base_model(
            input_ids=ids.long()[None], position_ids=(positions.long() + self.first_position)[None],
            use_cache=False, nanoserve=pages, **options)
        return out.last_hidden_state[0, wanted]

    @torch.inference_mode()
    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, kv_cache: KVCache,
                batch: Batch, wanted: torch.Tensor) -> torch.Tensor:
        lengths = batch.query_lens
        assert lengths == batch.seq_lens_host, "a prompt is not whole in its step"
        options = {} if self.separator is None else dict(
            token_type_ids=self.token_types(input_ids, lengths)[None])
        hidden = self.run(input_ids, positions, wanted, WholePrompts(lengths, self.windows),
                          **options)
        return class_head(self.layers, hidden) if self.classifies else hidden

    def token_types(self, ids: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        """0 up to a row's first separator, 1 behind it: CLS q q SEP d d SEP is 0 0 0 0 1 1 1."""
        is_separator = (ids == self.separator).long()
        before = is_separator.cumsum(0) - is_separator  # counted over all rows up to here
        starts = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)  # by token: the start of its row
        return (before - before[put(starts, torch.int64, device=ids.device)]).clamp(max=1)

    @torch.inference_mode()
    def _probe(self, width: int) -> dict[int, tuple]:
        """As the base class; besides, the results with our attention, positions and head must equal
        those of the class with its own."""
        padding = self.layers.config.pad_token_id  # it has no position in RoBERTa
        ids = torch.tensor([i for i in range(13) if i != padding][3:], device=self.on.device)
        self.set_attention("sdpa")
        with in_words("its own run ended with an error"):  # sizes don't fit together, say
            out = self.layers(input_ids=ids[None])
        expected = out.logits if self.classifies else out.last_hidden_state[0]
        self.set_attention(PROBED)
        layers = super()._probe(width)
        self.set_attention(PAGED)
        windows = [window for *_, window in layers.values()]
        everyone = torch.arange(len(ids), device=ids.device)
        got = self.run(ids, everyone, everyone, WholePrompts([len(ids)], windows))
        got = class_head(self.layers, got[:1]) if self.classifies else got
        if got.shape != expected.shape or not self.are_close([expected], [got]):
            raise ValueError("its results differ with our attention")
        return layers


def class_head(network: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """CLS rows (k, hidden_size) to classes (k, num_labels), as the network's own class does it.
    Its modules expect a prompt's hidden states, of which they take the first."""
    if hasattr(network, "pre_classifier"):  # DistilBERT
        return network.classifier(F.relu(network.pre_classifier(hidden)))
    if hasattr(network, "head"):  # ModernBERT
        return network.classifier(network.head(hidden))
    if getattr(network.base_model, "pooler", None) is not None:  # BERT
        return network.classifier(network.base_model.pooler(hidden[:, None]))
    return network.classifier(hidden[:, None])  # RoBERTa and its kin


# ------------------------------------------------------- reading a checkpoint


def read_encoder(asked: EngineArgs, folder: Path, architecture: str,
                 hf_config: transformers.PreTrainedConfig,
                 ) -> tuple[EngineArgs, ModelConfig, partial]:
    """For `LLM`, as `foreign.read_foreign`. Chunks and prefix cache are switched off."""
    if asked.runner == "generate":
        raise refusal(architecture, "an encoder does not generate: use runner='pooling'")
    classifies = architecture.endswith(CLASSIFIES)
    mapping = (transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING if classifies
               else transformers.MODEL_MAPPING)
    model_class = mapping.get(type(hf_config), None)
    if not isinstance(model_class, type) or hf_config.is_encoder_decoder:
        raise refusal(architecture, f"there is no encoder for model_type={hf_config.model_type!r}")
    if not model_class.is_backend_compatible():
        biased = hasattr(hf_config, "relative_attention_num_buckets")  # MPNet
        raise refusal(architecture, "its attention implementation can't be replaced" + (
            ": it adds a bias for each distance between tokens" if biased else ""))
    if classifies and getattr(hf_config, "classifier_pooling", "cls") != "cls":
        raise refusal(architecture, f"classifier_pooling={hf_config.classifier_pooling!r}: only "
                                    "'cls' is supported")
    if hf_config.model_type in ROBERTAS and hf_config.pad_token_id is None:
        raise refusal(architecture, "its positions begin behind pad_token_id, which is null")
    first = hf_config.pad_token_id + 1 if hf_config.model_type in ROBERTAS else 0
    config = describe(architecture, hf_config)
    longest = config.max_position_embeddings - first
    if longest < 1:
        raise refusal(architecture, f"config.json: max_position_embeddings="
                      f"{config.max_position_embeddings} leaves no position behind pad_token_id="
                      f"{hf_config.pad_token_id}")
    entries = read_json(folder / "config.json", True) | (asked.hf_overrides or {})
    limit = longest_text(folder, entries) or longest
    if asked.max_model_len is not None and limit < asked.max_model_len <= longest:
        raise ValueError(too_long(asked.max_model_len, limit))
    config = replace(config, pools=True, max_position_embeddings=min(limit, longest))
    separator = None
    if (classifies or is_reranker(folder)) and getattr(hf_config, "type_vocab_size", 1) > 1:
        tokenizer = load_tokenizer(tokenizer_folder(asked, folder), optional=True)
        separator = tokenizer and find_separator(architecture, hf_config.model_type, tokenizer)
    asked = replace(asked, runner="pooling", enable_prefix_caching=False,
                    enable_chunked_prefill=False)
    unused = "position_ids$" if classifies else PASSED_OVER
    return asked, config, partial(load, asked, folder, model_class, hf_config, config,
                                  make=partial(Encoder, first, separator), passed_over=unused)


def find_separator(architecture: str, kind: str, tokenizer) -> int | None:
    """The id after which a pair's tokens have type 1. None if all have type 0. RoBERTa's have,
    although its config has types: `model_input_names` lacks them. (A generic tokenizer class lacks
    them by default; then its template is tried.)"""
    says = "model_input_names" in tokenizer.init_kwargs or kind in ROBERTAS
    if says and "token_type_ids" not in tokenizer.model_input_names:
        return None
    pair = tokenizer("a", "b", return_token_type_ids=True)
    ids, types = pair["input_ids"], pair["token_type_ids"]
    if not any(types):
        return None
    first = ids.index(ids[types.index(1) - 1])
    texts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in "ab"]
    if ids[first] in texts[0]:  # the text's own end
        if says or ids != sum(texts, []):  # a template
            raise refusal(architecture, "its tokenizer gives a pair token types and no separator")
        return None
    if types != [int(i > first) for i in range(len(ids))]:
        raise refusal(architecture, f"its tokenizer's token types are {types} for {ids}")
    return ids[first]


# -------------------------------------------------------------------- pooling


class EncoderPooler(Pooler):
    """A `Pooler` whose classes come from the network."""

    usual_type: ClassVar[str] = "CLS"  # as vLLM has it for BERT
    side: ClassVar[str] = "right"  # as sentence-transformers does it

    def __str__(self) -> str:
        return f"{super().__str__()}, whole prompts without a prefix cache"

    @property
    def tasks(self) -> tuple[str, ...]:
        """A cross-encoder's head is for whole prompts, so it has no tasks for single tokens."""
        return super().tasks[:1] if self.kind == "classify" else super().tasks


def make_pooler(options: PoolingOptions, overrides: dict, model_config: ModelConfig, folder: Path,
                tokenizer) -> EncoderPooler:
    """Read the pooler from the files. Raises `ValueError` for tasks that an encoder lacks."""
    if options.convert not in ("auto", "embed", "classify"):
        raise ValueError(f"convert={options.convert!r} is not for encoders: leave it out")
    pooler = EncoderPooler.of(options, overrides, model_config, folder, tokenizer)
    classifies = model_config.architecture.endswith(CLASSIFIES)
    if pooler.needs_head != classifies:
        raise ValueError(f"{pooler} needs {'a' if pooler.needs_head else 'no'} classifier, and "
                         f"{model_config.architecture} has {'one' if classifies else 'none'}: "
                         f"leave convert={options.convert!r} out, or correct modules.json")
    if classifies and pooler.pooling_types != ("CLS",):
        raise ValueError(f"pooling_type={pooler.pooling_types[0]!r}, but the head of "
                         f"{model_config.architecture} takes CLS: leave it out")
    return pooler
