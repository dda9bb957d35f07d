"""Speculative decoding: guess the next tokens, and let the model check all of them in one step.

A decoding step of one sequence is bound by reading the weights, so a few more tokens in it cost
almost nothing. So a cheap method (guessers.py, hidden_drafts.py) guesses the next tokens, the
*drafts*, and the model computes them after the newest token in one step (Leviathan et al. 2023;
Chen et al. 2023):

    token_ids   the cat sat on the          drafts   mat   and   the
    sampled     after each of them                   mat   and   purr  far
    accepted    "mat and purr": two drafts were right, and `purr` is the model's own token

Invariant: **not one token changes, drawn ones included.** The number that decides a token is a
function of seed and position (sampler.py), so the model's token at each position is simply drawn,
and a draft is right if it equals this token (near-ties excepted, as everywhere). Wrong drafts need
no roll-back: they never counted as computed, and their slots are written again.

Rejection sampling accepts a draft with probability min(1, p/q) and corrects the rest: the same
distribution, another text. As our drafts are not drawn (q is 1 at one token), it would accept
equally often.
"""

from dataclasses import replace
from pathlib import Path

from nanoserve.engine import LLMEngine
from nanoserve.hooks import Extra
from nanoserve.progress import say
from nanoserve.sequence import Sequence, Step
from nanoserve_extras.base.plan import Plan
from nanoserve_extras.base.words import in_words
from nanoserve_extras.drafts.guessers import Guesser, ModelGuesser, NgramGuesser, SuffixGuesser
from nanoserve_extras.drafts.hidden_drafts import HiddenGuesser, OwnGuesser
from nanoserve_extras.engine_args import DraftOptions

GUESSERS: dict[str, type[Guesser]] = {"ngram": NgramGuesser, "suffix": SuffixGuesser,
                                      "draft_model": ModelGuesser, "eagle3": HiddenGuesser,
                                      "mtp": OwnGuesser}


class Speculation(Extra):
    """The extra behind `LLM(speculative_config=...)`: the scheduler asks it for drafts, it fills
    them in before a step is launched, and tells the guesser which of its drafts were right. (Others
    may come from a grammar, or from another drafter.)"""

    Options = DraftOptions

    def __init__(self, **options: dict):
        super().__init__(**options)
        self.asked = dict(self.options.speculative_config or {})
        with in_words("speculative_config", ValueError):
            self.kind = _choose(self.asked)
        self.needs, self.ends = self.kind.needs, self.kind.ends
        self.most_drafts = self.asked["num_speculative_tokens"]

    @property
    def name(self) -> str:
        return f"speculative_config={{'method': {self.asked['method']!r}, ...}}"

    def prepare(self, plan: Plan) -> Plan:
        """The plan, with all options in `speculative_config` filled in."""
        asked = self.asked
        with in_words("speculative_config", ValueError):
            plan = self.kind.prepare(asked, plan)
        say(f"speculative decoding: {asked['method']}, up to {asked['num_speculative_tokens']} "
            "guesses a step")
        return replace(plan, draft_folder=Path(asked["model"])) if asked.get("model") else plan

    def attach(self, engine: LLMEngine) -> None:
        asked = self.asked
        self.guesser = self.kind(asked, engine)
        self.guessed: set[Sequence] = set()  # they have the guesser's drafts in this step

    def draft(self, seq: Sequence, most: int) -> list[int]:
        drafts = self.guesser.propose(seq, most)
        if drafts:
            self.guessed.add(seq)
        return drafts

    def launching(self, step: Step) -> None:
        self.guesser.fill(step)

    def updated(self, step: Step, accepted: dict[Sequence, list[int]]) -> None:
        self.guesser.updated(step)
        for seq in step.drafts:
            if seq in self.guessed and seq in accepted:  # else it was aborted meanwhile
                self.guesser.checked(seq, step.num_right(seq))
        self.guessed.clear()

    def dropped(self, step: Step) -> None:
        self.guessed.clear()

    def ended(self, sequences: list[Sequence]) -> None:
        for seq in sequences:
            self.guesser.forget(seq)


def _choose(asked: dict) -> type[Guesser]:
    """The method's class. Raises a `ValueError` with the remedy for unknown methods and options."""
    method = asked.get("method")
    if not isinstance(method, str) or method not in GUESSERS:
        raise ValueError(f"method={method!r} is not supported: choose one of {', '.join(GUESSERS)}")
    known = ("num_speculative_tokens", *GUESSERS[method].keys)
    if unknown := [key for key in asked if key not in ("method", *known)]:
        raise ValueError(f"{', '.join(map(str, unknown))} is nothing that method={method!r} takes: "
                         f"leave it out, it takes {', '.join(known)}")
    if asked.get("num_speculative_tokens") is None:
        raise ValueError("num_speculative_tokens is missing: say how many tokens are to be guessed "
                         "at a time, 4 for example")
    for key, value in asked.items():
        if key not in ("method", "model") and value is not None and (
                type(value) is not int or value < 1):
            raise ValueError(f"{key} must be a whole number of at least 1, got {value!r}")
    return GUESSERS[method]
