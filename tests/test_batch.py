"""The batch against a twin that walks over every token of a step, one at a time.

The steps come from the real scheduler on random workloads: decoding and chunks in one step, prefix
hits, preemption, rows that pass from one sequence to the next, tokens whose value is not known yet.
"""

import random

import numpy as np
import pytest
import torch
from helpers import sequence

from nanoserve.batch import HEADER, MAX_MOVES, SECTIONS, Batch, BatchBuilder
from nanoserve.config import EngineConfig, SamplingParams
from nanoserve.graphs import Size
from nanoserve.parallel import HEAD
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import Sequence, Step

CPU = torch.device("cpu")
MAX_LEN = 64


def make_engine(block_size=4, num_blocks=24, max_num_seqs=6, budget=24):
    """A scheduler and a builder for it. No model: the tokens are made up."""
    config = EngineConfig(model="none", block_size=block_size, max_num_seqs=max_num_seqs,
                          max_num_batched_tokens=budget, max_model_len=MAX_LEN)
    return (Scheduler(config, num_blocks),
            BatchBuilder(max_num_seqs, budget, MAX_LEN, block_size, CPU))


def make_sequence(name, token_ids, max_tokens=8, **params) -> Sequence:
    return sequence(str(name), list(token_ids), SamplingParams(**params), arrival=int(name),
                    seed=int(name) * 0x9E3779B97F4A7C15 % 2 ** 64,
                    max_num_tokens=min(MAX_LEN, len(token_ids) + max_tokens))


# ------------------------------------------------------------ the naive twin


def naive_sections(step: Step, block_size: int) -> dict[str, list]:
    """What the buffer must say, token by token; block tables one list a row, without padding.

    A token that the host has not seen is named by its row, below zero: row 0 is -1, row 1 is -2.
    """
    rows = list(zip(step.num_new_tokens.items(), step.starts, strict=True))
    rows = [r for r in rows if r[0][1] == 1] + [r for r in rows if r[0][1] > 1]
    out = {name: [] for name in SECTIONS}
    out["cu_seqlens_q"].append(0)
    last_token, index = {}, {}
    for (seq, num_new), start in rows:
        for position in range(start, start + num_new):
            index[seq, position] = len(out["input_ids"])
            if position < len(seq.token_ids):
                out["input_ids"].append(seq.token_ids[position])
            else:
                assert position == len(seq.token_ids) == seq.num_tokens - (seq in step.sampling) - 1
                out["input_ids"].append(-seq.row - 1)
            place = position - block_size * len(seq.dropped_blocks)
            block = seq.block_table[place // block_size]
            out["slot_mapping"].append(block * block_size + place % block_size)
            out["positions"].append(position)
        last_token[seq] = len(out["input_ids"]) - 1
        out["cu_seqlens_q"].append(len(out["input_ids"]))
        out["seq_lens"].append(start + num_new - block_size * len(seq.dropped_blocks))
        out["block_tables"].append(list(seq.block_table))
    out["logits_indices"] = [last_token[seq] for seq in step.sampling]
    # Of a prompt's tokens all but the last are followed by another one of the prompt.
    out["prompt_logprob_indices"] = [
        index[seq, position] for (seq, num_new), start in zip(
            step.num_new_tokens.items(), step.starts, strict=True)
        if seq.request.params.prompt_logprobs is not None and not seq.output_token_ids
        for position in range(start, start + num_new) if position < seq.num_prompt_tokens - 1]
    for seq in step.sampling:
        params = seq.request.params
        out["sample_rows"].append(seq.row)
        out["seeds"].append(seq.seed if seq.seed < 2 ** 63 else seq.seed - 2 ** 64)
        out["temperature"].append(float(np.float32(params.temperature)))
        # One beyond 32 bits once stopped every step that its sequence was in.
        out["top_k"].append(min(params.top_k, 2 ** 31 - 1) if params.top_k > 0 else 0)
        out["top_p"].append(float(np.float32(params.top_p)))
        out["min_p"].append(float(np.float32(params.min_p)))
    return out


def assert_equals_twin(batch: Batch, step: Step, block_size: int, num_blocks: int) -> None:
    twin = naive_sections(step, block_size)
    tables = twin.pop("block_tables")
    for name, expected in twin.items():
        assert getattr(batch, name).tolist() == expected, f"{step}: {name}"
    width = max(map(len, tables), default=0)
    assert batch.block_tables.shape == (len(tables), width)
    for line, table in zip(batch.block_tables.tolist(), tables, strict=True):
        assert line[:len(table)] == table
        # Padding is never read as a number, but it is used as an index: it must name a block.
        assert all(0 <= block < num_blocks for block in line[len(table):])
    assert batch.query_lens == np.diff(twin["cu_seqlens_q"]).tolist()
    assert batch.seq_lens_host == twin["seq_lens"]
    assert batch.num_decodes == batch.query_lens.count(1)
    assert batch.num_unknown == sum(token_id < 0 for token_id in twin["input_ids"])
    assert (batch.num_tokens, len(batch.query_lens)) == (step.num_tokens, len(tables))


# ---------------------------------------------------------- random workloads


def random_prompt(rng: random.Random) -> list[int]:
    """Half of the prompts begin with one of two common prefixes."""
    start = rng.choice(([], [], range(9), range(100, 117)))
    return [*start, *(rng.randrange(1, 1000) for _ in range(rng.randrange(1, 20)))]


def random_params(rng: random.Random) -> dict:
    return rng.choice(({}, dict(temperature=0), dict(temperature=rng.random() + .01, top_k=5),
                       dict(top_k=-1, top_p=1 - rng.random()),
                       dict(min_p=rng.random(), top_k=2 ** rng.randrange(28, 40))))


def run_workload(seed: int, depth: int, *sizes: int) -> dict[str, int]:
    """Schedule, build, compare; results are taken `depth` steps late, and some sequences end with a
    sample on its way. An empty step is a batch of nothing: canceling everything once left one that
    could not be built (voxcpm #37, #42). Returns what was met."""
    rng, met = random.Random(seed), dict.fromkeys(
        ("mixed", "hits", "preempted", "reused", "unknown", "scored", "aborted", "empty",
         "dropped"), 0)
    scheduler, builder = make_engine(*sizes)
    block_size, num_blocks = sizes[:2]
    owners, in_flight, arrived = {}, [], 0
    while arrived < 40 or scheduler.has_unfinished():
        while arrived < 40 and rng.random() < 0.6:
            scored = 1 if rng.random() < 0.3 else None
            scheduler.add(make_sequence(arrived, random_prompt(rng), rng.randrange(1, 12),
                                        prompt_logprobs=scored, **random_params(rng)))
            arrived += 1
        if scheduler.running and rng.random() < 0.05:
            met["aborted"] += scheduler.running[0].num_unknown_tokens > 0
            scheduler.finish(scheduler.running[0], "abort")
        step = scheduler.schedule()
        for seq in step.num_new_tokens:
            if rng.random() < 0.02 and (num_full := seq.num_computed_tokens // block_size):
                scheduler.blocks.drop(seq, [rng.randrange(num_full)])
                met["dropped"] += 1
        batch = builder.build(step)
        assert_equals_twin(batch, step, block_size, num_blocks)
        met["empty"] += not step.num_new_tokens
        if step.num_new_tokens:
            in_flight.append(step)
            met["mixed"] += 0 < batch.num_decodes < len(batch.query_lens)
            met["preempted"] += len(step.preempted)
            met["unknown"] += batch.num_unknown
            met["scored"] += len(batch.prompt_logprob_indices)
            for seq in step.num_new_tokens:
                met["reused"] += owners.get(seq.row, seq) is not seq
                met["hits"] += owners.get(seq.row) is not seq and bool(seq.num_cached_tokens)
                owners[seq.row] = seq
        if len(in_flight) > depth or (in_flight and not step.num_new_tokens):
            done = in_flight.pop(0)
            scheduler.update(done, [rng.randrange(1, 1000) for _ in done.sampling])
            scheduler.check()
    return met


@pytest.mark.parametrize("depth", [0, 1], ids=["depth 0", "depth 1"])
@pytest.mark.parametrize("sizes", [(4, 24, 6, 24), (1, 80, 6, 24), (5, 16, 3, 7),
                                   (16, 5, 6, 24), (4, 52, 24, 60)], ids=str)
def test_every_step_of_a_random_workload_equals_the_twin(depth, sizes):
    """sizes: block size, blocks, sequences, budget."""
    total = {}
    for seed in range(8):
        for name, count in run_workload(seed, depth, *sizes).items():
            total[name] = total.get(name, 0) + count
    # The workload is worth nothing if it never meets what it is for.
    assert total["mixed"] and total["reused"] and total["preempted"], total
    assert total["hits"] and total["scored"] and total["empty"] and total["dropped"], total
    assert (total["unknown"] > 0) == (total["aborted"] > 0) == (depth > 0), total


# -------------------------------------------------------- one thing at a time


def test_the_picture_of_the_docstring():
    """A and B decode, C prefills 5 tokens: the numbers of `batch`'s docstring, made by hand."""
    _, builder = make_engine(block_size=4, num_blocks=20)
    a, b, c = (make_sequence(i, range(10 * i, 10 * i + n)) for i, n in enumerate((10, 5, 5)))
    for row, (seq, table) in enumerate(((a, [2, 7, 10]), (b, [3, 5]), (c, [16, 17]))):
        seq.row, seq.block_table = row, table
    # The chunk comes first in the step, and last in the batch.
    step = Step(0, {c: 5, a: 1, b: 1}, starts=[0, 9, 4], sampling=[c, a, b])
    batch = builder.build(step)
    assert batch.input_ids.tolist() == [9, 14, 20, 21, 22, 23, 24]
    assert batch.positions.tolist() == [9, 4, 0, 1, 2, 3, 4]
    assert batch.slot_mapping.tolist() == [41, 20, 64, 65, 66, 67, 68]
    assert batch.cu_seqlens_q.tolist() == [0, 1, 2, 7]
    assert batch.seq_lens.tolist() == [10, 5, 5]
    assert batch.block_tables[:, :2].tolist() == [[2, 7], [3, 5], [16, 17]]
    assert batch.logits_indices.tolist() == [6, 0, 1]  # in the order of step.sampling
    assert (batch.num_decodes, batch.query_lens) == (2, [1, 1, 5])


class LateEvent:
    """A copy that ends only when somebody waits for it, and then looks at what it copied."""

    def __init__(self, buffer: torch.Tensor):
        self.buffer, self.expected, self.num_copies = buffer, None, 0

    def record(self) -> None:
        assert self.expected is None, "two copies of one buffer at the same time"
        self.expected = self.buffer.clone()

    def synchronize(self) -> None:
        if self.expected is not None:
            assert torch.equal(self.buffer, self.expected), "written while it was being copied"
            self.expected, self.num_copies = None, self.num_copies + 1


def test_a_buffer_waits_for_its_own_copy_and_no_other():
    """The same story on a GPU, whose copies have events. A chunk samples nothing, so nobody waits
    for its step: several may be queued, and the third must not overwrite the first."""
    scheduler, _ = make_engine(budget=6, num_blocks=40)
    builder = BatchBuilder(6, 6, MAX_LEN, 4, CPU, staged=True)
    builder.copied = events = [LateEvent(buffer) for buffer in builder.buffers]
    scheduler.add(make_sequence(0, range(50)))
    addresses = set()
    for i in range(6):
        step = scheduler.schedule()
        batch = builder.build(step)
        addresses.add(batch.seeds.data_ptr())
        assert [event.num_copies for event in events] == [i // 2, max(i - 1, 0) // 2]
        assert batch.input_ids.tolist() == list(range(6 * i, 6 * i + 6))
        scheduler.update(step, [])
    assert len(addresses) == 1, "on the device a number keeps its address"


def test_a_batch_of_rows_with_drafts_is_padded_behind_the_last_of_them():
    """Two rows, the first with three drafts, in a batch of four rows and eight tokens. A decode
    comes first; samples are in the order of the rows. What an extra says of each row is in the
    order of the batch; of another extra's, which says nothing in this step, there are zeros."""
    staged = BatchBuilder(6, 24, MAX_LEN, 4, CPU, staged=True, num_drafts=3,
                          extra=dict(names=False, voices=False))
    seqs = [make_sequence(i, range(10 * i, 10 * i + 5), temperature=.5 + i) for i in range(2)]
    for row, seq in enumerate(seqs):
        seq.row, seq.block_table = row, [3 + row, 9]
    step = Step(0, {seqs[0]: 4, seqs[1]: 1}, [4, 4], seqs, {seqs[0]: [7, 8, 9]})
    assert len(staged.build(step, Size(4, 8)).extra["voices"]) == 0
    step.sections["voices"] = {seqs[0]: 2, seqs[1]: 5}
    batch = staged.build(step, Size(4, 8, extra=True))
    assert batch.extra["voices"].tolist() == [5, 2, 0, 0]
    assert batch.extra["names"].tolist() == [0, 0, 0, 0]
    assert batch.input_ids.tolist() == [14, 4, 7, 8, 9, 0, 0, 0]
    assert batch.positions.tolist() == [4, 4, 5, 6, 7, 0, 0, 0]
    assert batch.slot_mapping.tolist() == [36, 36, 37, 38, 39, -1, -1, -1]
    assert batch.cu_seqlens_q.tolist() == [0, 1, 5, 5, 5]
    assert batch.seq_lens.tolist() == [5, 8, 0, 0]
    assert batch.logits_indices.tolist() == [1, 2, 3, 4, 0, 0, 0, 0]
    assert batch.sample_rows.tolist() == [0, 0, 0, 0, 1, -1, -1, -1]
    assert batch.temperature.tolist() == [.5] * 4 + [1.5, 0, 0, 0]
    assert batch.block_tables.tolist() == [[4, 9], [3, 9], [0, 0], [0, 0]]


def test_the_largest_step_fits_into_the_buffer():
    """Every row, every token of the budget, the widest tables, scores, drafts, an extra's numbers
    and moves at the same time.

    The buffer's size is worked out from these maxima once; one number too few is an exception in
    the middle of serving (nano-vllm's graphs ended at batch 16 for 20 sequences).
    """
    width = MAX_LEN // 4
    builder = BatchBuilder(6, 60, MAX_LEN, 4, CPU, num_drafts=9, extra=dict(numbers=False))
    assert len(builder.buffers[0]) > HEAD, "a broadcast of a message's first part is so long"
    seqs = [make_sequence(i, range(MAX_LEN - 10), prompt_logprobs=1) for i in range(6)]
    for row, seq in enumerate(seqs):
        seq.row, seq.block_table = row, list(range(row * width, (row + 1) * width))
    step = Step(0, dict.fromkeys(seqs, 10), [MAX_LEN - 11] * 6, seqs,
                dict.fromkeys(seqs, list(range(9))),
                prompt_logprob_positions={seq: range(10) for seq in seqs})
    step.sections["numbers"] = dict.fromkeys(seqs, 1)
    step.block_moves.extend([(0, 0)] * 2 * MAX_MOVES)
    batch = builder.build(step)
    assert batch.block_tables.tolist() == [seq.block_table for seq in seqs]
    assert batch.logits_indices.tolist() == batch.prompt_logprob_indices.tolist() == [*range(60)]
    sections = [*(getattr(batch, name) for name in SECTIONS), *batch.extra.values()]
    used = HEADER + sum(one.numel() * one.element_size() // 4 for one in sections)
    assert len(builder.buffers[0]) == used, "and no more than that"


class CtrlC:
    """What the rows ask for; whoever writes to it is interrupted, once."""

    def __init__(self, numbers: np.ndarray):
        self.numbers, self.pressed = numbers, False

    def take(self, rows) -> np.ndarray:
        return self.numbers.take(rows)

    def __setitem__(self, index, value) -> None:
        if not self.pressed:
            self.pressed = True
            raise KeyboardInterrupt
        self.numbers[index] = value


def test_ctrl_c_while_a_row_is_taken_over():
    """The step is dropped and asked for again. The row's numbers must not count as the new owner's
    because its table did: it would draw with the last one's temperature to its end."""
    scheduler, builder = make_engine(max_num_seqs=1)
    builder.params = CtrlC(builder.params)
    seq = make_sequence(0, range(6), temperature=.5, top_k=3, top_p=.75, min_p=.25)
    seq.seed = 7
    scheduler.add(seq)
    with pytest.raises(KeyboardInterrupt):
        builder.build(scheduler.schedule())
    scheduler.drop_in_flight()
    step = scheduler.schedule()
    assert_equals_twin(builder.build(step), step, 4, 24)
