"""CUDA graphs of the steps that extras need: drafts to verify, a second network, sections.

A recorded size with drafts is a number of rows and a number of tokens, and the tokens may be spread
over the rows in any way: one row with a draft beside 60 decodes can be replayed, too. For each
number of rows, a power of two, there are two such sizes: for a few drafts, and for the most drafts
that there can be. A draft network needs them, too, to read the tokens that were verified.
"""

from itertools import pairwise

from nanoserve.graphs import Recorder, Size, graph_sizes
from nanoserve.sequence import Step

FEW_DRAFTS = 15  # in the size for a few drafts: drafts of all rows together, or all in one row
MANY_TOKENS = 256  # steps with at least as many tokens run long enough to hide kernel launches


class ExtrasRecorder(Recorder):
    """num_networks: 2 with a draft network. num_drafts: the largest number of drafts of a row."""

    def __init__(self, *args, num_networks: int = 1, num_drafts: int = 0):
        super().__init__(*args)
        self.num_networks, self.num_drafts = num_networks, num_drafts

    def sizes(self) -> list[Size]:
        sizes: list[Size] = []
        for size in all_sizes(len(self.builder.tables), self.num_networks, self.num_drafts,
                              self.builder.most_samples):
            sizes += with_sections(size, self.builder.extra)
        return sizes

    def padding(self, size: Size) -> Step:
        names = self.builder.extra if size.extra else ()
        return Step(0, network=size.network, sections=dict.fromkeys(names, {}))


def all_sizes(max_num_seqs: int, num_networks: int, num_drafts: int,
              most_samples: int) -> list[Size]:
    """All sizes, by ascending numbers of tokens: of decodes, and of rows with drafts, for each
    network (the second one reads the drafts that the first has verified). There are sizes for a few
    drafts also without a drafter, because a grammar may force a few tokens."""
    sizes = [Size(rows, rows, network=network) for rows in graph_sizes(max_num_seqs)
             for network in range(num_networks)]
    powers = [2 ** i for i in range(10) if 2 ** i < max_num_seqs]
    for fewer, rows in pairwise([0, *powers, max_num_seqs]):
        most = rows * num_drafts if num_drafts else FEW_DRAFTS
        few = min(most, FEW_DRAFTS)
        for drafts in (few, max(few, min(most, MANY_TOKENS - rows))):
            tokens = min(rows + drafts, most_samples)
            if tokens > fewer + 1:  # at least one row more than in the size before, and a draft
                sizes += [Size(rows, tokens, True, network) for network in range(num_networks)]
    return sorted(set(sizes), key=lambda size: (size.tokens, size.rows))


def with_sections(size: Size, extra: dict[str, bool]) -> list[Size]:
    """The variants in which one size is recorded: with the sections of extras and without them, or
    only with them if an extra fills its section in every step. extra: see `BatchBuilder`."""
    if size.network or not extra:
        return [size]
    with_them = size._replace(extra=True)
    return [with_them] if any(extra.values()) else [size, with_them]
