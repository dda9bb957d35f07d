"""Messages as clients send them, brought into one form.

    role        "user", "assistant", "system", "developer", "tool", or a template's own
    content     a list of {"type": "text", "text": ...}, and of places of images
    tool_calls  {"type": "function", "function": {"name": ..., "arguments": an object}}
    reasoning_content            a thought

Clients write a content as a text or in parts of several kinds, a call as `function_call` or
`custom`, its arguments as an object or as JSON, a thought as `reasoning` or as a part.

Invariant: an empty value, null and an absent key mean the same, and a template sees none of them
(for a missing content it sees ""). Arguments that are no JSON object are dropped, with a warning: a
limit may have cut them, or the model may have written them so.

template_forms.py finds the form in which a template wants them.
"""

import json
import warnings

IMAGES = ("image", "image_url", "input_image", "image_pil")  # a part's types
TEXT_OF = dict(text="text", input_text="text", output_text="text", summary_text="text",
               refusal="refusal", thinking="thinking")  # where a part of each kind has its text
EMPTY = [{"type": "text", "text": ""}]


class MediaError(ValueError):
    """An image or a sound that this engine can't take, with the options it was started with."""


class Taken(dict):
    """The part of a message whose image was taken out: {"type": "image"}."""


class Arguments(dict):
    """The arguments of a call. text: the JSON that was sent."""

    text: str


def tidy(message: dict, where: str) -> dict:
    """The message in the form above. where: its name in errors. Raises `ValueError`."""
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
    parts = _tidy_content(message, kept, where)
    if thought := "\n".join(part["thinking"] for part in parts if "thinking" in part):
        kept.setdefault("reasoning_content", thought)
    content = [part for part in parts if "thinking" not in part]
    return kept | {"role": role, "content": content or EMPTY}


def _tidy_content(message: dict, kept: dict, where: str) -> list[dict]:
    """Remove the content from the entries in `kept`, and return its parts."""
    role, content = message["role"], kept.pop("content", None)
    if content is None and (role == "assistant" or message.get("content") in ("", [])):
        content = kept.pop("refusal", "")
    if role == "tool" and not isinstance(content, (str, list)):  # a result may be any value
        content = "" if content is None else json.dumps(content, ensure_ascii=False)
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise _wrong_content(where, content)
    return [_tidy_part(part, f"{where}.content.{i}") for i, part in enumerate(content)]


def _tidy_part(part: object, where: str) -> dict:
    """One part in the form above: the place of an image, a thought, or a text."""
    if isinstance(part, Taken):
        return part
    kind = str(part.get("type")) if isinstance(part, dict) else ""
    text = part.get(TEXT_OF[kind]) if kind in TEXT_OF else None
    if kind == "document":
        text = _text_of_document(part, where)
    if kind == "thinking" and isinstance(text, list):  # Mistral's: a list of texts
        text = "".join(_tidy_part(one, where).get("text", "") for one in text)
    if not isinstance(text, str):
        raise _wrong_content(where, part)
    return {"type": kind, kind: text} if kind == "thinking" else {"type": "text", "text": text}


def _text_of_document(part: dict, where: str) -> str | None:
    """The text of an Anthropic document, after its title. None if its source is no text."""
    source, title = part.get("source"), part.get("title")
    if not isinstance(source, dict):
        return None
    inner = source.get("data" if source.get("type") == "text" else "content")
    if not isinstance(inner, (str, list)):
        return None
    parts = tidy({"role": "user", "content": inner}, where)["content"]
    texts = [title] if isinstance(title, str) else []
    return "\n".join(texts + [one["text"] for one in parts])


def _wrong_content(where: str, content: object) -> ValueError:
    is_image = isinstance(content, dict) and content.get("type") in IMAGES
    return (MediaError if is_image else ValueError)(
        f"{where}: a message's content must be text, or parts with text, and images where the "
        f"model was started for them (docs/extras.md), got {content!r:.80}")


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
    return call | {"function": function | {"arguments": _read_arguments(function)}}


def _read_arguments(function: dict) -> Arguments:
    given = function.get("arguments") or {}
    try:
        read = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        read = None
    if not isinstance(read, dict):
        warnings.warn("the arguments of a call are no JSON object: the conversation goes on "
                      "without", stacklevel=4)
        given = read = {}
    arguments = Arguments(read)
    arguments.text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    return arguments
