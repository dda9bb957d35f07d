"""Tool calls and thoughts in a model's text, by the format of its chat template.

    <tool_call>\\n{"name": "weather", "arguments": {"a": "b"}}\\n</tool_call>
    └──────── open ────────┘└name─┘└─── after ────┘└─ args ─┘└─── close ────┘

A `TurnFormat` says what stands around the parts of a turn; tool_format.py derives it. A
`TurnReader` follows one text as it comes. Text that may be the beginning of a marker is held back,
as with stop strings, so a call is never shown as content. Where a grammar keeps the model to the
format, a call is told as it is written; else when it is whole, because it may yet turn out to be
text.

The grammars that keep a model to the format: tool_grammar.py.
"""

import ast
import json
import re
from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from os.path import commonprefix
from typing import Any

NAME, ID = "zq_tool", "zqcall001"  # in made-up calls; a format is derived from them
# What of a literal a model may leave out: the id of a call, with its key or its marker.
ID_PART = re.compile(rf', ?"\w+": ?"{ID}"|\[\w+\]{ID}')
MAX_FORMS = 64  # ways to put an object together that are looked at
MAX_TRIES = 8  # ends of a value that are tried: JSON may hold what looks like one
# gpt-oss's template names the channel behind a call's name. The model may also name it in front,
# and the arguments' kind by a token, says the description of its format (openai_harmony).
CHANNEL = "<|channel|>commentary json<|message|>"
HARMONY = r"(<\|channel\|>commentary)?\s*(<\|constrain\|>)?json\s*<\|message\|>"
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
    """What is new in a text: of its thought, of its answer, and its calls. more: arguments of a
    call that an earlier piece has begun, in front of the other calls."""

    thought: str = ""
    said: str = ""
    calls: list[Call] = field(default_factory=list)
    more: str = ""


@dataclass
class TurnFormat:
    """What stands around the parts of an assistant's turn. "": nothing does.

    header: in front of every turn. A name that is written twice stands in `after` as `NAME`, and a
    call's id stands in any literal as `ID`.
    """

    header: str
    think: str = ""  # in front of a thought
    thought: str = ""  # behind it; "": there are no thoughts
    say: str = ""  # in front of an answer
    end: str = ""  # behind it
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

    def reader(self, schemas: dict[str, Any], prompt: str, one: bool = False,
               kept: bool = False, must: bool = False) -> "TurnReader":
        return TurnReader(self, schemas, prompt, one, kept, must)

    @property
    def trigger(self) -> str:
        """The beginning of `open` that nothing else begins with: its tag, or all of it."""
        return (re.match(r"<[^<>\s]+>", self.open) or [self.open.partition(ID)[0]])[0]

    @property
    def literals(self) -> list[str]:
        return [self.think, self.thought, self.say, self.end, self.open, self.after, self.between,
                self.close, self.first, self.then, *self.text, *self.value]


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


JSON = json.JSONDecoder(parse_constant=_no_number)


# ----------------------------------------------------------------- read a text


class TurnReader:
    """Follows one text: `feed` it as it comes.

    schemas: of each tool's arguments, by name. prompt: what stands in front of the text. one: calls
    behind the first are passed over. kept: a grammar keeps calls to the format. must: a call is
    asked for, and one that repeats an earlier call ends the turn.
    """

    def __init__(self, form: TurnFormat, schemas: dict[str, Any], prompt: str, one: bool = False,
                 kept: bool = False, must: bool = False):
        self.form, self.schemas, self.one = form, schemas if form.open else {}, one
        self.must, self.is_over = must, False
        self.made: list[Call] = []  # where a call is asked for: those that came
        self.may_think = bool(form.thought)
        self.state = "thinks" if self.may_think and not form.think else "says"
        self.rest, self.num_calls = "", 0
        self.keys: dict[int, dict] = {}  # by a schema's id: see `_keys`
        self.is_kept, self.next_read = False, 0  # not kept to in the prompt
        self.num_told: int | None = None  # characters told of the arguments of a call under way
        self.is_next = False  # a call of several, behind the first
        self.is_fresh = self.may_think  # white space in front of what comes is dropped
        self.is_heard = not form.say  # text without a marker in front is an answer
        self.unheard = ""  # it is an answer after all if no marker comes
        # Only where this comes a call may have ended.
        self.tip = commonprefix([form.between or form.close, form.close]).strip()[-1:]
        names = "|".join(map(re.escape, sorted(self.schemas, key=len, reverse=True)))
        longest = max(map(len, self.schemas), default=0)
        self.longest = 2 * len(form.open + form.after) + longest  # a call begins in so many
        behind = HARMONY if form.after == CHANNEL else "(?P=name)".join(
            map(loose, form.after.split(NAME)))
        self.heads = [re.compile(f"{begin}(?P<name>{names})(?!\\w){behind}")
                      for begin in (r"\s*" + loose(form.open), r"\s*")]
        # Where several calls share what ends them; else each next one begins as the first does.
        shares = form.between and not form.between.startswith(form.close)
        more = f"(?P<more>{loose(form.between)})|" if shares else ""
        self.ends = re.compile(f"{more}(?P<close>{loose(form.close)})")
        if form.header and form.header in prompt:  # the prompt may have begun the turn
            self.feed(prompt.rpartition(form.header)[2])
        self.is_kept = kept
        self.num_calls, self.began = 0, prompt[-1:].isspace() and not prompt.endswith(form.header)
        self.thinks_here = self.may_think  # or else the prompt has ended the thought
        self.places = {form.think: (0, 0)} if self.state == "thinks" else {}  # see `_place`
        self.num_fed, self.answer, self.is_answering = 0, 0, False  # see `span`

    def feed(self, text: str, ended: str | None = None) -> Piece:
        """What is new. ended: the text's `finish_reason`; nothing is held back then."""
        piece = Piece()
        self.rest = "" if self.is_over else self.rest + text
        while step := (self._calls(piece, text, ended) if self.state == "calls" else
                       self._texts(piece, ended)):
            self.state, text = step, self.rest
        if ended and not self.is_heard and not self.num_calls and (
                ended == "stop" or not self.form.say.strip().startswith(self.unheard.strip())):
            piece.said += self.unheard
        return piece

    def span(self, text: str, ended: bool) -> tuple[int, int, int | None]:
        """Instead of `feed`, for a `Detokenizer`: stop strings hold from the first character of an
        answer or a call on, up to what may become a mark. None is found in a thought, or in the
        white space behind it. The third number is where the turn is over, if it is."""
        self.is_heard = True  # also text that only may be an answer
        said, thinks = self.feed(text, "stop" if ended else None).said, self.state == "thinks"
        self.num_fed += len(text)
        clear = max(0, self.num_fed - len(self.rest))  # the rest may begin in the prompt
        if thinks or not self.is_answering:
            self.answer = max(0, clear - len(said))
        calls = self.state == "calls"
        self.is_answering = not thinks and bool(self.is_answering or said or calls)
        may_be_mark = not self.is_answering or self.may_think or self.form.say
        last = clear if may_be_mark and not calls else self.num_fed
        return self.answer, last, self.num_fed if self.is_over else None

    # Both take from `rest` what is clear, and name the state that follows, if one does.

    def _texts(self, piece: Piece, ended: str | None) -> str | None:
        """A thought or an answer, up to the mark that ends it."""
        form, text = self.form, self.rest.lstrip() if self.is_fresh else self.rest
        thinks, say = self.state == "thinks", form.say.strip()
        marks = {form.thought: "says"} if thinks else {
            say: "says", form.end: "says", form.think if self.may_think else "": "thinks",
            form.trigger if self.schemas else "": "calls"}
        marks.pop("", None)
        found = [(text.find(mark), -len(mark), mark) for mark in marks if mark in text]
        at, _, mark = min(found, default=(len(text), 0, ""))
        if mark and not ended and any(one != mark and one.startswith(text[at:]) for one in marks):
            mark = ""  # "to=" may become "to=user"
        if not mark and ended != "stop":  # text cut by a limit may have become a call
            at = _clear(text, list(marks), not ended and (thinks or bool(self.schemas)))
        shown = text[:at].rstrip() if mark else text[:at]
        if thinks:
            piece.thought += shown
            self.may_think = not mark
        else:
            self._say(piece, shown)
        self.is_fresh = bool(mark) or self.is_fresh and not shown
        self.is_heard |= mark == say != ""
        self.rest = text[len(shown) if marks.get(mark) == "calls" else at + len(mark):]
        return marks.get(mark)

    def _calls(self, piece: Piece, new: str, ended: str | None) -> str | None:
        head = self.heads[self.is_next].match(self.rest)
        if head is None:
            if ended != "stop" and len(self.rest) <= self.longest:
                return None
            self._say(piece, self.rest[:1])  # it is no call
            self.rest, self.is_next, self.is_fresh = self.rest[1:], False, False
            return "says"
        # What is read is all of the call, so behind a long one not for every token. A name is known
        # when something follows.
        reads = self.is_kept and len(self.rest) >= max(self.next_read, head.end() + 1)
        if not (ended or reads or self.tip in new):
            return None
        call, end = self._read(head, self.rest)
        if end is None and ended == "stop":  # the end of a turn is no text
            close = self.form.close
            has = max(at for at in range(len(close) + 1) if self.rest.endswith(close[:at]))
            call, end = self._read(head, self.rest + close[has:])
        if end is None:
            if ended == "stop" and not self.is_kept:  # nothing that was written is lost
                self._say(piece, self.rest)
                self.rest = ""
            elif ended or reads:
                self._tell(piece, call, False)
                self.next_read = len(self.rest) * 1.02
            return None
        self._tell(piece, call, True)
        self.num_told, self.next_read = None, 0
        self.is_next = end.lastgroup == "more"
        self.rest, self.is_fresh = self.rest[end.end():], True
        return "calls" if self.is_next else "says"

    def _say(self, piece: Piece, text: str) -> None:
        if self.is_heard:
            piece.said += text
        else:
            self.unheard += text

    def _tell(self, piece: Piece, call: Call, is_whole: bool) -> None:
        if self.num_told is None and any(
                one.name == call.name and one.arguments.startswith(call.arguments)
                for one in self.made):  # so far it says what an earlier one has said
            self.is_over |= is_whole
            return
        if self.must and is_whole:
            self.made.append(call)
        if self.num_told is not None:
            piece.more += call.arguments[self.num_told:]
        elif not (self.one and self.num_calls):
            piece.calls.append(call)
            self.num_calls += 1
        else:
            return
        self.num_told = max(self.num_told or 0, len(call.arguments))

    def count_thought(self, token_ids: list[int], decode: Callable[[list[int]], str]) -> int:
        """How many of the text's tokens so far are a thought; marks around it don't count."""
        thinks = self.state == "thinks"
        if not self.thinks_here or self.may_think and not thinks:
            return 0
        end = len(token_ids) if thinks else self._place(self.form.thought, token_ids, decode)[0]
        return end - self._place(self.form.think, token_ids, decode)[1]

    def _place(self, mark: str, token_ids: list[int], decode: Callable) -> tuple[int, int]:
        """The first tokens that hold a mark, from the first to behind the last one: (5, 7) for
        "</", "think>" behind five others. It is in the text, and looked for once."""
        if mark not in self.places:
            end = 1 + bisect_left(range(len(token_ids) - 1), True, key=lambda last: (
                mark in decode(token_ids[:last + 1])))
            self.places[mark] = next((start for start in range(end - 1, 0, -1) if mark in decode(
                token_ids[start:end])), 0), end
        return self.places[mark]

    # ------------------------------------------------------------- one call

    def _read(self, head: re.Match, text: str) -> tuple[Call, re.Match | None]:
        """The call that begins the text, as far as it came, and what ends it. head: its name, and
        what is around it."""
        name, at = head["name"], head.end()
        if not self.form.is_json:
            arguments, begun, end = self._parameters(text, at, self.schemas[name])
            written = json.dumps(arguments, ensure_ascii=False)
            return Call(name, written if end else written[:-2] if begun else written[:-1]), end
        try:
            arguments, stop = JSON.raw_decode(text, at)
        except (ValueError, RecursionError):
            return Call(name, text[at:]), None
        end = self.ends.match(text, stop) if isinstance(arguments, dict) else None
        return Call(name, text[at:stop]), end

    def _parameters(self, text: str, at: int, schema: dict) -> tuple[dict, bool, re.Match | None]:
        """Arguments between markers, whether the last one is a text that goes on, and the end. A
        value ends where a further key or the call's end follows."""
        form, found = self.form, {}
        if end := self.ends.match(text, at):
            return found, False, end
        if id(schema) not in self.keys:
            self.keys[id(schema)] = self._keys(schema)
        keys = self.keys[id(schema)]
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
                    found.setdefault(key["key"], *value)  # a key that was told keeps its value
                    break
            else:
                begun = bool(form.text[1]) and key["key"] not in found and self._is_plain(
                    schema, keys.get(key["key"], {}), is_text)
                if begun:
                    value, mark, _ = text[key.end():].partition(form.text[1])
                    found[key["key"]] = value if mark else value[
                        :_clear(value, [form.text[1]], False)]
                return found, begun, None
            if not end["key"]:
                return found, False, end
            key = end
        return found, False, None

    def _keys(self, schema: dict) -> dict:
        """The schema of each key that an object may have; none: it may have any."""
        keys: dict[str, dict] = {}
        with suppress(AttributeError, TypeError, ValueError):
            for form in forms_of(schema, schema):
                for key, value in form.get("properties", {}).items():
                    keys[key] = {"anyOf": [keys[key], value]} if key in keys else value
        return keys

    def _value(self, text: str, root: dict, schema: Any, is_text: bool) -> tuple | None:
        """The value in a tuple, or None where the text is none of the schema's."""
        kinds = kinds_of(schema, root)
        if self._is_plain(root, schema, is_text):
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

    def _is_plain(self, root: dict, schema: Any, is_text: bool) -> bool:
        """Whether a value is a text as it stands, whatever it looks like."""
        return is_text and self.form.is_raw and (
            self.form.text != self.form.value or kinds_of(schema, root) == {"string"})

    def _marked(self, text: str) -> Any:
        """JSON whose keys are bare and whose texts stand between markers. Raises `ValueError`."""
        parts = text.split(self.form.text[1] or "\0")
        for i, part in enumerate(parts):
            part = re.sub(r"\b(None|True|False)\b", lambda word: WORDS[word[0]], part)
            parts[i] = json.dumps(parts[i]) if i % 2 else re.sub(
                r"([{,])([^{}\[\],:]+):", r'\1"\2":', part)
        return JSON.decode("".join(parts))


def kinds_of(schema: Any, root: dict) -> set[str]:
    """The types that a schema allows. Empty: any type, or the schema doesn't say."""
    kinds, ahead, seen = set[str](), [schema], set[int]()
    while ahead:
        one = resolve(ahead.pop(), root)
        given, values = one.get("type"), one.get("enum", [one["const"]] if "const" in one else [])
        found = {kind for kind in KINDS.values() if kind == given or (
            isinstance(given, list) and kind in given)}
        if not found and isinstance(values, list):
            found = {KINDS.get(type(value), "") for value in values}
        parts = one.get("anyOf", one.get("oneOf", one.get("allOf")))
        if not found and not (isinstance(parts, list) and parts):
            return set()
        if not found and id(one) not in seen:  # a definition may be there a thousand times
            ahead += parts
        seen.add(id(one))
        kinds |= found
    return kinds


def forms_of(schema: Any, root: dict, depth: int = 8) -> list[dict]:
    """The ways to put an object together from $ref, allOf, anyOf and oneOf, up to MAX_FORMS: a
    schema without these for each. Raises `ValueError` if there is none; other errors for a schema
    that is none."""
    parts = [[one] for one in schema.get("allOf", ())]
    parts += [[resolve(schema, root)]] if "$ref" in schema else []
    parts += [schema[key] for key in ("anyOf", "oneOf") if key in schema]
    found = [{key: schema[key] for key in schema if key not in {"$ref", "allOf", "anyOf", "oneOf"}}]
    for choices in parts:
        others = list(islice((form for one in choices if depth and "object" in (
            kinds_of(one, root) or ("object",)) for form in forms_of(one, root, depth - 1)),
            MAX_FORMS))
        if not others:
            raise ValueError("no object can be put together from its parts, or they are too deep")
        found = [_joined(one, other) for one in found for other in others][:MAX_FORMS]
    return found


def _joined(one: dict, other: dict) -> dict:
    """Two parts of an object as one. Where both speak of a key, it has both schemas."""
    keys = {**one.get("properties", {})}
    for key, value in other.get("properties", {}).items():
        mine = keys.get(key, {})
        fits = all(mine.get(word, said) == said for word, said in value.items())
        keys[key] = mine | value if fits else {"allOf": [mine, value]}
    return one | other | dict(properties=keys, required=[
        *one.get("required", ()), *other.get("required", ())])


def resolve(schema: Any, root: dict) -> dict:
    """The schema that a reference leads to; one without a reference is returned as it is."""
    for _ in range(8):
        if not isinstance(schema, dict):
            return {}
        if not isinstance(name := schema.get("$ref"), str):
            return schema
        schema = root
        for key in name.split("/")[1:]:
            key = key.replace("~1", "/").replace("~0", "~")
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


def loose(literal: str) -> str:
    """A pattern for the literal, with any white space where it has some, and any id or none where
    it has one."""
    if part := ID_PART.search(literal):
        before, behind = literal[:part.start()], literal[part.end():]
        return f"{loose(before)}({_spaced(part[0])})?{loose(behind)}"
    return _spaced(literal)


def _spaced(literal: str) -> str:
    return "".join(r"\s*" if part.isspace() else r"[\w-]+" if part == ID else re.escape(part)
                   for part in re.split(rf"(\s+|{ID})", literal))
