"""sentence-transformers' files of a model: each field is applied, or refused by name.

    modules.json                        which modules there are, in order, and the folder of each
    1_Pooling/config.json, ...          a module's fields; its tensors lie beside them
    sentence_bert_config.json           the first module: the network's task, how a text is read
    config_sentence_transformers.json   the model: its kind, prompts, activation, similarity
    config.json                         the activation of a reranker of version 5.3 and before
    tokenizer_config.json               model_max_length

A model is a row of modules. Each makes a named tensor of another one:

    Transformer ─► token_embeddings ─► Dense, Normalize ─► Pooling ─► sentence_embedding ─┐
         └───────► causal_logits ─► LogitScore ─► scores    Dense, LayerNorm, Normalize ◄─┤
                                                                   scores ◄─ Dense ◄──────┘

A record below has all fields of its file, of versions 2 to 6, and each field's rule has the values
that are taken. Fields whose rule is ANYTHING change no number here; the comment says why.

Invariant: results equal those of sentence-transformers, or the file is refused with the field, its
value and the remedy. So a field that no record has is refused, too: it may change results.
"""

import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Self

import torch
from torch import nn

from nanoserve import rules
from nanoserve.model_config import read_json
from nanoserve.rules import Anything, Count, Flag, Rule, Size, Text, only_if
from nanoserve_extras.base.weight_files import inside, stored_tensors
from nanoserve_extras.base.words import in_words

TOKENS, VECTOR, SCORES, LOGITS = ("token_embeddings", "sentence_embedding", "scores",
                                  "causal_logits")
POOLING_TYPES = {"cls": "CLS", "max": "MAX", "mean": "MEAN", "mean_sqrt_len_tokens": "MEAN_SQRT",
                 "weightedmean": "WEIGHTED_MEAN", "lasttoken": "LAST"}
# What each task of the network makes, and from which of its outputs.
TASKS = {"feature-extraction": (TOKENS, "last_hidden_state"),
         "sequence-classification": (SCORES, "logits"), "text-generation": (LOGITS, "logits")}
# A message's content is a text, or a list of parts. A template that takes parts mentions these.
FORMS = ("auto", "flat", "structured")
PARTS = ("content[0]", "message.content[", ".type", "'type'", '"type"')
# Of torch.nn: none of these has weights or needs an argument, and the file names a class alone.
FUNCTIONS = ("CELU", "ELU", "GELU", "Hardshrink", "Hardsigmoid", "Hardswish", "Hardtanh",
             "Identity", "LeakyReLU", "LogSigmoid", "Mish", "ReLU", "ReLU6", "SELU", "SiLU",
             "Sigmoid", "Softmax", "Softplus", "Softshrink", "Softsign", "Tanh", "Tanhshrink")
TRANSFORMER_FILES = [f"sentence_{name}_config.json" for name in (
    "bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")]


# ------------------------------------------------------------------ the records of each file


def keep_function(path: Any) -> nn.Module:
    name = str(path).rpartition(".")[2]
    only_if(str(path).startswith("torch.nn.") and name in FUNCTIONS, path)
    return nn.Softmax(-1) if name == "Softmax" else getattr(nn, name)()


def keep_modes(modes: Any) -> tuple[str, ...]:
    modes = [modes] if isinstance(modes, str) else modes
    only_if(isinstance(modes, list) and len(modes) > 0, modes)
    return tuple(POOLING_TYPES[only_if(str(mode) in POOLING_TYPES, mode)] for mode in modes)


def keep_prompts(prompts: Any) -> dict[str, str]:
    only_if(isinstance(prompts, dict), prompts)
    only_if(all(isinstance(text, str | None) for text in prompts.values()), prompts)
    return {name: text or "" for name, text in prompts.items()}


def nothing(what: str) -> Rule:
    """The rule of a field that must be left out, or null."""
    return Rule(f"null: {what}", lambda value: only_if(value is None, value))


def only(names: str, remedy: str) -> Rule:
    """A dict with no other entries than these, which are applied or change no number."""
    return Rule(f"a dict with no entries but {names} ({remedy})", lambda given: only_if(
        isinstance(given, dict) and given.keys() <= set(names.replace(",", "").split()), given))


def parts(names: str, remedy: str) -> Rule:
    """The same, whose entries are dicts."""
    whole = only(names, remedy)
    return Rule(f"{whole.must}, each of them a dict", lambda given: {
        name: only_if(isinstance(part, dict | None), part) or {}
        for name, part in whole.keep(given).items()})


MODES = Rule(f"one or more of {', '.join(POOLING_TYPES)}", keep_modes)
FUNCTION = Rule(f"torch.nn.modules.activation. and one of {', '.join(FUNCTIONS)}", keep_function)
PER_TOKEN = nothing("a model with a vector for each token (ColBERT) is not supported")
TENSOR = rules.choice(TOKENS, VECTOR, SCORES)


@dataclass(kw_only=True)
class Record:
    """The fields of one file."""

    @classmethod
    def read(cls, file: Path, entries: dict | None = None) -> Self:
        """entries: a part of the file's. Raises `ValueError` with the file's name."""
        entries = read_json(file) if entries is None else entries
        known = [one.name for one in fields(cls)]
        for name in entries:
            if name not in known:
                raise ValueError(f"{file}: {name}={entries[name]!r:.80} is not known, and may "
                                 "change numbers: take it out of the file if it does not")
        with in_words(str(file), ValueError):
            record = cls(**entries)
            rules.check_fields(record)
            record.check()
        return record

    def check(self) -> None:
        """Fields that must fit together. Raises `ValueError`."""


@dataclass(kw_only=True)
class PoolingFile(Record):
    pooling_mode: Annotated[Any, MODES] | None = None
    # Until version 5.3; several of them are joined in this order.
    pooling_mode_cls_token: Flag | None = None
    pooling_mode_max_tokens: Flag | None = None
    pooling_mode_mean_tokens: Flag | None = None
    pooling_mode_mean_sqrt_len_tokens: Flag | None = None
    pooling_mode_weightedmean_tokens: Flag | None = None
    pooling_mode_lasttoken: Flag | None = None
    include_prompt: Flag = True
    embedding_dimension: Anything = None  # the width is the network's
    word_embedding_dimension: Anything = None  # its older name

    def types(self) -> tuple[str, ...]:
        older = tuple(kind for mode, kind in POOLING_TYPES.items() if any(
            getattr(self, f"pooling_mode_{mode}{end}", None) for end in ("", "_token", "_tokens")))
        return self.pooling_mode or older or ("MEAN",)


@dataclass(kw_only=True)
class DenseFile(Record):
    in_features: Count = 0
    out_features: Count = 0
    bias: Flag = True
    activation_function: Annotated[Any, FUNCTION] = "torch.nn.modules.activation.Tanh"
    module_input_name: Annotated[str, TENSOR] = VECTOR
    module_output_name: Annotated[str, TENSOR] | None = None
    use_residual: Flag = False


@dataclass(kw_only=True)
class NormalizeFile(Record):
    module_input_name: Annotated[str, TENSOR] = VECTOR
    module_output_name: Annotated[str, TENSOR] | None = None


@dataclass(kw_only=True)
class LayerNormFile(Record):
    dimension: Count = 0
    module_input_name = VECTOR
    module_output_name = None


@dataclass(kw_only=True)
class DropoutFile(Record):
    dropout: Anything = None  # nothing is dropped outside of training


@dataclass(kw_only=True)
class LogitScoreFile(Record):
    true_token_id: Size = -1
    false_token_id: Size | None = None
    module_input_name: Annotated[str, rules.choice(LOGITS)] = LOGITS


@dataclass(kw_only=True)
class TransformerFile(Record):
    transformer_task: Annotated[str, rules.choice(*TASKS)] = "feature-extraction"
    modality_config: Annotated[dict, rules.instance(dict, "a dict")] | None = None
    module_output_name: Annotated[str, rules.choice(TOKENS, SCORES, LOGITS)] | None = None
    max_seq_length: Count | None = None
    do_lower_case: Flag | None = None
    processing_kwargs: Annotated[dict, parts(
        "text, common, chat_template", "else the texts would be read in another way")] | None = None
    query_length: Annotated[None, PER_TOKEN] = None
    document_length: Annotated[None, PER_TOKEN] = None
    query_expansion: Annotated[None, PER_TOKEN] = None
    unpad_inputs: Anything = None  # nothing is padded here
    tokenizer_name_or_path: Annotated[None, nothing("name it with tokenizer=")] = None
    # Arguments for transformers, by their older and newer names.
    tokenizer_args: Annotated[dict, only(
        "model_max_length, padding_side, use_fast, trust_remote_code", "write it into "
        "tokenizer_config.json")] | None = None
    processor_kwargs: Annotated[dict, only(
        "model_max_length, padding_side, use_fast, trust_remote_code", "write it into "
        "tokenizer_config.json")] | None = None
    model_args: Annotated[dict, only(
        "dtype, torch_dtype, attn_implementation, device_map, trust_remote_code, use_safetensors",
        "write it into config.json")] | None = None  # the option dtype says how numbers are stored
    model_kwargs: Annotated[dict, only(
        "dtype, torch_dtype, attn_implementation, device_map, trust_remote_code, use_safetensors",
        "write it into config.json")] | None = None
    config_args: Annotated[dict, only("trust_remote_code", "use hf_overrides=")] | None = None
    config_kwargs: Annotated[dict, only("trust_remote_code", "use hf_overrides=")] | None = None

    def check(self) -> None:
        made, output = TASKS[self.transformer_task]
        if self.module_output_name not in (None, made):
            raise ValueError(f"module_output_name={self.module_output_name!r} with transformer_task"
                             f"={self.transformer_task!r}: only {made!r} is supported")
        for kind in ("text", "message"):
            entry = (self.modality_config or {}).get(kind)
            if entry is not None and not (isinstance(entry, dict) and entry.keys() <= {
                    "method", "method_output_name", "format"} and entry.get(
                        "method") == "forward" and entry.get("method_output_name") == output):
                raise ValueError(f"modality_config: {kind}={entry!r:.120}: only the method "
                                 f"'forward' and the output {output!r} are supported")
        if self.form not in FORMS:
            raise ValueError(f"modality_config: message: format={self.form!r:.80} must be one of "
                             f"{', '.join(FORMS)}")
        if self.modality_config is not None and not {"text", "message"} & set(self.modality_config):
            raise ValueError(f"modality_config={self.modality_config!r:.120} takes no text")
        ProcessingFile.read(Path("processing_kwargs"), self.reading)
        if {"max_length", "truncation"} & set(self.template or {}):
            raise ValueError(f"processing_kwargs: chat_template={self.template!r:.120}: max_length "
                             "and truncation must stand in its entry text")
        rules.checked("chat_template: restore_suffix", rules.rule_of(Flag), self.restores_suffix)
        if self.longest is not None:
            rules.checked("model_max_length", rules.rule_of(Count), self.longest)

    @property
    def reading(self) -> dict:
        """How the tokenizer is called for a text."""
        said = self.processing_kwargs or {}
        return said.get("common", {}) | said.get("text", {})

    @property
    def template(self) -> dict | None:
        """The chat template's options, where texts are read through it."""
        if "message" not in (self.modality_config or {}):
            return None
        said = (self.processing_kwargs or {}).get("chat_template", {})
        return {name: value for name, value in said.items() if name != "restore_suffix"}

    @property
    def form(self) -> str:
        """In which a message's content is handed to the chat template."""
        return ((self.modality_config or {}).get("message") or {}).get("format", "auto")

    @property
    def restores_suffix(self) -> bool:
        """Whether what the chat template writes behind a text stays when the text is cut."""
        return (self.processing_kwargs or {}).get("chat_template", {}).get("restore_suffix", True)

    @property
    def longest(self) -> int | None:
        """What this file says itself."""
        said = {**(self.tokenizer_args or {}), **(self.processor_kwargs or {})}
        return self.reading.get("max_length") or said.get("model_max_length") or self.max_seq_length


@dataclass(kw_only=True)
class ProcessingFile(Record):
    """The tokenizer's arguments: `processing_kwargs` of sentence_bert_config.json."""

    max_length: Count | None = None
    truncation: Annotated[Any, rules.choice(True, "longest_first")] = True
    padding: Anything = None  # nothing is padded here
    pad_to_multiple_of: Anything = None
    padding_side: Anything = None
    return_tensors: Anything = None
    return_attention_mask: Anything = None
    logits_to_keep: Anything = None  # of a generator's logits the last are read
    add_special_tokens: Annotated[bool, rules.choice(True)] = True


@dataclass(kw_only=True)
class ModelFile(Record):
    """config_sentence_transformers.json"""

    model_type: Annotated[str, Rule(
        "SentenceTransformer or CrossEncoder (a SparseEncoder's vectors, and a MultiVectorEncoder's"
        " or ColBERT's, one for each token, are not supported)",
        rules.choice("SentenceTransformer", "CrossEncoder").keep)] = "SentenceTransformer"
    prompts: Annotated[dict, Rule("a dict with a text for each name", keep_prompts)] | None = None
    default_prompt_name: Text | None = None
    similarity_fn_name: Annotated[
        str, rules.choice("cosine", "dot", "euclidean", "manhattan")] | None = None
    truncate_dim: Count | None = None
    activation_fn: Annotated[Any, FUNCTION] | None = None
    keep_in_fp32_modules: Annotated[list, Rule(  # heads compute in float32 anyway
        "a list of modules behind the network, or of its head (for the others use dtype='float32', "
        "and take the field out of the file)",
        lambda names: only_if(isinstance(names, list) and not any(
            str(name).startswith("0.") and not str(name).startswith(
                ("0.model.score", "0.model.classifier")) for name in names), names))] | None = None
    requirements: Anything = None  # which versions of packages its author wants
    __version__: Anything = None  # of those that wrote the file

    def check(self) -> None:
        if self.default_prompt_name and self.default_prompt_name not in (self.prompts or {}):
            raise ValueError(f"default_prompt_name={self.default_prompt_name!r:.80} is none of its "
                             f"prompts, which are {', '.join(self.prompts or ()) or 'none'}")


@dataclass(kw_only=True)
class RerankerEntry(Record):
    """`sentence_transformers` in config.json, until version 5.3"""

    activation_fn: Annotated[Any, FUNCTION] | None = None
    version: Anything = None


# ---------------------------------------------------------- modules that follow the network


class Dense(nn.Module):
    """activation(W x + b), and x itself is added where the file asks for it."""

    def __init__(self, said: DenseFile):
        super().__init__()
        self.linear = nn.Linear(said.in_features, said.out_features, said.bias)
        self.activation, self.use_residual = said.activation_function, said.use_residual
        self.residual = nn.Identity()
        if said.use_residual and said.in_features != said.out_features:
            self.residual = nn.Linear(said.in_features, said.out_features, False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.activation(self.linear(x))
        return y + self.residual(x) if self.use_residual else y


class LayerNorm(nn.Module):
    def __init__(self, said: LayerNormFile):
        super().__init__()
        self.norm = nn.LayerNorm(said.dimension)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


class Normalize(nn.Module):
    def __init__(self, said: NormalizeFile | None = None):
        super().__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.normalize(x, dim=-1)


STEPS: dict[str, tuple[type[nn.Module], Any]] = {
    "Dense": (Dense, DenseFile), "LayerNorm": (LayerNorm, LayerNormFile),
    "Normalize": (Normalize, NormalizeFile)}
KINDS = ("Transformer", "Pooling", *STEPS, "LogitScore", "Dropout")


# ---------------------------------------------------------------------------- all together


@dataclass
class SentenceModel:
    """The contents of all files. Without modules.json `kind` is None, and there may be prompts
    only."""

    kind: str | None = None  # "embed" or "classify"
    task: str | None = None  # of the network
    pooling_types: tuple[str, ...] = ()  # several: their vectors are joined
    include_prompt: bool = True
    on_tokens: nn.Sequential = field(default_factory=nn.Sequential)  # modules before the pooling
    on_vectors: nn.Sequential = field(default_factory=nn.Sequential)  # ... and behind it
    width: int = 0  # of what the last of them makes
    normalises: bool = False  # the last one, which is left out of `on_vectors`, is Normalize
    token_ids: list[int] = field(default_factory=list)  # LogitScore's: [no, yes], or one
    activation: nn.Module | None = None  # of scores
    similarity: str = "cosine"
    truncate_dim: int | None = None
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    template: dict | None = None  # texts are read through the chat template, with these options
    form: str = "auto"  # of a message's content for the template: see `in_parts`
    restores_suffix: bool = True  # what the template writes behind a text stays, if that is cut
    lowers: bool = False  # letters, before the text is split
    longest: int | None = None  # tokens of a text, as sentence_bert_config.json says it itself

    def in_parts(self, template: str) -> bool:
        """Whether the chat template gets a text as a list of one part."""
        return self.form == "structured" or self.form == "auto" and any(
            mark in template for mark in PARTS)


def is_reranker(folder: Path) -> bool:
    """Whether its modules make scores of pairs."""
    said = ModelFile.read(folder / "config_sentence_transformers.json")
    return (folder / "modules.json").exists() and (
        said.model_type == "CrossEncoder"
        or read_first(folder).transformer_task != "feature-extraction")


def read_sentence_model(folder: Path, config: dict, hidden_size: int) -> SentenceModel:
    """config: of config.json. Raises `ValueError` for what would be computed differently."""
    said, first = ModelFile.read(folder / "config_sentence_transformers.json"), read_first(folder)
    model = SentenceModel(prompts=said.prompts or {}, default_prompt=said.default_prompt_name,
                          similarity=said.similarity_fn_name or "cosine",
                          activation=_read_activation(folder, said, config))
    if not (modules := read_modules(folder)):
        return model
    model.task, model.template, model.lowers = (
        first.transformer_task, first.template, bool(first.do_lower_case))
    model.longest, model.truncate_dim = first.longest, said.truncate_dim
    model.restores_suffix = first.template is None or first.restores_suffix
    model.form = first.form
    model.kind = "classify" if is_reranker(folder) else "embed"
    with in_words(str(folder / "modules.json"), ValueError):
        _follow(modules, model, hidden_size)
    return model


def _follow(modules: list[tuple[str, Path]], model: SentenceModel, hidden_size: int) -> None:
    """Find the modules that make the result. made: for each tensor its width and the modules that
    make it, from the pooling on, or before it."""
    made: dict[str, tuple[int, list[nn.Module]]] = {TASKS[model.task][0]: (hidden_size, [])}
    for kind, part in modules[1:]:
        if kind == "Pooling":
            said = PoolingFile.read(part / "config.json", read_json(part / "config.json", True))
            if VECTOR in made or TOKENS not in made:
                raise ValueError(f"Pooling behind {', '.join(made)} is not supported")
            width, before = made[TOKENS]
            model.pooling_types, model.include_prompt = said.types(), said.include_prompt
            model.on_tokens = nn.Sequential(*before).requires_grad_(False)
            made[VECTOR] = (len(model.pooling_types) * width, [])
        elif kind == "LogitScore":
            read = LogitScoreFile.read(part / "config.json", read_json(part / "config.json", True))
            if LOGITS not in made:
                raise ValueError("LogitScore needs transformer_task='text-generation'")
            model.token_ids = [i for i in (read.false_token_id, read.true_token_id)
                               if i is not None]
            made = {SCORES: (1, [])}
        elif kind == "Dropout":
            DropoutFile.read(part / "config.json")
        else:
            _step(kind, part, made)
    wanted = VECTOR if model.kind == "embed" else SCORES
    if wanted not in made:
        raise ValueError(f"its modules make no {wanted}, without which there is no "
                         f"{'vector of a text' if model.kind == 'embed' else 'score'}: this model "
                         "is not supported")
    model.width, steps = made[wanted]
    if steps and not model.pooling_types:
        raise ValueError(f"modules behind {modules[0][0] if not model.token_ids else 'LogitScore'} "
                         "that change its scores are not supported: take them out")
    if model.kind == "embed" and steps and isinstance(steps[-1], Normalize):
        steps, model.normalises = steps[:-1], True
    model.on_vectors = nn.Sequential(*steps).requires_grad_(False)


def _step(kind: str, part: Path, made: dict[str, tuple[int, list[nn.Module]]]) -> None:
    """One module that makes `made[target]` of `made[source]`."""
    make, record = STEPS[kind]
    said = record.read(part / "config.json")
    source = said.module_input_name
    target = said.module_output_name or source
    if source not in made or (source == TOKENS) != (target == TOKENS):
        raise ValueError(f"{part}: {kind} makes {target!r} of {source!r} behind "
                         f"{', '.join(made)}, which is not supported: put it where {source} is "
                         "made, and let it make the same")
    width, before = made[source]
    expects, makes = width, width
    if kind == "Dense":
        expects, makes = said.in_features, said.out_features
    elif kind == "LayerNorm":
        expects = said.dimension
    if expects != width:
        raise ValueError(f"{part}: {kind} takes {expects} numbers, and gets {width}")
    with torch.device("meta"):
        module = make(said)
    if shapes := {name: tuple(one.shape) for name, one in module.state_dict().items()}:
        tensors = {name: tensor.float() for _, name, tensor in stored_tensors(part)}
        found = {name: tuple(one.shape) for name, one in tensors.items()}
        if found != shapes:
            raise ValueError(f"{part}: its tensors are {found}, and by its config.json {shapes}: "
                             "correct the one or the other")
        module.load_state_dict(tensors, assign=True)
    made[target] = makes, [*before, module]


def read_modules(folder: Path) -> list[tuple[str, Path]]:
    """`modules.json`: each module's class and its folder. [] where there is no such file."""
    file = folder / "modules.json"
    if not file.exists():
        return []
    with in_words(f"{file} can't be read"):
        modules = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(modules, list) or not modules or not all(
            isinstance(one, dict) and isinstance(one.get("type"), str)
            and isinstance(one.get("path"), str) for one in modules):
        raise ValueError(f"{file} must list modules, each with a type and a path, got "
                         f"{modules!r:.80}")
    names = [one["name"] for one in modules if "name" in one]
    if len(set(map(str, names))) < len(names):
        raise ValueError(f"{file}: two modules have the same name, {names}: rename one")
    for i, one in enumerate(modules):
        package, _, kind = one["type"].rpartition(".")
        if package.partition(".")[0] != "sentence_transformers" or kind not in KINDS or (
                (kind == "Transformer") != (i == 0)):
            raise ValueError(f"{file}: the module type={one['type']!r} is not supported as number "
                             f"{i}: Transformer stands first, and behind it there may be "
                             f"{', '.join(KINDS[1:])}, of sentence_transformers' own")
        if unknown := one.keys() - {"idx", "name", "path", "type", "kwargs"}:
            raise ValueError(f"{file}: {unknown} of a module is not known: take it out")
    if modules[0]["path"]:
        raise ValueError(f"{file}: path={modules[0]['path']!r} of the Transformer: its files must "
                         "lie beside modules.json, with the path \"\"")
    return [(one["type"].rpartition(".")[2], inside(folder, one["path"])) for one in modules]


def read_first(folder: Path) -> TransformerFile:
    """The first module's file: the first of its possible names that has entries."""
    found = (read_json(folder / name) and folder / name for name in TRANSFORMER_FILES)
    return TransformerFile.read(next(filter(None, found), folder / TRANSFORMER_FILES[0]))


def longest_text(folder: Path, config: dict) -> int | None:
    """How many tokens a text may have, special ones included; None: no file says it. Where
    sentence-transformers has no number of its own, it takes the tokenizer's. config: config.json's.
    """
    if (said := read_first(folder).longest) is not None:
        return said
    if not (folder / "modules.json").exists() and not _says_reranker(config):
        return None
    file = folder / "tokenizer_config.json"
    length = read_json(file).get("model_max_length")
    if length is not None and (type(length) not in (int, float) or length < 1):
        raise ValueError(f"{file}: model_max_length={length!r:.80} must be a whole number of at "
                         "least 1")
    return None if length is None else int(length)


def too_long(asked: int, longest: int) -> str:
    """The error for a max_model_len that is too large."""
    return (f"max_model_len={asked} is above the {longest} tokens that sentence-transformers' "
            "files allow a text (max_seq_length in sentence_bert_config.json, or model_max_length "
            "in tokenizer_config.json): lower it, or raise their number")


def _says_reranker(config: dict) -> bool:
    return bool(config.get("sentence_transformers")
                or config.get("sbert_ce_default_activation_function"))


def _read_activation(folder: Path, said: ModelFile, config: dict) -> nn.Module | None:
    """A reranker's activation: from the newer file, else from config.json."""
    if said.activation_fn is not None:
        return said.activation_fn
    entry, older = config.get("sentence_transformers"), config.get(
        "sbert_ce_default_activation_function")
    if entry is None:
        entry = {} if older is None else {"activation_fn": older}
    if not isinstance(entry, dict):
        raise ValueError(f"{folder / 'config.json'}: sentence_transformers={entry!r:.80} must be a "
                         "dict")
    return RerankerEntry.read(folder / "config.json", entry).activation_fn
