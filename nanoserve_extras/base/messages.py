"""A conversation through a chat template, in the form that the template expects.

A template is a program with rules, and clients send what breaks them:

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

So the conversation is rendered in the form that most templates read, and the prompt is looked at:
is each message's text in it, and no Python object? If not, the next form is tried.

Invariants: what is empty, null and an absent key are one thing, and a template sees none of them
(in the place of a content that is not there it sees ""). And no message is dropped without a word:
one whose text no form brings into the prompt is an error. A text that isn't found may have been
changed on purpose, trimmed say, so the conversation is rendered once more with marks for texts and
for the names of calls. What only decorates a call may go, with a warning: a text beside it, and
arguments that are no object. So do calls that no form writes: clients send their history to models
without tools, too, and the template says what such a model is to see.

The template's source is not read, as vLLM does to find out whether it loops over parts; what it
does is what counts.
"""

import json
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, count, product

from nanoserve_extras.base.words import words_of

IMAGES = ("image", "image_url", "input_image", "image_pil")  # a part's types
TEXT_OF = dict(text="text", input_text="text", output_text="text", summary_text="text",
               refusal="refusal", thinking="thinking")  # where a part of each kind has its text
EMPTY = [{"type": "text", "text": ""}]
FILLED = dict(description="", parameters=dict(type="object", properties={}))


class MediaError(ValueError):
    """An image or a sound that this model, as it was started, can't be shown."""


class Taken(dict):
    """The part of a message that an image was taken out of: {"type": "image"}."""


class Arguments(dict):
    """What a call is given. text: the JSON that was sent."""


def render_messages(conversation: list[dict], render: Callable[..., str],
                    tools: list | None = None) -> str:
    """render: messages, and `tools=` if there are any, to a prompt. Raises `ValueError` for a
    message that is none, or that the template refuses or drops."""
    messages = [_tidy(message, f"messages.{i}") for i, message in enumerate(conversation)]
    why = without_calls = ""
    for chat, draws in _forms(messages, render, tools):
        for draw in draws:
            try:
                prompt = draw(chat)
            except Exception as error:  # a template is a program of its own
                why = why or f"the chat template refuses this conversation: {words_of(error)}"
                continue
            lost, has_all_calls, is_python = _look(chat, prompt, draw)
            if dropped := next((one for one in lost if "tool_calls" not in one), None):
                why = why or ("the chat template does not write this message: "
                              f"{str(dropped)[:80]}: put it into a message of the user's, or "
                              "choose another template")
            elif not is_python and has_all_calls:
                if lost:
                    _warn("the chat template writes no text beside a call")
                return prompt
            elif not is_python:
                without_calls = without_calls or prompt
        if without_calls:
            _warn("the chat template does not write all calls")
            return without_calls
    raise ValueError(why or "the chat template writes calls or parts as Python does, and not as "
                     "JSON or text: choose another template")


def _warn(what: str) -> None:
    """Python shows a warning once: an agent sends its history with each turn."""
    warnings.warn(f"{what}: the conversation goes on without", stacklevel=3)


def _forms(messages: list[dict], render: Callable,
           tools: list | None) -> Iterator[tuple[list[dict], list[Callable]]]:
    """Conversations, and what renders each with its calls in different forms. What is nearest to
    what was sent comes first."""
    older = [one | {"role": "system"} if one["role"] == "developer" else one for one in messages]
    systems = [part for one in older if one["role"] == "system" for part in one["content"]]
    in_front = [{"role": "system", "content": systems}] * bool(systems) + [
        one for one in older if one["role"] != "system"]
    of_users = [one | {"role": "user"} if one["role"] == "system" else one for one in in_front]
    chats = [messages, older, in_front, _alternating(in_front), _alternating(of_users)]
    chats = [chat for i, chat in enumerate(chats) if chat not in chats[:i]]
    calls = [(list, False)]
    if any("tool_calls" in one for one in messages):
        calls += [(list, True), (_with_thoughts, False)]
    if any(one["role"] == "tool" for one in messages):
        calls += [(_one_by_one, False)]
    shown = [[_tool(one, defaults) for one in tools or ()] for defaults in ({}, FILLED)]
    for these, in_parts, chat in product(shown[:1 + (shown[0] != shown[1])], (False, True), chats):
        draw = partial(render, tools=these) if these else render
        yield chat, [partial(_draw, draw, in_parts, *form) for form in calls]


def _draw(render: Callable[..., str], in_parts: bool, change: Callable, as_text: bool,
          chat: list[dict]) -> str:
    given = []
    for one in change(chat):
        content, thought = one["content"], one.get("reasoning_content")
        if not in_parts and not any(isinstance(part, Taken) for part in content):
            content = "\n".join(part["text"] for part in content)
        if thought is not None:  # templates look for it under one of these names
            one = one | {"thinking": thought, "reasoning": thought}
        given.append(_with(one, lambda call: dict(arguments=call["arguments"].text if as_text else
                                                  call["arguments"]), content=content))
    return render(given)


def _with(message: dict, change: Callable[[dict], dict], **changed) -> dict:
    """The message with other entries, and with other ones in the function of each call."""
    if "tool_calls" in message:
        changed["tool_calls"] = [call | {"function": call["function"] | change(call["function"])}
                                 for call in message["tool_calls"]]
    return message | changed


def _alternating(chat: list[dict]) -> list[dict]:
    """Neighbours of the same role are one message. Results stay apart, and so do calls: what stood
    in a message of its own does not only decorate one."""
    found: list[dict] = []
    for one in chat:
        last = found[-1] if found else {}
        if last.get("role") == one["role"] != "tool" and "tool_calls" not in last | one:
            found[-1] = last | one | {"content": last["content"] + one["content"]}
        else:
            found.append(one)
    return found


def _with_thoughts(chat: list[dict]) -> list[dict]:
    """A text between a thought and a call belongs to the thought."""
    return [one | {"content": EMPTY, "reasoning_content": "\n".join(
                [one["reasoning_content"], *_texts(one)])}
            if "tool_calls" in one and isinstance(one.get("reasoning_content"), str) else one
            for one in chat]


def _one_by_one(chat: list[dict]) -> list[dict]:
    """Each call is a message, and its result the next one."""
    found: list[dict] = []
    for one in _with_thoughts(chat):
        at, calls = len(found), one.get("tool_calls", [])
        if one["role"] == "tool":  # its call is looked for from the end: some ids come again
            at = next((i for i in range(at, 0, -1) if one.get("tool_call_id") in (
                call.get("id") for call in found[i - 1].get("tool_calls", ()))), at)
        found[at:at] = [one | {"tool_calls": calls[:1]} if calls else one] + [
            {"role": one["role"], "content": EMPTY, "tool_calls": [call]} for call in calls[1:]]
    return found


def _look(chat: list[dict], prompt: str, draw: Callable) -> tuple[list[dict], bool, bool]:
    """The messages whose texts are not written, whether all calls are, and whether anything is
    written as Python does. A short text may be in the prompt by chance, so that is proof enough
    only if all are of the usual roles, and there in order."""
    at = 0  # each text is looked for behind the one before it: a long chat is read once
    if all(one["role"] in ("user", "assistant") and "tool_calls" not in one for one in chat):
        for text in chain(*map(_texts, chat)):
            at = prompt.find(text, at)
            if at < 0:
                break
            at += len(text)
        else:
            if not _has_python(chat, prompt):
                return [], True, False
    marked = [_marked(message, f"{i}mark") for i, message in enumerate(chat)]
    try:
        prompt = draw(marked)
    except Exception:  # the template looks into the text: then that counts
        marked = chat
    lost = [message for message, one in zip(chat, marked, strict=True)
            if not all(text in prompt for text in _texts(one))]
    names = [call["function"]["name"] for one in marked for call in one.get("tool_calls", ())]
    return lost, all(name in prompt for name in names), _has_python(marked, prompt)


def _texts(message: dict) -> list[str]:
    return [part["text"].strip() for part in message["content"] if "text" in part]


def _marked(message: dict, mark: str) -> dict:
    """The message with other texts and thoughts, and with calls of other names."""
    number, thought = count(), {"reasoning_content": f"thought{mark}"}
    return _with(message | (thought if "reasoning_content" in message else {}),
                 lambda call: dict(name=f"call{next(number)}of{mark}"),
                 content=[part | {"text": f"mark{i}of{mark}"} if part.get("text", "").strip() else
                          part for i, part in enumerate(message["content"])])


def _has_python(chat: list[dict], prompt: str) -> bool:
    return any(str(one["content"]) in prompt or any(
        given and str(given) in prompt for call in one.get("tool_calls", ())
        for given in [call["function"]["arguments"]]) for one in chat)


def _tidy(message: dict, where: str) -> dict:
    """One form for all that means the same. where: what an error calls the message."""
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ValueError(f"{where}: a message needs a 'role' such as 'system', 'user' or "
                         f"'assistant', got role={role!r} in {str(message)[:80]}")
    kept = {key: value for key, value in message.items() if value not in (None, "", [], {})}
    if function := kept.pop("function_call", None):  # the older form of one call
        kept.setdefault("tool_calls", [{"type": "function", "function": function}])
    if calls := kept.get("tool_calls"):
        kept["tool_calls"] = [_tidy_call(one) for one in (
            calls if isinstance(calls, list) else [calls])]
    if thought := kept.pop("reasoning", None):  # vLLM's name
        kept.setdefault("reasoning_content", thought)
    content = kept.pop("content", None)
    if content is None and (role == "assistant" or message.get("content") in ("", [])):
        content = kept.pop("refusal", "")
    if role == "tool" and not isinstance(content, (str, list)):  # a result may be any value
        content = "" if content is None else json.dumps(content, ensure_ascii=False)
    if not isinstance(content, (str, list)):
        raise _strange(where, content)
    parts = [_tidy_part(part, f"{where}.content.{i}") for i, part in enumerate(
        content if isinstance(content, list) else [{"type": "text", "text": content}])]
    if thought := "\n".join(part["thinking"] for part in parts if "thinking" in part):
        kept.setdefault("reasoning_content", thought)
    content = [part for part in parts if "thinking" not in part]
    return kept | {"role": role, "content": content or EMPTY}


def _tidy_part(part: object, where: str) -> dict:
    """What was taken out, a thought, or a text, which has several names."""
    if isinstance(part, Taken):
        return part
    kind = str(part.get("type")) if isinstance(part, dict) else ""
    text = part.get(TEXT_OF[kind]) if kind in TEXT_OF else None
    source = part.get("source") if kind == "document" else None  # Anthropic's
    inner = isinstance(source, dict) and source.get(
        "data" if source.get("type") == "text" else "content")
    if isinstance(inner, (str, list)):
        parts = _tidy({"role": "user", "content": inner}, where)["content"]
        title = [part["title"]] if isinstance(part.get("title"), str) else []
        text = "\n".join(title + [one["text"] for one in parts])
    if kind == "thinking" and isinstance(text, list):  # Mistral's: a list of texts
        text = "".join(_tidy_part(one, where).get("text", "") for one in text)
    if not isinstance(text, str):
        raise _strange(where, part)
    return {"type": kind, kind: text} if kind == "thinking" else {"type": "text", "text": text}


def _strange(where: str, content: object) -> ValueError:
    is_image = isinstance(content, dict) and content.get("type") in IMAGES
    return (MediaError if is_image else ValueError)(
        f"{where}: a message's content must be text, or parts with text, and images where the "
        f"model was started for them (docs/vision.md), got {content!r:.80}")


def _tidy_call(call: object) -> dict:
    """Raises `ValueError`."""
    if isinstance(call, dict) and isinstance(own := call.get("custom"), dict):
        call = {"id": call.get("id"), "type": "function", "function": {
            "name": own.get("name"), "arguments": {"input": own.get("input")}}}
    if isinstance(call, dict) and "function" not in call:
        call = {"type": "function", "function": call}
    function = call["function"] if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("a message's tool_calls must be a list of functions, each with a name, "
                         f"got {function or call!r:.80}")
    given = function.get("arguments") or {}
    try:
        arguments = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):  # cut by a limit, or written so by the model
        arguments = None
    if not isinstance(arguments, dict):
        _warn("the arguments of a call are no JSON object")
        given = arguments = {}
    arguments = Arguments(arguments)
    arguments.text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    return call | {"function": function | {"arguments": arguments}}


def _tool(tool: object, defaults: dict) -> object:
    if not isinstance(tool, dict) or not isinstance(function := tool.get("function"), dict):
        return tool
    kept = {key: value for key, value in function.items() if value not in (None, {})}
    return tool | {"function": defaults | kept}
