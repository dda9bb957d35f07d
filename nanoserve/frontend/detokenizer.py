"""Tokens to text while they arrive: no half characters, no half stop strings.

Two things make this harder than decoding token by token. One character may need several tokens (an
emoji is four bytes, and a token may hold two of them), and a token's text may depend on the token
before it (a leading space, for many tokenizers). So a small window is decoded twice, without
and with the new tokens; the difference is the new text, and while it ends in U+FFFD, the mark of an
unfinished character, it is kept back. (The method is that of Hugging Face's
text-generation-inference and of vLLM's first detokenizer.)

    tokens      "Once"  " upon"  "\\xf0\\x9f"   "\\x98\\x80"  " !"
    decoded      Once    upon     \ufffd        😀          !
    emitted      Once    upon     (nothing)    😀          !

Stop strings are looked for in the text, because they need not coincide with tokens. Text that might
be the beginning of one is held back until it is clear: a stream never shows what the final text
does not contain.

A decoder with byte tokens (SentencePiece's, as of Llama 2 and Gemma) decodes a run of them as a
whole: one byte that begins a new character spoils the characters before it, which were emitted
already. There the new tokens are decoded by themselves.

Invariants: the texts that were emitted, joined, are the final text; and the final text does not
depend on whether it was read before the end.

Not known here: where the tokens come from, and what ends a request otherwise.
"""

from nanoserve.checkpoint.tokenizers import Tokenizer
from nanoserve.config import RequestOutputKind, SamplingParams

CONTEXT = 5  # prompt tokens in front of the first window: enough for a character or a leading space


class Detokenizer:
    """Text of one sequence's output: `add` tokens as they come, then `flush` at the end.

    tokenizer: anything with `decode(ids, skip_special_tokens=...)`.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt_token_ids: list[int]):
        self.tokenizer = tokenizer
        self.params = params
        self.text = ""  # everything decoded so far, up to a stop string
        self.ids = self._context(prompt_token_ids)
        self.num_context = len(self.ids)
        self.window = 0  # decoding starts here ...
        self.read = len(self.ids)  # ... and text up to here has been emitted
        self.stop_string: str | None = None

    def add(self, token_ids: list[int]) -> str | None:
        """Take new tokens; returns the stop string that the text now contains, if any.

        Where no caller looks at the text before the end, `flush` makes it all at once.
        """
        self.ids += token_ids
        return None if self.is_deferred else self._emit(len(self.ids))

    def flush(self) -> str | None:
        """The output is over: what is still incomplete is emitted as it is. Returns the stop string
        that turns up in it, if one does."""
        if self.stop_string is not None:
            return None
        if self.is_deferred and "\ufffd" in self._decode(self.ids[self.window:]):
            for end in range(self.read + 1, len(self.ids) + 1):  # as if they came one by one
                self._emit(end)
        return self._emit(len(self.ids), at_the_end=True)

    @property
    def is_deferred(self) -> bool:
        """Whether the text is wanted only when it has ended: then it is decoded in one call, which
        gives the same text unless there are broken characters in it."""
        return self.params.output_kind is RequestOutputKind.FINAL_ONLY and not self.params.stop

    def _emit(self, end: int, at_the_end: bool = False) -> str | None:
        """Emit the text of the tokens before `end`, unless it ends in half a character. Returns a
        stop string that the text now contains."""
        before = self._decode(self.ids[self.window:self.read])
        after = self._decode(self.ids[self.window:end])
        if not after.startswith(before):
            # Byte tokens 0A | F0: before is a newline, after is two broken characters. What was
            # emitted stays; F0 by itself is one broken character, and may be the first of four.
            before, after = "", self._decode(self.ids[self.read:end])
        if at_the_end or len(after) > len(before) and not after.endswith("\ufffd"):
            return self._extend(after[len(before):], end)
        return None

    @property
    def visible_text(self) -> str:
        """What may be shown while the output goes on: no text that a stop string might take back.

        Example: with stop "###", "done ##" shows "done " until the next character is known.
        """
        held = 0
        for stop in self.params.stop:
            for n in range(min(len(stop) - 1, len(self.text)), held, -1):
                if self.text.endswith(stop[:n]):
                    held = n
                    break
        return self.text[:len(self.text) - held]

    def _context(self, prompt_token_ids: list[int]) -> list[int]:
        """The end of the prompt, from the beginning of a character: 3 tokens further back at most,
        because a decoder with byte tokens spoils a whole run of them if it begins in the middle.

        A prompt that ends in U+FFFD can't be told from an output that waits for half a character.
        There the last token that reads well takes its place, because a decoder that strips the
        first space must not see the output's.
        """
        for length in range(CONTEXT, CONTEXT + 4):
            ids = prompt_token_ids[-length:]
            if not self._decode(ids).endswith("\ufffd"):
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

    def _extend(self, new_text: str, end: int) -> str | None:
        self.window, self.read = self.read, end
        start = len(self.text)
        self.text += new_text
        if end - self.num_context <= self.params.min_tokens:
            return None  # as in vLLM: a stop string may begin in here, but not end
        # A stop string may begin in older text, at most its length minus one character back.
        found = [(at, stop) for stop in self.params.stop
                 if (at := self.text.find(stop, max(0, start - len(stop) + 1))) >= 0]
        if found:
            at, self.stop_string = min(found)
            end = at + len(self.stop_string) if self.params.include_stop_str_in_output else at
            self.text = self.text[:end]
        return self.stop_string
