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

A model may write bytes that are no UTF-8, or special tokens that are skipped, for ever. A character
has four bytes at most. So where `PATIENCE` tokens brought no text, all but the last four of them
are broken or silent for good: they are emitted, and the window stays short.

Invariants: the texts that were emitted, joined, are the final text; and the final text does not
depend on whether it was read before the end. A token costs the same wherever in a text it stands.
"""

from collections.abc import Callable

from nanoserve.config import RequestOutputKind, SamplingParams
from nanoserve.tokenizers import Tokenizer

PATIENCE = 24  # tokens that are kept back before the first of them are given up
ENDED_BY_SPAN = ""  # in place of a stop string, none of which is empty: see `Detokenizer.span`
CONTEXT = 5  # prompt tokens in front of the first window: enough for a character or a leading space


class Detokenizer:
    """Text of one sequence's output: `add` each token as it comes, then `flush` at the end.

    tokenizer: anything with `decode(ids, skip_special_tokens=...)`. span: a function of what is new
    of the text, and of whether it is complete. It returns in which part of the text stop strings
    hold (first, last), and where a thought, say, ends the text without a stop string, or None.
    Without a span stop strings hold everywhere.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt_token_ids: list[int],
                 span: Callable[[str, bool], tuple[int, int, int | None]] | None = None):
        self.tokenizer = tokenizer
        self.params = params
        self.span = span
        self.text = ""  # everything decoded so far, up to a stop string
        self.context = self._context(prompt_token_ids)  # decoding starts here; it was emitted
        self.pending: list[int] = []  # tokens behind the context: not emitted yet
        self.num_emitted = 0  # tokens of the output whose text was emitted
        self.stop_string: str | None = None  # once the text is over: what has ended it
        self.starts = dict.fromkeys(params.stop, 0)  # where each may begin in the text

    def add(self, token_id: int) -> str | None:
        """Take the next token; returns the stop string that the text now contains, if any.

        Where no caller looks at the text before the end, `flush` makes it all at once.
        """
        self.pending.append(token_id)
        return None if self.is_deferred else self._emit()

    def flush(self) -> str | None:
        """The output is over: what is still incomplete is emitted as it is. Returns the stop string
        that turns up in it, if one does."""
        if self.stop_string is not None:
            return None
        if self.is_deferred and "\ufffd" in self._decode(self.context + self.pending):
            token_ids, self.pending = self.pending, []
            for token_id in token_ids:  # as if they were watched: see `is_deferred`
                self.pending.append(token_id)
                self._emit()
        return self._emit(at_the_end=True)

    @property
    def is_deferred(self) -> bool:
        """Whether the text is wanted only when it has ended: then it is decoded in one call, which
        gives the same text unless there are broken characters in it."""
        is_watched = self.params.stop or self.span
        return self.params.output_kind is RequestOutputKind.FINAL_ONLY and not is_watched

    def _emit(self, at_the_end: bool = False) -> str | None:
        """Emit the text of the pending tokens, unless it ends in half a character. Returns a stop
        string that the text now contains."""
        context, before = self.context, self._decode(self.context)
        after = self._decode(context + self.pending)
        if not after.startswith(before):
            # Byte tokens 0A | F0: before is a newline, after is two broken characters. What was
            # emitted stays; F0 by itself is one broken character, and may be the first of four.
            context, before, after = [], "", self._decode(self.pending)
        if at_the_end or len(after) > len(before) and not after.endswith("\ufffd"):
            return self._extend(after[len(before):], len(self.pending), self.pending, at_the_end)
        return self._give_up(context, before, after) if len(self.pending) > PATIENCE else None

    def _give_up(self, context: list[int], before: str, after: str) -> str | None:
        """Emit all pending tokens but some four: where the text can be cut without a change.

        They leave the window, or become its context: a decoder with byte tokens has to see what has
        spoilt their run. Example: of FF, 25 times, four stay. Of E4 BD, twelve times, and E4 five
        stay, because four would begin with BD, in the middle of a broken character. Tokens without
        any text go first: 25 of them may stand between the bytes of one character.
        """
        loud = [token_id for token_id in self.pending if self._decode([token_id])]
        if len(loud) < len(self.pending) and self._decode(context + loud) == after:
            self.num_emitted += len(self.pending) - len(loud)
            self.pending = loud
            if len(loud) <= 4:
                return None
        for num in range(len(self.pending) - 4, len(self.pending) - 8, -1):
            head, tail = self.pending[:num], self.pending[num:]
            emitted = self._decode(context + head)
            texts = [(self._decode(ids), ids) for ids in (context, head)]
            for start, ids in sorted(texts, key=lambda one: not one[0].endswith("\ufffd")):
                rest = self._decode(ids + tail)
                if rest.startswith(start) and emitted + rest[len(start):] == after:
                    return self._extend(emitted[len(before):], num, ids)
        return self._extend(after[len(before):], len(self.pending), self.pending)

    @property
    def visible_text(self) -> str:
        """What may be shown while the output goes on: no text that a stop string might take back.

        Example: with stop "###", "done ##" shows "done " until the next character is known.
        """
        return self.text[:min(self.starts.values(), default=len(self.text))]

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

    def _extend(self, new_text: str, num: int, context: list[int], ended=False) -> str | None:
        """Emit the text of the first `num` pending tokens; the next ones are decoded behind
        `context`."""
        self.context, self.pending = context, self.pending[num:]
        self.num_emitted += num
        self.text += new_text
        first, last, over = self.span(new_text, ended) if self.span else (0, len(self.text), None)
        found = [(at, stop) for stop, start in self.starts.items()
                 if (at := self.text.find(stop, max(first, start), last)) >= 0]
        if over is not None:
            found.append((over, ENDED_BY_SPAN))
        if found and self.num_emitted > self.params.min_tokens:
            at, self.stop_string = min(found)
            end = at + len(self.stop_string) if self.params.include_stop_str_in_output else at
            self.text = self.text[:end]
        else:  # as in vLLM: a stop string may begin within `min_tokens`, but not end there
            self.starts = {stop: min(self._next_start(stop, max(first, at)), max(at, last))
                           for stop, at in self.starts.items()}
        return self.stop_string

    def _next_start(self, stop: str, at: int) -> int:
        """The first place from `at` on where the text ends with the beginning of `stop`: its end,
        if there is none. It never goes back, so all calls together read the text once."""
        text = self.text
        while 0 <= at < len(text) and not (
                len(text) - at < len(stop) and stop.startswith(text[at:])):
            at = text.find(stop[0], at + 1)
        return at if at >= 0 else len(text)
