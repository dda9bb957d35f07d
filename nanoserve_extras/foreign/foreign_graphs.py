"""CUDA graphs of transformers' networks, which must first show that they can be recorded.

A recording freezes each number that the host put into it. Our decoder reads all numbers from
memory; a network by other authors may not. So one recording of each kind is replayed with two other
batches at the same addresses, and compared with the network itself. If they differ, there are no
graphs.

Such a network returns logits, and a recording keeps the memory of its results: logits of 20 sizes
and 152,000 tokens would be 1.3 GB. So all recordings write them to the largest one's memory.
"""

import torch

from nanoserve.batch import Batch
from nanoserve.config import SamplingParams
from nanoserve.graphs import DecodeGraphs, Size
from nanoserve.sequence import CoreRequest, Sequence, Step
from nanoserve_extras.base.graphs import FEW_DRAFTS, ExtrasRecorder


class ForeignRecorder(ExtrasRecorder):
    """For the steps of transformers' network."""

    logits: torch.Tensor | None = None  # those of the largest recording, which is the first one

    def record_all(self) -> DecodeGraphs:
        try:
            return super().record_all()
        finally:
            self.logits = None

    def states(self, batch: Batch) -> torch.Tensor:
        logits = self.layers(batch)
        if batch.network:  # a draft network of ours
            return logits
        if self.logits is None:
            self.logits = logits
            return logits
        return self.logits[:len(logits)].copy_(logits)

    def try_out(self, graphs: DecodeGraphs) -> None:
        smallest = {size[2:]: size for size in graphs.sizes[::-1]}  # one of each kind
        for size in smallest.values():
            room = self.builder.tables.shape[1] * self.builder.block_size
            for place, known in ((1, 2), (2, min(7, room))):
                self.compare(graphs, size, self.step_for(size, known, place))

    def step_for(self, size: Size, known: int, place: int) -> Step:
        """A step with a row that computes its last known token, and as many drafts as there is room
        for. All KV goes to block 0. The sections of extras hold `place`, place + 1, ..., so that an
        extra reads and writes at different places for place=1 and place=2."""
        width, block_size = self.builder.tables.shape[1], self.builder.block_size
        seq = Sequence(CoreRequest("trial", SamplingParams()), [known - 1] * known, row=0,
                       block_table=[0] * width)
        most = min(block_size, size.tokens, width * block_size + 1 - known,
                   (self.num_drafts or FEW_DRAFTS) + 1) - 1
        drafts = [known] * most if size.drafts else []
        names = self.builder.extra if size.extra else ()
        return Step(0, {seq: 1 + len(drafts)}, [known - 1], [seq], {seq: drafts} if drafts else {},
                    size.network,
                    sections={name: {seq: number} for number, name in enumerate(names, place)})

    def compare(self, graphs: DecodeGraphs, size: Size, step: Step) -> None:
        """Raises `RuntimeError` if the recording and the network differ: then a number from the
        host is frozen in the recording."""
        batch = graphs.fix(self.builder.build(step, size), size)
        right = self.layers(batch).clone()
        got = graphs.graphs[size][0].replay()
        got, right = (one[:step.num_tokens].float().nan_to_num() for one in (got, right))
        if not (got - right).norm() <= 1e-2 * right.norm():
            raise RuntimeError("a replay differs from the step")


class EvenRecorder(ForeignRecorder):
    """For a network whose rows must all have the same length: no drafts beside decodes."""

    def sizes(self) -> list[Size]:
        return [size for size in super().sizes() if size.network or not size.drafts]
