"""Tool calls that models write in other formats than their chat template's.

Models mix the formats that they have seen. So a call may come as

    {"arguments": {...}, "name": "f"}       keys in any order, with any white space
    {"function": "f", "parameters": "{}"}   other keys; arguments as a text
    {{"name": "f", ...}}                    a brace too many, or one too few at the end
    {'name': 'f', 'arguments': {'x': None}} as Python writes it
    <function=f>{...}</function>            or with <parameter=x> ... </parameter> for each value
    [f(x=1)]                                Python's own calls, in a list or a fence

one after the other, in lists, in fences (```json) and in tags (<tools>). Text between a format's
marks can only be meant as a call. Text without marks may be meant otherwise, so there the whole
answer has to be calls: objects with no other keys than those of a call (`LooseReader.is_all`).

A call must name a tool that was offered, and nothing is made up: a text that breaks off within a
string, or with arguments that are no object, is no call.
"""

import ast
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nanoserve_extras.server.tool_schemas import kinds_of

NAMES = "name", "function", "tool", "tool_name", "function_name"
ARGUMENTS = "arguments", "parameters", "args", "input"
LISTS = "tool_calls", "tool_call", "function_call"  # an object of one of these holds calls
OTHERS = "id", "call_id", "type", "index"
KNOWN = {*NAMES, *ARGUMENTS, *LISTS, *OTHERS}
TAGS = "tools?|tool_?calls?|function_calls?|functions?|calls?"
LANGUAGES = r"(?:(?:json|tool|function|py|xml|text)\w*)?(?!\w)"  # of a fence
BETWEEN = re.compile(rf"\s+|[\[\],;}}]|</?(?:{TAGS})>|```{LANGUAGES}", re.I)
HALF = re.compile(r"`{1,2}|```\w*|</?\w*|<function=[^<>\s]*")  # of what stands in front of a call
FUNCTION = re.compile(r"<function=([^<>\s]+)>\s*")
PARAMETER = re.compile(r"\s*<parameter=([^<>\s]+)>\n?(.*?)\n?</parameter>\s*", re.S)
BEGINNING = re.compile(r"\{+\s*")
PAIR = re.compile(r"""["'](\w+)["']\s*:\s*(?:["']([^"'\\]*)["']|[\w.+-]+)\s*,\s*""")
HALF_PAIR = re.compile(r"""["'](\w*)(?:(["'])\s*(?::\s*(?:["']([^"'\\]*)(["'])?)?)?)?""")
PARTS = re.compile(r"""(?s)"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|["'{}\[\]()]|```|</\w+>""")
CLOSING = {"{": "}", "[": "]", "(": ")"}
WORDS = {"true": "True", "false": "False", "null": "None"}
WORD = re.compile(r"""("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|\b(true|false|null)\b""")
WAIT = ..., 0  # more text is needed to decide


@dataclass
class Call:
    """arguments: JSON, as the model wrote it where its format is JSON."""

    name: str
    arguments: str


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


JSON = json.JSONDecoder(parse_constant=_no_number)
LINES = json.JSONDecoder(parse_constant=_no_number, strict=False)  # texts may hold lines


@dataclass
class LooseReader:
    """schemas: those of each tool's arguments, by name. stop: the mark after the calls; "": there
    is none. is_all: whether the calls have to be all of the text."""

    schemas: dict[str, Any]
    stop: str = ""
    is_all: bool = False

    def read(self, text: str, ended: bool) -> tuple[Any, int]:
        """The calls at the beginning of the text, and where they end; no calls if the text begins
        with anything else; or `WAIT`."""
        calls, at = [], 0
        while True:
            if self.stop and text.startswith(self.stop, at):
                return calls, at + len(self.stop)
            if not ended and (self.stop.startswith(text[at:]) or HALF.fullmatch(text, at)):
                return WAIT
            if space := BETWEEN.match(text, at):
                at = space.end()
                continue
            if at == len(text):
                return (calls, at) if ended else WAIT
            found, end = self._one(text, at, ended)
            if found is ...:
                return WAIT
            if not found:
                return ([], 0) if self.is_all else (calls, at)
            calls, at = calls + found, end

    def _one(self, text: str, at: int, ended: bool) -> tuple[Any, int]:
        """As `read`, for one object or function."""
        if text[at] == "{":
            if not self._may_call(text, at):
                return [], 0
            value, end = self.value(text, at, ended)
            return (value, end) if value is ... else (self._calls_of(value), end)
        if tag := FUNCTION.match(text, at):
            return self._function(tag, text, ended)
        if re.search(r"[\[`<]", text[:at]):  # a call alone on a line is a text about it
            return self._python(text, at, ended)
        return [], 0

    def _may_call(self, text: str, at: int) -> bool:
        """Whether an object that begins so may be a call. If not, a stream of JSON can go on."""
        at = BEGINNING.match(text, at).end()
        while pair := PAIR.match(text, at):
            if pair[1] in NAMES:
                return self._name(pair[2]) is not None
            if self.is_all and pair[1] not in KNOWN:
                return False
            at = pair.end()
        half = HALF_PAIR.match(text, at)
        if half is None:
            return at == len(text) or not self.is_all
        key, key_ended, name, name_ended = half.groups()
        if key_ended and name is not None and key in NAMES:
            return self._name(name) is not None if name_ended else any(
                one.startswith(name.removeprefix("functions.")) for one in self.schemas) or (
                "functions.".startswith(name))
        return not self.is_all or (key in KNOWN if key_ended else any(
            one.startswith(key) for one in KNOWN))

    def _name(self, name: Any) -> str | None:
        """The tool of this name."""
        if not isinstance(name, str):
            return None
        return next((one for one in (name, name.removeprefix("functions."))
                     if one in self.schemas), None)

    def _calls_of(self, value: Any) -> list[Call]:
        """The calls that an object, or a list of objects, describes. None: there are no calls."""
        if isinstance(value, list):
            found = [self._calls_of(one) for one in value]
            return sum(found, []) if all(found) else []
        if not isinstance(value, dict):
            return []
        if len(value) == 1 and min(value) in LISTS:
            return self._calls_of(value[min(value)])
        key = next((key for key in value if key in NAMES), None)
        if isinstance(value.get(key), dict):  # {"type": "function", "function": {...}}
            value = {name: one for name, one in value.items() if name != key} | value[key]
            key = next((key for key in value if key in NAMES), None)
        name, given = self._name(value.get(key)), next(
            (key for key in ARGUMENTS if key in value), None)
        others = value.keys() - {key, given, *OTHERS}
        if name is None or self.is_all and (others or given is None) or others and given is None:
            return []
        return self._call(name, {} if value.get(given) is None else value[given])

    def call(self, name: str, text: str, at: int, ended: bool) -> tuple[Any, int]:
        """As `read`: the call with the arguments that begin there."""
        value, end = self.value(text, at, ended)
        return (value, end) if value is ... else (self._call(name, value), end)

    def _call(self, name: str, arguments: Any) -> list[Call]:
        if isinstance(arguments, str):
            arguments, _ = self.value(arguments.strip() or "{}", 0, True)
        try:
            text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError):
            return []
        return [Call(name, text)] if isinstance(arguments, dict) else []

    def _function(self, tag: re.Match, text: str, ended: bool) -> tuple[Any, int]:
        """Read the arguments after <function=f>."""
        name, at, found = self._name(tag[1]), tag.end(), {}
        if name is None:
            return [], 0
        if text.startswith("{", at):
            return self.call(name, text, at, ended)
        while value := PARAMETER.match(text, at):
            found[value[1]] = self._typed(value[2], name, value[1])
            at = value.end()
        rest = text[at:].lstrip()
        if rest.startswith("</function>") or rest.startswith(self.stop or "</function>") or (
                ended and not rest):
            return self._call(name, found), at
        may_go_on = rest.startswith("<parameter=") or any(
            mark.startswith(rest) for mark in ("<parameter=", "</function>", self.stop))
        return WAIT if may_go_on and not ended else ([], 0)

    def _typed(self, text: str, name: str, key: str) -> Any:
        """A value, converted to the type in its schema."""
        root = self.schemas[name]
        properties = root.get("properties") if isinstance(root, dict) else None
        kinds = kinds_of((properties or {}).get(key), root)
        if kinds == {"string"}:
            return text
        for read in (JSON.decode, ast.literal_eval):
            value = _tried(read, text)
            if value is not None:
                return value
        return None if text == "null" else text

    def _python(self, text: str, at: int, ended: bool) -> tuple[Any, int]:
        """A call with keywords and literals."""
        found = re.compile(r"([\w.]+)(\()?").match(text, at)
        if not found:
            return [], 0
        if not found[2]:
            begins = found.end() == len(text) and any(
                one.startswith(found[1].removeprefix("functions.")) for one in self.schemas)
            return WAIT if begins and not ended else ([], 0)
        name, end = self._name(found[1]), _extent(text, found.end() - 1, "")[0]
        if name is None or end < 0:
            return ([], 0) if ended or name is None else WAIT
        call = _tried(lambda part: ast.parse(part, mode="eval").body, text[at:end])
        if not isinstance(call, ast.Call) or call.args or not all(one.arg for one in call.keywords):
            return [], 0
        values = {one.arg: _tried(lambda part: (ast.literal_eval(part),), one.value)
                  for one in call.keywords}
        if None in values.values():
            return [], 0
        return self._call(name, {key: value for key, (value,) in values.items()}), end

    def value(self, text: str, at: int, ended: bool) -> tuple[Any, int]:
        """The object that begins here, repaired if necessary, and where it ends. None: no object.
        """
        for start in (at, at + 1 if text.startswith("{{", at) else at):
            if found := _tried(lambda part, start=start: LINES.raw_decode(part, start), text):
                return found
        end, missing = _extent(text, at, self.stop)
        if end < 0 and not ended or missing is None:
            return (None, 0) if ended else WAIT
        end = len(text) if end < 0 else end
        part = text[at:end].rstrip() + missing
        for mended in (part, part.replace("{{", "{").replace("}}", "}")):
            for read in (LINES.decode, lambda one: ast.literal_eval(WORD.sub(
                    lambda word: word[1] or WORDS[word[2]], one))):
                if isinstance(value := _tried(read, mended), dict):
                    return value, end
        return None, end


def _extent(text: str, at: int, stop: str) -> tuple[int, str | None]:
    """Where the brackets that open here are closed, or where a mark comes before that; -1: neither.
    Also returns the brackets that are missing there; None: a string is not closed."""
    marks = re.compile(f"{re.escape(stop)}|{PARTS.pattern[4:]}", re.S) if stop else PARTS
    opened: list[str] = []
    for part in marks.finditer(text, at):
        mark = part[0]
        if mark in CLOSING:
            opened.append(CLOSING[mark])
        elif opened and mark == opened[-1]:
            opened.pop()
            if not opened:
                return part.end(), ""
        elif mark in "\"'":
            return -1, None
        elif mark[0] in "`<" or mark == stop:
            return part.start(), "".join(reversed(opened))
    return -1, "".join(reversed(opened))


def _tried(read: Callable, text: Any) -> Any:
    """What `read` returns; None if it raises."""
    try:
        return read(text)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None
