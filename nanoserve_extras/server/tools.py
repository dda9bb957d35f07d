"""Tool calls and thoughts in a model's text, by the format of its chat template.

    <tool_call>\\n{"name": "weather", "arguments": {"a": "b"}}\\n</tool_call>
    └──────── open ────────┘└name─┘└─── after ────┘└─ args ─┘└─── close ────┘

A `TurnFormat` has the text around the parts of a turn; tool_format.py derives it. A `TurnReader`
follows one text as it comes. Text that may be the beginning of a marker is held back, as with stop
strings, so a call is never shown as content. If a grammar holds the model to the format, a call is
streamed as it is written; else it is sent when it is complete, because it may turn out to be text.

    thinks ──► says ──► calls        by marks; after a call the answer goes on
      └► drafts        └► guesses    a call within a thought; an answer that may be one call
    heads ──► any of them            in formats in which every message has a head

tool_grammar.py has the grammars that hold a model to the format. loose_calls.py reads calls in
other formats than the template's.
"""

import ast
import json
import re
from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from os.path import commonprefix
from typing import Any

from nanoserve.config import SamplingParams
from nanoserve.detokenizer import StopStrings
from nanoserve_extras.server.loose_calls import JSON, WAIT, Call, LooseReader
from nanoserve_extras.server.tool_schemas import KINDS, forms_of, kinds_of

NAME, ID = "zq_tool", "zqcall001"  # in made-up calls; a format is derived from them
# The part of a literal that a model may leave out: the id of a call, with its key or its marker.
ID_PART = re.compile(rf', ?"\w+": ?"{ID}"|\[\w+\]{ID}')
TAG = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")
MAX_TRIES = 8  # ends of a value that are tried: a JSON string may look like an end
WORDS = {"None": "null", "True": "true", "False": "false"}


@dataclass
class Piece:
    """The new parts of a text: of its thought, its answer, and its calls. more: further arguments
    of a call that an earlier piece has begun; they come before the other calls."""

    thought: str = ""
    said: str = ""
    calls: list[Call] = field(default_factory=list)
    more: str = ""


@dataclass
class TurnFormat:
    """The text around the parts of an assistant's turn. "": there is none.

    header: before every turn. A tool's name that is written twice is `NAME` in `after`, and in any
    literal a call's id is `ID`.
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

    def reader(self, schemas: dict[str, Any], prompt: str, one: bool = False, kept: bool = False,
               must: bool = False, bare: bool = True) -> "TurnReader":
        return TurnReader(self, schemas, prompt, one, kept, must, bare)

    @property
    def trigger(self) -> str:
        """The beginning of `open` that nothing else begins with: its tag, or all of it."""
        return (TAG.match(self.open) or [self.open.partition(ID)[0]])[0]

    @property
    def stop(self) -> str:
        """The closing tag after calls that belongs to the trigger; "": there is none."""
        tags, word = TAG.findall(self.close), re.sub(r"\W", "", self.trigger)
        return next((tag for tag in tags if word in re.sub(r"\W", "", tag)), (*tags, "")[0])

    @property
    def message(self) -> str:
        """The tag after the head of a message, if each thought, answer and call is a message of its
        own with a head (gpt-oss's channels and recipients). "": there are no heads."""
        tag = re.search(r"<[^<>\s]+>$", self.say)
        has_heads = tag and self.header and self.thought.endswith(self.header) and (
            self.think.endswith(tag[0]) and tag[0] in self.after)
        return tag[0] if has_heads else ""

    @property
    def literals(self) -> list[str]:
        return [self.think, self.thought, self.say, self.end, self.open, self.after, self.between,
                self.close, self.first, self.then, *self.text, *self.value]


# ----------------------------------------------------------------- read a text


class TurnReader:
    """Follows one text: `feed` it as it comes.

    schemas: those of each tool's arguments, by name. prompt: the text's prompt. one: calls after
    the first are ignored. kept: a grammar holds calls to the format. must: a call is required, and
    a call that repeats an earlier one ends the turn. bare: an answer that consists of a call
    without the format's marks is a call.
    """

    def __init__(self, form: TurnFormat, schemas: dict[str, Any], prompt: str, one: bool = False,
                 kept: bool = False, must: bool = False, bare: bool = True):
        self.form, self.schemas, self.one = form, schemas if form.open else {}, one
        self.must, self.is_over = must, False
        self.made: list[Call] = []  # if a call is required: the calls so far
        self.may_think = bool(form.thought)
        self.state = "heads" if form.message else "thinks" if (
            self.may_think and not form.think) else "says"
        self.rest, self.num_calls = "", 0
        self.keys: dict[int, dict] = {}  # by a schema's id: see `_keys`
        self.is_kept, self.next_read = False, 0  # not kept to in the prompt
        self.num_told: int | None = None  # characters sent of the arguments of a call in progress
        self.is_next = False  # a call of several, behind the first
        self.is_fresh = self.may_think  # white space in front of what comes is dropped
        self.is_heard = not form.say or bool(form.message)  # text without a marker is an answer
        self.unheard = ""  # it is an answer after all if no marker comes
        self.joint, self.told = "", set[str]()  # between messages; the states that have told one
        self.bare: LooseReader | None = None  # for an answer of which nothing was sent yet
        self.draft: Draft | None = None
        self.thoughts: list[list[int]] = [[0]]  # from which character to which
        self.num_fed = self.num_marked = 0
        # A call can only end after this character.
        self.tip = commonprefix([form.between or form.close, form.close]).strip()[-1:]
        names = "|".join(map(re.escape, sorted(self.schemas, key=len, reverse=True)))
        longest = max(map(len, self.schemas), default=0)
        self.longest = 2 * len(form.open + form.after) + longest  # a call begins in so many
        after, begin = form.after, r"\s*" + loose(form.open)
        named = f"(?P<name>{names})(?!\\w)"
        if form.message:  # the rest of a head may say what it likes
            inside = f"(?s:(?!{re.escape(form.message)}).)*?"
            begin, after = inside + begin, after.partition(form.message)[2]
            named += inside + re.escape(form.message)
        behind = "(?P=name)".join(map(loose, after.split(NAME)))
        self.called = re.compile(begin + named)
        self.heads = [re.compile(f"{before}{named}{behind}") for before in (begin, r"\s*")]
        self.loose = LooseReader(self.schemas, form.stop)
        # Whether several calls share one closing mark; else each call begins as the first does.
        shares = form.between and not form.between.startswith(form.close)
        more = f"(?P<more>{loose(form.between)})|" if shares else ""
        self.ends = re.compile(f"{more}(?P<close>{loose(form.close)})")
        if form.header and form.header in prompt:  # the prompt may have begun the turn
            begun = self.feed(prompt.rpartition(form.header)[2]).said + self.rest
            bare = bare and not (self.state == "says" and begun.strip())
        self.is_kept = kept
        self.bare = LooseReader(self.schemas, is_all=True) if bare and self.schemas else None
        self.num_calls, self.began = 0, prompt[-1:].isspace() and not prompt.endswith(form.header)
        self.thoughts = [[0]] if self.state == "thinks" else []  # not those of the prompt
        self.places: dict[tuple[int, bool], int] = {}  # tokens in front of these characters
        self.num_fed, self.answer, self.is_answering = 0, 0, False  # see `span`

    def feed(self, text: str, ended: str | None = None) -> Piece:
        """Read more text, and return the new parts. ended: the text's `finish_reason`; if it is
        given, nothing is held back."""
        piece = Piece()
        self.rest = "" if self.is_over else self.rest + text
        self.num_fed += len(text)
        while step := self._step(piece, text, ended):
            self._note_thought(step)
            self.state, text = step, self.rest
        if ended and not self.is_heard and not self.num_calls and (
                ended == "stop" or not self.form.say.strip().startswith(self.unheard.strip())):
            piece.said += self.unheard
        return piece

    def span(self, text: str, ended: bool) -> tuple[int, int, int | None]:
        """Used instead of `feed` by `TurnStops`: returns the range in which stop strings count,
        from the first character of an answer or a call to the last one that can't be part of a
        mark. A thought, and the white space after it, is not in it. The third number is the place
        where the turn is over, or None."""
        self.is_heard = True  # also text that only may be an answer
        said = self.feed(text, "stop" if ended else None).said
        thinks = self.state in ("thinks", "drafts", "heads")
        clear = max(0, self.num_fed - len(self.rest))  # the rest may begin in the prompt
        if thinks or not self.is_answering:
            self.answer = max(0, clear - len(said))
        calls = self.state in ("calls", "guesses")
        self.is_answering = not thinks and bool(self.is_answering or said or calls)
        may_be_mark = not self.is_answering or self.may_think or self.form.say
        last = clear if may_be_mark and not calls else self.num_fed
        return self.answer, last, self.num_fed if self.is_over else None

    def _note_thought(self, step: str) -> None:
        """Note where in the text a thought begins and ends, without the marks around it."""
        thinks, at = ("thinks", "drafts"), max(0, self.num_fed - len(self.rest))
        if self.state not in thinks and step in thinks:
            self.thoughts.append([at])
        elif self.state in thinks and step not in thinks:
            self.thoughts[-1].append(max(0, at - self.num_marked))

    # Each method takes the text that is decided from `rest`, and returns the next state, if any.

    def _step(self, piece: Piece, new: str, ended: str | None) -> str | None:
        if self.state == "heads":
            return self._heads(piece, ended)
        if self.state == "guesses":
            return self._guesses(piece, ended)
        if self.state == "drafts":
            return self._drafts(piece, ended)
        return self._calls(piece, new, ended) if self.state == "calls" else (
            self._texts(piece, ended))

    def _heads(self, piece: Piece, ended: str | None) -> str | None:
        """Read a message's head: it names a tool, or belongs to a thought, or else to an answer."""
        form, (head, mark, body) = self.form, self.rest.partition(self.form.message)
        if not mark:
            begins = (form.say, form.think, form.gap + form.open)
            is_text = ended == "stop" or ended and not any(
                one.strip().startswith(head.strip()) for one in begins)
            return "says" if is_text and head else None
        text, header, rest = head.partition(form.header)
        if header:  # a message without a head stands in front
            self._say(piece, text.removesuffix(form.thought.removesuffix(header)))
            self.rest = rest + mark + body
            return "heads"
        if self.schemas and self.called.match(self.rest):
            return "calls"
        thinks = head.strip().startswith(form.think.removesuffix(mark).strip())
        self.rest, self.is_fresh, state = body, True, "thinks" if thinks else "says"
        self.joint = "\n\n" if state in self.told else ""
        return state

    def _marks(self) -> dict[str, str]:
        """The marks that may end a thought or an answer, and the state after each."""
        form, calls = self.form, self.form.trigger if self.schemas else ""
        if form.message:
            marks = {form.thought: "heads", form.thought.removesuffix(form.header): "heads"}
        elif self.state == "thinks":
            marks = {form.thought: "says", calls: "drafts"}
        else:
            marks = {form.say.strip(): "says", form.end: "says", calls: "calls",
                     form.think if self.may_think else "": "thinks"}
        marks.pop("", None)
        return marks

    def _texts(self, piece: Piece, ended: str | None) -> str | None:
        """A thought or an answer, up to the mark that ends it."""
        form, text = self.form, self.rest.lstrip() if self.is_fresh else self.rest
        thinks, say, marks = self.state == "thinks", form.say.strip(), self._marks()
        found = [(text.find(mark), -len(mark), mark) for mark in marks if mark in text]
        at, _, mark = min(found, default=(len(text), 0, ""))
        if mark and not ended and any(one != mark and one.startswith(text[at:]) for one in marks):
            mark = ""  # "to=" may become "to=user"
        if not mark and ended != "stop":  # text cut by a limit may have become a call
            at = _clear(text, list(marks), not ended and (thinks or bool(self.schemas)))
        shown = text[:at].rstrip() if mark else text[:at]
        if shown and not thinks and self.bare:
            return "guesses"
        if shown:
            shown, self.joint = self.joint + shown, ""
            self.told.add(self.state)
        is_call, self.num_marked = marks.get(mark) in ("calls", "drafts"), len(mark)
        self.rest = text[len(text[:at].rstrip()) if is_call else at + len(mark):]
        if thinks:
            piece.thought += shown
            self.may_think = is_call or not mark
        else:
            self._say(piece, shown)
        self.is_fresh = bool(mark) or self.is_fresh and not shown
        self.is_heard |= mark == say != ""
        return marks.get(mark)

    def _guesses(self, piece: Piece, ended: str | None) -> str | None:
        """An answer that may be nothing but a call."""
        if not ended and len(self.rest) < self.next_read:
            return None
        text, mark, _ = self.rest.partition(self.form.end or "\0")
        text = text if mark or ended else text[:_clear(text, [self.form.end], False)]
        calls, end = self.bare.read(text, ended == "stop" or bool(mark))
        self.next_read = len(self.rest) * 1.02
        if calls is ... and not ended:
            return None
        self.bare, self.next_read = None, 0
        if calls is not ... and calls:
            self._take(piece, calls, end + len(mark))
        return "says"

    def _drafts(self, piece: Piece, ended: str | None) -> str | None:
        """Read a possible call within a thought. It is a call if the turn ends after it, or after
        the thought's end. If the thought goes on, or an answer follows, it was only quoted."""
        if self.draft is None:
            self.draft = Draft(self.form, self.schemas)
        is_draft = self.draft.read(self.rest, ended)
        if is_draft and not ended:
            return None
        calls, self.draft = self.draft.calls, None
        if is_draft and calls and ended == "stop":
            self.num_marked = len(self.rest)
            return self._take(piece, calls, len(self.rest))
        cut = self.rest.index(self.form.trigger) + 1
        piece.thought += self.rest[:cut]
        self.rest, self.is_fresh = self.rest[cut:], False
        return "thinks"

    def _calls(self, piece: Piece, new: str, ended: str | None) -> str | None:
        head = self.heads[self.is_next].match(self.rest)
        if head is None:
            calls, end = self._loosely(None, ended)
            count = len(self.rest) - self.rest.find(self.form.message)
            if calls is ... or ended != "stop" and not calls and count <= self.longest:
                return None
            if calls:
                return self._take(piece, calls, end)
            shown = self.rest[:0 if self.form.message else 1]  # it is no call
            self._say(piece, shown)
            self.rest, self.is_next = self.rest.partition(self.form.message or shown)[2], False
            self.is_fresh, self.next_read = not shown, 0
            return "says"
        # A read parses the whole call, so a long one is not read again for every token. The name is
        # complete when something follows it.
        reads = self.is_kept and len(self.rest) >= max(self.next_read, head.end() + 1)
        if not (ended or reads or self.tip in new or self.form.stop[-1:] in new):
            return None
        call, end = self._read(head, self.rest)
        if end is None and ended == "stop":  # the end of a turn is no text
            close = self.form.close
            has = max(at for at in range(len(close) + 1) if self.rest.endswith(close[:at]))
            call, end = self._read(head, self.rest + close[has:])
        if end is None and not self.is_kept and (ended or self.form.stop in self.rest):
            calls, stop = self._loosely(head, ended)
            if calls is not ... and calls:
                return self._take(piece, calls, stop)
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

    def _loosely(self, head: re.Match | None, ended: str | None) -> tuple[Any, int]:
        """Read calls in other formats than the template's: see `LooseReader.read`. head: the match
        of the text around the name, if it follows the format."""
        form, tag = self.form, TAG.match(self.form.open)
        if self.is_kept or self.is_next:
            return [], 0
        if not ended and len(self.rest) < self.next_read:
            return WAIT
        if head and form.is_json and not form.open.rstrip('"').endswith(": "):
            calls, end = self.loose.call(head["name"], self.rest, head.end(), ended == "stop")
            behind = re.compile(r"[\s}]*" + self.ends.pattern).match(self.rest, end)
            if calls is not ... and calls and behind:
                return calls, behind.end()
        start = self.rest.index(tag[0]) + len(tag[0]) if tag and not form.message else 0
        reader = self.loose if start else self.bare
        if reader is None:
            return [], 0
        calls, end = reader.read(self.rest[start:], ended == "stop")
        if calls is ...:
            self.next_read = len(self.rest) * 1.02
        return calls, start + end

    def _take(self, piece: Piece, calls: list[Call], end: int) -> str:
        """Add to the piece all calls that end there."""
        for call in calls:
            self._tell(piece, call, True)
            self.num_told = None
        self.rest, self.is_fresh, self.next_read = self.rest[end:], True, 0
        return "says"

    def _say(self, piece: Piece, text: str) -> None:
        if self.is_heard:
            piece.said += text
        else:
            self.unheard += text

    def _tell(self, piece: Piece, call: Call, is_whole: bool) -> None:
        if self.num_told is None and any(
                one.name == call.name and one.arguments.startswith(call.arguments)
                for one in self.made):  # so far it equals an earlier call
            self.is_over |= is_whole
            return
        if self.must and is_whole:
            self.made.append(call)
        self.bare = None
        if self.num_told is not None:
            piece.more += call.arguments[self.num_told:]
        elif not (self.one and self.num_calls):
            piece.calls.append(call)
            self.num_calls += 1
        else:
            return
        self.num_told = max(self.num_told or 0, len(call.arguments))

    def count_thought(self, token_ids: list[int], decode: Callable[[list[int]], str]) -> int:
        """How many of the text's tokens so far belong to thoughts, without the marks around them.
        """
        def place(at: int, is_end: bool) -> int:
            if (at, is_end) not in self.places:  # a token that holds the end's first letter is out
                self.places[at, is_end] = bisect_left(
                    range(len(token_ids)), at + is_end, key=lambda end: len(
                        decode(token_ids[:end]))) - is_end
            return self.places[at, is_end]

        return sum((place(end[0], True) if end else len(token_ids)) - place(start, False)
                   for start, *end in self.thoughts)

    # ------------------------------------------------------------- one call

    def _read(self, head: re.Match, text: str) -> tuple[Call, re.Match | None]:
        """The call at the beginning of the text, as far as it came, and the match of its end. head:
        the match of its name and the text around it."""
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
        """Arguments between markers, whether the last one is an unfinished string, and the match of
        the call's end. A value ends where a further key or the call's end follows."""
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
        """The value in a tuple, or None if the text is no value that the schema allows."""
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


class TurnStops(StopStrings):
    """Stop strings of a turn: they count in its answer and its calls, not in its thoughts. The text
    also ends if the reader finds that the turn is over."""

    def __init__(self, params: SamplingParams, reader: TurnReader):
        super().__init__(params)
        self.reader, self.is_watching = reader, True

    def find(self, text: str, new_text: str, is_complete: bool) -> tuple[int, str | None] | None:
        self.first, self.last, end = self.reader.span(new_text, is_complete)
        found = super().find(text, new_text, is_complete)
        return found if end is None or found and found[0] < end else (end, None)


class Draft:
    """A text within a thought that begins as a call does."""

    def __init__(self, form: TurnFormat, schemas: dict[str, Any]):
        plain = replace(form, header="", think="", thought="", say="", end="")
        self.reader, self.mark = TurnReader(plain, schemas, "", bare=False), form.thought
        self.calls: list[Call] = []
        self.said, self.num_read, self.num_within = "", 0, -1

    def read(self, text: str, ended: str | None) -> bool:
        """Whether the whole text may be calls, followed by the thought's end."""
        ends = [end.end() for end in re.finditer(re.escape(self.mark), text)]
        for end in sorted({*ends, len(text)}):
            if end < self.num_read:
                continue
            piece = self.reader.feed(text[self.num_read:end], ended if end == len(text) else None)
            self.num_read, self.said = end, self.said + piece.said
            self.calls += piece.calls
            if self.num_within < 0 and self.said.strip() == self.mark:
                self.num_within = len(self.calls)
        return self.mark.startswith(self.said.strip()) and (
            self.num_within in (-1, len(self.calls)))


def _clear(text: str, marks: list[str], holds_space: bool) -> int:
    """How many characters can be shown: after them a marker may have begun, or the white space in
    front of one. Example: with the marker "</think>" 3 characters of "so </th" can be shown, and 2
    if white space is held back."""
    longest = max(map(len, marks), default=1) - 1
    at = next((at for at in range(max(0, len(text) - longest), len(text)) if any(
        mark.startswith(text[at:]) for mark in marks)), len(text))
    return len(text[:at].rstrip()) if holds_space else at


def loose(literal: str) -> str:
    """A pattern for the literal that accepts any white space where it has some, and any id, or
    none, where it has one."""
    if part := ID_PART.search(literal):
        before, behind = literal[:part.start()], literal[part.end():]
        return f"{loose(before)}({_spaced(part[0])})?{loose(behind)}"
    return _spaced(literal)


def _spaced(literal: str) -> str:
    return "".join(r"\s*" if part.isspace() else r"[\w-]+" if part == ID else re.escape(part)
                   for part in re.split(rf"(\s+|{ID})", literal))
