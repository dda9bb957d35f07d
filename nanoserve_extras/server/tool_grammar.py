"""A grammar that holds a model to its own format of calls, in llguidance's dialect of Lark.

    required, or one tool      thought?  calls                     never an invalid call
    auto                       thought?  (text  calls)*  text      a call that has begun is valid
    a form (response_format)   thought?  JSON                      or, with tools: calls | JSON

So no tool's name is invented, and all arguments follow the tool's schema. In `auto` the model
writes freely until the format's trigger, for example `<tool_call>`, and is held to the format from
there. A special token in a literal is written as its id, because no token has its bytes.

In formats with message heads, the messages before the last one are thoughts, and in `auto` texts. A
head may hold more than the template writes: gpt-oss names channel, tool and kind in its own order.

If a format writes strings as they are, between markers, a string can't contain its closing marker,
and a schema's `pattern` can't be enforced. Such a keyword, or one that llguidance lacks, is refused
if a call is required, and ignored in `auto`, because real agents send them. JSON is written without
optional white space.

structured/structured.py makes masks of a grammar. llguidance's own `StructTag` is not used: it has
neither thoughts nor a second call after a separator.
"""

import json
import os
import re
import resource
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from nanoserve.config import SamplingParams
from nanoserve.detokenizer import Tokenizer
from nanoserve_extras.base.llm import LLM
from nanoserve_extras.server.errors import BadRequest
from nanoserve_extras.server.protocol import ChatBody
from nanoserve_extras.server.tool_format import format_of
from nanoserve_extras.server.tool_schemas import forms_of, kinds_of, resolve
from nanoserve_extras.server.tools import (
    ID,
    ID_PART,
    NAME,
    TAG,
    TurnFormat,
    TurnReader,
)

TEXT = "/(?s:.*)/"
# Parts of a message's head that gpt-oss writes but its template doesn't: a mark, argument kinds.
CONSTRAIN, KINDS = "<|constrain|>", ("code", "json")
LITERAL = r"""/'([^'\\\n]|\\['"\\nrt])%s'/"""  # a text as Python writes it
OTHERS = {"number", "boolean", "null"}
MAX_VALUES = 2_000
MAX_SECONDS = 3  # CPU time for compiling schemas to find unsupported ones
# Bounds of a chat template while its format is derived, which takes a tenth of a second.
CPU_SECONDS, WALL_SECONDS, ROOM, MOST_TEXT = 5, 60, 2 ** 29, 2 ** 20


class ModelTurns:
    """The format of a model's turns, for a server. chat_template: replaces the tokenizer's own.
    bare_calls: whether an answer that consists of a call without the format's marks is a call."""

    def __init__(self, llm: LLM, chat_template: str | None = None, bare_calls: bool = True):
        tokenizer, self.bare_calls = llm.tokenizer, bare_calls
        if tokenizer is None or not (chat_template or tokenizer.chat_template):
            self.form = TurnFormat("", why="tools need a chat template, and the tokenizer has none")
            return
        self.form = apart(tokenizer, lambda: format_of(llm, chat_template))
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self.special = {one.content: token_id for token_id, one in added.items()
                        if one.special or re.fullmatch("<.+>", one.content)}  # as llguidance does

    def reader(self, body: ChatBody, prompt: str | None) -> TurnReader | None:
        """None: the whole text is the answer, without calls and thoughts."""
        schemas = body.schemas()
        is_free = not {"regex", "choice", "grammar"} & (body.structured_outputs or {}).keys()
        if not schemas and not (self.form.thought and is_free):
            return None
        # An answer in a form, or behind a marker of its own, may hold what looks like a call.
        kept = body.must_call or bool(
            not self.form.say and body.form() is None and find_spec("llguidance"))
        is_auto = not body.must_call and body.form() is None
        return self.form.reader(schemas, prompt or "", body.calls_once, kept, body.must_call,
                                self.bare_calls and is_auto)

    def params(self, body: ChatBody, params: SamplingParams, prompt: str) -> SamplingParams:
        """The parameters, with the grammar that the body's tools need. Raises `ValueError`."""
        schemas, start, asked = body.schemas(), self.reader(body, prompt), params.structured_outputs
        needed = body.must_call
        if schemas and not self.form.open:
            raise BadRequest(self.form.why, "tools")
        if start is None:
            return params
        budget = body.thinking and body.thinking.budget_tokens  # no matter where nothing thinks
        if self.form.thought and budget is not None and params.thinking_token_budget is None:
            params = replace(params, thinking_token_budget=budget)
        if any(token in text for text in self.form.literals for token in self.special):
            params = replace(params, skip_special_tokens=False)
        if asked is None and not needed:
            if not schemas or not find_spec("llguidance"):
                return params  # calls are only read
        elif not schemas and not start.may_think:
            return params
        answer = None if asked is None or needed else self._schema_of(asked)
        grammar = ToolGrammar(self.form, schemas, self.special)
        try:
            text = grammar.text(start, needed, start.one, answer,
                                params.thinking_token_budget is None)
        except (AttributeError, KeyError, RecursionError, TypeError) as error:
            raise BadRequest(f"tools: one of the schemas is no JSON schema: {error!s:.200}",
                             "tools") from error
        return replace(params, structured_outputs=dict(grammar=text))

    def _schema_of(self, asked: Any) -> dict:
        """The schema of an answer that must be JSON. Raises `ValueError`."""
        from nanoserve_extras.structured.structured import (
            StructuredOutputsParams,  # here: it may be deleted
        )
        asked = StructuredOutputsParams.of(asked)
        schema = {"type": "object"} if asked.json_object else asked.json
        if schema is None:
            raise BadRequest("structured_outputs: with tools only json is possible: leave one of "
                             "them out", "structured_outputs")
        return json.loads(schema) if isinstance(schema, str) else schema


def apart(tokenizer: Tokenizer, work: Callable[[], TurnFormat]) -> TurnFormat:
    """Run `work` in a separate process and return its result: a chat template is a program that
    came with a model, and may never end, or take all memory. Raises `ValueError` beyond the
    bounds."""
    context = get_context("fork")  # nothing is imported, or sent there
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_work_apart, args=(tokenizer, work, theirs), daemon=True)
    child.start()
    theirs.close()
    try:
        if ours.poll(WALL_SECONDS):
            return ours.recv()
    except EOFError:
        pass
    finally:
        child.kill()
        child.join()
    raise ValueError(f"the chat template takes more than {CPU_SECONDS} seconds, {ROOM:,} bytes or "
                     f"{MOST_TEXT:,} characters for a few words: choose another (--chat-template)")


def _work_apart(tokenizer: Tokenizer, work: Callable[[], TurnFormat], answer: Connection) -> None:
    def render(*args, **options) -> str:
        try:
            text = template(*args, **options)
        except MemoryError:
            os._exit(1)
        return text if len(text) <= MOST_TEXT else os._exit(1)

    template, tokenizer.apply_chat_template = tokenizer.apply_chat_template, render
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    with suppress(OSError, ValueError):  # where there is no /proc, time is the bound
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + ROOM, size + ROOM))
    answer.send(work())


class ToolGrammar:
    """schemas: those of each tool's arguments, by name; special: ids of special tokens, by text."""

    def __init__(self, form: TurnFormat, schemas: dict[str, Any], special: dict[str, int]):
        self.form, self.schemas, self.special = form, schemas, special
        self.rules: dict[str, str] = {}  # name by body
        self.num_values = self.num_seconds = 0
        self.is_lenient = False  # whether keywords that can't be enforced are ignored

    def text(self, start: TurnReader, required: bool, one: bool, answer: dict | None,
             again: bool = True) -> str:
        """The grammar of a turn. start: the reader's state after the prompt; one: at most one call;
        answer: a JSON schema for an answer without calls; again: whether, in formats with message
        heads, a thought may be followed by other messages. Raises `ValueError`."""
        form, literal, self.is_lenient = self.form, self.literal, not required
        if form.message:
            return self._grammar(self._messages(start, required, one, answer, again))
        end = self._end()
        thought, gap = "", "" if start.began else form.gap
        if start.may_think:
            thought = self._add("thought", self._until(form.thought))
            if start.state != "thinks":
                thought = rf"(/[ \n]{{0,2}}/ {literal(form.think)} {thought})?"
            gap = form.gap
        calls, said = "", self._add("said", f"{literal(form.say)} {TEXT} {end}")
        is_free = not required and answer is None and not form.say
        if self.schemas and is_free:
            head = self._add("head", self._until(form.trigger))
            rest = form.open.removeprefix(form.trigger)
            calls = f"{head} {self._calls(one, self._head(rest))}"
        elif self.schemas:
            calls = self._calls(one, self._head(gap + form.open))
        if answer is not None:
            said = rf"/[ \n]{{0,2}}/ {literal(form.say)} {self._json(answer, answer)} {end}"
        if required or not calls:
            body = calls or said
        elif is_free:
            body = f"({calls}){'?' if one else '*'} {TEXT}"
        else:
            body = f"({calls} | {said})"
        return self._grammar(f"{thought} {body}")

    def _grammar(self, start: str) -> str:
        return "\n".join([f"start: {start}", *(
            f"{name}{body}" for body, name in self.rules.items())])

    def _end(self) -> str:
        return f"({self.literal(self.form.end)})?" if self.form.end else ""

    def _messages(self, start: TurnReader, required: bool, one: bool, answer: dict | None,
                  again: bool) -> str:
        """A turn whose messages have heads: thoughts and texts, and at last a call or an answer."""
        form, literal, last = self.form, self.literal, []
        (front, words, behind), end = self._around_names(), self._end()
        text = self._add("told", self._until(form.thought))
        thinks = rf"/[ \n]{{0,2}}/ {literal(form.think)}"
        says = f"{literal(form.say.removesuffix(form.message))} /( {words})?/ {behind}"
        if self.schemas:
            rest = form.after.partition(form.message)[2]
            last.append(self._calls(one, lambda name: (
                f"{front} /{words}{escaped(form.open + name)}( {words})?/ {behind} "
                + literal(rest.replace(NAME, name)))))
        if not required and answer is None and again:
            head = self._add("head", f"/{words}/ {behind}")
            thinks, says = f"({head} | {thinks})", f"({head} | {says})"
        if not required:
            said = TEXT if answer is None else self._json(answer, answer)
            last.append(rf"/[ \n]{{0,2}}/ {says} {said} {end}")
        begun, more = text if start.state == "thinks" else "", "*" if again else "?"
        return f"{begun} ({thinks} {text}){more} ({' | '.join(last)})"

    def _around_names(self) -> tuple[str, str, str]:
        """The parts of a head before a tool's name, next to it (a pattern: words in a token of
        their own would swallow the name's beginning), and after it."""
        form, tag = self.form, self.literal(self.form.message)
        written = form.think + form.say + form.after.partition(form.message)[0]
        if not (marks := {*TAG.findall(written)} - {form.message}):
            return "", " ?", tag
        marks |= self.special.keys() & {CONSTRAIN}
        mark = self._add("mark", " | ".join(map(self.literal, sorted(marks))))
        known = "|".join(sorted({*KINDS, *re.findall(r"\w+", TAG.sub(" ", written))}))
        words = f"( ?({known})){{0,2}} ?"
        return f"(/{words}/ {mark})?", words, f"({mark} /{words}/){{0,2}} {tag}"

    def literal(self, text: str) -> str:
        """A literal of Lark, written as a JSON string; special tokens are written as ids. A call's
        id may be any, or be left out. A call without a marker is written in JSON's own tokens,
        because an answer in JSON may begin with the same ones."""
        if (part := ID_PART.search(text)) and part[0] != text:
            before, behind = text[:part.start()], text[part.end():]
            return f"{self.literal(before)} ({self.literal(part[0])})? {self.literal(behind)}"
        known = "|".join(map(re.escape, [*sorted(self.special, key=len, reverse=True), ID]))
        if self.form.open.startswith(('{"', "[{")):
            known += rf'|"(?!{ID})[^"]*"|[,:] ?'
        return " ".join(f"<[{self.special[part]}]>" if part in self.special else
                        "/[a-zA-Z0-9]{9}/" if part == ID else json.dumps(part)
                        for part in re.split(f"({known})", text) if part)

    def _add(self, name: str, body: str) -> str:
        """Add a rule. An attribute, for example `[lazy]`, comes after its name."""
        body = body if body.startswith("[") else f": {body}"
        return self.rules.setdefault(body, f"{name}_{len(self.rules)}")

    def _until(self, mark: str, text: str = "(?s:.*)") -> str:
        """Any text up to the mark, and the mark. A special token is in no text, and ends it."""
        where = [mark.find(token) for token in self.special if token in mark]
        if not where:
            return f"[suffix={json.dumps(mark)}]: /{text}/"
        return f"/{text}{escaped(mark[:min(where)])}/ {self.literal(mark[min(where):])}"

    def _calls(self, one: bool, head: Callable[[str], str]) -> str:
        """One call or several. head: a function of the tool's name that returns the text before the
        first call's arguments."""
        form, tools = self.form, {name: self._add("tool", self._arguments(name, schema))
                                  for name, schema in self.schemas.items()}

        def call(head: Callable[[str], str]) -> str:
            return " | ".join(f"{head(name)} {arguments}" for name, arguments in tools.items())

        more = "" if one or not form.between else self._add(
            "more", call(self._head(form.between))) + "*"
        return f"{self._add('call', call(head))} {more} {self.literal(form.close)}"

    def _head(self, before: str) -> Callable[[str], str]:
        """A call's head in the template's format. before: the text before the name."""
        return lambda name: self.literal(before + name + self.form.after.replace(NAME, name))

    def _arguments(self, name: str, schema: dict) -> str:
        """A tool's arguments. For a schema that can't be enforced this raises `BadRequest` if a
        call is required; else it allows any value."""
        from nanoserve_extras.structured.structured_schema import (  # here, as in `_json`
            loosened,
            with_definitions,
        )

        def write(schema: dict) -> str:
            return self._json(schema, schema) if self.form.is_json else self._object(
                schema, schema, self.form.first, self.form.then)

        try:
            schema = json.loads(json.dumps(schema | {"type": "object"}))
            with_definitions(schema)
            for key, why in loosened(schema, self._refusal):
                if not self.is_lenient:
                    raise ValueError(f"{key!r}: {why:.500}" if key else f"{why:.500}")
            return write(schema)
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            if not self.is_lenient:
                why = error if not isinstance(error, RecursionError) else (
                    "it refers to itself, which this model's format of calls has no grammar for")
                raise BadRequest(f"tools: {name}: {why!s:.600}", "tools") from error
        return write({"type": "object", "additionalProperties": True})

    def _refusal(self, schema: dict) -> str:
        from nanoserve_extras.structured.structured import SCHEMAS, refusal
        if self.num_seconds >= MAX_SECONDS:
            raise ValueError("to look for what can't be kept to takes too long: shorten it")
        before = SCHEMAS.seconds
        why = refusal(schema | {"x-guidance": {"lenient": self.is_lenient}})
        self.num_seconds += SCHEMAS.seconds - before
        return why

    def _json(self, schema: Any, root: Any) -> str:
        """JSON in one line. root: the document that the schema's references point into."""
        shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
        whole = json.loads(json.dumps({**shared, **(schema if isinstance(schema, dict) else {})}))
        from nanoserve_extras.structured.structured import ONE_LINE  # here: it may be deleted
        from nanoserve_extras.structured.structured_schema import tidy
        whole = tidy(whole, True, lambda keys, patterns: True, self._refusal)
        return "%json " + json.dumps(whole | {
            "x-guidance": ONE_LINE | {"lenient": self.is_lenient}})

    def _object(self, schema: dict, root: dict, first: str, then: str) -> str:
        """Keys and values between markers."""
        forms = [self._form(one, root, first, then) for one in forms_of(schema, root)]
        return f"({' | '.join(forms)})"

    def _form(self, schema: dict, root: dict, first: str, then: str) -> str:
        """Listed keys come in the schema's order. There are two rules for the rest: `none`, if no
        key has been written yet, and `some`."""
        keys, needed = schema.get("properties") or {}, set(schema.get("required") or ())
        others = schema.get("additionalProperties") or schema.get("patternProperties")
        is_map = bool(others and not keys)
        if not self.is_lenient and (
                needed - keys.keys() or schema.get("minProperties", 0) > len(needed)
                or is_map and {"maxProperties", "patternProperties"} & schema.keys()
                or schema.get("maxProperties", MAX_VALUES) < len(keys)):
            raise ValueError("this model's format of calls has no grammar for minProperties, maxPr"
                             "operties, patternProperties or required keys that are not listed")
        if is_map:
            values = self._values("", schema.get("additionalProperties"), root)
            one, more = (self._add("entry", " | ".join(
                rf"""{self.literal(mark)} /[^\s=:<>"'{{}},\[\]]+/ {self.literal(before)} {rule}"""
                for before, rule in values)) for mark in (first, then))
            return f"({one} {more}*)?"
        none = some = self._add("end", '""')
        order = sorted(keys, key=str.lower) if self.form.is_sorted else list(keys)
        for key in reversed(order):
            values = self._values(key, keys[key], root)
            none, some = (self._add("keys", " | ".join(
                [f"{self.literal(mark + key + before)} {rule} {some}" for before, rule in values]
                + ([] if key in needed else [skip]))) for mark, skip in (
                    (first, none), (then, some)))
        return none

    def _values(self, key: str, schema: Any, root: dict) -> list[tuple[str, str]]:
        """The alternatives after a key: the text before a value, and the value's rule."""
        form, schema, self.num_values = self.form, resolve(schema, root), self.num_values + 1
        if len(parts := schema.get("allOf", ())) == 1:  # a reference with a default beside it
            schema = {word: schema[word] for word in schema if word != "allOf"} | resolve(
                parts[0], root)
        if self.num_values > MAX_VALUES:
            raise ValueError(f"with it there are more than {MAX_VALUES:,} places for values: "
                             "shorten it")
        if parts := schema.get("anyOf", schema.get("oneOf")):
            return [value for part in parts for value in self._values(key, part, root)]
        kinds, found = kinds_of(schema, root), []
        if not kinds or "string" in kinds:
            found.append((form.text[0], self._text(key, schema)))
        if not kinds or kinds - {"string"}:
            if "enum" in schema:
                rest = {"enum": [one for one in schema["enum"] if not isinstance(one, str)]}
            else:
                others = OTHERS if form.is_marked else OTHERS | {"object", "array"}
                rest = schema | {"type": sorted(kinds - {"string"} or others)}
            rule = self._marked(key, rest, root) if form.is_marked else self._json(rest, root)
            found.append((form.value[0], f"{rule} {self.literal(form.value[1])}"))
        return found

    def _text(self, key: str, schema: dict) -> str:
        """A string and its closing marker."""
        form = self.form
        values = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
        if values:
            write = str if form.is_raw else repr
            texts = [write(one) + form.text[1] for one in values if isinstance(one, str)]
            return f"({' | '.join(map(self.literal, texts))})"
        for word in {"pattern", "allOf"} & schema.keys() if not self.is_lenient else ():
            raise ValueError(f"{key!r} has {word}, which this model's format of calls has no "
                             "grammar for: leave it out")
        bounds = {word: schema[word] for word in ("minLength", "maxLength") if word in schema}
        if bounds and (why := self._refusal(bounds | {"type": "string"})):
            if not self.is_lenient:
                raise ValueError(f"{key!r}: {why:.500}")
            bounds = {}
        least, most = bounds.get("minLength", 0), bounds.get("maxLength", "")
        length = f"{{{least},{most}}}" if bounds else "*"
        if not form.is_raw:
            return LITERAL % length + f" {self.literal(form.text[1])}"
        return self._add("text", self._until(form.text[1], f"(?s:.){length}"))

    def _marked(self, key: str, schema: dict, root: dict) -> str:
        """A value with bare keys, and strings between markers."""
        kinds, found = schema.get("type", ()), []
        if "object" in kinds:
            found.append(f'"{{" {self._object(schema, root, "", self.form.then)} "}}"')
        if "array" in kinds:
            before, items = len(self.form.value[0]), schema.get("items", {})
            item = self._add("item", " | ".join(
                f"{self.literal(mark[before:])} {rule}"
                for mark, rule in self._values(key, items, root)))
            found.append(f'"[" ({item} ("," {item})*)? "]"')
        if rest := set(kinds) - {"object", "array"} or not kinds:
            found.append(self._json(schema | ({"type": sorted(rest)} if kinds else {}), root))
        return self._add("value", " | ".join(found))


def escaped(text: str) -> str:
    """A pattern for the text, as Lark writes them."""
    return re.sub(r"([^\w\s])", r"\\\1", text).replace("\n", r"\n")
