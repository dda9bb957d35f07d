"""Tool calls and thoughts in a model's text: their format is read from the chat template.

Every family of models writes a call in a way of its own, and its chat template writes calls in just
that way. So no parser is written for any family. A made-up call is rendered, and whatever stands
around its name, its keys and its values is the format (as llama.cpp does it):

    <tool_call>\\n{"name": "zq_tool", "arguments": {"zq_key": "zq_one"}}\\n</tool_call>
    └──────── open ───────┘└─name─┘└──── after ────┘└─── arguments ───┘└──── close ────┘

The arguments are one JSON object, or each stands between markers: texts as they are, other values
as JSON. What a template writes around a thought (`reasoning_content`) is found in the same way.

**Proof.** At start five calls are rendered, read back and compared (`Format.prove`). If one comes
back changed, tools are refused, and the reason is said.

A `Reader` follows one text as it comes. Text that may be the beginning of a marker is held back, as
with stop strings, so a call is never shown as content; a call is told when it is whole.

Not known here: HTTP, and the grammars that keep a model to the format (tool_grammar.py). Road not
taken: a parser for each model's format, of which vLLM and SGLang have some thirty.
"""

import ast
import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from os.path import commonprefix
from typing import Any

# Of the made-up conversation. No template writes these words by itself.
NAME, OTHER, KEY, MORE = "zq_tool", "zq_other", "zq_key", "zq_more"
ONE, TWO, ASKED, SAID, THOUGHT = "zq_one", "zq_two", "zq_asked", "zq_said", "zq_thought"
KINDS_OF_KEYS = dict(text="string", more="string", count="integer", nested="object") | {
    KEY: "string", MORE: "string"}
SCHEMA = dict(type="object", required=[], properties={
    key: dict(type=kind) for key, kind in KINDS_OF_KEYS.items()})
TOOLS = [dict(type="function", function=dict(name=name, description="A tool.", parameters=SCHEMA))
         for name in (NAME, OTHER)]
PROOF = [{"text": "zq"}, {"text": "it's \"so\", (he) {said}", "count": -7}, {},
         {"text": " two\n  <b>lines</b>: é\\n ", "more": ""},
         {"nested": {"list": [1, 2.5, "ü \"x\"", None, True, {}], "empty": {}}, "more": "5"}]
THOUGHTS = ("reasoning_content", "thinking")  # keys of a message
MAX_TRIES = 8  # ends of a value that are tried: JSON may hold what looks like one
WORDS = {"None": "null", "True": "true", "False": "false"}
KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array",
         dict: "object", type(None): "null"}


@dataclass
class Call:
    """arguments: JSON, as the model wrote it where its format is JSON."""

    name: str
    arguments: str


@dataclass
class Piece:
    """What is new in a text: of its thought, of its answer, and the calls that are now whole."""

    thought: str = ""
    said: str = ""
    calls: list[Call] = field(default_factory=list)


@dataclass
class Format:
    """What stands around the parts of an assistant's turn. "": nothing does.

    header: in front of every turn. A name that is written twice stands in `after` as `NAME`.
    """

    header: str
    think: str = ""  # in front of a thought
    thought: str = ""  # behind it; "": there are no thoughts
    say: str = ""  # in front of an answer
    gap: str = ""  # white space in front of `open`
    open: str = ""  # in front of a call's name; "": there are no calls
    after: str = ""  # behind its name
    between: str = ""  # from a call's last argument to the next one's name; "": one call at most
    close: str = ""
    is_json: bool = True  # the arguments are one JSON object; else ...
    first: str = ""  # ... in front of the first key, ...
    then: str = ""  # ... of the next one, ...
    text: tuple[str, str] = ("", "")  # ... around a text, and ...
    value: tuple[str, str] = ("", "")  # ... around any other value
    is_marked: bool = False  # nested texts are between markers, too, and keys are bare
    is_sorted: bool = False  # keys come in alphabetical order
    is_raw: bool = True  # between markers a text stands as it is; else it is a literal of Python's
    why: str = ""  # the reason, if there are no calls
    template: dict | None = None  # the tokenizer's `response_template`, which is read with then

    def reader(self, schemas: dict[str, Any], prompt: str, one: bool = False) -> "Reader":
        return (TemplateReader if self.template else Reader)(self, schemas, prompt, one)

    @property
    def trigger(self) -> str:
        """The beginning of `open` that nothing else begins with: its tag, or all of it."""
        return (re.match(r"<[^<>\s]+>", self.open) or [self.open])[0]

    @property
    def literals(self) -> list[str]:
        return [self.think, self.thought, self.say, self.open, self.after, self.between, self.close,
                self.first, self.then, *self.text, *self.value]


# ------------------------------------------------------- read from the template


def derive(render: Callable[..., str], end_texts: list[str],
           template: dict | None = None) -> Format:
    """The format of a template, proved. render: a conversation, and the template's options, to
    text. end_texts: of the tokens that end a turn. template: the tokenizer's `response_template`.
    `Format.why` says why there are no calls."""
    probe = Probe(render, end_texts)
    found = probe.thoughts()
    try:
        probe.calls(found)
        try:
            probe.prove(found)
        except ValueError:
            if found.is_json or found.text == found.value:
                raise
            found = replace(found, text=found.value, is_raw=False)
            probe.prove(found)
    except ValueError as error:
        found.open, found.why = "", f"tools can't be used with this chat template: {error}"
    if template is not None:
        own = replace(found, template=template)
        with suppress(ValueError):  # else what is derived reads better, or nothing reads it
            probe.prove(own)
            return own
    return found


class Probe:
    """Renders made-up turns, and looks at what the template puts around their parts."""

    def __init__(self, render: Callable[..., str], end_texts: list[str]):
        self.render, self.end_texts = render, end_texts
        begun = self._render(add_generation_prompt=True)
        turns = map(self._render, (
            {"content": SAID}, {"content": SAID, "reasoning_content": THOUGHT}, _turn({KEY: ONE})))
        self.start = len(_whole_tags(commonprefix([begun, *filter(None, turns)])))
        self.header = begun[len(commonprefix([begun, self._render()])):self.start]
        self.begun = begun[self.start:]  # of a turn, by the prompt

    def _render(self, turn: dict | None = None, **options) -> str:
        """"": the template refuses it."""
        chat = [{"role": "user", "content": ASKED}]
        if turn is not None:
            chat.append({"role": "assistant", "content": ""} | turn)
        try:
            return self.render(chat, tools=TOOLS, **options)
        except Exception:
            return ""

    def turn(self, turn: dict) -> str:
        """What is written behind the header."""
        return self._render(turn)[self.start:]

    def thoughts(self) -> Format:
        """The markers of thoughts and answers."""
        found = Format(self.header)
        found.say, _, self.end = self.turn({"content": SAID}).partition(SAID)
        name_at = self.turn(_turn({KEY: ONE})).partition(NAME)[0]
        for turn, behind in (({"content": SAID}, SAID), (_turn({KEY: ONE}), name_at + NAME)):
            text = self.turn({"reasoning_content": THOUGHT, "thinking": THOUGHT} | turn)
            think, thought, rest = text.partition(THOUGHT)
            if thought and behind in rest:
                thought = rest.partition(behind)[0]
                found.think, found.thought = think.strip(), thought.strip()
                if found.think and not found.say.startswith(think):  # an answer has its own marker
                    found.thought = thought.removesuffix(found.say).strip()
                else:  # what looks like one is the end of an empty thought
                    found.say = ""
                return found
        if tag := re.search(r"<(\w+)>\s*$", self.begun):  # the template drops thoughts, ...
            found.think, found.thought = tag[0].strip(), f"</{tag[1]}>"  # ... the prompt begins one
        found.say = found.say.strip()
        return found

    def calls(self, found: Format) -> None:
        """The literals of calls. Raises `ValueError`."""
        one = self.turn(_turn({KEY: ONE}))
        before, name, rest = one.partition(NAME)
        if not name:
            raise ValueError("it does not write them")
        if found.thought and found.thought in before:  # an empty thought
            before = before.rpartition(found.thought)[2]
        found.open = before.lstrip()
        found.gap = before[:len(before) - len(found.open)]
        at, end = _find_object(rest, {KEY: ONE})
        found.is_json = at >= 0
        if found.is_json:
            found.after, found.close = rest[:at], self._cut(rest[end:])
            behind = lambda text: text[_find_object(text, {KEY: ONE})[1]:]  # noqa: E731
        else:
            self._parameters(found)
            behind = lambda text: text.partition(ONE + found.text[1])[2]  # noqa: E731
        if not found.open or not (found.close or found.is_json):
            raise ValueError("nothing marks where a call begins or ends")
        two = self.turn(_turn({KEY: ONE}, {KEY: TWO}))
        between, name, _ = behind(two.partition(NAME)[2]).partition(OTHER)
        found.between = between if name else ""

    def _parameters(self, found: Format) -> None:
        """Keys and values between markers."""
        none, one, two, value, values = (
            self.turn(_turn(arguments)).partition(NAME)[2] for arguments in (
                {}, {KEY: ONE}, {KEY: ONE, MORE: TWO}, {KEY: 7}, {KEY: 7, MORE: 8}))
        first, _, behind = one.partition(KEY)
        found.text, then, close = _around(behind, two.partition(KEY)[2], ONE)
        found.value, *same = _around(value.partition(KEY)[2], values.partition(KEY)[2], "7")
        if same != [then, close] or not found.text[0]:
            raise ValueError("its arguments are neither JSON nor between markers")
        found.then, found.close, found.after = then, self._cut(close), self._cut(
            none).removesuffix(self._cut(close))
        if not none.startswith(found.after) or not first.startswith(found.after):
            raise ValueError("it writes a call without arguments in another way")
        found.first = first.removeprefix(found.after)
        two = self.turn(_turn({MORE: ONE, KEY: TWO}))
        found.is_sorted = two.find(KEY) < two.find(MORE)
        found.is_marked = _find_object(self.turn(_turn({KEY: {MORE: ONE}})), {MORE: ONE})[0] < 0

    def prove(self, found: Format) -> None:
        """Render five calls, and two at once, and read them back; JSON may hold what looks like the
        call's end. Raises `ValueError`."""
        more = [[PROOF[1], PROOF[4]]] if found.between else []
        more += [[{"text": f"a{found.close} b"}]] if found.is_json else []
        for calls in [*([arguments] for arguments in PROOF), *more]:
            reader = found.reader({NAME: SCHEMA, OTHER: SCHEMA}, found.header)
            read = reader.feed(self.turn(_turn(*calls)), "stop").calls
            back = [(call.name, json.loads(call.arguments)) for call in read]
            if back != list(zip((NAME, OTHER), calls, strict=False)):
                raise ValueError(f"the call {json.dumps(calls[0])} does not come back as it was")

    def _cut(self, text: str) -> str:
        """Without what ends the turn."""
        for end in filter(None, [self.end, *self.end_texts]):
            text = text.partition(end)[0]
        return text.rstrip("\n")


def _around(one: str, two: str, value: str) -> tuple[tuple[str, str], str, str]:
    """Behind a key, of one argument and of two -> what is around the value, what is in front of a
    further key, and what ends the call."""
    before, _, behind = one.partition(value)
    after = two.partition(value)[2].partition(MORE)[0]
    end = _whole_tags(commonprefix([behind, after]))
    return (before, end), after[len(end):], behind[len(end):]


def _whole_tags(text: str) -> str:
    """Without the half of a tag at its end."""
    return re.sub(r"<[^>\s]*$", "", text)


def _find_object(text: str, wanted: dict) -> tuple[int, int]:
    """Where this JSON object begins and ends; -1 where it isn't."""
    for brace in re.finditer(r"\{", text):
        try:
            found, end = JSON.raw_decode(text, brace.start())
        except ValueError:
            continue
        if found == wanted:
            return brace.start(), end
    return -1, -1


def _turn(*calls: dict) -> dict:
    """A turn that calls the made-up tools."""
    return {"tool_calls": [{"id": f"call{i:05}", "type": "function", "function": dict(
        name=name, arguments=arguments)} for i, (name, arguments) in enumerate(
            zip((NAME, OTHER), calls, strict=False))]}


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


JSON = json.JSONDecoder(parse_constant=_no_number)


# ----------------------------------------------------------------- read a text


class Reader:
    """Follows one text: `feed` it as it comes.

    schemas: of each tool's arguments, by name. prompt: what stands in front of the text. one: calls
    behind the first are passed over.
    """

    def __init__(self, form: Format, schemas: dict[str, Any], prompt: str, one: bool = False):
        self.form, self.schemas, self.one = form, schemas if form.open else {}, one
        self.may_think = bool(form.thought)
        self.state = "thinks" if self.may_think and not form.think else "says"
        self.rest, self.num_calls = "", 0
        self.is_next = False  # a call of several, behind the first
        self.is_fresh = self.may_think  # white space in front of what comes is dropped
        self.is_heard = not form.say  # text without a marker in front is an answer
        # Only where this comes a call may have ended.
        self.tip = commonprefix([form.between or form.close, form.close]).strip()[-1:]
        names = "|".join(map(re.escape, sorted(self.schemas, key=len, reverse=True)))
        behind = "(?P=name)".join(map(_loose, form.after.split(NAME)))
        self.heads = [re.compile(f"{begin}(?P<name>{names})(?!\\w){behind}")
                      for begin in (_loose(form.open), r"\s*")]
        # Where several calls share what ends them; else each next one begins as the first does.
        shares = form.between and not form.between.startswith(form.close)
        more = f"(?P<more>{_loose(form.between)})|" if shares else ""
        self.ends = re.compile(f"{more}(?P<close>{_loose(form.close)})")
        if form.header and form.header in prompt:  # the prompt may have begun the turn
            self.feed(prompt.rpartition(form.header)[2])
        self.num_calls, self.began = 0, prompt[-1:].isspace() and not prompt.endswith(form.header)

    def feed(self, text: str, ended: str | None = None) -> Piece:
        """What is new. ended: the text's `finish_reason`; nothing is held back then."""
        piece = Piece()
        self.rest += text
        while step := (self._calls(piece, text, ended) if self.state == "calls" else
                       self._texts(piece, ended)):
            self.state, text = step, self.rest
        return piece

    # Both take from `rest` what is clear, and name the state that follows, if one does.

    def _texts(self, piece: Piece, ended: str | None) -> str | None:
        """A thought or an answer, up to the mark that ends it."""
        form, text = self.form, self.rest.lstrip() if self.is_fresh else self.rest
        thinks, say = self.state == "thinks", form.say.strip()
        marks = {form.thought: "says"} if thinks else {
            mark: state for mark, state, is_possible in (
                (say, "says", say), (form.trigger, "calls", self.schemas),
                (form.think, "thinks", self.may_think)) if is_possible}
        found = [(text.find(mark), -len(mark), mark) for mark in marks if mark in text]
        at, _, mark = min(found, default=(len(text), 0, ""))
        if mark and not ended and any(one != mark and one.startswith(text[at:]) for one in marks):
            mark = ""  # "to=" may become "to=user"
        if not mark and ended != "stop":  # what a limit cuts may have become a call
            at = _clear(text, list(marks), not ended and (thinks or bool(self.schemas)))
        shown = text[:at].rstrip() if mark else text[:at]
        if thinks:
            piece.thought += shown
            self.may_think = not mark
        elif self.is_heard:
            piece.said += shown
        self.is_fresh = bool(mark) or self.is_fresh and not shown
        self.is_heard |= mark == say != ""
        self.rest = text[at if marks.get(mark) == "calls" else at + len(mark):]
        return marks.get(mark)

    def _calls(self, piece: Piece, new: str, ended: str | None) -> str | None:
        if not ended and self.tip not in new:
            return None
        found = self._read(self.rest)
        if ended == "stop" and (found is None or found[1] is None):  # what ends a turn is no text
            found = self._read(self.rest + self.form.close) or found
        if found is None or found[1] is None:
            if ended == "stop":  # nothing that was written is lost
                piece.said, self.rest = piece.said + self.rest, ""
            elif ended and found:
                self._tell(piece, found[0])
            return None
        call, end = found
        self._tell(piece, call)
        self.is_next = end.lastgroup == "more"
        self.rest, self.is_fresh = self.rest[end.end():], True
        return "calls" if self.is_next else "says"

    def _tell(self, piece: Piece, call: Call) -> None:
        if not (self.one and self.num_calls):
            piece.calls.append(call)
            self.num_calls += 1

    # ------------------------------------------------------------- one call

    def _read(self, text: str) -> tuple[Call, re.Match | None] | None:
        """The call at the beginning of the text, as far as it came, and what ends it; None where
        its name isn't whole."""
        head = self.heads[self.is_next].match(text)
        if head is None:
            return None
        name, at = head["name"], head.end()
        if not self.form.is_json:
            arguments, end = self._parameters(text, at, self.schemas[name])
            written = json.dumps(arguments, ensure_ascii=False)
            return Call(name, written if end else written[:-1]), end
        try:
            arguments, stop = JSON.raw_decode(text, at)
        except (ValueError, RecursionError):
            return Call(name, text[at:]), None
        end = self.ends.match(text, stop) if isinstance(arguments, dict) else None
        return Call(name, text[at:stop]), end

    def _parameters(self, text: str, at: int, schema: dict) -> tuple[dict, re.Match | None]:
        """Arguments between markers. A value ends where a further key or the call's end follows."""
        form, found = self.form, {}
        if end := self.ends.match(text, at):
            return found, end
        keys = schema.get("properties") or {}
        names = "|".join(map(re.escape, keys)) or r"[^\s=:<>\"']+"
        before = f"{re.escape(form.text[0])}|{re.escape(form.value[0])}"
        a_key = f"(?P<key>{names})(?P<before>{before})"
        key = re.compile(re.escape(form.first) + a_key).match(text, at)
        while key:
            is_text = key["before"] == form.text[0]
            behind = re.escape((form.text if is_text else form.value)[1])
            stop = re.compile(f"{behind}(?:{re.escape(form.then)}{a_key}|{self.ends.pattern})")
            for end in islice(stop.finditer(text, key.end()), MAX_TRIES):
                value = self._value(text[key.end():end.start()], schema, keys.get(key["key"], {}),
                                    is_text)
                if value is not None:
                    found[key["key"]], = value
                    break
            else:
                return found, None
            if not end["key"]:
                return found, end
            key = end
        return found, None

    def _value(self, text: str, root: dict, schema: Any, is_text: bool) -> tuple | None:
        """The value in a tuple, or None where the text is none of the schema's."""
        kinds = kinds_of(schema, root)
        if is_text and self.form.is_raw and (
                self.form.text != self.form.value or kinds == {"string"}):
            return (text,)
        for read in (JSON.decode, ast.literal_eval, self._marked):
            try:
                value = read(text)
                json.dumps(value)
            except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
                continue
            kind = KINDS.get(type(value))
            if not kinds or kind in kinds or kind == "integer" and "number" in kinds:
                return (value,)
        return (text,) if self.form.is_raw and (not kinds or "string" in kinds) else None

    def _marked(self, text: str) -> Any:
        """JSON whose keys are bare and whose texts stand between markers. Raises `ValueError`."""
        parts = text.split(self.form.text[1] or "\0")
        for i, part in enumerate(parts):
            part = re.sub(r"\b(None|True|False)\b", lambda word: WORDS[word[0]], part)
            parts[i] = json.dumps(parts[i]) if i % 2 else re.sub(
                r"([{,])([^{}\[\],:]+):", r'\1"\2":', part)
        return JSON.decode("".join(parts))


class TemplateReader(Reader):
    """Reads with transformers' parser, to which a `response_template` describes the format."""

    def __init__(self, form: Format, schemas: dict[str, Any], prompt: str, one: bool = False):
        super().__init__(form, schemas, prompt, one)
        from transformers.utils.chat_parsing import ResponseParser
        self.schemas = schemas
        self.parser = ResponseParser(form.template, prefix=prompt, tools=[dict(
            type="function", function=dict(name=name, parameters=schema))
            for name, schema in schemas.items()])

    def feed(self, text: str, ended: str | None = None) -> Piece:
        if not hasattr(self, "parser"):  # the prompt's end, which the parser reads by itself
            return super().feed(text, ended)
        piece, events = Piece(), []
        with suppress(ValueError):  # of a call that is broken, or cut
            events += self.parser.feed(text)
            events += self.parser.finalize()[1] if ended else []
        for event in events:
            if event["type"] == "region_chunk" and event["field"] == "content":
                piece.said += event["text"]
            elif event["type"] == "region_chunk" and event["field"] in THOUGHTS:
                piece.thought += event["text"]
            elif event["type"] == "region_close" and event["field"] == "tool_calls":
                call = event["value"]["function"]
                if call["name"] in self.schemas:
                    self._tell(piece, Call(call["name"], json.dumps(
                        call["arguments"], ensure_ascii=False)))
        return piece


def kinds_of(schema: Any, root: dict, depth: int = 8) -> set[str]:
    """The types that a schema allows. Empty: any type, or the schema doesn't say."""
    schema = resolve(schema, root) if depth else {}
    if "type" in schema:
        given = schema["type"]
        return set(map(str, given if isinstance(given, list) else [given]))
    values = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    if isinstance(values, list) and values:
        return {KINDS.get(type(value), "") for value in values}
    parts = schema.get("anyOf", schema.get("oneOf", schema.get("allOf")))
    kinds = [kinds_of(one, root, depth - 1) for one in parts] if isinstance(parts, list) else []
    return set().union(*kinds) if all(kinds) else set()


def resolve(schema: Any, root: dict) -> dict:
    """The schema that a reference leads to; one without a reference is returned as it is."""
    for _ in range(8):
        if not isinstance(schema, dict):
            return {}
        if not isinstance(name := schema.get("$ref"), str):
            return schema
        schema = root
        for key in name.split("/")[1:]:
            schema = schema.get(key) if isinstance(schema, dict) else None
    return {}


def _clear(text: str, marks: list[str], holds_space: bool) -> int:
    """How many characters can be shown: behind them a marker may have begun, or the white space in
    front of one. With the marker "</think>", of "so </th" 3 characters are clear, and 2 of them if
    white space is held back."""
    longest = max(map(len, marks), default=1) - 1
    at = next((at for at in range(max(0, len(text) - longest), len(text)) if any(
        mark.startswith(text[at:]) for mark in marks)), len(text))
    return len(text[:at].rstrip()) if holds_space else at


def _loose(literal: str) -> str:
    """A pattern for the literal with any white space where it has some."""
    return "".join(r"\s*" if part.isspace() else re.escape(part)
                   for part in re.split(r"(\s+)", literal))
