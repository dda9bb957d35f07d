"""Pooling: prompts become vectors, classes and scores, and no token is ever sampled.

A prompt is computed by the same steps as any other: in chunks, beside others, in the same blocks.
Only the end differs. The LM head is not loaded, and instead of logits each step returns the hidden
states of the positions that are needed:

    prompt     t0   t1   t2 | t3   t4              two chunks, two steps
    CLS        h0                                  ─┐
    LAST                           h4               │
    MEAN      (h0 + h1 + h2) + (h3 + h4), over 5    ├─► head, activation (pooler.py) ─► output
    MAX        the largest of h0 ... h4, by number  │
    ALL        h0   h1   h2   h3   h4              ─┘   each one by itself

These positions are `prompt_logprob_positions`, which the core has for logprobs. A pooled sequence
gets None instead of a token, and ends there, because the prompt is its maximum length.

Invariants: the same numbers alone, batched or in chunks. A request that needs another position than
the last never reads the prefix cache, which keeps no hidden states. A chunk counts once.

Names are vLLM's (`PoolingParams`, `pooling_task`).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any

import torch
from tokenizers import normalizers

from nanoserve import rules
from nanoserve.config import EngineConfig, SamplingParams
from nanoserve.engine import no_numbers
from nanoserve.hooks import Extra
from nanoserve.inputs import one_for_each
from nanoserve.progress import say
from nanoserve.request import Sample
from nanoserve.rules import Count, Flag, Text
from nanoserve.sequence import CoreRequest, Sequence
from nanoserve_extras.base.config_files import ModelConfig
from nanoserve_extras.base.facts import Fact
from nanoserve_extras.base.inputs import Inputs, Prompt, as_list, salt_of
from nanoserve_extras.base.plan import Plan
from nanoserve_extras.base.request import Request, salted
from nanoserve_extras.base.vllm import takes_vllms_words
from nanoserve_extras.base.words import in_words
from nanoserve_extras.engine_args import PoolingOptions
from nanoserve_extras.pooling.pooler import POOLS, First, Pooler
from nanoserve_extras.pooling.sentence_files import too_long

GREEDY = SamplingParams(temperature=0)  # a sequence must have params; nothing is sampled
LENGTH = rules.Rule("a whole number of at least 1, or -1: as many tokens as fit",
                    lambda count: count if count == -1 else rules.rule_of(Count).keep(count))
SIDE = rules.choice("left", "right")


@takes_vllms_words("PoolingParams", "pooling")
@dataclass(kw_only=True)
class PoolingParams:
    """The parameters of one request. Raises a `ValueError` that names the field."""

    use_activation: Flag | None = None  # None: the model's default
    dimensions: Count | None = None  # Matryoshka: the embedding's first numbers
    truncate_prompt_tokens: Annotated[int, LENGTH] | None = None  # keep at most so many
    truncation_side: Annotated[str, SIDE] | None = None  # where the others go; None: the pooler's
    task: Text | None = None  # set by `embed`, `classify`, `score`, `encode`
    prompt_name: Text | None = None  # the beginning of a text

    def __post_init__(self):
        rules.check_fields(self)


@dataclass
class PoolingOutput:
    """The tensor as computed: (numbers,) for a prompt, (tokens, numbers) for its tokens."""

    data: torch.Tensor


@dataclass
class EmbeddingOutput:
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass
class ClassificationOutput:
    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass
class ScoringOutput:
    score: float


@dataclass
class PoolingRequestOutput:
    """A pooled request as its caller sees it. `outputs` is None for one that was aborted, or that
    ended with an `error`."""

    request_id: str
    outputs: PoolingOutput | EmbeddingOutput | ClassificationOutput | ScoringOutput | None
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool = True
    error: str | None = None

    @property
    def aborted(self) -> bool:
        return self.outputs is None


@dataclass(eq=False, kw_only=True)
class PoolingRequest(Request):
    """A request of one sequence, with the part of its vector so far; params: `PoolingParams`."""

    pooler: Pooler
    num_skipped: int = 0  # positions of what the text begins with, which aren't pooled
    num_seen: int = 0  # positions that were taken into account
    seen: list[torch.Tensor] = field(default_factory=list)  # ALL: (n, numbers) each
    pools: dict[str, First] = field(default_factory=dict)  # by pooling type
    result: torch.Tensor | None = None
    error: str | None = None
    dtype: str  # of the engine, for the error

    @property
    def pooling_types(self) -> tuple[str, ...]:
        return ("ALL",) if self.params.task.startswith("token_") else self.pooler.pooling_types

    def start(self, arrival: int, engine_seed: int) -> list[Sequence]:
        ids = self.prompt_token_ids
        core = replace(self.core, request_id=self.request_id, arrival=arrival,
                       root=salted(self.core.root, self.cache_salt))
        # Above 0 it also switches off prefix hits: all but LAST need earlier positions.
        needed = {"LAST": 0, "CLS": self.num_skipped + 1}
        num_pooled = max(needed.get(kind, len(ids)) for kind in self.pooling_types)
        seq = Sequence(core, list(ids), num_prompt_logprobs=num_pooled)
        self.samples = [Sample(seq, None, len(ids))]
        return self.sequences

    def add_prompt_logprobs(self, positions: range, vectors: torch.Tensor) -> None:
        """Hidden states from a finished step. After a preemption they start at position 0 again."""
        if positions.start == 0:
            self.num_seen, self.seen = 0, []
            self.pools = {kind: POOLS[kind]() for kind in self.pooling_types if kind in POOLS}
        assert positions.start == self.num_seen, (
            f"request {self.request_id} has seen {self.num_seen} positions, now gets {positions}")
        vectors = self.pooler.read(vectors)
        if self.pooling_types == ("ALL",):  # each by itself, and off the device
            self.seen.append(self._finish(vectors))
        start = max(positions.start, self.num_skipped)
        if start < positions.stop:
            for pool in self.pools.values():
                pool.add(vectors[start - positions.start:], start)
        self.num_seen = positions.stop

    def add_tokens(self, seq: Sequence, last: list[torch.Tensor]) -> None:
        """The prompt is complete, and no token came. last: (hidden_size,), of its last position."""
        if self.pooling_types == ("ALL",):
            self.result = torch.cat(self.seen)
        else:
            parts = [self.pooler.read(last[0][None]) if kind == "LAST" else
                     self.pools[kind].result() for kind in self.pooling_types]
            self.result = self._finish(torch.cat(parts, 1))[0]
        self.seen, self.pools = [], {}
        if not self.result.isfinite().all():
            self.result, self.error = None, (f"request {self.request_id}: "
                                             + no_numbers("its result", self.dtype))
            say(self.error)

    def _finish(self, vectors: torch.Tensor) -> torch.Tensor:
        params = self.params
        return self.pooler.finish(vectors, params.use_activation, params.dimensions).cpu()

    def flush(self) -> None:
        """Nothing to do: no text was held back."""

    def output(self) -> PoolingRequestOutput:
        # A clone, because tensors of inference mode can't be changed by the caller.
        outputs = None if self.result is None else PoolingOutput(self.result.clone())
        return PoolingRequestOutput(self.request_id, outputs, self.prompt_token_ids,
                                    self.sequences[0].num_cached_tokens or 0, error=self.error)


# ---------------------------------------------------------------- the way in


def make_headless(make_network: Callable, *args, **options) -> Any:
    """A network of transformers without its LM head. None in a trial of weights."""
    model = make_network(*args, **options)
    if model is not None:
        model.drop_head()
    return model


class Pooling(Extra):
    """The extra behind `LLM(runner="pooling")`: a pooler, a replacement for `InputProcessor`, and
    the methods `encode`, `embed`, `classify` and `score` of `LLM`."""

    Options = PoolingOptions
    name = "runner='pooling'"
    ends = frozenset([Fact.GENERATES, Fact.GRAPHS])

    def prepare(self, plan: Plan) -> Plan:
        make = plan.make_pooler or Pooler.of
        self.pooler = make(self.options, plan.config.hf_overrides or {}, plan.model_config,
                           plan.folder, plan.tokenizer)
        parts = replace(plan.parts, pooler=self.pooler)
        if parts.make_network is not None and plan.make_pooler is None:
            if self.pooler.needs_head:
                raise ValueError(f"{plan.model_config.architecture} is {plan.network}', and a "
                                 "decoder of theirs pools to embeddings alone: use convert='embed'")
            parts = replace(parts, make_network=partial(make_headless, parts.make_network))
        return replace(plan, parts=parts, config=self._shortened(plan),
                       make_inputs=partial(PoolingInputs, self.pooler))

    def _shortened(self, plan: Plan) -> EngineConfig:
        """The config, with the `max_model_len` of sentence-transformers' files."""
        config, longest = plan.config, self.pooler.longest
        if longest is None or config.max_model_len <= longest:
            return config
        if config.max_model_len != plan.model_config.max_position_embeddings:
            raise ValueError(too_long(config.max_model_len, longest))
        return replace(config, max_model_len=longest)

    # ------------------------------------------------------ offline batches

    @takes_vllms_words("encode()", "call")
    def encode(self, prompts: Prompt | list[Prompt],
               pooling_params: PoolingParams | list[PoolingParams] | None = None, *,
               pooling_task: str | None = None, use_tqdm: bool | Callable = True,
               priority: list[int] | None = None,
               lora_request: Any = None) -> list[PoolingRequestOutput]:
        """Pool one prompt or many; results come in the order of the prompts.

        prompts: in the forms of `generate`. pooling_task: "embed" or "classify" for a prompt as a
        whole, "token_embed" or "token_classify" for each of its tokens. lora_request: a
        `LoRARequest` for all, or one or None for each. Raises `ValueError` before any work starts,
        or at the end where a result is NaN or infinity; after Ctrl-C the engine stays usable.
        """
        if pooling_task is None:
            raise ValueError("encode() needs pooling_task: choose one of "
                             f"{', '.join(self.pooler.tasks)}")
        prompts = as_list(prompts)
        params = _with_task(pooling_params, len(prompts), pooling_task)
        requests = self.engine.make_requests(prompts, params, priority=priority,
                                             lora_request=lora_request)
        outputs = self.engine.results_of(requests, use_tqdm)
        if errors := [output.error for output in outputs if output.error]:
            raise ValueError(errors[0])
        return outputs

    def embed(self, prompts: Prompt | list[Prompt], *, pooling_params=None,
              prompt_name: str | None = None, **options) -> list[PoolingRequestOutput]:
        """A vector for each prompt, as `EmbeddingOutput`; options are `encode`'s. prompt_name: what
        texts begin with, of the names in config_sentence_transformers.json."""
        prompts = as_list(prompts)
        params = [replace(one, prompt_name=prompt_name or one.prompt_name) for one in
                  _with_task(pooling_params, len(prompts), "embed")]
        outputs = self.encode(prompts, params, pooling_task="embed", **options)
        return _converted(outputs, lambda data: EmbeddingOutput(data.tolist()))

    def classify(self, prompts: Prompt | list[Prompt], *, pooling_params=None,
                 **options) -> list[PoolingRequestOutput]:
        """Probabilities of the classes for each prompt, as `ClassificationOutput`."""
        outputs = self.encode(prompts, pooling_params, pooling_task="classify", **options)
        return _converted(outputs, lambda data: ClassificationOutput(data.tolist()))

    def score(self, data_1: Prompt | list[Prompt], data_2: Prompt | list[Prompt], /, *,
              chat_template: str | None = None, pooling_params: PoolingParams | None = None,
              **options) -> list[PoolingRequestOutput]:
        """How well texts go together, pair by pair, as `ScoringOutput`.

        data_1: a query, or one for each of data_2. An embedding model's score is the cosine of two
        embeddings, or what its files name (dot, euclidean, manhattan); a reranker reads both texts
        at once, behind each other or in a `chat_template` with a "query" and a "document".
        """
        first, second = as_list(data_1), as_list(data_2)
        if not self.pooler.reads_pairs(first, second):
            return self._cosines(first, second, pooling_params, options)
        if len(first) == 1:
            first *= len(second)
        params = _with_task(pooling_params, len(second), "classify")
        prompts = [self.engine.inputs.pair(*texts, chat_template, asked)
                   for *texts, asked in zip(first, second, params, strict=True)]
        outputs = self.encode(prompts, params, pooling_task="classify", **options)
        return _converted(outputs, lambda data: ScoringOutput(data.item()))

    def _cosines(self, first: list, second: list, params, options) -> list:
        """Scores of embeddings. If one query is compared with all of `second`, it is embedded once.
        """
        if not second:
            return []
        if isinstance(options.get("lora_request"), (list, tuple)):
            raise ValueError("lora_request is a list, but score() compares embeddings, which only "
                             "make sense under one adapter: give one for all texts")
        outputs = self.encode(first + second, params, pooling_task="embed", **options)
        queries, documents = outputs[:len(first)], outputs[len(first):]
        if len(queries) == 1:
            queries *= len(documents)
        pad_id = getattr(self.engine.tokenizer, "pad_token_id", None)
        pad = [] if pad_id is None else [pad_id]
        return [PoolingRequestOutput(
            f"{a.request_id}_{b.request_id}",
            None if a.outputs is None or b.outputs is None else ScoringOutput(
                self.pooler.similarity(a.outputs.data, b.outputs.data).item()),
            a.prompt_token_ids + pad + b.prompt_token_ids,
            a.num_cached_tokens + b.num_cached_tokens)
            for a, b in zip(queries, documents, strict=True)]


class PoolingInputs(Inputs):
    """Checks requests to pool."""

    def __init__(self, pooler: Pooler, config: EngineConfig, model_config: ModelConfig, tokenizer):
        super().__init__(config, model_config, tokenizer)
        self.pooler = pooler
        if pooler.files.lowers:
            lower(tokenizer)
        self.own_limit = self._own_limit()

    def _own_limit(self) -> int | None:
        """The length to which a text is truncated without being asked; None: longer ones are
        refused.

        Files ask for it that have a length for an encoder (max_seq_length), and tokenizer files
        with an entry for truncation. If the user's max_model_len is lower, longer texts are
        refused.
        """
        files, given = self.pooler.files, getattr(self.tokenizer, "init_kwargs", {})
        cuts = files.longest is not None and self.pooler.side == "right" or (
            files.kind is not None and "truncation_strategy" in given)
        limit = min(self.pooler.longest or self.model_config.max_position_embeddings,
                    self.model_config.max_position_embeddings)
        return limit if cuts and limit <= self.config.max_model_len else None

    def process(self, request_id: str, prompt: Prompt, params: PoolingParams | None,
                priority: int = 0, lora_request: object = None) -> PoolingRequest:
        """Raises `ValueError` for a request to generate, a task that the model does not have, and
        a wrong prompt."""
        if not isinstance(params, PoolingParams):
            self.check_generates()
        self.check_envelope(request_id, priority)
        task = params.task or self.pooler.task
        if task not in self.pooler.tasks:
            raise ValueError(f"task={task!r} is not one of this model's, which are "
                             f"{', '.join(self.pooler.tasks)}: see the options convert and "
                             "pooler_config")
        self.pooler.check_dimensions(params.dimensions)
        use = params.use_activation
        params = replace(params, task=task,
                         dimensions=params.dimensions or self.pooler.dimensions,
                         use_activation=self.pooler.use_activation if use is None else use)
        begin, salt = self._begin(prompt, params), salt_of(prompt)
        if (text := text_of(prompt)) is not None:
            prompt = (prompt if isinstance(prompt, dict) else {}) | {
                "prompt": begin + text, "prompt_token_ids": self._ids(begin, text)}
        text, ids = self.read_prompt(prompt)
        ids = self._truncate(text, ids, params, begin)
        core = CoreRequest(request_id, GREEDY, priority=priority, arrival_time=time.time(),
                           max_num_tokens=len(ids))
        return PoolingRequest(request_id, core, params, text, ids, None, lora_request=lora_request,
                              cache_salt=salt, pooler=self.pooler, dtype=self.config.dtype,
                              num_skipped=self._num_skipped(begin, ids))

    def tokenize(self, prompts: list[Prompt]) -> list[Prompt]:
        """Texts are not tokenised yet if `process` may add a prefix or a template."""
        files = self.pooler.files
        return prompts if files.prompts or files.template is not None else super().tokenize(prompts)

    def _begin(self, prompt: Prompt, params: PoolingParams) -> str:
        """The prefix of a text. Prompts with token ids and a text, which `pair` makes, have it
        already. Raises `ValueError`."""
        name, text = params.prompt_name or self.pooler.files.default_prompt, text_of(prompt)
        if text is not None or params.task.endswith("embed"):
            return self.pooler.beginning(text, name)
        begin = self.pooler.beginning("", name)
        has_it = isinstance(prompt, dict) and str(prompt.get("prompt")).startswith(begin)
        return begin if has_it else ""

    def _ids(self, begin: str, text: str) -> list[int]:
        """A text's tokens; for an empty text the special ones, as in sentence-transformers."""
        if (options := self.pooler.files.template) is None:
            return self.encode(begin + text)
        return self._render(begin, [{"role": "user", "content": text}], options)

    def _render(self, begin: str, messages: list[dict], options: dict) -> list[int]:
        """Tokens by the chat template; the prefix is the system message, as in
        sentence-transformers."""
        system, files = [{"role": "system", "content": begin}] if begin else [], self.pooler.files
        messages = system + messages
        own = options.get("chat_template") or getattr(self.tokenizer, "chat_template", None) or ""
        if options is not files.template or not files.in_parts(str(own)):
            return self.render_chat(messages, **options)["prompt_token_ids"]
        self.check_template(options)
        for message in messages:
            message["content"] = [{"type": "text", "text": message["content"]}]
        with in_words("the chat template refuses this text"):
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, **options)
        return self.encode(text, add_special_tokens=False)

    def _num_skipped(self, begin: str, ids: list[int]) -> int:
        """How many tokens of `begin` aren't pooled, which is counted as sentence-transformers does:
        those that it has alone, but for a last special one. Raises `ValueError`."""
        files = self.pooler.files
        if not begin or files.include_prompt or files.template is not None:
            return 0
        alone = self.encode(begin)
        count = len(alone) - (alone[-1] in self.tokenizer.all_special_ids)
        if count >= len(ids):
            raise ValueError(f"of the {len(ids)} tokens all belong to {begin!r:.80}, which is not "
                             "pooled (include_prompt=false): give more text, or allow more tokens")
        return count

    def check_generates(self) -> None:
        raise ValueError("this engine pools (runner='pooling') and generates no text: use encode() "
                         f"with one of {', '.join(self.pooler.tasks)}, add requests with "
                         "PoolingParams, or make it with runner='generate'")

    def _truncate(self, text: str | None, ids: list[int], asked: PoolingParams,
                  begin: str) -> list[int]:
        """text: None for a prompt of ids, whose last one is a separator if an encoder reads it.
        begin: what the text begins with. Both stay; but what is cut without being asked loses its
        end as in sentence-transformers, which knows no difference between that and the text."""
        limit, given = self.config.max_model_len, getattr(self.tokenizer, "init_kwargs", {})
        count = asked.truncate_prompt_tokens
        if count is None and self.own_limit is not None:
            count, begin = self.own_limit, ""
        side = asked.truncation_side or given.get("truncation_side") or self.pooler.side
        end = ids[-1:] if text is None and self.pooler.side == "right" else []
        ids = self._cut(ids, count, side,
                        lambda text: (self._ids(begin, text) if self.tokenizer else []) + end)
        if len(ids) > limit:  # all of it may be prompt: with 64, one of 64 tokens is fine
            raise ValueError(
                f"the prompt has {len(ids)} tokens, and this model's maximum context length is "
                f"{limit} tokens: shorten it, cut it with truncate_prompt_tokens, or raise "
                "max_model_len (and kv_cache_memory_bytes, if the KV cache is what limits it)")
        return ids

    def _cut(self, ids: list[int], count: int | None, side: str,
             read: Callable[[str], list[int]]) -> list[int]:
        """`cut`, where the files may say that the chat template's end is cut like a text's."""
        return self.cut(ids, count, side,
                        read if self.pooler.files.restores_suffix else lambda text: [])

    def pair(self, query: str, document: str, chat_template: str | None, asked: Any) -> Prompt:
        """A reranker's prompt: by its template, both texts in a row (a generator that answers yes
        or no), or joined by the tokenizer. asked: `PoolingParams`, or a body. Too long a prompt
        loses the document's end, or start; but a tokenizer that joins pairs truncates the longer
        text, unless a side is named."""
        if not isinstance(query, str) or not isinstance(document, str):
            raise ValueError(f"score() needs texts, got {query!r:.80} and {document!r:.80}")
        count, side, files = asked.truncate_prompt_tokens, asked.truncation_side, self.pooler.files
        name = getattr(asked, "prompt_name", None) or files.default_prompt
        begin = self.pooler.beginning(query, name)
        template = files.template if chat_template is None else {"chat_template": chat_template}
        most = self.own_limit if count is None else count

        def read(query: str, document: str) -> list[int]:
            if template is not None:
                return self._render(begin, [{"role": "query", "content": query},
                                            {"role": "document", "content": document}], template)
            if self.pooler.token_ids and files.kind is None:
                return self.encode(query + document)
            with in_words(f"no valid text, a lone surrogate? {query!r}, {document!r}", TypeError):
                return self.tokenizer_for("score()")(
                    [(begin + query, document)],  # an empty text alone would make no pair
                    truncation="longest_first" if most and not side else False,
                    max_length=self.config.max_model_len if most == -1 else most)["input_ids"][0]

        ids = self._cut(read(query, document), most, side or "right", lambda text: read(
            text if count is None else query, text))
        return {"prompt": begin + query + document, "prompt_token_ids": ids}


def text_of(prompt: Prompt) -> str | None:
    """The text of a prompt without token ids."""
    if isinstance(prompt, dict) and prompt.get("prompt_token_ids") is None:
        prompt = prompt.get("prompt")
    return prompt if isinstance(prompt, str) else None


def lower(tokenizer: Any) -> None:
    """do_lower_case: letters become small ones before anything else, as sentence-transformers has
    it. Raises `ValueError`."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError("sentence_bert_config.json: do_lower_case=True needs a tokenizer.json")
    backend.normalizer = normalizers.Sequence([
        normalizers.Lowercase(), *filter(None, [backend.normalizer])])


def _converted(outputs: list[PoolingRequestOutput], kind: Callable) -> list[PoolingRequestOutput]:
    """The outputs with `kind` applied to their tensors; an aborted request has none."""
    return [output if output.outputs is None else
            replace(output, outputs=kind(output.outputs.data)) for output in outputs]


def _with_task(given: object, count: int, task: str) -> list[PoolingParams]:
    """For each of so many prompts. Raises `ValueError`."""
    params = [PoolingParams() if one is None else one
              for one in one_for_each(given, count, "pooling_params")]
    for one in params:
        if not isinstance(one, PoolingParams):
            raise ValueError(f"pooling_params must be PoolingParams, got {one!r}")
        if one.task not in (None, task):
            raise ValueError(f"pooling_params has task={one.task!r}, which is not pooling_task="
                             f"{task!r}: leave one of them out")
    return [replace(one, task=task) for one in params]
