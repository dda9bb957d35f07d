"""Networks with recurrent layers: Mamba 2, gated delta nets, short convolutions.

Attention reads the KV of all tokens. A recurrent layer folds them into one *state* of a fixed size
instead (Gu and Dao 2023, "Mamba"; Yang et al. 2024, "Gated Delta Networks"), and a hybrid has both
kinds of layers. The KV is in blocks, as always. A state is at index `Sequence.row`:

    states   padding | zeros | row 0 | ... | row R-1 | snapshot | ... | drafts of row 0 | ...
             a row begins ▲  | a step changes its own | or here ▲     | behind each draft: the next
                                                                      step goes on from a right one

Three numbers for each row, in sections of the batch, give these places, so that a CUDA graph can
read them (0 in rows of padding). Snapshots are copied between two steps.

transformers' recurrent layers (*mixers*) access their state through one interface of its cache. So
one class, `Rows`, which implements it with the states of some rows, runs all of them.

Invariant: **a row's state is that of exactly the tokens that its sequence has computed.** KV may be
written twice; a token that is folded in twice changes the text. So a row begins with zeros or a
snapshot (recurrent_snapshots.py), and a sequence of a lost step starts anew. A trial at
load takes 9 tokens at once, and in chunks of 4, 3, 1 and 1 beside another row; networks whose
mixers take no state from outside (Mamba 1, Jamba) fail it and are refused.

Known limits: no tensor parallelism; the speed of transformers' mixers, but for gated delta nets
(recurrent_delta.py).
"""

import weakref
from collections import defaultdict
from collections.abc import Callable
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, chain, zip_longest

import torch
from torch import nn

from nanoserve.batch import Batch
from nanoserve.config import EngineConfig
from nanoserve.device import MIN_CACHE_TOKENS, cpu_budget, full_float32, memory_for
from nanoserve.engine import LLMEngine
from nanoserve.hooks import Extra
from nanoserve.layers import Linear
from nanoserve.model import KVCache
from nanoserve.parallel import HEAD
from nanoserve.progress import say
from nanoserve.sampler import put
from nanoserve.sequence import Step
from nanoserve_extras.base.device import return_freed_memory
from nanoserve_extras.base.facts import Fact
from nanoserve_extras.base.plan import Plan
from nanoserve_extras.base.runner import Runner
from nanoserve_extras.engine_args import RecurrentOptions
from nanoserve_extras.foreign.foreign_graphs import EvenRecorder, ForeignRecorder
from nanoserve_extras.foreign.foreign_layers import SIZES, Packed, Picks
from nanoserve_extras.foreign.transformers_model import Pages, Probe, TransformersModel
from nanoserve_extras.recurrent.recurrent_delta import DeltaNet, delta_rule_for
from nanoserve_extras.recurrent.recurrent_snapshots import FIRST_ROW, Snapshots

Key = tuple[str, int, int]  # "conv" or "recurrent", the layer's index, which of its states
SECTIONS = "state_sources", "state_places", "state_drafts"  # see `Rows`
COPY = -5  # stands for a step's first length: states to be copied come next
CHUNKS = (4, 3, 1, 1)  # in the trial at load
STATES_SHARE = 0.5  # the most for rows, as a share of the memory that is left
SNAPSHOTS_SHARE = 0.1  # a share of the KV cache's size, unless `snapshot_bytes` is given
LEAST_SNAPSHOTS = 4  # also with a small cache


# ------------------------------------------------------------------ the mixers


@dataclass
class Rows:
    """Replaces transformers' cache. Attention uses `Pages`, so `update` returns keys unchanged.

    states: (num_states, ...) each; while a mixer runs, those of its rows alone, (b, ...). sources,
    places, drafts: (b,) where the state of each of the step's rows lies; where its tokens leave it;
    and, if that is not 0, where those behind the first do, each in a place of its own. starts: see
    `Batch.cu_seqlens_q`. query_lens: None in a recording whose rows may have any number of tokens.
    drafts_host: as `drafts`, or none.
    """

    states: dict[Key, torch.Tensor]
    sources: torch.Tensor
    places: torch.Tensor
    drafts: torch.Tensor
    starts: torch.Tensor
    num_tokens: int
    query_lens: list[int] | None
    drafts_host: list[int]

    @classmethod
    def at(cls, states: dict[Key, torch.Tensor], places: list[int], query_lens: list[int],
           device: torch.device) -> "Rows":
        """Rows whose states stay in these places."""
        slots = put(places, torch.int64, device=device)
        starts = put(list(accumulate(query_lens, initial=0)), torch.int32, device=device)
        return cls(states, slots, slots, slots * 0, starts, sum(query_lens), query_lens, [])

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor:
        return self.states["conv", layer_idx, state_idx]

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor:
        return self.states["recurrent", layer_idx, state_idx]

    def update_conv_state(self, new: torch.Tensor, layer_idx: int, state_idx: int = 0,
                          conv_kernel_size: int | None = None) -> torch.Tensor:
        """new: (b, channels, n). Returns the window before it, too, and keeps the last one."""
        state = self.states["conv", layer_idx, state_idx]
        inputs = torch.cat((state.to(new.dtype), new), dim=-1)
        state.copy_(inputs[..., -state.shape[-1]:])
        return inputs

    def update_recurrent_state(self, new: torch.Tensor, layer_idx: int,
                               state_idx: int = 0) -> torch.Tensor:
        return self.states["recurrent", layer_idx, state_idx].copy_(new)

    @cached_property
    def tokens(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """For each token its index in the step, its row, and its place in that row, (num_tokens,)
        each. Padding belongs to the last row."""
        starts = self.starts.long()
        index = torch.arange(self.num_tokens, device=starts.device)
        row = torch.searchsorted(starts[1:], index, right=True).clamp(max=len(starts) - 2)
        return index, row, index - starts[row]

    @cached_property
    def slots(self) -> torch.Tensor:
        """Where each token leaves its row's state, (num_tokens,)."""
        if self.are_single:
            return self.places
        index, row, behind = self.tokens
        own = (behind > 0) & (self.drafts[row] > 0)
        slots = torch.where(own, self.drafts[row] + behind - 1, self.places[row])
        return torch.where(index < self.starts[-1], slots, 0)

    @property
    def are_single(self) -> bool:
        """Whether each row has one token."""
        return self.query_lens is not None and self.num_tokens == len(self.sources)

    @cached_property
    def parts(self) -> list[tuple[torch.Tensor | slice, torch.Tensor, torch.Tensor]]:
        """The batches that a mixer computes: the tokens, n of each of b rows; where these rows'
        states are read and written, (b,) each. First the rows of one token and the first tokens of
        drafted rows, then the second tokens of these, and so on, each a batch with n = 1; then
        chunks, each with b = 1. In a recording of rows with drafts: all tokens, each of which
        leaves a state (see `windows`)."""
        if self.are_single:
            return [(slice(None), self.sources, self.places)]
        index, row, behind = self.tokens
        if self.query_lens is None:  # tokens may share a place: the last one counts
            is_last = index + 1 == self.starts[row + 1]
            return [(slice(None), self.sources,
                     torch.where(is_last | (self.drafts[row] > 0), self.slots, 0))]
        sources = torch.where(behind > 0, self.slots.roll(1), self.sources[row])
        turns, chunks, end = defaultdict(list), [], 0
        for n, drafts in zip_longest(self.query_lens, self.drafts_host):
            first, end = end, end + n
            if n > 1 and not drafts:
                chunks.append((slice(first, end), sources[first:first + 1], self.slots[first:][:1]))
                continue
            for turn in range(n):
                turns[turn].append(first + turn)
        batches = [slice(turn[0], turn[-1] + 1) if turn[-1] - turn[0] == len(turn) - 1 else
                   put(turn, torch.int64, device=self.starts.device) for turn in turns.values()]
        return [(turn, sources[turn], self.slots[turn]) for turn in batches] + chunks

    @cached_property
    def windows(self) -> torch.Tensor:
        """The inputs of a convolution for each token, (num_tokens, width): indices into the states
        of all rows, `width - 1` tokens each, followed by the step's tokens. Example: with a width
        of 4 the second token of row 2 reads two inputs from a state, at 3 * 2 + 1 and the next
        index, and two from the step."""
        kept = next(one.shape[1] for (kind, *_), one in self.states.items() if kind == "conv")
        index, row, behind = (one[:, None] for one in self.tokens)
        i = torch.arange(kept + 1, device=index.device)
        return torch.where(behind + i < kept, row * kept + behind + i,
                           (len(self.sources) - 1) * kept + index + i)

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int = 0) -> bool:
        return True

    def update(self, keys: torch.Tensor, values: torch.Tensor, *args, **kwargs) -> tuple:
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    get_query_offset = get_seq_length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0


class Finder(Rows):
    """Notes which module uses which state, and its shape. A mixer that finds no state begins with
    zeros, and passes on the state that it would keep."""

    def __init__(self, network: nn.Module):
        super().__init__({}, *[torch.empty(0)] * 4, 0, [], [])
        self.running: list[nn.Module] = []
        self.keys: dict[nn.Module, list[Key]] = {}
        self.hooks = [hook for module in network.modules() for hook in (
            module.register_forward_pre_hook(self.enter), module.register_forward_hook(self.leave))]

    def enter(self, module: nn.Module, args: tuple) -> None:
        self.running.append(module)

    def leave(self, *unused) -> None:
        self.running.pop()

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    get_recurrent_state = get_conv_state

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int = 0) -> bool:
        return False

    def update_conv_state(self, new: torch.Tensor, layer_idx: int, state_idx: int = 0,
                          conv_kernel_size: int | None = None) -> torch.Tensor:
        size = conv_kernel_size or new.shape[-1]
        self.note(("conv", layer_idx, state_idx), new.new_empty(1, *new.shape[1:-1], size))
        return new

    def update_recurrent_state(self, new: torch.Tensor, layer_idx: int,
                               state_idx: int = 0) -> torch.Tensor:
        self.note(("recurrent", layer_idx, state_idx), new.float())  # in half precision it drifts
        return new

    def note(self, key: Key, state: torch.Tensor) -> None:
        if key in self.states:
            raise ValueError(f"{key[0]} state {key[2]} of layer {key[1]} is written twice")
        self.states[key] = state.to("meta")
        self.keys.setdefault(self.running[-1], []).append(key)

    def close(self) -> None:
        for hook in self.hooks:
            hook.remove()


def by_rows(mixer: Callable, keys: list[Key], layers: list[Linear], hidden_states: torch.Tensor,
            cache: Rows, **unused) -> torch.Tensor:
    """Replaces a mixer's forward, (1, num_tokens, hidden_size), and runs it over `cache.parts`. No
    mask is passed: a row has no padding. layers: the linear layers in it, whose adapters must know
    which tokens they get."""
    out = torch.empty_like(hidden_states)
    for tokens, sources, targets in cache.parts:
        for layer in layers:
            if layer.adapted is not None:
                layer.adapted.choose(tokens)
        held = {key: cache.states[key].index_select(0, sources) for key in keys}
        x = hidden_states[0, tokens].unflatten(0, (len(sources), -1))
        out[0, tokens] = mixer(x, cache=replace(cache, states=held)).flatten(0, 1)
        for key, state in held.items():
            cache.states[key].index_copy_(0, targets, state)
    return out


# ----------------------------------------------------------------- the network


class RecurrentModel(TransformersModel):
    """A network of transformers with a state for each row, and snapshots. config: resolved. most:
    the memory of snapshots, in bytes. num_drafts: the drafts of a row. counts: the numbers of rows
    and snapshots, if the engine had such a network before."""

    def __init__(self, config: EngineConfig, most: int | None, num_drafts: int,
                 counts: tuple[int, int] | None, *args, **options):
        self.shapes: dict[Key, torch.Tensor] = {}  # (1, ...), without memory
        self.states: dict[Key, torch.Tensor] = {}
        self.delta_rule = delta_rule_for(config.kernels)
        super().__init__(*args, **options)
        self.state_bytes = sum(state.nbytes for state in self.shapes.values())
        kv_bytes = sum(2 * heads * size * self.on.dtype.itemsize for heads, size in self.kv_shapes)
        counts = counts or share_memory(config, most, num_drafts, max(self.state_bytes, 1),
                                        kv_bytes, free_memory(config, self.on.device)
                                        // self.on.ranks.local_size)
        self.most_rows, self.num_snapshots = map(self.on.ranks.least, counts)
        with memory_for("recurrent states: lower max_num_seqs or snapshot_bytes"):
            self.states = self.make_states(max(
                FIRST_ROW + self.most_rows * (1 + num_drafts) + self.num_snapshots,
                4 + num_drafts))  # a trial of graphs says 2, 3, 4 of our sections
        for states in self.states.values():
            states.is_scratch = True  # an engine that sleeps forgets them

    def make_states(self, count: int) -> dict[Key, torch.Tensor]:
        """`count` states of zeros, written here so that their memory no longer counts as free."""
        return {key: torch.empty(count, *state.shape[1:], dtype=state.dtype,
                                 device=self.on.device).zero_()
                for key, state in self.shapes.items()}

    @property
    def recorder(self) -> type[ForeignRecorder]:
        """transformers' mixers take rows of one length each."""
        return ForeignRecorder if self.num_fast == self.num_mixers else EvenRecorder

    @torch.inference_mode()
    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy states: (from, to) each."""
        sources, targets = put(pairs, torch.int64, device=self.on.device).T
        for states in self.states.values():
            states.index_copy_(0, targets, states.index_select(0, sources))

    @torch.inference_mode()
    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, kv_cache: KVCache,
                batch: Batch, wanted: torch.Tensor | None = None) -> torch.Tensor:
        zeros = torch.zeros_like(batch.seq_lens)  # the largest step, which is measured, has none
        given = [(batch.extra[name] if len(batch.extra.get(name, ())) else zeros).long()
                 for name in SECTIONS]
        rows = Rows(self.states, *given, batch.cu_seqlens_q, batch.num_tokens,
                    None if batch.is_padded else batch.query_lens,
                    list(batch.host.get(SECTIONS[-1], ())))
        return self.run(input_ids, positions, slice(None) if wanted is None else wanted,
                        self.pages(kv_cache, batch), rows)

    def run(self, ids: torch.Tensor, positions: torch.Tensor | None, wanted: torch.Tensor | slice,
            pages: Pages | Probe, cache: Rows | None = None, **options) -> torch.Tensor:
        """cache: None at load, where each token is a row of its own, at its beginning."""
        count = len(ids)
        cache = cache or Rows.at(self.make_states(count), list(range(count)), [1] * count,
                                 ids.device)
        return super().run(ids, positions, wanted, pages, cache=cache, **options)

    # ------------------------------------------------------------ the trial at load

    def _probe(self, width: int) -> dict[int, tuple]:
        """Find the mixers, and compare their results in chunks with those of the network at once.
        """
        count = min(sum(CHUNKS), self.config.max_position_embeddings)
        ids = (torch.arange(2 * count, device=self.on.device) * 7 + 1) % self.config.vocab_size
        texts = [(one, torch.arange(len(one), device=ids.device)) for one in ids.split(count)]
        dense = [self.at_once(*text) for text in texts]
        finder = Finder(self.layers)
        try:
            self.at_once(*texts[0], cache=finder)
        finally:
            finder.close()
        if not finder.states and self.stage is None:
            raise ValueError("its layers keep a state somewhere else than in transformers' cache")
        self.num_mixers, self.num_fast, self.shapes = len(finder.keys), 0, dict(finder.states)
        for module, keys in finder.keys.items():
            fast = self.is_delta_net(module, keys)
            self.replace(module, keys, fast)
            self.num_fast += fast
        if not self.are_close(dense, [self.in_chunks(*text, *texts[0]) for text in texts]):
            raise ValueError("its layers can't continue from a given state")
        return super()._probe(width)

    @full_float32()
    def is_delta_net(self, net: nn.Module, keys: list[Key]) -> bool:
        """Whether `DeltaNet` computes what a mixer does. A copy of it in float32, with `Picks` for
        matrices, gets rows of all sizes: twice one token, then a chunk."""
        trial, device = copy(net), self.on.device
        try:
            trial._parameters = {name: one.float() for name, one in net._parameters.items()}
            trial._modules = {
                name: Picks(one.weight.shape, i) if type(one) is Packed else deepcopy(one).float()
                for i, (name, one) in enumerate(net._modules.items())}
            ours = DeltaNet(trial, self.on.ops, self.delta_rule)
            x = torch.randn(5, net.hidden_size, generator=torch.Generator().manual_seed(0))
            x = (SIZES[..., None] * torch.stack((x, -x))[:, None]).flatten(0, 1).to(device)
            for rows in x.split(4):  # a few: transformers pads a chunk to 64 tokens
                theirs = {key: torch.zeros(len(rows), *self.shapes[key].shape[1:], device=device)
                          for key in keys}
                own = {key: (state.transpose(1, 2)[:, 1:] if key[0] == "conv" else state).clone()
                       for key, state in theirs.items()}
                for chunk in rows.split((1, 1, 3), 1):
                    step = list(range(len(rows))), [chunk.shape[1]] * len(rows), device
                    wanted = type(net).forward(trial, chunk, cache=Rows.at(theirs, *step))
                    got = ours.forward(chunk.flatten(0, 1)[None], Rows.at(own, *step)).view_as(
                        wanted)
                    # A backend may flush numbers below 1e-38 to 0.
                    lost = 1e-5 * wanted.abs().amax(-1, keepdim=True) + 1e-30
                    if not ((got - wanted).abs() <= lost).all():
                        return False
                    return_freed_memory()  # glibc does not find it again
        except Exception:  # it has other parts
            return False
        return True

    def replace(self, module: nn.Module, keys: list[Key], fast: bool) -> None:
        """A mixer's forward. Weak: a module that holds itself would keep its weights after the
        engine's end."""
        if fast:
            module.forward = DeltaNet(weakref.proxy(module), self.on.ops, self.delta_rule).forward
            conv = "conv", module.layer_idx, 0
            self.shapes[conv] = self.shapes[conv].transpose(1, 2)[:, 1:]  # see `DeltaNet.convolve`
        else:
            module.forward = partial(by_rows, partial(type(module).forward, weakref.proxy(module)),
                                     keys, [one for one in module.modules()
                                            if isinstance(one, Linear)])

    def at_once(self, ids: torch.Tensor, positions: torch.Tensor, **options) -> torch.Tensor:
        """Logits, (num_tokens, vocab_size), by the network as it is."""
        return super().run(ids, positions, positions, Probe(), attention_mask=mask_for(ids),
                           **options)

    def in_chunks(self, ids: torch.Tensor, positions: torch.Tensor, others: torch.Tensor,
                  places: torch.Tensor) -> torch.Tensor:
        """The same in several steps. In each of them another row, before this one, computes a
        token."""
        states, out = self.make_states(2), []
        chunks = zip(ids.split(CHUNKS), positions.split(CHUNKS), strict=True)
        for i, (chunk, at) in enumerate(chunks):
            wanted = 1 + torch.arange(len(chunk), device=ids.device)
            both = torch.cat((others[i:i + 1], chunk))
            cache = Rows.at(states, [1, 0], [1, len(chunk)], ids.device)
            out.append(self.run(both, torch.cat((places[i:i + 1], at)), wanted, Probe(), cache,
                                attention_mask=mask_for(both)))
        return torch.cat(out)


def mask_for(ids: torch.Tensor) -> torch.Tensor:
    """No padding."""
    return torch.ones(1, len(ids), device=ids.device)


# ---------------------------------------------------------------- at the start


class Recurrent(Extra):
    """The extra that `LLM` adds for a network with states."""

    snapshots: Snapshots
    counts: tuple[int, int] | None = None  # other weights don't change them

    Options = RecurrentOptions
    name = "a model with recurrent states"
    ends = frozenset([Fact.KV_ALONE])

    def prepare(self, plan: Plan) -> Plan:
        make = partial(plan.parts.make_network, make=partial(
            self.make, plan.config, self.options.snapshot_bytes, plan.parts.num_drafts))
        own = dict.fromkeys(SECTIONS if plan.parts.num_drafts else SECTIONS[:2], True)
        return replace(plan, parts=replace(  # in front of other sections: see `states`
            plan.parts, make_network=make, calls=plan.parts.calls | {COPY: copy_states},
            sections=own | plan.parts.sections))

    def make(self, config: EngineConfig, snapshot_bytes: int | None, num_drafts: int, *args,
             **options) -> RecurrentModel:
        model = RecurrentModel(config, snapshot_bytes, num_drafts, self.counts, *args, **options)
        self.counts = model.most_rows, model.num_snapshots
        return model

    def attach(self, engine: LLMEngine) -> None:
        self.runner = weakref.proxy(engine.runner)  # weak: the runner's parts hold this object
        model = engine.runner.model
        self.snapshots = Snapshots(engine.scheduler, model.most_rows, model.num_snapshots,
                                   engine.runner.parts.num_drafts)
        self.after: list[tuple[int, int]] = []  # (from, to): still to be copied
        engine.add(self.snapshots)
        slow = ", the others by transformers' own mixers, which are slower"
        count = 1 + engine.runner.parts.num_drafts
        say(f"recurrent states: {count} x {size_of(model.state_bytes)} a sequence, "
            f"{model.most_rows} sequences and {model.num_snapshots} snapshots = "
            f"{size_of(model.state_bytes * (model.most_rows * count + model.num_snapshots))}; "
            f"{model.num_fast} of {model.num_mixers} layers by delta_rule"
            f"{slow if model.num_fast < model.num_mixers else ''}")

    def launching(self, step: Step) -> None:
        """Copy states. A graph contains no copies, so copies after a step are made before the next
        one, in the same order on the device. A lost step has no snapshots: its copies do no harm.
        """
        for start in range(0, len(self.after), HEAD // 4):
            self.copy(self.after[start:][:HEAD // 4])
        copies = self.snapshots.plan(step)
        self.after = copies.after
        rows = {seq: (*places, 0)[:3] for seq, places in copies.places.items()}  # 0: no drafts
        step.sections |= {name: {seq: row[i] for seq, row in rows.items()}
                          for i, name in enumerate(SECTIONS)}

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """On all ranks: each has the states of its layers."""
        ranks, head = self.runner.ranks, torch.zeros(HEAD, dtype=torch.int32)
        numbers = [COPY, len(pairs), *chain.from_iterable(pairs)]
        head[:len(numbers)] = torch.tensor(numbers)
        with ranks.together():
            ranks.broadcast_host(head)
            copy_states(self.runner, head)


def copy_states(runner: Runner, head: torch.Tensor) -> None:
    """On every rank. head: COPY, how many pairs, and these."""
    runner.model.copy(head[2:2 + 2 * int(head[1])].view(-1, 2).tolist())


def free_memory(config: EngineConfig, device: torch.device) -> int:
    """Bytes that the weights leave for KV and states."""
    if device.type != "cuda":
        return cpu_budget(1)[0]
    free, total = torch.cuda.mem_get_info(device)
    return int(free - (1 - config.gpu_memory_utilization) * total)


def size_of(num_bytes: int) -> str:
    return f"{num_bytes / 2 ** 20:,.3g} MB"


def share_memory(config: EngineConfig, snapshot_bytes: int | None, num_drafts: int,
                 state_bytes: int, token_bytes: int, budget: int) -> tuple[int, int]:
    """The numbers of rows with a state, and of snapshots. snapshot_bytes: the user's option.
    budget: bytes for states and KV. Raises `ValueError` if there is no room for one row. A stage
    with recurrent layers only has no KV, and gets few snapshots."""
    row_bytes = state_bytes * (1 + num_drafts)
    num_rows = min(config.max_num_seqs, int((STATES_SHARE * budget - state_bytes) / row_bytes))
    if num_rows < 1:
        raise ValueError(f"no room for one sequence's recurrent state of {size_of(row_bytes)}: "
                         f"{size_of(budget)} are left, half of which is for KV. End other programs "
                         "that use the memory, or raise gpu_memory_utilization")
    if num_rows < config.max_num_seqs:
        say(f"max_num_seqs is lowered from {config.max_num_seqs} to {num_rows}: a sequence keeps a "
            f"recurrent state of {size_of(row_bytes)}")
    if not config.enable_prefix_caching:
        return num_rows, 0
    if snapshot_bytes is not None:
        return num_rows, snapshot_bytes // state_bytes
    num_tokens = max(config.max_num_seqs * config.max_model_len, MIN_CACHE_TOKENS)
    kv_bytes = min(budget - num_rows * row_bytes, num_tokens * token_bytes)
    if config.num_gpu_blocks_override is not None:
        kv_bytes = config.num_gpu_blocks_override * config.block_size * token_bytes
    elif config.kv_cache_memory_bytes is not None:
        kv_bytes = config.kv_cache_memory_bytes
    return num_rows, max(LEAST_SNAPSHOTS, int(SNAPSHOTS_SHARE * kv_bytes / state_bytes))
