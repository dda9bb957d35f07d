"""Tokens to text while they arrive: no half characters, no half stop strings.

Two things make this harder than decoding token by token. One character may need several tokens (an
emoji is four bytes, and a token may hold two of them), and a token's text may depend on the token
before it (a leading space, for many tokenizers). So a small window is decoded twice, without
and with the new tokens. The difference is the new text. While it ends in U+FFFD, which stands for
an unfinished character, it is held back. (The method is that of Hugging Face's
text-generation-inference and of vLLM's first detokenizer.)

    tokens      "Once"  " upon"  "\\xf0\\x9f"   "\\x98\\x80"  " !"
    decoded      Once    upon     \ufffd        😀          !
    emitted      Once    upon     (nothing)    😀          !

Stop strings are searched in the text, because they need not begin or end where a token does. Text
that might be the beginning of a stop string is held back until the next tokens decide: a stream
never shows what the final text does not contain.

Two cases need more. First, a decoder with byte tokens (SentencePiece's, as in Llama 2 and Gemma)
decodes a run of bytes as a whole. While the last character of the run is unfinished, the decoder
gives U+FFFD for all characters of the run, even for those that were emitted already. There the new
tokens are decoded without the window. Second, a model may write invalid bytes, or special tokens
without text, forever. A character has at most four bytes. So after `PATIENCE` tokens without text,
only the last four tokens can still become a character: the others are emitted, and the window stays
short.

Invariants: the emitted texts, joined, are the final text. The final text does not depend on whether
it was read before the end. A token costs the same at any place in a text.
"""

from pathlib import Path
from typing import Any

from nanoserve.config import RequestOutputKind, SamplingParams

PATIENCE = 24  # pending tokens; if there are more, the first ones are emitted as they are
CONTEXT = 5  # prompt tokens before the first output token: enough for a character, a leading space


# ---------------------------------------------------------------------- the tokenizer
# Read by transformers' `AutoTokenizer`, because every family has its own file formats.
# Besides the attributes eos_token_id and chat_template, the engine uses only encode(text,
# add_special_tokens=), decode(token_ids, skip_special_tokens=) and apply_chat_template(messages).
Tokenizer = Any


def load_tokenizer(folder: Path, *, optional: bool = False,
                   trust_remote_code: bool = False) -> Tokenizer | None:
    """The tokenizer in a folder.

    optional: return None if there are no tokenizer files, as with random weights. Raises
    `ValueError` for a tokenizer that can't be loaded, or is empty: if files are missing,
    transformers makes an empty one, which would encode every text to nothing.
    """
    if optional and not any((*folder.glob("*token*"), *folder.glob("tekken.json"))):
        return None
    from transformers import AutoTokenizer  # here: a slow import, for engines with a tokenizer only
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        if len(tokenizer) < 2:
            raise ValueError("it is empty: its files are missing")
        return tokenizer
    except Exception as error:  # transformers raises whatever its parsers raise
        raise ValueError(f"{folder}: the tokenizer can't be loaded ({error}): name another with "
                         "tokenizer=, or use skip_tokenizer_init=True and token ids") from error


# ---------------------------------------------------------------------- stop strings


class StopStrings:
    """Finds the stop strings of a request in its text, which grows from call to call.

    first, last: where the part of the text begins and ends in which stop strings count. Here it is
    the whole text; a subclass may exclude thoughts.
    """

    first: int = 0
    last: int | None = None

    def __init__(self, params: SamplingParams):
        self.starts = dict.fromkeys(params.stop, 0)  # where each may begin at the earliest
        self.is_watching = bool(params.stop)  # whether the text must be searched as it grows

    def find(self, text: str, new_text: str, is_complete: bool) -> tuple[int, str | None] | None:
        """Where the text has to be cut, and the stop string that begins there, or None.

        new_text: what was added since the last call. is_complete: no more text will follow.
        """
        found = []
        for stop, start in self.starts.items():
            at = text.find(stop, max(self.first, start), self.last)
            if at >= 0:
                found.append((at, stop))
        return min(found, default=None)

    def go_on(self, text: str) -> None:
        """Note for each stop string where it may begin at the earliest. The text was not cut."""
        last = len(text) if self.last is None else self.last
        for stop, start in self.starts.items():
            next_start = self._next_start(text, stop, max(self.first, start))
            self.starts[stop] = min(next_start, max(start, last))

    def _next_start(self, text: str, stop: str, at: int) -> int:
        """The first place from `at` on where the rest of the text is a beginning of `stop`; the
        text's end if there is none. It never goes back, so all calls together read the text once.
        """
        while 0 <= at < len(text):
            is_short = len(text) - at < len(stop)
            if is_short and stop.startswith(text[at:]):
                return at
            at = text.find(stop[0], at + 1)
        return len(text)

    def length_without(self, text: str) -> int:
        """How many characters no stop string can remove any more.

        Example: with stop "###", "done ##" counts 5 until the next character is known.
        """
        return min(self.starts.values(), default=len(text))


# ---------------------------------------------------------------------- the text


class Detokenizer:
    """Text of one sequence's output: `add` each token as it comes, then `flush` at the end.

    When `is_over` is True, the text was cut, and `stop_string` is the stop string that was found
    (None if a subclass of `StopStrings` cuts for another reason).
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt_token_ids: list[int],
                 stops: StopStrings | None = None):
        self.tokenizer = tokenizer
        self.params = params
        self.stops = StopStrings(params) if stops is None else stops
        self.text = ""  # everything decoded so far, up to a stop string
        self.context = self._context(prompt_token_ids)  # emitted tokens, at which decoding starts
        self.pending: list[int] = []  # tokens after the context, not emitted yet
        self.num_emitted = 0  # tokens of the output whose text was emitted
        self.is_over = False
        self.stop_string: str | None = None

    @property
    def is_deferred(self) -> bool:
        """Whether nothing reads the text before it has ended. Then it is decoded in one call, which
        gives the same text unless it contains broken characters."""
        return (self.params.output_kind is RequestOutputKind.FINAL_ONLY
                and not self.stops.is_watching)

    def add(self, token_id: int) -> None:
        """Take the next token. A deferred text is made by `flush`, all at once."""
        self.pending.append(token_id)
        if not self.is_deferred:
            self._emit()

    def flush(self) -> None:
        """The output has ended: emit the pending tokens, even half a character."""
        if self.is_over:
            return
        if self.is_deferred and "\ufffd" in self._decode(self.context + self.pending):
            token_ids, self.pending = self.pending, []
            for token_id in token_ids:  # one by one, as if the text were watched
                self.pending.append(token_id)
                self._emit()
        self._emit(at_the_end=True)

    @property
    def visible_text(self) -> str:
        """The text that may be shown while the output goes on: no stop string can remove it."""
        return self.text[:self.stops.length_without(self.text)]

    def _context(self, prompt_token_ids: list[int]) -> list[int]:
        """The last `CONTEXT` tokens of the prompt, or up to 3 more, so that they begin with a whole
        character: a decoder with byte tokens gives U+FFFD for a whole run of bytes if the run
        begins in the middle of a character.

        If the prompt itself ends in U+FFFD, it would look like an output with an unfinished
        character. Then the context is the last token that is text by itself. (An empty one would be
        wrong: a decoder that strips the first space of a text would strip the output's.)
        """
        for length in range(CONTEXT, CONTEXT + 4):
            ids = prompt_token_ids[-length:]
            if self._ends_whole(ids):
                return ids
        for token_id in reversed(prompt_token_ids):
            text = self._decode([token_id])
            if text and not text.endswith("\ufffd"):
                return [token_id]
        return []

    def _decode(self, ids: list[int]) -> str:
        # Cleaning up spaces would change text that has been emitted: "don" + " 't" -> "don't".
        return self.tokenizer.decode(ids, skip_special_tokens=self.params.skip_special_tokens,
                                     clean_up_tokenization_spaces=False)

    def _emit(self, at_the_end: bool = False) -> None:
        """Emit the text of the pending tokens, unless it ends in half a character."""
        context, before = self.context, self._decode(self.context)
        after = self._decode(context + self.pending)
        if not after.startswith(before):
            # Byte tokens: 0A was emitted, F0 is new. `before` is a newline, `after` is two broken
            # characters. So F0 is decoded alone: it may be the first byte of a character.
            context, before, after = [], "", self._decode(self.pending)
        is_whole = len(after) > len(before) and not after.endswith("\ufffd")
        if is_whole or at_the_end:
            self._extend(after[len(before):], len(self.pending), self.pending, at_the_end)
        elif len(self.pending) > PATIENCE:
            self._give_up(context, before, after)

    def _give_up(self, context: list[int], before: str, after: str) -> None:
        """Emit all pending tokens but the last 4 to 7, so that the texts of both parts join.

        Example: of 25 times FF, four stay pending. Of twelve times E4 BD and then E4, five stay,
        because the last four begin with BD, in the middle of a broken character.
        """
        self._leave_out_silent(context, after)
        if len(self.pending) <= 4:
            return
        for num in range(len(self.pending) - 4, len(self.pending) - 8, -1):
            emitted = self._decode(context + self.pending[:num])
            next_context = self._joining_context(context, num, emitted, after)
            if next_context is not None:
                self._extend(emitted[len(before):], num, next_context)
                return
        self._extend(after[len(before):], len(self.pending), self.pending)

    def _leave_out_silent(self, context: list[int], after: str) -> None:
        """Take out pending tokens without any text: 25 of them may stand between the bytes of one
        character."""
        with_text = [token_id for token_id in self.pending if self._decode([token_id])]
        if self._decode(context + with_text) == after:
            self.num_emitted += len(self.pending) - len(with_text)
            self.pending = with_text

    def _joining_context(self, context: list[int], num: int, emitted: str,
                         after: str) -> list[int] | None:
        """The tokens at which to decode the pending ones from `num` on, so that `emitted` and their
        text are `after`: the old context or the emitted tokens. A decoder with byte tokens may need
        the bytes that made a run invalid, so contexts that end in a broken character come first."""
        head, tail = self.pending[:num], self.pending[num:]
        for ids in sorted((context, head), key=self._ends_whole):
            start, whole = self._decode(ids), self._decode(ids + tail)
            if whole.startswith(start) and emitted + whole[len(start):] == after:
                return ids
        return None

    def _ends_whole(self, ids: list[int]) -> bool:
        return not self._decode(ids).endswith("\ufffd")

    def _extend(self, new_text: str, num: int, context: list[int],
                is_complete: bool = False) -> None:
        """Emit the text of the first `num` pending tokens, up to a stop string. The tokens after
        them are decoded after `context`."""
        self.context, self.pending = context, self.pending[num:]
        self.num_emitted += num
        self.text += new_text
        found = self.stops.find(self.text, new_text, is_complete)
        # As in vLLM: a stop string may begin within `min_tokens`, but not end there.
        if found is None or self.num_emitted <= self.params.min_tokens:
            self.stops.go_on(self.text)
            return
        end, self.stop_string = found
        if self.stop_string is not None and self.params.include_stop_str_in_output:
            end += len(self.stop_string)
        self.text, self.is_over = self.text[:end], True
