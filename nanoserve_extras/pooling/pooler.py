"""Poolers: which positions, which head and which activation a model's vectors need (pooling.py).

    architecture                convert     head                              activation
    Qwen3Model, ...ForCausalLM  embed       none; the LM head is not loaded   L2-normalise
    ...ForSequenceClassification  classify  `score`, a matrix                 softmax, or sigmoid
    ...ForRewardModel           -           `score`, two layers (Qwen's)      none; or sigmoid
    ...ForProcessRewardModel    -           the same, two classes a token     softmax
    ...ForCausalLM, with        classify    rows of the LM head: a reranker   sigmoid
      classifier_from_token                 that answers "yes" or "no"

A `Pooler` is read from a checkpoint's files: the architecture's name, `config.json`, and the files
of sentence-transformers (sentence_files.py), with modules before and after the pooling. The user
may override them (`convert`, `pooler_config`). The `Pooler` is sent to all ranks. On each of them
`replace_head` puts its head in the LM head's place, so that the loader fills the head like any
other module and checks that nothing is missing.

Invariant: settings that would change the result and are not implemented (bidirectional attention)
are refused by name. After the hidden states everything is float32, whatever the model's dtype: sums
over positions, modules, heads.

Only rank 0 pools; all ranks have the hidden states, but need no result.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from nanoserve import rules
from nanoserve.layers import Embedding, Linear, Placement, Tensors
from nanoserve.model import Decoder
from nanoserve.model_config import read_json
from nanoserve.rules import Count, Flag, Text
from nanoserve_extras.base.config_files import ModelConfig
from nanoserve_extras.base.vllm import takes_vllms_words
from nanoserve_extras.engine_args import PoolingOptions
from nanoserve_extras.pooling.sentence_files import (
    POOLING_TYPES,
    SentenceModel,
    longest_text,
    read_sentence_model,
)

POOLING_TYPE = rules.choice(*POOLING_TYPES.values(), "ALL")
# The tasks of a model by its kind; the first is the default of a request.
TASKS = {"embed": ("embed", "token_embed"), "classify": ("classify", "token_classify"),
         "reward": ("token_classify",)}
HEADS = ("lm_head.", "score.")  # heads that a checkpoint may have and that may be unused
# Similarities of two texts' vectors, row by row; the larger, the more similar.
SIMILARITIES = {
    "cosine": lambda a, b: F.cosine_similarity(a, b, dim=-1),
    "dot": lambda a, b: (a * b).sum(-1),
    "euclidean": lambda a, b: -(a - b).norm(dim=-1),
    "manhattan": lambda a, b: -(a - b).abs().sum(-1)}


@takes_vllms_words("PoolerConfig", "pooling")
@dataclass(kw_only=True)
class PoolerConfig:
    """How a model pools, if its files lack it or shall be overridden."""

    pooling_type: Annotated[str, POOLING_TYPE] | None = None  # None: what the files say, else LAST
    use_activation: Flag | None = None  # None: as the model is meant
    dimensions: Count | None = None  # an embedding's, if a request names none
    task: Text | None = None  # a request's, if it names none

    def __post_init__(self):
        rules.check_fields(self)


@dataclass
class Pooler:
    """Makes vectors, classes or scores from hidden states. `of` reads it from files, `replace_head`
    makes its head, and in each step `pool` replaces the sampler."""

    kind: str  # "embed", "classify" or "reward"
    task: str = field(init=False)  # a request's, if it names none
    pooling_types: tuple[str, ...]  # of several the vectors are joined
    use_activation: bool
    width: int  # of an embedding
    files: SentenceModel = field(default_factory=SentenceModel)  # sentence-transformers'
    longest: int | None = None  # tokens of a text, where these files say it
    activation: nn.Module = field(default_factory=nn.Identity)  # embeddings are normalised instead
    num_labels: int = 0
    labels: dict[str, str] = field(default_factory=dict)  # names of classes, by index
    dimensions: int | None = None
    matryoshka: list[int] | bool = False  # the dimensions that may be asked for; True: any
    token_ids: list[int] = field(default_factory=list)  # the LM head's rows that are the head ...
    subtract: bool = False  # ... or, of two, the second less the first
    tied: bool = False  # they are rows of the embedding
    unused: tuple[str, ...] = HEADS  # tensors that are passed over
    head: nn.Module | None = None  # this rank's, in float32, of the checkpoint's own tensors
    usual_type: ClassVar[str] = "LAST"  # where no file says another
    side: ClassVar[str] = "left"  # at which a prompt that is too long is cut, as in vLLM

    @classmethod
    def of(cls, options: PoolingOptions, overrides: dict, model_config: ModelConfig, folder: Path,
           tokenizer) -> "Pooler":
        """Read the pooler from the architecture's name, `config.json`, sentence-transformers' files
        and the user's options. overrides: those of config.json. Raises `ValueError` if the model
        can't pool so."""
        entries = read_json(folder / "config.json", True) | overrides
        asked = options.pooler_config
        if asked is None or isinstance(asked, dict):
            asked = PoolerConfig(**asked or {})
        if not isinstance(asked, PoolerConfig):
            raise ValueError(f"pooler_config must be a dict or a PoolerConfig, got {asked!r}")
        files = read_sentence_model(folder, entries, model_config.hidden_size)
        pooler = cls(
            kind=_find_kind(options.convert, model_config.architecture, entries, files),
            pooling_types=_find_types(asked.pooling_type, files) or (cls.usual_type,),
            use_activation=True, width=files.width or model_config.hidden_size, files=files,
            longest=longest_text(folder, entries), tied=model_config.tie_word_embeddings,
            dimensions=asked.dimensions, matryoshka=entries.get("matryoshka_dimensions") or bool(
                entries.get("is_matryoshka") or files.truncate_dim))
        if pooler.kind != "embed":
            pooler._read_head(entries, tokenizer, model_config.vocab_size)
        elif files.kind is not None:
            pooler.use_activation = files.normalises
        if asked.use_activation is not None:
            pooler.use_activation = asked.use_activation
        pooler.check_dimensions(asked.dimensions)
        if not pooler.tasks:
            raise ValueError("pooling_type='ALL', but modules.json has modules for whole texts "
                             "behind the pooling: leave it out")
        pooler.task = asked.task or pooler.tasks[0]
        if pooler.task not in pooler.tasks:
            raise ValueError(f"task={asked.task!r} is not one of this model's, which are "
                             f"{', '.join(pooler.tasks)}: see the option convert")
        return pooler

    def _read_head(self, entries: dict, tokenizer, vocab_size: int) -> None:
        self.labels = entries.get("id2label") or {}
        labels = entries.get("num_labels") or len(self.labels)
        # Two are transformers' default. Qwen's reward models have one, whatever their config says.
        judges_steps = str(entries.get("architectures")).count("ForProcessRewardModel")
        self.num_labels = 1 if self.kind == "reward" and not judges_steps else labels or 2
        if self.files.pooling_types:  # its modules are the head
            self.num_labels = self.width
        elif self.files.token_ids:
            self._read_rows(self.files.token_ids, len(self.files.token_ids) == 2, vocab_size)
        elif words := entries.get("classifier_from_token"):
            method = entries.get("method") or (
                "from_2_way_softmax" if entries.get("is_original_qwen3_reranker")
                else "no_post_processing")
            usable = {"from_2_way_softmax": len(words) == 2, "no_post_processing": True}
            if not usable.get(method):
                raise ValueError(f"config.json: method={method!r} with classifier_from_token="
                                 f"{words!r}: use from_2_way_softmax with two tokens, or "
                                 "no_post_processing")
            self._read_rows(_token_ids(words, tokenizer), method == "from_2_way_softmax",
                            vocab_size)
        kept = "lm_head." if self.token_ids else "score."
        if not self.files.pooling_types:
            self.unused = tuple(name for name in HEADS if name != kept)
        problem = entries.get("problem_type")
        one = self.num_labels == 1 or problem == "multi_label_classification"
        self.activation = nn.Identity() if problem == "regression" else (
            nn.Sigmoid() if one else nn.Softmax(-1))
        if self.files.activation is not None:
            self.activation = self.files.activation
        # A reward is no probability, unless the caller asks for one; as in vLLM.
        if self.kind == "reward" and not judges_steps:
            self.activation, self.use_activation = nn.Sigmoid(), False

    def _read_rows(self, token_ids: list[int], subtract: bool, vocab_size: int) -> None:
        if max(token_ids) >= vocab_size:
            raise ValueError(f"the scores are those of the tokens {token_ids}, and the vocabulary "
                             f"has {vocab_size}: correct LogitScore's config.json")
        self.token_ids, self.subtract = token_ids, subtract
        self.num_labels = 1 if subtract else len(token_ids)

    def __str__(self) -> str:
        return f"pooling {' and '.join(self.pooling_types)} to {self.kind}"

    @property
    def tasks(self) -> tuple[str, ...]:
        """Modules after the pooling are for whole prompts: then there are no tasks for tokens."""
        tasks = TASKS[self.kind][:1] if len(self.files.on_vectors) else TASKS[self.kind]
        return tuple(one for one in tasks if one.startswith("token_")
                     or self.pooling_types != ("ALL",))

    @property
    def needs_head(self) -> bool:
        """Whether the network has one of its own tensors; modules.json may bring another."""
        return self.kind != "embed" and not self.files.pooling_types

    def beginning(self, text: str | None, name: str | None) -> str:
        """The prefix of texts by its name ("query": "search for: "). Raises `ValueError` for a name
        that the model does not have, or a prompt without a text."""
        if name is None:
            return ""
        if name not in self.files.prompts:
            raise ValueError(f"prompt_name={name!r} is not one of this model's, which are "
                             f"{', '.join(self.files.prompts) or 'none'}")
        if text is None and self.files.prompts[name]:
            raise ValueError(f"prompt_name={name!r} needs texts, got token ids")
        return self.files.prompts[name]

    def reads_pairs(self, first: list, second: list) -> bool:
        """Whether a score is made of both texts as one prompt; else it is the cosine of two
        embeddings. Raises `ValueError` where there are no pairs, or no scores."""
        if len(first) not in (1, len(second)):
            raise ValueError(f"text_1 and text_2 have {len(first)} and {len(second)} texts: give "
                             "one text and many, or as many of one kind as of the other")
        if "embed" not in self.tasks and ("classify" not in self.tasks or self.num_labels != 1):
            raise ValueError("this model has no scores, which need embeddings or a classifier with "
                             f"one class: its tasks are {', '.join(self.tasks)}")
        return "embed" not in self.tasks

    def similarity(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """Of embeddings, row by row: (n, width) twice -> (n,)"""
        return SIMILARITIES[self.files.similarity](first, second)

    def check_dimensions(self, dimensions: int | None) -> None:
        """Raises `ValueError` unless the model was trained for embeddings of this length."""
        if dimensions is None:
            return
        if self.kind != "embed":
            raise ValueError(f"dimensions={dimensions} is about embeddings, and this model has "
                             f"{self.num_labels} classes: leave it out")
        if not self.matryoshka:
            raise ValueError(f"dimensions={dimensions}, but config.json does not say that the "
                             "model supports it (is_matryoshka, matryoshka_dimensions): if it "
                             'does, say so with hf_overrides={"is_matryoshka": True}')
        choices = self.matryoshka if isinstance(self.matryoshka, list) else None
        if dimensions > self.width or (choices and dimensions not in choices):
            raise ValueError(f"dimensions={dimensions} is not supported: choose "
                             f"{f'one of {choices}' if choices else f'at most {self.width}'}")

    # ---------------------------------------------- on a rank, for the runner

    def replace_head(self, model: Decoder, on: Placement) -> None:
        """Put the head in the LM head's place, before weights are loaded. Every rank has the whole
        head: it's small, and only rank 0 uses it."""
        model.unused += self.unused
        if not self.needs_head:
            return model.take_head("lm_head", None)
        on, stream = replace(on, dtype=torch.float32), model.config.hidden_size
        if self.token_ids:
            self.head = TokenRows(self.token_ids, self.subtract, model.embed_tokens, self.tied, on)
        elif self.kind == "reward":  # Qwen's
            self.head = nn.Sequential(Linear(stream, {"0": stream}, True, on), nn.ReLU(),
                                      Linear(stream, {"2": self.num_labels}, True, on))
        else:
            self.head = Linear(stream, {"score": self.num_labels}, False, on)
        model.take_head("lm_head" if self.token_ids and not self.tied else "score", self.head)

    def pool(self, hidden: torch.Tensor, num_samples: int) -> "PooledStep":
        """Called instead of the sampler. hidden: (samples + prompt positions, hidden_size)."""
        return PooledStep(hidden[:num_samples], hidden[num_samples:])

    def read(self, hidden: torch.Tensor) -> torch.Tensor:
        """(n, hidden_size) -> (n, numbers) in float32: the modules before the pooling."""
        return self.files.on_tokens.to(hidden.device)(_finite(hidden.float()))

    def finish(self, vectors: torch.Tensor, activate: bool,
               dimensions: int | None = None) -> torch.Tensor:
        """Apply modules, head and activation to pooled vectors, (n, numbers) in float32.
        dimensions: keep so many of an embedding's first numbers, and normalise them again."""
        x = vectors if self.head is None else self.head.to(vectors.device)(vectors)
        x = _finite(self.files.on_vectors.to(x.device)(x))
        if self.kind != "embed":
            return self.activation(x) if activate else x
        if dimensions is None:  # the files' own cut comes behind all
            return (F.normalize(x, dim=-1) if activate else x)[:, :self.files.truncate_dim]
        x = x[:, :dimensions]
        return F.normalize(x, dim=-1) if activate else x


def _finite(x: torch.Tensor) -> torch.Tensor:
    """Infinity becomes NaN, which no activation makes a number of."""
    return x + 0 * x


class TokenRows(nn.Module):
    """A classifier made of a generator's LM head: the rows of a few tokens, "no" and "yes" say.

    The softmax over two logits is the sigmoid of their difference, so of two rows one is enough.
    """

    def __init__(self, token_ids: list[int], subtract: bool, embedding: Embedding, tied: bool,
                 on: Placement):
        super().__init__()
        self.token_ids = torch.tensor(token_ids, device=on.device)
        self.subtract, self.vocab_size = subtract, embedding.tokens.total
        self.tied_to = [embedding] if tied else []  # in a list: it is no part of this module
        self.weight = on.weight(len(token_ids), embedding.weight.shape[1])

    def tensors(self, path: str) -> Tensors:
        if not self.tied_to:
            yield f"{path}.weight", self.fill

    def fill(self, tensor: torch.Tensor) -> None:
        expected = (self.vocab_size, self.weight.shape[1])
        if tuple(tensor.shape) != expected:
            raise ValueError(f"shape {tuple(tensor.shape)} in the file, {expected} expected")
        self.weight.copy_(tensor[self.token_ids.cpu()])

    def process_weights_after_loading(self) -> None:
        """Every rank has a part of the embedding: they look the rows up together."""
        for embedding in self.tied_to:
            self.weight.copy_(embedding(self.token_ids))
        self.tied_to = []
        if self.subtract:
            self.weight = nn.Parameter(self.weight[1:] - self.weight[:1], requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


class PooledStep:
    """A step's results, in the form of `SamplerOutput`: for each completed prompt a None and its
    last hidden state, and the hidden states of `prompt_logprob_positions`."""

    def __init__(self, last: torch.Tensor, positions: torch.Tensor):
        self.last, self.positions, self.ready, self.failed = last, positions, None, {}
        if last.is_cuda:
            self.ready = torch.cuda.Event()
            self.ready.record()

    def to_host(self) -> "PooledStep":
        """The tensors stay where they are."""
        return self

    def tolist(self) -> tuple[list[None], dict[int, torch.Tensor], torch.Tensor]:
        """Wait for the step: an error of the device is then raised here, where the step can still
        be dropped."""
        if self.ready is not None:
            self.ready.synchronize()
        return [None] * len(self.last), dict(enumerate(self.last)), self.positions


# ------------------------------------------------------- reductions over a text's positions


class First:
    """CLS. `add` gets hidden states (n, numbers) and the position of the first one."""

    vector: torch.Tensor | None = None

    def add(self, vectors: torch.Tensor, start: int) -> None:
        if self.vector is None:
            self.vector = vectors[:1]

    def result(self) -> torch.Tensor:
        """(1, numbers)"""
        return self.vector


class Largest(First):
    """MAX, number by number."""

    def add(self, vectors: torch.Tensor, start: int) -> None:
        kept = [vectors] if self.vector is None else [self.vector, vectors]
        self.vector = torch.cat(kept).amax(0, keepdim=True)


class Mean(First):
    """A running sum: the hidden states are not kept."""

    total = 0.0  # of the positions' weights

    def weights(self, start: int, count: int) -> torch.Tensor:
        return torch.ones(count)

    def add(self, vectors: torch.Tensor, start: int) -> None:
        weights = self.weights(start, len(vectors))
        part = (vectors * weights.to(vectors.device)[:, None]).sum(0, keepdim=True)
        self.vector = part if self.vector is None else self.vector + part
        self.total += weights.sum().item()  # a tensor of the host

    def result(self) -> torch.Tensor:
        return self.vector / self.total


class MeanOfRoots(Mean):
    """MEAN_SQRT: with 9 tokens the sum over 3."""

    def result(self) -> torch.Tensor:
        return self.vector / self.total ** 0.5


class WeightedMean(Mean):
    """A mean in which position i counts i times, from 1 on."""

    def weights(self, start: int, count: int) -> torch.Tensor:
        return torch.arange(start + 1.0, start + count + 1)


POOLS: dict[str, type[First]] = {"CLS": First, "MAX": Largest, "MEAN": Mean,
                                 "MEAN_SQRT": MeanOfRoots, "WEIGHTED_MEAN": WeightedMean}


# ------------------------------------------------------- reading a checkpoint


def _find_types(asked: str | None, files: SentenceModel) -> tuple[str, ...]:
    """() if no file says it."""
    if asked is None:
        return files.pooling_types
    if len(files.pooling_types) > 1:
        raise ValueError(f"pooling_type={asked!r}, but modules.json joins "
                         f"{', '.join(files.pooling_types)}: leave it out")
    return (asked,)


def _find_kind(convert: str, architecture: str, entries: dict, files: SentenceModel) -> str:
    if convert == "none" and architecture.endswith("ForCausalLM"):
        raise ValueError(f"convert='none', but {architecture} generates: to pool with it use "
                         "convert='embed' or 'classify'")
    if files.kind is not None:
        if convert not in ("auto", "none", files.kind):
            raise ValueError(f"convert={convert!r}, but the modules of modules.json are there to "
                             f"{files.kind}: leave it out")
        return files.kind
    if convert in TASKS:
        return convert
    if architecture.endswith(("ForRewardModel", "ForRewardModeling", "ForProcessRewardModel")):
        return "reward"
    classifies = (architecture.endswith("ForSequenceClassification")
                  or "classifier_from_token" in entries)
    return "classify" if classifies else "embed"


def _token_ids(words: list[str], tokenizer) -> list[int]:
    if not isinstance(words, (list, tuple)):  # from "yes" every letter would be a class
        raise ValueError(f"classifier_from_token={words!r} must be a list of tokens")
    if tokenizer is None:
        raise ValueError(f"classifier_from_token={words!r} needs a tokenizer")
    ids = tokenizer.convert_tokens_to_ids(list(words))
    for word, token_id in zip(words, ids, strict=True):
        if token_id is None or token_id == tokenizer.unk_token_id:
            raise ValueError(f"classifier_from_token={words!r}: {word!r} is no token")
    return ids
