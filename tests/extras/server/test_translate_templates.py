"""What three coding agents send in five turns, through the templates of real models.

Oracle: the texts and names that were sent, each found in the prompt. The templates are those that
TRL brings (pip install trl). Rules of theirs, in our words, are in test_messages.py of the base.
"""

import warnings
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

pytest.importorskip("fastapi")

from nanoserve_extras.base.template_forms import render_messages  # noqa: E402
from nanoserve_extras.server.protocol import ChatBody  # noqa: E402
from nanoserve_extras.server.tool_format import derive  # noqa: E402
from nanoserve_extras.server.translate import ResponsesBody  # noqa: E402
from nanoserve_extras.server.translate_messages import MessagesBody  # noqa: E402

FOLDER = Path(find_spec("trl").origin).parent / "chat_templates" if find_spec("trl") else Path("-")
FILES = {file.stem: file for file in sorted(FOLDER.glob("*.jinja"))
         if not file.stem.endswith("_training")}
SCHEMA = {"type": "object", "required": ["path"], "additionalProperties": False, "properties": {
    "path": {"type": "string", "description": "Where it is."}, "kind": {"enum": ["a", "b"]},
    "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]}, "any": {},
    "edits": {"type": "array", "items": {"type": "object", "properties": {
        "old": {"type": ["string", "null"]}}}}}}
NO_CALLS = {  # they write no calls, so the server refuses tools; and those that take no results
    "deepseek_r1_distill", "idefics3", "lfm2", "llama3", "qwen2_5_vl", "smolvlm"}
NO_RESULTS = {"cohere", "cohere2", "gemma", "gemma3", "llava_next", "phi3", "phi3_5"}
BESIDE = {"deepseekv3", "gptoss", "llama3_1", "llama3_2", "muse_glimmer"}  # calls without a text


def block(kind: str, text: str, **more) -> dict:
    return {"type": kind, kind: text} | more


def claude_code() -> list[MessagesBody]:
    """System messages in the middle, several results and a text in one turn, errors, documents."""
    def call(number: int, name: str = "Read", **arguments) -> dict:
        return dict(type="tool_use", id=f"toolu_{number:04}", name=name, input=arguments)

    def result(number: int, content: object, **more) -> dict:
        return dict(type="tool_result", tool_use_id=f"toolu_{number:04}", content=content) | more

    document = dict(type="document", source=dict(
        type="text", media_type="text/plain", data="Text of C"))
    turns = [
        ("user", [block("text", "Text of a reminder"), block("text", "Text of a question")]),
        ("system", "Text of the system, late"),
        ("assistant", [block("thinking", "Hm, two files.", signature="x"),
                       block("text", "Beside the first"), call(1, path="a.py")]),
        ("user", [result(1, [block("text", "Text of A")])]),
        ("assistant", [call(2, path="b.py"), call(3, "Now")]),
        ("user", [result(2, "Text of B", is_error=True), result(3, []),
                  block("text", "Text to go on")]),
        ("assistant", [block("text", "Text at the end")]),
        ("user", [block("text", "Text of a second question")]),
        ("system", "Text of the system, later"),
        ("assistant", [block("text", "Beside the last"), call(4, path="c.py")]),
        ("user", [result(4, [document])])]
    tools = [dict(name="Read", description="Reads a file.", input_schema=SCHEMA),
             dict(name="Now", input_schema=dict(type="object")),
             dict(name="Bash", description="", input_schema=dict(type="object", properties={}))]
    return [MessagesBody(
        max_tokens=9, tools=tools, system=[block("text", "Text of the system")],
        messages=[dict(role=role, content=content) for role, content in turns[:end]])
        for end in (2, 4, 6, 9, 11)]


def codex() -> list[ResponsesBody]:
    """Instructions and developers, several messages of a user's, calls that a limit has cut."""
    def said(role: str, text: str) -> dict:
        kind = "output_text" if role == "assistant" else "input_text"
        return dict(type="message", role=role, content=[dict(type=kind, text=text)])

    def call(number: int, arguments: str, name: str = "shell") -> dict:
        return dict(type="function_call", call_id=f"call_{number}", name=name, arguments=arguments)

    def result(number: int, output: object) -> dict:
        return dict(type="function_call_output", call_id=f"call_{number}", output=output)

    turns = [
        [said("developer", "Text of a developer"), said("user", "Text of the folder"),
         said("user", "Text of a question")],
        [dict(type="reasoning", summary=[], content=[block("text", "Hm.")]),
         said("assistant", "Beside the first"), call(1, '{"path":"a"}'), result(1, "Text of A")],
        [call(2, '{"path": '), result(2, "Text of a refusal")],
        [call(3, '{"path": "c"}'), call(4, "{}", "plan"), result(3, "Text of C"), result(4, None)],
        [said("assistant", "Text at the end"), said("developer", "Text of a developer, late"),
         said("user", "Text of thanks")]]
    tools = [dict(type="function", name="shell", description="Runs.", strict=False,
                  parameters=SCHEMA), dict(type="function", name="plan", parameters={})]
    return [ResponsesBody(instructions="Text of instructions", tools=tools,
                          input=sum(turns[:end], [])) for end in range(1, 6)]


def opencode() -> list[ChatBody]:
    """Two system messages, contents of every kind, tools without a description."""
    def call(number: int, arguments: str, name: str = "read") -> dict:
        return dict(id=f"call_{number}", type="function", function=dict(
            name=name, arguments=arguments))

    def result(number: int, content: object) -> dict:
        return dict(role="tool", tool_call_id=f"call_{number}", content=content)

    turns = [
        [dict(role="system", content="Text of the system"),
         dict(role="system", content="Text of the folder"),
         dict(role="user", content=[block("text", "Text of a question")])],
        [dict(role="assistant", content="", reasoning_content="Hm.", tool_calls=[
            call(1, '{"path": "a"}')]), result(1, "Text of A")],
        [dict(role="assistant", content="Beside two", tool_calls=[
            call(2, '{"path": "b"}'), call(3, "", "todo")]), result(2, "Text of B"),
         result(3, None)],
        [dict(role="assistant", content="Text at the end"),
         dict(role="user", content="Text of a second question")],
        [dict(role="assistant", content=None, tool_calls=[call(4, "no json")]), result(4, 12345)]]
    tools = [dict(type="function", function=dict(
        name="read", description="Reads.", parameters=SCHEMA)),
        dict(type="function", function=dict(name="todo"))]
    return [ChatBody(messages=sum(turns[:end], []), tools=tools) for end in range(1, 6)]


AGENTS = {"Claude Code": claude_code, "Codex": codex, "opencode": opencode}


def texts(value: object) -> set[str]:
    """All that begin with "Text", and numbers."""
    if isinstance(value, dict | list):
        return set().union(*map(texts, value.values() if isinstance(value, dict) else value))
    return {str(value)} if str(value).startswith("Text ") or value == 12345 else set()


@pytest.mark.full
@pytest.mark.skipif(not FILES, reason="trl is not installed")
@pytest.mark.parametrize("agent", AGENTS)
@pytest.mark.parametrize("name", FILES or ["none"])
def test_five_turns_of_an_agent_go_through_a_models_template(name, agent):
    def once(messages: list[dict], **options) -> str:
        return render_jinja_template([messages], chat_template=FILES[name].read_text(),
                                     bos_token="<s>", eos_token="</s>", **options)[0][0]

    form = derive(lambda messages, **options: render_messages(messages, partial(once, **options)),
                  ["<|im_end|>"])
    assert bool(form.why) == (name in NO_CALLS | NO_RESULTS)
    for number, body in enumerate(AGENTS[agent]()):
        body = body if isinstance(body, ChatBody) else ChatBody.model_validate(body.chat())
        options = body.template_options()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            if number and name in NO_RESULTS:
                with pytest.raises(ValueError, match="the chat template "):
                    render_messages(body.messages, partial(once, **options), options["tools"])
                continue
            prompt = render_messages(body.messages, partial(once, **options), options["tools"])
        missing = {text for text in texts(body.messages) if text not in prompt}
        assert not missing
        calls = [call["function"] for one in body.messages for call in one.get("tool_calls", ())]
        lost = {one["name"] for one in calls if one["name"] not in prompt}
        assert not lost or name in NO_CALLS
        if "Beside" in str(body.messages) and name in BESIDE:
            assert "Beside" in prompt or "no text beside a call" in str([
                one.message for one in said])
        elif name not in NO_CALLS:
            assert "Beside" not in str(body.messages) or "Beside" in prompt
