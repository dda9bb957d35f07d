"""Structured output: a grammar says which tokens may come next, and the model chooses among them.

A JSON schema, a regular expression, a list of choices or a Lark grammar is compiled when a request
is checked, by the library llguidance. From then on a parser (Earley's) reads the output and says,
before each token, which tokens of the vocabulary can go on with it: a mask, one bit a token. All
others get a logit of -inf (controls.py), so every text that ends by itself is valid.

**Where only one text is possible** (`{"hero": "`) its tokens are proposed as drafts, and one step
checks all of them: jump-forward decoding (Zheng et al. 2023, "SGLang"). The road not taken is to
append them without asking the model: another path for tokens to get into a sequence.

Invariant: **a parser's state follows from the sequence's tokens.** A draft is read to make the
masks after it, and then rolled back; after an interruption all tokens are read again.

How a text ends: the parser's vocabulary has one more token than the model's, END. If END is
allowed, so is each EOS, and each of `stop_token_ids`. The request's other constraints hold,
unless they leave no token that the grammar allows; its limits may cut a text anywhere.

Known limit: a text follows the grammar from its first token, so a model can think first only if the
grammar allows it (server/tool_grammar.py).
"""

import json
import re
import warnings
import weakref
from collections import ChainMap
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Annotated, Any

import numpy as np

from nanoserve import rules
from nanoserve.engine import LLMEngine
from nanoserve.hooks import Extra
from nanoserve.request import Request
from nanoserve.sequence import Sequence
from nanoserve_extras.base.facts import Fact
from nanoserve_extras.base.plan import Plan
from nanoserve_extras.base.words import in_words
from nanoserve_extras.structured.structured_schema import tidy
from nanoserve_extras.structured.structured_trial import Trial, byte_tokenizer

END = "<|nanoserve: the text may end here|>"
SAMPLE = "the café, 5"  # has a space, a letter of two bytes, a digit and a sign
MAX_RULES = 1_000  # in EBNF: the library's translation takes the square of it
SCHEMA = rules.instance((str, dict), "a JSON schema, as a dict or as text")
REGEX = rules.instance(str, "a regular expression")
GRAMMAR = rules.instance(str, "a grammar, Lark's or EBNF")
Flag = Annotated[bool, rules.instance(bool, "True or False")]
CHOICE = rules.list_of(rules.keep_text, "a list of non-empty texts", 1)
KINDS = ("json", "regex", "choice", "grammar", "json_object")
# JSON's white space is that of Python's json.dumps. If a grammar leaves it open, small models may
# write spaces for ever. A schema can change this by its own "x-guidance".
ONE_LINE = dict(whitespace_flexible=False, item_separator=", ", key_separator=": ")


# ------------------------------------------------------------ what is asked for


@dataclass
class StructuredOutputsParams:
    """The form of the output: exactly one kind of constraint, and options for schemas. The names
    are vLLM's. Raises `ValueError`."""

    json: Annotated[str | dict, SCHEMA] | None = None
    regex: Annotated[str, REGEX] | None = None  # the whole output matches it
    choice: Annotated[list[str], CHOICE] | None = None  # one of these texts
    grammar: Annotated[str, GRAMMAR] | None = None  # Lark's, with llguidance's extensions; or EBNF
    json_object: Flag | None = None  # any JSON object
    disable_additional_properties: Flag = True  # False: any other keys, too

    def __post_init__(self):
        # json_object=False asks for nothing, as None does; an empty schema allows any JSON value.
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise ValueError(f"structured_outputs must have exactly one of {', '.join(KINDS)}, got "
                             f"{' and '.join(given) or 'none of them'}")
        with in_words("structured_outputs"):
            rules.check_fields(self)

    @classmethod
    def of(cls, asked: Any) -> "StructuredOutputsParams":
        """Also takes a dict with these names. Raises `ValueError` for anything else."""
        if isinstance(asked, dict):
            names = [f.name for f in fields(cls)]
            if unknown := [str(key) for key in asked if key not in names]:
                raise ValueError(f"structured_outputs takes one of {', '.join(KINDS)}, got "
                                 f"{', '.join(unknown)}")
            return cls(**asked)
        if not isinstance(asked, cls):
            raise ValueError("structured_outputs must be StructuredOutputsParams or a dict such as "
                             f"{{'regex': '[0-9]+'}}, got {asked!r:.100}")
        return replace(asked)  # checked once more


def from_response_format(response_format: dict | None) -> StructuredOutputsParams | None:
    """OpenAI's `response_format` as our parameters; None for any text. Raises `ValueError`."""
    if response_format is None:
        return None
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        schema = response_format.get("schema")  # llama.cpp's clients write it so
        return StructuredOutputsParams(json=schema or None, json_object=not schema or None)
    if kind == "json_schema":
        named = response_format.get("json_schema")
        if not isinstance(named, dict) or not isinstance(named.get("schema"), dict):
            raise ValueError("response_format: json_schema must be a dict with a schema, got "
                             f"{named!r:.100}")
        return StructuredOutputsParams(json=named["schema"])
    raise ValueError("response_format must be a dict whose type is text, json_object or "
                     f"json_schema, got {response_format!r:.100}")


# ------------------------------------------------------------------ its compiler


class Grammars:
    """Compiles grammars for one tokenizer. Making this object is slow with a large vocabulary, so
    it is made for the first request of this kind.

    vocab_size: the model's, which may be padded beyond the tokenizer's. Raises `ValueError`.
    """

    def __init__(self, tokenizer: Any, vocab_size: int):
        self.library, self.vocab_size = _library(), vocab_size
        if tokenizer is None:
            raise ValueError("structured_outputs needs a tokenizer, and this engine has none: name "
                             "one with tokenizer= (and without skip_tokenizer_init)")
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError("structured_outputs needs a tokenizer of the library `tokenizers`, "
                             f"got a {type(tokenizer).__name__}: name another with tokenizer=")
        from tokenizers import Tokenizer  # here: it came with the tokenizer
        own = Tokenizer.from_str(backend.to_str())
        own.no_padding()
        own.no_truncation()
        own.add_special_tokens([END])
        # Behind all others, so that no real token has it; a padded vocabulary may have room there.
        self.end_id = own.token_to_id(END)
        read = dict(tokenizer=own.to_str(), n_vocab=max(vocab_size, self.end_id + 1),
                    eos_token=self.end_id)
        with in_words("structured_outputs: llguidance can't read this tokenizer", ValueError):
            self.tokenizer = self.library.LLTokenizer(**read)
        self.trial = Trial(read)
        # llguidance knows the usual ways to write a space and bytes; others it takes for letters.
        found = self.tokenizer.decode_bytes(own.encode(SAMPLE, add_special_tokens=False).ids)
        if found.decode(errors="replace").strip() != SAMPLE:
            raise ValueError(f"structured_outputs: llguidance reads this tokenizer's {SAMPLE!r} as "
                             f"{found!r}: name another with tokenizer=")
        # One schema often comes with many requests. A matcher in here is only ever copied.
        self.matcher_of = lru_cache(maxsize=64)(self._compile)

    def compile(self, asked: Any, stop_ids: frozenset[int]) -> "Grammar":
        """asked: `SamplingParams.structured_outputs`; stop_ids: EOS and stop tokens. Raises
        `ValueError`, with the library's message, for unsupported grammars."""
        asked = StructuredOutputsParams.of(asked)
        end_ids = frozenset(i for i in stop_ids if 0 <= i < self.vocab_size)
        if not end_ids:
            raise ValueError("structured_outputs needs a token that ends the text, and there is no "
                             "EOS (ignore_eos=True, or a model without): name one with "
                             "stop_token_ids, or leave ignore_eos out")
        with in_words("structured_outputs has a text that UTF-8 has no bytes for, a lone "
                      "surrogate?", UnicodeEncodeError):
            return Grammar(self, self.matcher_of(self._translate(asked)), end_ids)

    def _compile(self, grammar: str) -> Any:
        if words := self.trial.refusal(grammar):  # they may repeat the whole grammar
            words = "no text at all matches it" if words.startswith("NoExtension") else words
            raise ValueError(f"structured_outputs: llguidance refuses this: {words:.500}")
        return self.library.LLMatcher(self.tokenizer, grammar, log_level=0)

    def _translate(self, asked: StructuredOutputsParams) -> str:
        """Translate to the library's own form of a grammar."""
        to = self.library.LLMatcher
        if asked.regex is not None:
            return to.grammar_from_regex(asked.regex)
        if asked.grammar is not None:
            is_ebnf = re.search(r"(?m)^[ \t]*[\w-]+\s*::=", asked.grammar)
            return to.grammar_from_lark(_to_lark(asked.grammar) if is_ebnf else asked.grammar)
        if asked.choice is not None:  # Lark's strings are written as JSON's are. One terminal: ...
            "".join(asked.choice).encode()  # ... for a parser's rule 2,000 are too many
            texts = " | ".join(map(json.dumps, asked.choice))
            return to.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}")
        schema = {"type": "object"} if asked.json is None else asked.json
        with in_words("structured_outputs: json is no JSON schema", ValueError, TypeError,
                      RecursionError):
            # As text: a dict that holds itself, handed to the library, ends the process.
            text = schema if isinstance(schema, str) else json.dumps(schema)
            text = json.dumps(tidy(json.loads(text), asked.disable_additional_properties,
                                   self._is_dead, refusal))
            return to.grammar_from_json_schema(text, defaults=ONE_LINE)

    def _is_dead(self, keys: list[str], patterns: list[str]) -> bool:
        """Whether these patterns match no key besides the listed ones: then the parser, after an
        object with all keys and a comma, finds no way to go on."""
        probe = dict(type="object", properties=dict.fromkeys(keys, {}), required=keys,
                     patternProperties=dict.fromkeys(patterns, {}), additionalProperties=False)
        grammar = self.library.LLMatcher.grammar_from_json_schema(
            json.dumps(probe), defaults=ONE_LINE)
        if self.trial.refusal(grammar):
            return False  # it will be said of the whole schema
        matcher = self.library.LLMatcher(self.tokenizer, grammar, log_level=0)
        text = json.dumps(dict.fromkeys(keys), ensure_ascii=False)[:-1] + ", "
        matcher.consume_tokens(self.tokenizer.tokenize_str(text))
        matcher.compute_bitmask()
        return matcher.get_error().startswith("NoExtension")


def _library() -> Any:
    """Raises `ValueError` where it is not installed."""
    try:
        import llguidance
    except ImportError as error:
        raise ValueError('structured_outputs needs the library llguidance: pip install '
                         '"nanoserve[structured]", or pip install "llguidance>=1.9,<2"'
                         ) from error
    return llguidance


SCHEMAS = Trial(byte_tokenizer())


def refusal(schema: dict) -> str:
    """The library's error for a schema by itself; "" if it can be compiled."""
    return _refusal_of(json.dumps(schema))


@lru_cache(maxsize=512)  # an agent sends its tools with each turn
def _refusal_of(schema: str) -> str:
    return " ".join(SCHEMAS.refusal(_library().LLMatcher.grammar_from_json_schema(schema)).split())


def _to_lark(grammar: str) -> str:
    """EBNF as llama.cpp and xgrammar write it. Raises `ValueError`."""
    from llguidance.gbnf_to_lark import gbnf_to_lark
    if (count := grammar.count("::=")) > MAX_RULES:
        raise ValueError(f"structured_outputs: grammar has {count:,} rules in EBNF, and "
                         f"{MAX_RULES:,} are the most: write it as Lark's")
    with in_words("structured_outputs: grammar is no EBNF"):
        return gbnf_to_lark(grammar)


# ---------------------------------------------------------------- one text's parser


class Grammar:
    """A compiled grammar, and the parser's state for the output of one sequence."""

    def __init__(self, made_by: Grammars, compiled: Any, end_ids: frozenset[int]):
        self.made_by, self.compiled, self.end_ids = made_by, compiled, end_ids
        self.matcher: Any = None
        self.failed_at = -1  # behind so many tokens the parser knew none to go on with
        self.num_read: int | None = None  # tokens of the sequence, its prompt among them; None: ...
        # ... the matcher has to begin anew

    def fresh(self) -> "Grammar":
        """A copy for another sequence. The compiled grammar is shared."""
        return Grammar(self.made_by, self.compiled, self.end_ids)

    def mask(self, seq: Sequence, drafts: list[int] | tuple, allowed: np.ndarray,
             banned: list[int]) -> np.ndarray:
        """The tokens that may follow the sequence's tokens and these drafts: a bit for each,
        (ceil(vocab_size / 8),) uint8, the lowest bit first.

        allowed, banned: the request's other constraints (allowed: if empty, all tokens are).
        """
        self._read(seq)
        self.num_read = None  # Ctrl-C while drafts are read: begin anew
        num_fitting = self.matcher.try_consume_tokens(list(drafts))
        if num_fitting == len(drafts):
            mask = self._mask_here(len(seq.token_ids) + len(drafts))
        else:  # a draft is forbidden, so it is wrong, and what follows it is thrown away
            mask = np.full(-(-self.made_by.vocab_size // 8), 255, dtype=np.uint8)
        self.matcher.rollback(num_fitting)
        self.num_read = len(seq.token_ids)
        return _narrow(mask, allowed, banned) if banned or len(allowed) else mask

    def forced(self, seq: Sequence, most: int) -> list[int]:
        """The tokens that have to follow, up to `most`: none where there is a choice."""
        self._read(seq)
        return self.matcher.compute_ff_tokens()[:most]

    def _read(self, seq: Sequence) -> None:
        """Read the new tokens, or the whole output after an interruption."""
        num_read, self.num_read = self.num_read, None
        if num_read is None:
            self.matcher, num_read = self.compiled.deep_copy(), seq.num_prompt_tokens
        if num_read < len(seq.token_ids):
            self.matcher.consume_tokens(seq.token_ids[num_read:])
        self.num_read = len(seq.token_ids)

    def _mask_here(self, num_tokens: int) -> np.ndarray:
        """A matcher that has failed allows only END. The text ends there with a warning and the
        `finish_reason` "length". (A matcher fails if a grammar is so ambiguous that the library's
        limits are met, or if it reaches a state from which it can't go on.)"""
        every = np.frombuffer(self.matcher.compute_bitmask(), dtype=np.uint8)
        if num_tokens <= self.failed_at:
            self.failed_at = -1  # that was behind a wrong draft
        if self.matcher.is_error():
            self.failed_at = num_tokens
            warnings.warn("structured_outputs: a text ends early, because llguidance gave up: "
                          + self.matcher.get_error().partition("\n")[0], stacklevel=2)
        vocab_size, (byte, bit) = self.made_by.vocab_size, divmod(self.made_by.end_id, 8)
        mask = every[:-(-vocab_size // 8)].copy()
        may_end = every[byte] >> bit & 1
        if byte < len(mask):  # in a padded vocabulary END's place is one of the model's, too
            mask[byte] &= 255 - (1 << bit)
        mask[-1] &= 255 >> -vocab_size % 8  # 260 tokens: of the last 8 bits only 4 are theirs
        if may_end:
            for token_id in self.end_ids:
                mask[token_id // 8] |= 1 << token_id % 8
        return mask


def _narrow(mask: np.ndarray, allowed: np.ndarray, banned: list[int]) -> np.ndarray:
    """Apply the other constraints, too, unless they would leave no token."""
    bits = np.unpackbits(mask, bitorder="little")
    kept = np.zeros_like(bits) if len(allowed) else bits.copy()
    kept[allowed] = bits[allowed]
    kept[banned] = 0
    return np.packbits(kept, bitorder="little") if kept.any() else mask


# ------------------------------------------------------------- beside the engine


class StructuredOutput(Extra):
    """Compiles the grammars of requests, keeps each sequence's grammar until it ends, and proposes
    forced tokens as drafts. Without a drafter these use the places that running sequences leave
    free: with `max_num_seqs` running there are none, but such a step is well used.
    """

    name = "structured_outputs"
    needs = frozenset([Fact.GENERATES])
    takes = ("structured_outputs",)

    def __init__(self):
        super().__init__()
        self.constraints: dict[Sequence, Grammar] = {}  # rank 0's sampler reads them, too
        self.grammars: Grammars | None = None  # made for the first request of this kind

    def prepare(self, plan: Plan) -> Plan:
        self.tokenizer, self.vocab_size = plan.tokenizer, plan.model_config.vocab_size
        return replace(plan, parts=replace(plan.parts, constraints=ChainMap(
            *plan.parts.constraints.maps, self.constraints)))

    def attach(self, engine: LLMEngine) -> None:
        self.forced = Forced(self)

    def check(self, request: Request) -> None:
        """Compile what the request asks for. Raises `ValueError` for what is not supported."""
        params = request.params
        if params.structured_outputs is None:
            return
        if self.grammars is None:
            self.grammars = Grammars(self.tokenizer, self.vocab_size)
        request.made[self] = self.grammars.compile(
            params.structured_outputs, request.core.eos_ids.union(params.stop_token_ids))

    def added(self, request: Request) -> None:
        if (grammar := request.made.get(self)) is not None:
            if not self.constraints:
                self.engine.add(self.forced)
            self.constraints.update({seq: grammar.fresh() for seq in request.sequences})

    def gave_up(self, seq: Sequence) -> bool:
        """Whether the last token came because the parser had failed: the text is not whole."""
        grammar = self.constraints.get(seq)
        return grammar is not None and grammar.failed_at == len(seq.token_ids) - 1

    def ended(self, sequences: list[Sequence]) -> None:
        for seq in sequences:
            if self.constraints.pop(seq, None) is not None and not self.constraints:
                self.engine.remove(self.forced)

    def propose(self, seq: Sequence, most: int) -> list[int]:
        """Up to `most` tokens that have to follow, none where there is a choice."""
        grammar = self.constraints.get(seq)
        return [] if grammar is None else grammar.forced(seq, most)


class Forced(Extra):
    """Is among an engine's extras while a sequence has a grammar; otherwise it costs nothing."""

    def __init__(self, grammars: StructuredOutput):
        self.grammars = weakref.proxy(grammars)

    def force(self, seq: Sequence, most: int) -> list[int]:
        return self.grammars.propose(seq, most)
