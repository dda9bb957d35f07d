"""What hidden states become: which positions, which head, which activation (see pooling.py).

    architecture                convert     head                              activation
    Qwen3Model, ...ForCausalLM  embed       none; the LM head is not loaded   L2-normalise
    ...ForSequenceClassification  classify  `score`, a matrix                 softmax, or sigmoid
    ...ForRewardModel           -           `score`, two layers (Qwen's)      none; or sigmoid
    ...ForProcessRewardModel    -           the same, two classes a token     softmax
    ...ForCausalLM, with        classify    rows of the LM head: a reranker   sigmoid
      classifier_from_token                 that answers "yes" or "no"

A `Pooler` is read from a checkpoint's files: the architecture's name, `config.json`, and
`modules.json` with `1_Pooling` where sentence-transformers wrote them. The user may overrule them
(`convert`, `pooler_config`). The `Pooler` is sent to all ranks. On each of them `replace_head` puts
its head in the LM head's place, so that the loader fills the head like any other module and checks
that nothing is missing.

Invariant: what would change the numbers and is not implemented (attention that looks ahead, dense
layers behind the pooling) is refused by name. Heads compute in float32 whatever the model does.

Only rank 0 pools: each rank has the hidden states, and the others need not know.
"""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from nanoserve.checkpoint.model_config import ModelConfig, inside, read_json
from nanoserve.frontend import rules
from nanoserve.frontend.rules import in_words, option
from nanoserve.frontend.vllm import takes_vllms_words
from nanoserve.layers import Embedding, Linear, Placement, Tensors
from nanoserve.model import Decoder
from nanoserve_extras.engine_args import PoolingOptions

POOLING_TYPE = rules.choice("CLS", "LAST", "MEAN", "ALL")
# The tasks of a model by its kind; the first is the default of a request.
TASKS = {"embed": ("embed", "token_embed"), "classify": ("classify", "token_classify"),
         "reward": ("token_classify",)}
ACTIVATIONS = {"identity": lambda x: x, "softmax": lambda x: x.softmax(-1),
               "sigmoid": torch.sigmoid}
HEADS = ("lm_head.", "score.")  # heads that a checkpoint may have and that may be unused


@takes_vllms_words("PoolerConfig", "pooling")
@dataclass(kw_only=True)
class PoolerConfig:
    """How a model pools, where its files don't say it or are to be overruled."""

    pooling_type: str | None = option(None, POOLING_TYPE)  # None: what the files say, else LAST
    use_activation: bool | None = option(None, rules.FLAG)  # None: as the model is meant
    dimensions: int | None = option(None, rules.COUNT)  # an embedding's, if a request names none
    task: str | None = option(None, rules.TEXT)  # a request's, if it names none

    def __post_init__(self):
        rules.check_fields(self)


@dataclass
class Pooler:
    """What a model's hidden states become. `of` reads it from files, `replace_head` makes its head,
    and in each step `pool` replaces the sampler."""

    kind: str  # "embed", "classify" or "reward"
    task: str = field(init=False)  # a request's, if it names none
    pooling_type: str
    use_activation: bool
    activation: str = "identity"  # for a head's numbers; embeddings are normalised
    num_labels: int = 0
    labels: dict[str, str] = field(default_factory=dict)  # names of classes, by index
    dimensions: int | None = None
    matryoshka: list[int] | bool = False  # the dimensions that may be asked for; True: any
    token_ids: list[int] = field(default_factory=list)  # the LM head's rows that are the head ...
    subtract: bool = False  # ... or, of two, the second less the first
    tied: bool = False  # they are rows of the embedding
    unused: tuple[str, ...] = HEADS  # tensors that are passed over
    head: nn.Module | None = None  # this rank's, in float32; of an encoder, its Dense layers
    prompts: dict[str, str] = field(default_factory=dict)  # beginnings of texts, by name
    default_prompt: str | None = None  # the name that is used where none is given
    more_modules: ClassVar[tuple[str, ...]] = ()  # sentence-transformers' kinds, read elsewhere
    side: ClassVar[str] = "left"  # at which a prompt that is too long is cut, as in vLLM

    @classmethod
    def of(cls, options: PoolingOptions, overrides: dict, model_config: ModelConfig, folder: Path,
           tokenizer) -> "Pooler":
        """Find out from the architecture's name, `config.json`, sentence-transformers' files, and
        what the user overrules. overrides: of config.json. Raises `ValueError` for what can't be
        pooled."""
        entries = read_json(folder / "config.json", True) | overrides
        asked = options.pooler_config
        if asked is None or isinstance(asked, dict):
            asked = PoolerConfig(**asked or {})
        if not isinstance(asked, PoolerConfig):
            raise ValueError(f"pooler_config must be a dict or a PoolerConfig, got {asked!r}")
        meant = _read_sentence_transformer(folder, cls.more_modules)
        pooler = cls(
            kind=_find_kind(options.convert, model_config.architecture, entries),
            pooling_type=asked.pooling_type or meant.pooling_type or "LAST", use_activation=True,
            dimensions=asked.dimensions, tied=model_config.tie_word_embeddings,
            matryoshka=entries.get("matryoshka_dimensions") or bool(entries.get("is_matryoshka")))
        if pooler.kind == "embed":
            pooler.use_activation = meant.use_activation is not False
        else:
            pooler._read_head(entries, tokenizer)
        if asked.use_activation is not None:
            pooler.use_activation = asked.use_activation
        pooler.check_dimensions(asked.dimensions, model_config.hidden_size)
        pooler.task = asked.task or pooler.tasks[0]
        if pooler.task not in pooler.tasks:
            raise ValueError(f"task={asked.task!r} is not one of this model's, which are "
                             f"{', '.join(pooler.tasks)}: see the option convert")
        pooler.prompts, pooler.default_prompt = _read_prompts(folder)
        return pooler

    def _read_head(self, entries: dict, tokenizer) -> None:
        self.labels = entries.get("id2label") or {}
        labels = entries.get("num_labels") or len(self.labels)
        # Two are transformers' default. Qwen's reward models have one, whatever their config says.
        judges_steps = str(entries.get("architectures")).count("ForProcessRewardModel")
        self.num_labels = 1 if self.kind == "reward" and not judges_steps else labels or 2
        if words := entries.get("classifier_from_token"):
            self.token_ids = _token_ids(words, tokenizer)
            method = entries.get("method") or (
                "from_2_way_softmax" if entries.get("is_original_qwen3_reranker")
                else "no_post_processing")
            usable = {"from_2_way_softmax": len(words) == 2, "no_post_processing": True}
            if not usable.get(method):
                raise ValueError(f"config.json: method={method!r} with classifier_from_token="
                                 f"{words!r}: use from_2_way_softmax with two tokens, or "
                                 "no_post_processing")
            self.subtract = method == "from_2_way_softmax"
            self.num_labels = 1 if self.subtract else len(words)
        kept = "lm_head." if self.token_ids and not self.tied else "score."
        self.unused = tuple(name for name in HEADS if name != kept)
        self.activation = {
            "regression": "identity", "multi_label_classification": "sigmoid"}.get(
                entries.get("problem_type"), "sigmoid" if self.num_labels == 1 else "softmax")
        # A reward is no probability, unless somebody asks for one; as in vLLM.
        if self.kind == "reward" and not judges_steps:
            self.activation, self.use_activation = "sigmoid", False

    def __str__(self) -> str:
        return f"pooling {self.pooling_type} to {self.kind}"

    @property
    def tasks(self) -> tuple[str, ...]:
        tasks = TASKS[self.kind]
        return tasks[-1:] if self.pooling_type == "ALL" else tasks

    def begin(self, prompt: str | dict | list, name: str | None) -> str | dict | list:
        """The prompt with the text of `name` in front ("query": "search for: "). Raises
        `ValueError` for a name that the model does not have, or a prompt without a text."""
        if name is None:
            return prompt
        if name not in self.prompts:
            raise ValueError(f"prompt_name={name!r} is not one of this model's, which are "
                             f"{', '.join(self.prompts) or 'none'}")
        text = prompt.get("prompt") if isinstance(prompt, dict) else prompt
        if not isinstance(text, str):
            raise ValueError(f"prompt_name={name!r} needs texts, got {prompt!r:.80}")
        return self.prompts[name] + text

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

    def check_dimensions(self, dimensions: int | None, hidden_size: int) -> None:
        """A prefix of an embedding means something only where the model was trained for it."""
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
        if dimensions > hidden_size or (choices and dimensions not in choices):
            raise ValueError(f"dimensions={dimensions} is not supported: choose "
                             f"{f'one of {choices}' if choices else f'at most {hidden_size}'}")

    # ---------------------------------------------- on a rank, for the runner

    def replace_head(self, model: Decoder, on: Placement) -> None:
        """Put the head in the LM head's place, before weights are loaded. Every rank has the whole
        head: it's small, and only rank 0 uses it."""
        if self.kind == "embed":
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
        """In the sampler's place. hidden: (samples + prompt positions, hidden_size)."""
        return PooledStep(hidden[:num_samples], hidden[num_samples:])

    def finish(self, vectors: torch.Tensor, activate: bool,
               dimensions: int | None = None) -> torch.Tensor:
        """(n, hidden_size) -> (n, numbers), in float32: head and activation. dimensions: of an
        embedding, the first so many, normalised again."""
        x = vectors.float()
        if self.head is not None:
            x = self.head.to(x.device)(x)
        x = x + 0 * x  # infinity becomes NaN, which no activation makes a number of
        if self.kind == "embed":
            x = x[:, :dimensions]
            return F.normalize(x, dim=-1) if activate else x
        return ACTIVATIONS[self.activation](x) if activate else x


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

    def finish_loading(self) -> None:
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


# ------------------------------------------------------- reading a checkpoint


def read_modules(folder: Path) -> list[tuple[str, Path]]:
    """sentence-transformers' `modules.json`: each module's class and its folder. [] where there is
    no such file. Raises `ValueError` for a file that says something else."""
    file = folder / "modules.json"
    if not file.exists():
        return []
    with in_words(f"{file} can't be read"):
        modules = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(modules, list) or not all(
            isinstance(one, dict) and isinstance(one.get("type"), str)
            and isinstance(one.get("path"), str) for one in modules):
        raise ValueError(f"{file} must list modules, each with a type and a path, got "
                         f"{modules!r:.80}")
    return [(one["type"].rpartition(".")[2], inside(folder, one["path"])) for one in modules]


def _read_prompts(folder: Path) -> tuple[dict[str, str], str | None]:
    """The beginnings of texts by name, and the name that is used where none is given."""
    file = folder / "config_sentence_transformers.json"
    entries = read_json(file)
    prompts, default = entries.get("prompts") or {}, entries.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ValueError(f"{file}: prompts={prompts!r:.80} must give a text for each name")
    if default is not None and (not isinstance(default, str) or default not in prompts):
        raise ValueError(f"{file}: default_prompt_name={default!r:.80} is none of its prompts")
    return prompts, default


def _find_kind(convert: str, architecture: str, entries: dict) -> str:
    if convert == "none" and architecture.endswith("ForCausalLM"):
        raise ValueError(f"convert='none', but {architecture} generates: to pool with it use "
                         "convert='embed' or 'classify'")
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


def _read_sentence_transformer(folder: Path, more: tuple[str, ...]) -> PoolerConfig:
    """What `modules.json` and the pooling module's file say; an empty config where there is none.
    Embeddings are normalised if there is a module for it. more: modules that others read."""
    if not (modules := read_modules(folder)):
        return PoolerConfig()
    meant = PoolerConfig(use_activation=False)
    text = folder / "sentence_bert_config.json"
    if read_json(text).get("do_lower_case"):
        raise ValueError(f"{text}: do_lower_case=True is not supported: leave it to the tokenizer")
    for kind, part in modules:
        if kind == "Normalize":
            meant.use_activation = True
        elif kind == "Pooling":
            meant.pooling_type = _read_pooling(part, any(_read_prompts(folder)[0].values()))
        elif kind not in ("Transformer", *more):
            raise ValueError(f"{folder / 'modules.json'}: the module {kind} is not supported")
        elif kind == "Dense" and meant.use_activation:
            raise ValueError(f"{folder / 'modules.json'}: Dense behind Normalize is not supported")
    return meant


def _read_pooling(part: Path, has_prompts: bool) -> str:
    """The pooling module's type. Raises `ValueError` for another one than ours, or several."""
    entries = read_json(part / "config.json", True)
    modes = [name for name, on in entries.items()
             if name.startswith("pooling_mode_") and on is True]
    modes = modes or [f"pooling_mode_{entries.get('pooling_mode')}"]
    known = {"pooling_mode_cls_token": "CLS", "pooling_mode_cls": "CLS",
             "pooling_mode_lasttoken": "LAST", "pooling_mode_mean_tokens": "MEAN",
             "pooling_mode_mean": "MEAN"}
    if len(modes) != 1 or modes[0] not in known:
        raise ValueError(f"{part}: {', '.join(modes)} is not supported: "
                         f"one of {', '.join(known)} is")
    pooling_type = known[modes[0]]
    if pooling_type == "MEAN" and has_prompts and entries.get("include_prompt", True) is not True:
        raise ValueError(f"{part}: include_prompt={entries['include_prompt']!r} is not supported: "
                         "the mean is that of all tokens, the prompt's included")
    return pooling_type
