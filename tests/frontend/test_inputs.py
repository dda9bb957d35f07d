"""A conversation that a chat template would drop in part is refused before it is rendered."""

from types import SimpleNamespace

import pytest

from nanoserve.frontend.inputs import InputProcessor

USER = {"role": "user", "content": "hello"}


class Template:
    """A tokenizer whose template prints what the roles that it knows say, as real ones do."""

    chat_template = "for each message of the user or the assistant: ..."

    def apply_chat_template(self, conversation, tokenize, **options) -> str:
        return "".join(f"<{message['role']}>{message['content']}" for message in conversation
                       if message.get("role") in ("user", "assistant"))

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(text.encode())


@pytest.fixture
def inputs() -> InputProcessor:
    return InputProcessor(SimpleNamespace(), SimpleNamespace(vocab_size=256), Template())


@pytest.mark.parametrize("message", [
    {"content": "secret"}, {"role": None, "content": "secret"}, {"role": "", "content": "secret"},
    {"role": ["user"], "content": "secret"}])
def test_a_message_without_a_role_is_refused_by_name(inputs, message):
    """Templates drop its text in silence."""
    with pytest.raises(ValueError, match="needs a 'role'.*secret"):
        inputs.render_chat([USER, message])
    assert inputs.render_chat([USER])["prompt"] == "<user>hello"
