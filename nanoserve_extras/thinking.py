"""A budget for thinking: after a number of tokens a thought's closing mark is forced.

    <think> so the first two </think> ...      the model's own thought, five tokens long
    <think> so the first </think> ...          thinking_token_budget=3

The marks are those of the chat template that wrote the prompt (server/tool_format.py); a thought
begins in the prompt, or where the model's text begins with the opening mark. At the budget's end
the tokens of the closing mark are forced one after the other, and the model goes on after them.

Invariant: whether a token is forced follows from the tokens before it, drafts included, and not
from the step. So drafts, preemption and other requests change no text.

A grammar has precedence: the mark is forced only where the grammar allows it, as those for tools
and response formats of a chat do. Known limits: the mark may cut a character of several tokens in
two; and a model whose format allows a second thought (gpt-oss) may think again, uncounted.
"""

from collections import ChainMap
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from nanoserve.engine import LLMEngine
from nanoserve.hooks import Extra
from nanoserve.request import Request
from nanoserve.sequence import Sequence, Step
from nanoserve_extras.base.facts import Fact
from nanoserve_extras.base.plan import Plan


@dataclass
class Thought:
    """How far one sequence has got in its thought. marks: the texts in front of and behind it."""

    extra: "ThinkingBudget"
    most: int  # the budget
    marks: tuple[str, str]
    closing: list[int]  # the second mark's tokens
    is_begun: bool
    is_over: bool = False
    num_read: int = 0  # tokens of the sequence
    start: int = 0  # the place of its first token

    def read(self, ids: list[int]) -> "Thought":
        """Look for the marks in the new tokens."""
        while self.num_read < len(ids) and not self.is_over:
            self.num_read += 1
            if self.is_begun:
                self.is_over = self._ends(ids)
                continue
            text = self.extra.tokenizer.decode(ids[self.start:self.num_read]).lstrip()
            if text.startswith(self.marks[0]):
                self.is_begun, self.start = True, self.num_read
            else:  # another beginning: no thought, as a later mark may be part of an argument
                self.is_over = not self.marks[0].startswith(text.rstrip("\ufffd"))
        return self

    def _ends(self, ids: list[int]) -> bool:
        """Whether the last token that was read completes the second mark, which may begin in the
        prompt."""
        end, mark, last = self.num_read, self.marks[1], self.extra.text_of(ids[self.num_read - 1])
        if mark[-1] not in last and "\ufffd" not in last:
            return False
        begin = max(0, end - len(mark.encode()))
        before, now = (self.extra.tokenizer.decode(ids[begin:at]) for at in (end - 1, end))
        return now.count(mark) > before.count(mark)

    def num_over(self, num_tokens: int) -> int:
        """How many tokens of the sequence are beyond the budget; if negative, how many are left."""
        is_on = self.is_begun and not self.is_over
        return num_tokens - self.start - self.most if is_on else -1

    def mask(self, seq: Sequence, drafts: list[int], allowed: np.ndarray, banned: list[int],
             ) -> np.ndarray | None:
        """The mask, as a grammar's (structured/structured.py). None: no token is forced."""
        grammar, ids = self.extra.others.get(seq), [*seq.token_ids, *drafts]
        mask = None if grammar is None else grammar.mask(seq, drafts, allowed, banned)
        here = copy(self).read(ids)
        if here.num_over(len(ids)) < 0:
            return mask
        # How many tokens of the mark are written already, perhaps by the model or in the prompt.
        done = max(n for n in range(len(self.closing)) if ids[len(ids) - n:] == self.closing[:n])
        byte, bit = divmod(self.closing[done], 8)
        if mask is not None and not mask[byte] >> bit & 1:
            return mask
        forced = np.zeros(-(-self.extra.vocab_size // 8), dtype=np.uint8)
        forced[byte] = 1 << bit
        return forced


class ThinkingBudget(Extra):
    """Keeps `SamplingParams.thinking_token_budget`."""

    name = "thinking_token_budget"
    needs = frozenset([Fact.GENERATES])
    takes = ("thinking_token_budget",)

    def __init__(self):
        super().__init__()
        self.thoughts: dict[Sequence, Thought] = {}
        self.due: dict[Sequence, Thought] = {}  # those that may reach their budget in the next step
        self.form_of = lru_cache(maxsize=8)(self._form_of)
        self.text_of = lru_cache(maxsize=2 ** 16)(lambda id_: self.tokenizer.decode([id_]))

    def prepare(self, plan: Plan) -> Plan:
        self.tokenizer, self.vocab_size = plan.tokenizer, plan.model_config.vocab_size
        return replace(plan, parts=replace(
            plan.parts, constraints=plan.parts.constraints.new_child(self.due)))

    def attach(self, engine: LLMEngine) -> None:
        self.others = ChainMap(*(one for one in engine.runner.parts.constraints.maps
                                 if one is not self.due))

    def _form_of(self, template: str | None) -> Any:
        """The format with a template's marks of thoughts. None: the tokenizer's template."""
        from nanoserve_extras.server.tool_format import format_of  # late: it may be deleted
        return format_of(self.engine, template)

    def check(self, request: Request) -> None:
        """Find the marks. Raises `ValueError` if the template has none."""
        most, form = request.params.thinking_token_budget, None
        if most is None:
            return
        if self.tokenizer is not None:
            form = self.form_of(request.chat_template)
        if not (form and form.thought):
            raise ValueError(f"thinking_token_budget={most}: no chat template says what stands "
                             "behind a thought: leave it out")
        prompt = request.prompt or self.tokenizer.decode(request.prompt_token_ids)
        reader = form.reader({}, prompt)
        if not reader.may_think:
            return  # the prompt has ended the thought
        asked = request.params.structured_outputs
        if asked is not None and not (asked.get("grammar") if isinstance(asked, dict) else
                                      asked.grammar):
            raise ValueError(f"thinking_token_budget={most}: a text in the form of "
                             "structured_outputs begins without a thought: leave one of them out")
        closing = self.tokenizer.encode(form.thought, add_special_tokens=False)
        if form.thought not in self.tokenizer.decode(closing) or max(closing) >= self.vocab_size:
            raise ValueError(f"thinking_token_budget={most}: the model has no tokens for "
                             f"{form.thought!r}, which ends a thought: leave it out")
        request.made[self] = Thought(self, most, (form.think, form.thought), closing,
                                     is_begun=reader.state == "thinks")

    def added(self, request: Request) -> None:
        if (thought := request.made.get(self)) is not None:
            for seq in request.sequences:
                n = seq.num_prompt_tokens
                self.thoughts[seq] = replace(thought, num_read=n, start=n)

    def scheduled(self, step: Step) -> None:
        self.due.clear()
        for seq in step.sampling if self.thoughts else ():
            if seq in self.thoughts:
                thought = self.thoughts[seq].read(seq.token_ids)
                num_drafts = len(step.drafts.get(seq, ()))
                begins = not thought.is_begun and num_drafts > thought.most  # and ends, perhaps
                if begins or thought.num_over(len(seq.token_ids) + num_drafts) >= 0:
                    self.due[seq] = thought

    def ended(self, sequences: list[Sequence]) -> None:
        for seq in sequences:
            self.thoughts.pop(seq, None)
