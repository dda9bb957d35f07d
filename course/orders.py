"""Two orders that change while requests run, each as an extra of some fifteen lines.

    LLM(extras=[FairShare()])                                          in an engine
    python -m nanoserve trace --policy course.orders:FairShare ...     in the simulator

`Extra.order` is asked before each step how urgent every sequence is. Such an order can't be a row
of `POLICIES`, whose keys are asked for once. docs/api.md has the figures of both.
"""

from collections import Counter

from nanoserve.hooks import Extra
from nanoserve.sequence import Sequence, Step


class FeedbackQueue(Extra):
    """MLFQ, as in FastServe (Wu et al. 2023): a sequence falls to a lower level whenever its share
    has doubled, and interrupts those of lower levels. Nobody has to know how long an answer will
    be: short ones are done before they have fallen far. A long prompt begins at a lower level."""

    interrupts = True

    def order(self, seq: Sequence) -> int:
        num_output = seq.num_tokens - seq.num_prompt_tokens
        share = seq.num_prompt_tokens + 10 * num_output  # a token of the output costs a pass
        return (share // 256).bit_length()  # 0 below 256, 1 below 512, 2 below 1,024


class FairShare(Extra):
    """VTC (Sheng et al. 2024, "Fairness in Serving Large Language Models"): first comes the user
    for whom the fewest tokens were computed. A user who was away gets no credit for that time."""

    def __init__(self):
        super().__init__()
        self.counts: Counter[object] = Counter()  # user -> tokens
        self.users: dict[Sequence, object] = {}  # of all sequences that have not ended

    def user(self, request) -> object:
        """Here priorities tell users apart; a request's id may do, too: "alice/17"."""
        return request.priority

    def added(self, request) -> None:
        for seq in request.sequences:
            user = self.user(seq.request)
            if user not in self.users.values():
                least = min([self.counts[one] for one in self.users.values()], default=0)
                self.counts[user] = max(self.counts[user], least)
            self.users[seq] = user

    def order(self, seq: Sequence) -> int:
        return self.counts[self.users[seq]]

    def updated(self, step: Step, accepted: dict[Sequence, list[int]]) -> None:
        for seq, num_new in step.num_new_tokens.items():
            self.counts[self.user(seq.request)] += num_new

    def ended(self, sequences: list[Sequence]) -> None:
        for seq in sequences:
            self.users.pop(seq, None)
