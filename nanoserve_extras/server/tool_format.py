"""The format of tool calls and thoughts, derived from a chat template.

Every family of models writes tool calls in its own way, and its chat template writes them in the
same way. So there are no parsers for families. A made-up call is rendered, and the text around its
name, its keys and its values is the format (llama.cpp does it so, too):

    <tool_call>\\n{"name": "zq_tool", "arguments": {"zq_key": "zq_one"}}\\n</tool_call>
    └──────── open ───────┘└─name─┘└──── after ────┘└─── arguments ───┘└──── close ────┘

The arguments are one JSON object, or each is between markers: strings as they are, other values as
JSON. The marks around a thought (`reasoning_content`) are found in the same way.

**Proof.** At start-up five calls are rendered, read back and compared (`TemplateProbe.prove`). If
one comes back changed, tools are refused, and the error gives the reason.

The road not taken: vLLM and SGLang have some thirty parsers, one for each format.
"""

import json
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from os.path import commonprefix
from typing import Any

from nanoserve_extras.server.loose_calls import JSON
from nanoserve_extras.server.tools import ID, NAME, TurnFormat, loose

# Words of the made-up conversation, which no template writes by itself.
OTHER, KEY, MORE = "zq_other", "zq_key", "zq_more"
ONE, TWO, ASKED, SAID, THOUGHT = "zq_one", "zq_two", "zq_asked", "zq_said", "zq_thought"
KINDS_OF_KEYS = dict(text="string", more="string", count="integer", nested="object") | {
    KEY: "string", MORE: "string"}
SCHEMA = dict(type="object", required=[], properties={
    key: dict(type=kind, description="A value.") for key, kind in KINDS_OF_KEYS.items()})
TOOLS = [dict(type="function", function=dict(name=name, description="A tool.", parameters=SCHEMA))
         for name in (NAME, OTHER)]
PROOF = [{"text": "zq"}, {"text": "it's \"so\", (he) {said}", "count": -7}, {},
         {"text": " two\n  <b>lines</b>: é\\n ", "more": ""},
         {"nested": {"list": [1, 2.5, "ü \"x\"", None, True, {}], "empty": {}}, "more": "5"}]


def derive(render: Callable[..., str], end_texts: list[str]) -> TurnFormat:
    """The format of a template, after the proof. render: makes a text of a conversation and the
    template's options. end_texts: the texts of tokens that end a turn. If calls can't be used,
    `TurnFormat.why` gives the reason."""
    probe = TemplateProbe(render, end_texts)
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
    return found


def format_of(llm: Any, chat_template: str | None = None) -> TurnFormat:
    """The format of an engine's chat template, or of `chat_template`."""
    given = {} if chat_template is None else {"chat_template": chat_template}
    ends = [llm.tokenizer.decode([token_id]) for token_id in {
        *llm.model_config.eos_token_ids, llm.tokenizer.eos_token_id} - {None}
        if token_id < llm.model_config.vocab_size]
    return derive(lambda chat, **more: llm.inputs.render_chat(
        chat, **given, **more)["prompt"], ends)


class TemplateProbe:
    """Renders made-up turns, and finds the text that the template writes around their parts."""

    def __init__(self, render: Callable[..., str], end_texts: list[str]):
        self.render, self.end_texts, self.error = render, end_texts, ""
        begun = self._render(add_generation_prompt=True)
        turns = map(self._render, (
            {"content": SAID}, {"content": SAID, "reasoning_content": THOUGHT}, _turn({KEY: ONE})))
        self.start = len(_whole_tags(commonprefix([begun, *filter(None, turns)])))
        self.header = begun[len(commonprefix([begun, self._render()])):self.start]
        self.begun = begun[self.start:]  # the prompt begins a turn so

    def _render(self, turn: dict | None = None, **options) -> str:
        """The text after the question. "": the template refuses the turn."""
        chat = [{"role": "user", "content": ASKED}]
        if turn is not None:
            chat.append({"role": "assistant", "content": ""} | turn)
        try:
            with warnings.catch_warnings(action="ignore"):  # expected: calls that are not written
                return self.render(chat, tools=TOOLS, **options).rpartition(ASKED)[2]
        except Exception as error:
            self.error = str(error)
            return ""

    def turn(self, turn: dict) -> str:
        """The text of a turn after its header."""
        return self._render(turn)[self.start:]

    def _behind_prompt(self, text: str) -> str:
        """A turn without the part that the prompt has written already; white space may differ."""
        for mark in re.finditer(r"[<\[]", self.begun):
            if found := re.match(r"\s*" + loose(self.begun[mark.start():]), text):
                return text[found.end():]
        return text

    def thoughts(self) -> TurnFormat:
        """The markers of thoughts and answers."""
        found = TurnFormat(self.header)
        said = self._behind_prompt(self.turn({"content": SAID}))
        found.say, _, self.end = said.partition(SAID)
        found.end = self._cut(self.end, self.end_texts).strip()
        name_at = self.turn(_turn({KEY: ONE})).partition(NAME)[0]
        for turn, behind in (({"content": SAID}, SAID), (_turn({KEY: ONE}), name_at + NAME)):
            text = self.turn({"reasoning_content": THOUGHT, "thinking": THOUGHT} | turn)
            think, thought, rest = text.partition(THOUGHT)
            if thought and behind in rest:
                thought = rest.partition(behind)[0]
                if thought.strip() in found.say:  # the end of an empty thought
                    found.say = ""
                found.think, found.thought = think.strip(), thought.removesuffix(found.say).strip()
                return found
        if tag := re.search(r"<(\w+)>\s*$", self.begun):  # the template drops thoughts, ...
            found.think, found.thought = tag[0].strip(), f"</{tag[1]}>"  # ... the prompt begins one
        found.say = found.say.strip()
        return found

    def calls(self, found: TurnFormat) -> None:
        """The literals of calls. Raises `ValueError`."""
        one = self.turn(_turn({KEY: ONE}))
        before, name, rest = one.partition(NAME)
        if not name:
            raise ValueError(self.error or "it does not write them")
        if found.thought and found.thought in before:  # an empty thought
            before = before.rpartition(found.thought)[2]
        before = self._behind_prompt(before)
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

    def _parameters(self, found: TurnFormat) -> None:
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

    def prove(self, found: TurnFormat) -> None:
        """Render five calls, and two at once, and read them back. Their arguments contain text that
        looks like a call's end. Raises `ValueError`."""
        more = [[PROOF[1], PROOF[4]]] if found.between else []
        more += [[{"text": f"a{found.close} b"}]] if found.is_json else []
        for calls in [*([arguments] for arguments in PROOF), *more]:
            reader = found.reader({NAME: SCHEMA, OTHER: SCHEMA}, found.header + self.begun)
            text = self._behind_prompt(self.turn(_turn(*calls, id_="another02")))
            if reader.state == "thinks" and found.thought not in text.partition(NAME)[0]:
                text = found.thought + text
            read = reader.feed(text, "stop").calls
            back = [(call.name, json.loads(call.arguments)) for call in read]
            if back != list(zip((NAME, OTHER), calls, strict=False)):
                raise ValueError(f"the call {json.dumps(calls[0])} does not come back as it was")

    def _cut(self, text: str, ends: list[str] | None = None) -> str:
        """The text without the marks that end a turn."""
        for end in filter(None, ends or [self.end, *self.end_texts]):
            text = text.partition(end)[0]
        return text.rstrip("\n")


def _around(one: str, two: str, value: str) -> tuple[tuple[str, str], str, str]:
    """Compare the texts after a key in a call with one argument and in a call with two. Returns the
    text around the value, the text before a further key, and the text that ends the call."""
    before, _, behind = one.partition(value)
    after = two.partition(value)[2].partition(MORE)[0]
    end = _whole_tags(commonprefix([behind, after]))
    return (before, end), after[len(end):], behind[len(end):]


def _whole_tags(text: str) -> str:
    """The text without an incomplete tag at its end."""
    return re.sub(r"<[^>\s]*$", "", text)


def _find_object(text: str, wanted: dict) -> tuple[int, int]:
    """Where this JSON object begins and ends in a text; -1 if it is not there."""
    for brace in re.finditer(r"\{", text):
        try:
            found, end = JSON.raw_decode(text, brace.start())
        except ValueError:
            continue
        if found == wanted:
            return brace.start(), end
    return -1, -1


def _turn(*calls: dict, id_: str = ID) -> dict:
    """A turn that calls the made-up tools. Mistral's templates want ids of nine letters."""
    return {"tool_calls": [{"id": id_, "type": "function", "function": dict(
        name=name, arguments=arguments)} for name, arguments in zip(
            (NAME, OTHER), calls, strict=False)]}
