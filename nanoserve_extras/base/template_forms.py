"""A conversation through a chat template, in the form that the template expects.

A template is a program with rules, and conversations break them:

    content      "Hi"       [{"type": "text", "text": "Hi"}]       a text, or its parts
                            [..., {"type": "image"}]               with images: parts alone
    roles        "developer"             "system"                  its older name
                 some, anywhere          one, in front             texts of systems are joined
                 user, user              user                      turns alternate
                 system, user            user                      no system is known
    arguments    {"city": "Paris"}       '{"city": "Paris"}'       an object, or JSON as text
    a call       thought, text, call     thought, call             the text joins the thought
                 call, call, results     call, result, call, ...   one in a message
    a tool       no description          ""                        all entries are there

So the conversation is rendered in the form that most templates read, and the prompt is examined: is
each message's text in it, and no Python object? If not, the next form is tried. vLLM reads the
template's source instead, to find out whether it loops over parts; here only the output counts.

Invariant: no message is dropped silently. A message whose text is in the prompt of no form is an
error. The template may change a text on purpose (trim it, for example), so if a text is not found,
the conversation is rendered once more with marks in the place of texts and names of calls. Two
things may be dropped, with a warning: a text beside a call, and calls that no form writes, because
clients send their history to models without tools, too, and the template decides what such a model
sees.
"""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, count, product

from nanoserve_extras.base.messages import EMPTY, Taken, tidy
from nanoserve_extras.base.words import words_of

FILLED = dict(description="", parameters=dict(type="object", properties={}))


def render_messages(conversation: list[dict], render: Callable[..., str],
                    tools: list | None = None) -> str:
    """Render a conversation in the first form that works. render: takes messages, and `tools=` if
    there are any, and returns the prompt. Raises `ValueError` for a malformed message, or one that
    the template refuses or drops."""
    messages = [tidy(message, f"messages.{i}") for i, message in enumerate(conversation)]
    problem = without_calls = ""
    for chat, forms in _ways(messages, render, tools):
        for form in forms:
            try:
                prompt = form.render(chat)
            except Exception as error:  # a template is a program of its own
                problem = problem or (
                    f"the chat template refuses this conversation: {words_of(error)}")
                continue
            found = _examine(chat, prompt, form)
            if found.dropped:
                problem = problem or (
                    f"the chat template does not write this message: {str(found.dropped[0])[:80]}: "
                    "put it into a message of the user's, or choose another template")
            elif found.has_all_calls and not found.has_python:
                if found.dropped_beside_calls:
                    _warn("the chat template writes no text beside a call")
                return prompt
            elif not found.has_python:
                without_calls = without_calls or prompt
        if without_calls:
            _warn("the chat template does not write all calls")
            return without_calls
    raise ValueError(problem or "the chat template writes calls or parts as Python does, and not "
                     "as JSON or text: choose another template")


def _warn(what: str) -> None:
    """Warn. Python shows an equal warning once, although agents send their history each turn."""
    warnings.warn(f"{what}: the conversation goes on without", stacklevel=3)


# ---------------------------------------------------------------------- forms


@dataclass
class Form:
    """One of the forms in which a conversation is handed to a template."""

    template: Callable[..., str]
    in_parts: bool  # contents are lists of parts, and not texts
    rearrange: Callable[[list[dict]], list[dict]] = list  # changes messages with calls
    arguments_as_text: bool = False

    def render(self, chat: list[dict]) -> str:
        return self.template([self._message(one) for one in self.rearrange(chat)])

    def _message(self, message: dict) -> dict:
        content, thought = message["content"], message.get("reasoning_content")
        if not self.in_parts and not any(isinstance(part, Taken) for part in content):
            content = "\n".join(part["text"] for part in content)
        if thought is not None:  # templates look for it under one of these names
            message = message | {"thinking": thought, "reasoning": thought}
        return _with(message, self._function, content=content)

    def _function(self, function: dict) -> dict:
        given = function["arguments"]
        return {"arguments": given.text if self.arguments_as_text else given}


def _ways(messages: list[dict], render: Callable[..., str],
          tools: list | None) -> Iterator[tuple[list[dict], list[Form]]]:
    """Conversations, each with the forms that its calls may have. The one nearest to the
    conversation that was sent comes first."""
    chats = _with_other_roles(messages)
    for shown, in_parts, chat in product(_shown_tools(tools), (False, True), chats):
        template = partial(render, tools=shown) if shown else render
        forms = [Form(template, in_parts)]
        if any("tool_calls" in one for one in messages):
            forms += [Form(template, in_parts, arguments_as_text=True),
                      Form(template, in_parts, _with_thoughts)]
        if any(one["role"] == "tool" for one in messages):
            forms += [Form(template, in_parts, _one_by_one)]
        yield chat, forms


def _with_other_roles(messages: list[dict]) -> list[list[dict]]:
    """The conversation as it is, and in the roles that older or stricter templates know."""
    older = [one | {"role": "system"} if one["role"] == "developer" else one for one in messages]
    systems = [part for one in older if one["role"] == "system" for part in one["content"]]
    others = [one for one in older if one["role"] != "system"]
    in_front = [{"role": "system", "content": systems}] * bool(systems) + others
    of_users = [one | {"role": "user"} if one["role"] == "system" else one for one in in_front]
    chats = [messages, older, in_front, _alternating(in_front), _alternating(of_users)]
    return [chat for i, chat in enumerate(chats) if chat not in chats[:i]]


def _alternating(chat: list[dict]) -> list[dict]:
    """Join neighbours of the same role to one message. Results stay apart, and so do calls: a text
    that joined a call's message might be dropped."""
    found: list[dict] = []
    for one in chat:
        last = found[-1] if found else {}
        if last.get("role") == one["role"] != "tool" and "tool_calls" not in last | one:
            found[-1] = last | one | {"content": last["content"] + one["content"]}
        else:
            found.append(one)
    return found


def _with_thoughts(chat: list[dict]) -> list[dict]:
    """Move a text between a thought and a call to the thought."""
    found = []
    for one in chat:
        if "tool_calls" in one and isinstance(one.get("reasoning_content"), str):
            thought = "\n".join([one["reasoning_content"], *_texts(one)])
            one = one | {"content": EMPTY, "reasoning_content": thought}
        found.append(one)
    return found


def _one_by_one(chat: list[dict]) -> list[dict]:
    """Make each call a message of its own, followed by its result."""
    found: list[dict] = []
    for one in _with_thoughts(chat):
        first, *others = one.get("tool_calls", []) or [None]
        apart = [one if first is None else one | {"tool_calls": [first]}]
        apart += [{"role": one["role"], "content": EMPTY, "tool_calls": [call]} for call in others]
        at = _behind_its_call(found, one) if one["role"] == "tool" else len(found)
        found[at:at] = apart
    return found


def _behind_its_call(chat: list[dict], result: dict) -> int:
    """The index behind the last call with the result's id (ids may be used again), or the end of
    the chat if there is none."""
    for at in range(len(chat), 0, -1):
        ids = [call.get("id") for call in chat[at - 1].get("tool_calls", ())]
        if result.get("tool_call_id") in ids:
            return at
    return len(chat)


def _shown_tools(tools: list | None) -> list[list]:
    """The tools as they were sent, and with all entries that a template may ask for."""
    as_sent, filled = ([_tool(one, defaults) for one in tools or ()] for defaults in ({}, FILLED))
    return [as_sent] if as_sent == filled else [as_sent, filled]


def _tool(tool: object, defaults: dict) -> object:
    if not isinstance(tool, dict) or not isinstance(function := tool.get("function"), dict):
        return tool
    kept = {key: value for key, value in function.items() if value not in (None, {})}
    return tool | {"function": defaults | kept}


# ---------------------------------------------------------------------- the prompt


@dataclass
class Found:
    """Which parts of the conversation are in the prompt."""

    dropped: list[dict]  # messages whose texts are not written
    dropped_beside_calls: list[dict]  # the same, of messages with calls
    has_all_calls: bool
    has_python: bool  # something is written as Python shows it


def _examine(chat: list[dict], prompt: str, form: Form) -> Found:
    if _has_texts_in_order(chat, prompt) and not _has_python(chat, prompt):
        return Found([], [], True, False)
    marked = [_marked(message, f"{i}mark") for i, message in enumerate(chat)]
    try:
        prompt = form.render(marked)
    except Exception:  # the template reads the texts: then the first prompt counts
        marked = chat
    lost = [message for message, one in zip(chat, marked, strict=True)
            if not all(text in prompt for text in _texts(one))]
    names = [call["function"]["name"] for one in marked for call in one.get("tool_calls", ())]
    return Found([one for one in lost if "tool_calls" not in one],
                 [one for one in lost if "tool_calls" in one],
                 all(name in prompt for name in names), _has_python(marked, prompt))


def _has_texts_in_order(chat: list[dict], prompt: str) -> bool:
    """Whether all texts are in the prompt, in order. This is proof enough only for a chat of the
    usual roles. (Of other roles a template might drop a text, and a short text might be in the
    prompt by chance.) Each text is searched behind the one before it, so a long chat is read once.
    """
    if not all(one["role"] in ("user", "assistant") and "tool_calls" not in one for one in chat):
        return False
    at = 0
    for text in chain(*map(_texts, chat)):
        at = prompt.find(text, at)
        if at < 0:
            return False
        at += len(text)
    return True


def _texts(message: dict) -> list[str]:
    return [part["text"].strip() for part in message["content"] if "text" in part]


def _marked(message: dict, mark: str) -> dict:
    """The message with other texts and thoughts, and with calls of other names."""
    number, content = count(), []
    for i, part in enumerate(message["content"]):
        has_text = part.get("text", "").strip()
        content.append(part | {"text": f"mark{i}of{mark}"} if has_text else part)
    if "reasoning_content" in message:
        message = message | {"reasoning_content": f"thought{mark}"}
    return _with(message, lambda _: {"name": f"call{next(number)}of{mark}"}, content=content)


def _with(message: dict, change: Callable[[dict], dict], **changed) -> dict:
    """The message with changed entries, and with `change` applied to each call's function."""
    if "tool_calls" in message:
        changed["tool_calls"] = [call | {"function": call["function"] | change(call["function"])}
                                 for call in message["tool_calls"]]
    return message | changed


def _has_python(chat: list[dict], prompt: str) -> bool:
    for message in chat:
        given = [call["function"]["arguments"] for call in message.get("tool_calls", ())]
        if any(one and str(one) in prompt for one in (message["content"], *given)):
            return True
    return False
