"""Methods that draft the next tokens: by looking them up, or with a small network (speculative.py).

    ngram         the last few tokens occurred before, and the tokens after them may come again
                  (Saxena 2023, "Prompt Lookup Decoding"): a dict look-up, no second network
    suffix        the same in all texts of the engine, earlier answers too, by longer matches; a
                  draft is as long as its match (Oliaro et al. 2024, "SuffixDecoding")
    draft_model   a small network of the same vocabulary, greedily. Its layers are more KV layers of
                  the same blocks, so chunks, prefix hits and preemption serve both networks
    eagle3, mtp   a head of one layer reads the model's hidden states (hidden_drafts.py)

A method is a class with the interface of `Guesser`. When a step is scheduled it is asked for the
drafts of one sequence (`propose`). A method that needs the device returns placeholders, and fills
them in for all rows together (`fill`):

    schedule ──► propose: [3, 1, 2] or [?, ?, ?] ──► fill: ? by the device ──► launch ──► checked

Invariant: a wrong guess costs time, and changes no token.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Protocol

from nanoserve.detokenizer import load_tokenizer
from nanoserve.engine import LLMEngine
from nanoserve.parallel import check_shares
from nanoserve.progress import say
from nanoserve.sequence import Sequence, Step
from nanoserve_extras.base.checkpoint import find_folder
from nanoserve_extras.base.config_files import ModelConfig, read_architecture, read_config
from nanoserve_extras.base.facts import Fact
from nanoserve_extras.base.plan import Plan
from nanoserve_extras.base.runner import Runner

DEFAULT_LOOKUP = 5  # tokens, if neither bound is given; as in vLLM
UNKNOWN = -1  # stands for a draft that the small network has not made yet
SUFFIXES = (16, 8, 5, 4, 3)  # tokens that method "suffix" compares, the longest match first
MOST_NGRAMS = 2 ** 18  # of some 50,000 tokens, 100 MB; then all are forgotten
LONGEST_REST = 32  # the most tokens that a sequence decodes without drafts after wrong ones


class Guesser(Protocol):
    """A method: a class made with `speculative_config` and the engine, and named in `GUESSERS`. A
    function that it inherits does nothing."""

    keys: tuple[str, ...]  # in `speculative_config`, beside `method` and the number
    # A draft may be beyond the position at which a cache forgets keys.
    needs: frozenset[Fact] = frozenset([Fact.GENERATES, Fact.ALL_KEYS])
    ends: frozenset[Fact] = frozenset()

    @classmethod
    def prepare(cls, asked: dict, plan: Plan) -> Plan:
        """Fill in the options that `asked` leaves out, and add to the plan what the runner needs.
        Raises a `ValueError` with the remedy."""
        return plan

    def propose(self, seq: Sequence, most: int) -> list[int]:
        """Up to `most` guesses of the tokens after `seq.token_ids`; `UNKNOWN` if `fill` makes them.
        """

    def fill(self, step: Step) -> None:
        """The step is about to be launched: put tokens into `step.drafts` for each `UNKNOWN`."""

    def updated(self, step: Step) -> None:
        """A step has finished, one without drafts, too."""

    def checked(self, seq: Sequence, num_right: int) -> None:
        """`num_right` of the drafts from `propose` were right."""

    def forget(self, seq: Sequence) -> None:
        """The sequence has ended."""


class NgramIndex:
    """Where each n-gram of one sequence was last seen, kept up to date token by token, and how many
    of the sequence's guesses were wrong. sizes: the lengths of n-grams, the longest first. follows:
    from n-gram to a text and the position after it; several sequences may share it."""

    def __init__(self, sizes: Iterable[int], follows: dict[tuple[int, ...], tuple[list[int], int]]):
        self.sizes, self.follows = sizes, follows
        self.num_read = 0  # all n-grams that end before this position are entered
        self.num_misses = 0  # in a row
        self.rests_until = 0  # no guess before it has so many tokens

    def find(self, token_ids: list[int]) -> tuple[list[int], int, int] | None:
        """The longest n-gram at the end of `token_ids` that occurred before: the text, the position
        after it, n. A call costs O(new tokens), so all calls together O(text)."""
        for position in range(max(self.num_read, 1), len(token_ids)):
            for n in self.sizes:
                if n <= position:
                    self.follows[tuple(token_ids[position - n:position])] = token_ids, position
        self.num_read = len(token_ids)
        for n in self.sizes:
            if n < len(token_ids) and (found := self.follows.get(tuple(token_ids[-n:]))):
                return *found, n
        return None


class NgramGuesser(Guesser):
    """Copies the tokens that followed the last time. After wrong drafts a sequence gets none for 1,
    2, 4, ... tokens, so that text without repetitions costs as much as without drafts. (Tried: a
    single draft after such a pause instead of all. It took two steps more for the greedy text of
    benchmarks/speculative.py, and saved none for the drawn one.)"""

    keys = ("prompt_lookup_max", "prompt_lookup_min")

    @classmethod
    def prepare(cls, asked: dict, plan: Plan) -> Plan:
        longest, shortest = (asked.get(key) for key in cls.keys)
        longest = longest or shortest or DEFAULT_LOOKUP  # one bound stands for both
        shortest = shortest or longest
        if shortest > longest:
            raise ValueError(f"prompt_lookup_min={shortest} is above prompt_lookup_max={longest}: "
                             "lower the first or raise the second")
        asked |= dict(prompt_lookup_max=longest, prompt_lookup_min=shortest)
        return plan

    def __init__(self, asked: dict, engine: LLMEngine | None = None):
        self.asked, self.num_drafts = asked, asked["num_speculative_tokens"]
        self.indices: dict[Sequence, NgramIndex] = {}

    def make_index(self) -> NgramIndex:
        longest, shortest = self.asked["prompt_lookup_max"], self.asked["prompt_lookup_min"]
        return NgramIndex(range(longest, shortest - 1, -1), {})

    def most_for(self, n: int) -> int:
        """How many tokens are worth guessing behind a match of n."""
        return self.num_drafts

    def propose(self, seq: Sequence, most: int) -> list[int]:
        """Up to `most` tokens; none if nothing is found.

        At the end of the text the copy goes on with its own first tokens, as in LZ77: after "ha ha
        ha" the match is one "ha" back, and five more can be copied from there.
        """
        token_ids, index = seq.token_ids, self.indices.get(seq)
        if index is None:
            index = self.indices[seq] = self.make_index()
        if len(token_ids) < index.rests_until or (found := index.find(token_ids)) is None:
            return []
        text, at, n = found
        count = min(most, self.most_for(n))
        drafts = text[at:at + count]
        while len(drafts) < count and text is token_ids:
            drafts.append(drafts[at - len(token_ids)])
        return drafts

    def checked(self, seq: Sequence, num_right: int) -> None:
        index = self.indices[seq]
        index.num_misses = 0 if num_right else index.num_misses + 1
        rest = min(2 ** (index.num_misses - 1), LONGEST_REST) if index.num_misses else 0
        index.rests_until = len(seq.token_ids) + rest

    def forget(self, seq: Sequence) -> None:
        self.indices.pop(seq, None)


class SuffixGuesser(NgramGuesser):
    """Looks into all texts that the engine has written or read, through one dict. (A suffix tree
    would find a match of any length, and could count continuations. Here a few lengths take one
    look-up each, and the longest one stands for all longer matches.)"""

    keys = ()

    @classmethod
    def prepare(cls, asked: dict, plan: Plan) -> Plan:
        """There are no options to fill in."""
        return plan

    def __init__(self, asked: dict, engine: LLMEngine | None = None):
        super().__init__(asked, engine)
        self.follows: dict = {}

    def make_index(self) -> NgramIndex:
        if len(self.follows) > MOST_NGRAMS:
            self.follows.clear()
        return NgramIndex(SUFFIXES, self.follows)

    def most_for(self, n: int) -> int:
        return self.num_drafts if n == SUFFIXES[0] else min(n, self.num_drafts)

    def forget(self, seq: Sequence) -> None:
        if index := self.indices.pop(seq, None):
            index.find(seq.token_ids)  # enters its last tokens


class ModelGuesser(Guesser):
    """A small network generates the drafts, for all rows of a step together."""

    needs = Guesser.needs | {Fact.IN_MEMORY}
    keys = ("model",)

    @classmethod
    def prepare(cls, asked: dict, plan: Plan) -> Plan:
        """Load the draft model's config. Both networks must have the same vocabulary: otherwise all
        drafts would be wrong, which is slow and raises no error."""
        config, tokenizer, vocab_size = plan.config, plan.tokenizer, plan.model_config.vocab_size
        if asked.get("model") is None:
            raise ValueError("model is missing: name a small model with the same vocabulary (a "
                             "folder, a hub id or a GGUF file)")
        name = str(asked["model"])
        folder = find_folder(name, dtype=config.dtype, weights=config.load_format != "dummy",
                            code=config.trust_remote_code)
        asked["model"] = str(folder)  # where other ranks will look for it
        if "Assistant" in (architecture := read_architecture(read_config(folder))):
            raise ValueError(f"model={name!r} is a {architecture}, which guesses from its model's "
                             "hidden states and keys, and is not computed here: choose "
                             "method='ngram' or 'suffix', or a small model of the same family")
        draft = ModelConfig.from_folder(folder)
        check_shares(config.tensor_parallel_size, draft.num_attention_heads,
                     draft.num_key_value_heads)
        if not draft.architecture.endswith("ForCausalLM"):
            raise ValueError(f"model={name!r} has no LM head, by its architecture "
                             f"{draft.architecture}: choose a ...ForCausalLM checkpoint")
        if draft.vocab_size != vocab_size:
            raise ValueError(f"model={name!r} has a vocabulary of {draft.vocab_size} tokens, "
                             f"{config.model!r} one of {vocab_size}: choose a draft model of the "
                             "same family")
        if tokenizer is not None and any(folder.glob("*token*")):
            other = load_tokenizer(folder, trust_remote_code=config.trust_remote_code)
            if _vocabulary(other) != _vocabulary(tokenizer):
                raise ValueError(f"the tokens of model={name!r} are others than those of "
                                 f"{config.model!r}: choose a draft model of the same family")
        if draft.max_position_embeddings < config.max_model_len:
            say(f"the draft model was made for {draft.max_position_embeddings:,} tokens: behind "
                "them its guesses will be worse")
        return replace(plan, parts=replace(plan.parts, make_draft=partial(
            Runner.read, model_config=draft, folder=folder)))

    def __init__(self, asked: dict, engine: LLMEngine):
        self.num_drafts = asked["num_speculative_tokens"]
        self.runner = engine.runner
        self.max_num_batched_tokens = engine.config.max_num_batched_tokens

    def propose(self, seq: Sequence, most: int) -> list[int]:
        """Placeholders: `fill` computes the tokens at launch, when the step has its blocks."""
        return [UNKNOWN] * min(most, self.num_drafts)

    def fill(self, step: Step) -> None:
        """Put the guesses into `step.drafts`.

        First the small network computes the tokens that the model is about to compute, so that
        every block has its KV, too. After the prompt it begins one token earlier: the last draft of
        the step before was never its input, so if that draft was right, its KV is missing.

            known     .. 17 18          model        18 [19 20 21]
            first     17 18 -> 19       second       19 -> 20         third   20 -> 21

        Drafts that are known already (a grammar forces them: structured.py) are only its input.

        Known limit: if the sequence then ends, is preempted, or decodes with no budget left, this
        token's KV stays missing, and a sequence that reuses the block gets worse drafts there.
        """
        known = {seq: drafts for seq, drafts in step.drafts.items() if UNKNOWN not in drafts}
        asked = [seq for seq in step.drafts if seq not in known]
        first = Step(step.index, network=1, sampling=asked, drafts=known,
                     block_moves=step.block_moves)
        step.block_moves = []  # the first launch moves blocks for both
        spare = self.max_num_batched_tokens - step.num_tokens
        for (seq, num_new), start in zip(step.num_new_tokens.items(), step.starts, strict=True):
            guesses = seq in step.drafts and seq not in known
            num_given = 1 if guesses else num_new
            earlier = guesses or (spare > 0 and (
                seq in known or num_new == 1 and start >= seq.num_prompt_tokens))
            spare -= earlier and not guesses  # it takes a draft's place in the budget
            first.num_new_tokens[seq] = num_given + earlier
            first.starts.append(start - earlier)
        write_drafts(self.runner, step, first)


def write_drafts(runner: Runner, step: Step, first: Step) -> None:
    """Launch `first`, whose samples are the first drafts, then a step for each further draft, and
    put all of them into `step.drafts`. Graphs are recorded for steps with a sample for each token,
    so the last row samples once more for each token without a sample, unless these belong to a
    prompt. This is not done if each row has one token: such a graph assigns each token to its row.
    """
    asked, num_rows = first.sampling, len(first.num_new_tokens)
    more = first.num_tokens - len(first.samples())
    if runner.graphs is not None and first.num_tokens > num_rows and (
            more <= len(asked) * runner.parts.num_drafts):
        first.sampling = asked + asked[-1:] * more
    passes = [(first, runner.launch(first))]
    for i in range(1, max((len(step.drafts[seq]) for seq in asked), default=0)):
        rows = [seq for seq in asked if len(step.drafts[seq]) > i]
        # Their input, the guess before, is still on the device: see batch.py.
        starts = [len(seq.token_ids) - 1 - first.shift + i for seq in rows]
        one = Step(step.index, dict.fromkeys(rows, 1), starts, rows, network=1, shift=first.shift)
        passes.append((one, runner.launch(one)))
    for i, (one, output) in enumerate(passes):
        for seq, token_id in zip(one.sampling, runner.fetch(output)[0], strict=True):
            step.drafts[seq][i] = max(token_id, 0)  # `NO_TOKEN` is a wrong guess like any other


def _vocabulary(tokenizer) -> dict[str, int]:
    """The vocabulary without tokens added for chats, which differ within a family harmlessly."""
    added = tokenizer.get_added_vocab()
    return {token: i for token, i in tokenizer.get_vocab().items() if token not in added}
