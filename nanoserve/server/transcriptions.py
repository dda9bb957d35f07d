"""`/v1/audio/transcriptions`: what is said in a WAV file, by a model that hears (docs/vision.md).

The one endpoint whose body is a form, multipart/form-data (RFC 7578):

    --boundary                                                        a head, an empty line,
    Content-Disposition: form-data; name="file"; filename="a.wav"     the value: a file is bytes,
                                                                      all others are texts
    RIFF...
    --boundary--

The sound becomes a prompt of the model's own form, and the answer is a completion's text.

Not known here: sounds (extras/multimodal_inputs.py), the engine. Road not taken: the package
python-multipart, for twenty lines.
"""

from email import message_from_bytes, message_from_string
from typing import Any, Literal

from starlette.responses import PlainTextResponse

from nanoserve.server.errors import BadRequest
from nanoserve.server.protocol import CompletionBody


class TranscriptionBody(CompletionBody):
    """`POST /v1/audio/transcriptions`, a form: what is said in a WAV file."""

    prompts_in = ()
    file: bytes
    prompt: str | None = None  # a hint
    language: str | None = None
    temperature: float = 0.0
    response_format: Literal["json", "text"] = "json"

    def form(self) -> Any:
        return self.structured_outputs

    def prompt_for(self, inputs) -> dict:
        """What the model reads. inputs: the engine's. Raises `BadRequest`."""
        if not hasattr(inputs, "transcription"):
            raise BadRequest("this model does not hear: start one that does with "
                             "--limit-mm-per-prompt '{\"audio\": 1}'", "model")
        if self.stream:
            raise BadRequest("a transcription comes in one piece: leave stream out", "stream")
        return inputs.transcription(self.file, self.language, self.prompt)

    def shown(self, inputs, answer: dict) -> dict | PlainTextResponse:
        text = answer["choices"][0]["text"]
        text = getattr(inputs.processor, "extract_transcription", str)(text)
        return dict(text=text) if self.response_format == "json" else PlainTextResponse(text)


def form_fields(kind: str, body: bytes) -> dict[str, bytes | str]:
    """The fields of a form, of which files are bytes. kind: the request's Content-Type. Raises
    `BadRequest`. The standard library reads the heads alone: its parser goes into parts of parts,
    and takes a square of time for them."""
    whole, found = message_from_string(f"Content-Type: {kind}"), {}
    boundary = whole.get_boundary("").encode(errors="replace")
    if whole.get_content_type() != "multipart/form-data" or not boundary:
        raise BadRequest(f"the body was not read, because its Content-Type is {kind:.80}: send a "
                         "form, multipart/form-data", None, 415)
    for part in (b"\r\n" + body).split(b"\r\n--" + boundary)[1:-1]:
        head, _, data = part.partition(b"\r\n\r\n")
        told = message_from_bytes(head.strip())
        name = str(told.get_param("name", header="content-disposition"))
        found[name] = data if told.get_filename() else data.decode(errors="replace")
    return found
