"""A conversation through a chat template, in the form that the template expects.

Clients send one thing in several forms, and a template reads only one of them:

    content       "Hi"      [{"type": "text", "text": "Hi"}]        a text, or its parts
                            [..., {"type": "image"}]                with images: parts alone
    arguments     {"city": "Paris"}      '{"city": "Paris"}'        an object, or JSON as text
    role          "developer"              "system"                 its older name

So the conversation is rendered in the form that most templates read, and the prompt is looked at:
is each message's text in it, and no Python object? If not, the next form is tried.

Invariants: what is empty, null and an absent key are one thing, and a template sees none of them
(in the place of a content that is not there it sees ""). And no message is dropped without a word:
one whose text no form brings into the prompt is an error. A text that isn't found may have been
changed on purpose, trimmed say, so the conversation is rendered once more with marks for texts and
for the names of calls. Calls that no form writes are passed over: clients send their history to
models without tools, too, and the template says what such a model is to see.

The template's source is not read, as vLLM does to find out whether it loops over parts; what it
does is what counts.
"""

import json
from collections.abc import Callable
from itertools import chain, product


class Taken(dict):
    """The part of a message that an image was taken out of: {"type": "image"}."""


def render_messages(conversation: list[dict], render: Callable[[list[dict]], str]) -> str:
    """Raises `ValueError` for a message that is none, or that the template refuses or drops."""
    messages, why = [_tidy(message, f"messages.{i}") for i, message in enumerate(conversation)], ""
    without_calls = ""
    has_developer = any(message["role"] == "developer" for message in messages)
    has_calls = any("tool_calls" in message for message in messages)
    for form in product((False, True), (False, True)[:1 + has_developer],
                        (False, True)[:1 + has_calls]):
        given = [_in_form(message, *form) for message in messages]
        objects = [message["content"] for message in given] + [
            call.get("function", call)["arguments"] for message in given
            for call in message.get("tool_calls", ())]
        try:
            prompt = render(given)
        except Exception as error:  # a template is a program of its own
            why = why or f"the chat template refuses this conversation: {error}"
            continue
        dropped, has_all_calls = _find_dropped(given, prompt, render)
        if dropped:
            why = why or (f"the chat template does not write this message: {str(dropped)[:80]}: put"
                          " it into a message of the user's, or choose another template")
        elif not any(one and not isinstance(one, str) and str(one) in prompt for one in objects):
            if has_all_calls:
                return prompt
            without_calls = without_calls or prompt
    if without_calls:
        return without_calls
    raise ValueError(why or "the chat template writes calls or parts as Python does, and not as "
                     "JSON or text: choose another template")


def _find_dropped(messages: list[dict], prompt: str,
                  render: Callable) -> tuple[dict | None, bool]:
    """The first message whose texts are not written, and whether all calls are. A short text may be
    in the prompt by chance, so that is proof enough only if all are of the usual roles, and there
    in order."""
    texts = [_texts(message["content"]) for message in messages]
    at = 0  # each text is looked for behind the one before it: a long chat is read once
    if all(message["role"] in ("user", "assistant") and "tool_calls" not in message
           for message in messages):
        for text in chain(*texts):
            at = prompt.find(text, at)
            if at < 0:
                break
            at += len(text)
        else:
            return None, True
    marks = [[text and f"mark{i}mark{j}mark" for j, text in enumerate(own)]
             for i, own in enumerate(texts)]
    names = [f"call{i}mark" if "tool_calls" in one else "" for i, one in enumerate(messages)]
    try:
        prompt = render([_marked(*one) for one in zip(messages, marks, names, strict=True)])
    except Exception:  # the template looks into the text: then that counts
        marks, names = texts, [""] * len(texts)
    dropped = (message for message, own in zip(messages, marks, strict=True)
               if not all(part in prompt for part in own))
    return next(dropped, None), all(name in prompt for name in names)


def _texts(content: str | list) -> list[str]:
    parts = [content] if isinstance(content, str) else [
        part["text"] for part in content if "text" in part]
    return [text.strip() for text in parts]


def _marked(message: dict, texts: list[str], name: str) -> dict:
    """The message with other texts, and with calls of another name."""
    content, turn = message["content"], iter(texts)
    marked = message | {"content": next(turn) if isinstance(content, str) else [
        part | {"text": next(turn)} if "text" in part else part for part in content]}
    if calls := message.get("tool_calls"):
        marked["tool_calls"] = [_with(call, name=name) for call in calls]
    return marked


def _tidy(message: dict, where: str) -> dict:
    """One form for all that means the same. where: what an error calls the message."""
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ValueError(f"{where}: a message needs a 'role' such as 'system', 'user' or "
                         f"'assistant', got role={role!r} in {str(message)[:80]}")
    kept = {key: value for key, value in message.items() if value not in (None, "", [], {})}
    if function := kept.pop("function_call", None):  # the older form of one call
        kept.setdefault("tool_calls", [{"type": "function", "function": function}])
    if thought := kept.pop("reasoning", None):  # vLLM's name
        kept.setdefault("reasoning_content", thought)
    content = kept.pop("content", None)
    if content is None and (role == "assistant" or message.get("content") in ("", [])):
        content = kept.pop("refusal", "")
    if not isinstance(content, (str, list)):
        raise _strange(where, content)
    for i, part in enumerate(content if isinstance(content, list) else ()):
        if not isinstance(part, Taken) and not (isinstance(part, dict) and part.get(
                "type") == "text" and isinstance(part.get("text"), str)):
            raise _strange(f"{where}.content.{i}", part)
    if isinstance(content, list) and not any(isinstance(part, Taken) for part in content):
        content = "\n".join(part["text"] for part in content)
    return kept | {"role": role, "content": content}


def _strange(where: str, content: object) -> ValueError:
    return ValueError(f"{where}: a message's content must be text, or parts with text, and images "
                      f"where the model was started for them (docs/vision.md), got {content!r:.80}")


def _in_form(message: dict, in_parts: bool, older: bool, as_text: bool) -> dict:
    form = dict(message)
    if in_parts and isinstance(message["content"], str):
        form["content"] = [{"type": "text", "text": message["content"]}] * bool(message["content"])
    if older and message["role"] == "developer":
        form["role"] = "system"
    if calls := message.get("tool_calls"):
        form["tool_calls"] = [_call(one, as_text) for one in (
            calls if isinstance(calls, list) else [calls])]
    return form


def _call(call: dict, as_text: bool) -> dict:
    """A call whose arguments are an object, or a text of JSON. Raises `ValueError`."""
    function = call.get("function", call) if isinstance(call, dict) else None
    given = (function.get("arguments") or {}) if isinstance(function, dict) else None
    try:
        arguments = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict) or not isinstance(function.get("name"), str):
        raise ValueError("a message's tool_calls must be a list of functions, each with a name and "
                         f"arguments that are a JSON object, got {function or call!r:.80}")
    if as_text:
        arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    return _with(call, arguments=arguments)


def _with(call: dict, **changed) -> dict:
    """The call, whose function is changed so."""
    function = call.get("function", call) | changed
    return call | {"function": function} if "function" in call else function
