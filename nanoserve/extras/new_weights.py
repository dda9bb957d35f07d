"""New weights in a running engine, and an engine that sleeps: for those who train and sample.

A step of reinforcement learning samples texts, trains on them, and samples again with weights that
are a little different. A new engine for each step would read a checkpoint each time; here the same
engine gets the trainer's tensors, and the trainer its memory meanwhile:

    generate ── sleep(2) ── train ── update_weights(model.state_dict()) ── wake_up() ── generate
                weights and          tensor by tensor, on all ranks        the KV cache
                KV cache go

The old network goes first, since packed weights can't be written in place and there may be no room
for two; then the ordinary loader makes a new one. A trial against a network without memory comes
before that. It reads names and shapes only, so what is wrong with a folder, a dict or a list is an
error that changes nothing.

Invariants: no text is ever computed from two sets of weights, so whatever was computed from the old
ones is forgotten: the prefix cache and what annexes keep (`Extra.reset`). All ranks see all tensors
to the last one, whatever fails on one of them. An engine without its weights, or without its KV
cache, refuses requests with a sentence (elsewhere it wrote garbage: TRL #4571).

Not known here: how a layer takes its tensors (layers.py). Known limits: a draft network keeps its
weights; with a second place for blocks there is no sleep. Road not taken: memory that both
processes map, which would tie the trainer's layout to ours.
"""

import weakref
from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import fields, replace
from pathlib import Path

import torch
from safetensors.torch import load, save

from nanoserve.checkpoint.hub import find_model
from nanoserve.checkpoint.loader import Tensors, load_weights, stored_tensors
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.engine import Extra, LLMEngine, Plan
from nanoserve.extras.block_store import BlockStore
from nanoserve.layers import Placement
from nanoserve.model import Decoder
from nanoserve.model_runner import ModelRunner
from nanoserve.parallel.ranks import Ranks
from nanoserve.parallel.serving import HEAD

CALL = -3  # in the place of a step's first length: one of the following comes next
UPDATE, RELOAD, UNLOAD, START = range(4)
THE_END, BROKEN = 0, -1  # in the place of the length of the next tensor
GIVEN = Path("update_weights()")  # what messages say in the place of a file
# What two folders of one network may differ in. A text's end is settled when the engine is made.
FREE = ("architecture", "dtype", "eos_token_ids", "generation_defaults", "quantization")
PARTS = ("weights", "kv_cache")  # vLLM's tags
NO_WEIGHTS = ("this engine has no weights: they were given back by sleep(level=2), or "
              "update_weights() failed. Call update_weights() with a folder, a dict or an iterable")
ASLEEP = "this engine is asleep: call wake_up()"
Weights = str | Path | dict[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


class NewWeights(Extra):
    """`LLM.update_weights`, `LLM.sleep` and `LLM.wake_up`."""

    def prepare(self, plan: Plan) -> Plan:
        calls = plan.parts.calls | {CALL: take_call}
        return replace(plan, parts=replace(plan.parts, calls=calls))

    def attach(self, engine: LLMEngine) -> None:
        self.engine = weakref.proxy(engine)  # which holds this object
        self.source: Path | None = engine.runner.folder  # of the weights; None: a trainer's tensors
        self.gone: set[str] = set()  # of `PARTS`
        self.are_lost = False  # no weights, and nothing to bring them back from
        engine.gates.append(self.check_awake)

    def update_weights(self, weights: Weights) -> None:
        """Put other weights in the place of the present ones, on all ranks.

        weights: a folder or hub id, a dict (`model.state_dict()`) or an iterable of (name, tensor),
        with the names of the checkpoint or of a wrapping around it. All of the network's tensors
        must come, each once. Raises `ValueError` before anything changes for what is wrong with
        the names and shapes of a folder, a dict or a list, and `RuntimeError` while requests run.
        After any other error (an iterator that breaks) the engine has no weights, and refuses
        requests until an update succeeds.
        """
        with self.engine.turns:
            runner = self.idle_runner("update_weights()")
            tensors = read(weights, runner)
            if not isinstance(tensors, Iterator):
                try_names(runner, tensors)
            self.are_lost = True
            self.lose("weights")
            if self.engine.config.kv_store is not None:
                self.engine.extra(BlockStore).rename()
            self.raise_if(call(runner, UPDATE, tensors=tensors))
            self.source = tensors.folder if isinstance(tensors, Stored) else None
            self.are_lost = False
            self.gone.discard("weights")

    def sleep(self, level: int = 1) -> None:
        """Give memory back to the system until `wake_up`. level 1: the KV cache, and weights that
        came from a folder, which is read again; a trainer's tensors stay. level 2: both, and only
        `update_weights` brings weights back. Raises `RuntimeError` while requests run."""
        if level not in (1, 2):
            raise ValueError(f"sleep(level={level!r}): choose 1, or 2 to lose the weights, too")
        with self.engine.turns:
            runner = self.idle_runner("sleep()")
            if self.engine.config.kv_offload_bytes or self.engine.config.kv_store is not None:
                raise ValueError("sleep() is not supported with kv_offload_bytes or kv_store, which"
                                 " hold on to the KV cache: leave them out")
            self.are_lost = self.are_lost or level == 2
            with_weights = self.are_lost or self.source is not None
            self.lose("kv_cache", *["weights"] * with_weights)
            call(runner, UNLOAD, with_weights, True)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Take memory again, and weights after `sleep(level=1)`. tags: "weights", "kv_cache", or
        both. Raises `ValueError` for others."""
        if not set(tags or PARTS).issubset(PARTS):
            raise ValueError(f"wake_up(tags={tags!r}): choose of {', '.join(PARTS)}")
        with self.engine.turns:
            self.engine.check_open()
            runner, tags = self.engine.runner, self.gone.intersection(tags or PARTS)
            if "weights" in tags and not self.are_lost:
                own = self.source == runner.folder
                self.raise_if(call(runner, RELOAD) if own else call(
                    runner, UPDATE, tensors=Stored(self.source)))
                self.gone.discard("weights")
            if "kv_cache" in tags:
                call(runner, START, self.engine.scheduler.blocks.num_blocks,
                     self.engine.config.max_model_len)
                self.gone.discard("kv_cache")

    def idle_runner(self, what: str) -> ModelRunner:
        """Take the results of steps in flight that nobody waits for. Raises `RuntimeError`."""
        self.engine.check_open()
        if self.engine.requests:
            raise RuntimeError(f"{what} while {len(self.engine.requests)} requests are running: "
                               "wait until they have ended, or abort them")
        while self.engine.scheduler.in_flight:
            self.engine.advance()
        return self.engine.runner

    def lose(self, *parts: str) -> None:
        """From here on requests are refused; what was computed is forgotten."""
        self.engine.reset_prefix_cache()
        self.gone.update(parts)

    def check_awake(self) -> None:
        if self.are_lost or self.gone:
            raise RuntimeError(NO_WEIGHTS if self.are_lost else ASLEEP)

    def raise_if(self, error: Exception | None) -> None:
        if error is not None:
            self.are_lost = True
            self.lose("weights")
            raise error


def read(weights: Weights, runner: ModelRunner) -> Iterable[tuple[str, torch.Tensor]]:
    """Names and tensors. Those of a folder are mapped from its files, each when it is asked for;
    so they may be asked for twice. Raises `ValueError`."""
    if isinstance(weights, dict):
        return list(weights.items())
    if not isinstance(weights, (str, Path)):
        return weights if isinstance(weights, (list, tuple)) else iter(weights)
    folder, old, config = find_model(weights), runner.model_config, runner.config
    if runner.parts.make_network is None:
        new = ModelConfig.from_folder(folder, config.hf_overrides)
    else:
        from nanoserve.extras.foreign import read_foreign  # here: it imports transformers
        _, new, _ = read_foreign(config, folder)
    differing = [f.name for f in fields(ModelConfig) if f.name not in FREE
                 and getattr(old, f.name) != getattr(new, f.name)]
    if differing:
        raise ValueError(f"{folder} holds another network, its config.json differs in "
                         f"{', '.join(differing)}: make a new LLM")
    return Stored(folder)


class Stored:
    """A folder's tensors, as often as they are asked for."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, tensor) for _, name, tensor in stored_tensors(self.folder))


def try_names(runner: ModelRunner, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Fill a network that has no memory: the loader checks each name and shape, and reads none of
    the numbers. Raises `ValueError`. (A tied head is compared later, when its numbers are there.)
    """
    config, make_network = runner.model_config, runner.parts.make_network
    if make_network is not None:  # transformers keeps what it is given: tensors of one number
        make_network(runner.placement, trial=True, tensors=(
            (GIVEN, name, torch.zeros((), dtype=tensor.dtype).expand(tensor.shape))
            for name, tensor in checked(tensors)))
        return
    on = Placement(runner.dtype, torch.device("meta"))
    model = Decoder(config, on)
    pooler = copy(runner.pooler)
    if pooler is not None:
        pooler.replace_head(model, on)
    named = ((GIVEN, name, tensor) for name, tensor in checked(tensors)
             if not (config.tie_word_embeddings and name.endswith("lm_head.weight")))
    load_weights(model, config, GIVEN, unused=pooler.unused if pooler is not None else (),
                 assemble=runner.placement.assemble, tensors=named)


def checked(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The same, without a trainer's graph of gradients. Raises `ValueError` for anything else."""
    for pair in tensors:
        match pair:
            case (str(name), torch.Tensor() as tensor):
                yield name, tensor.detach()
            case _:
                raise ValueError("update_weights() takes a folder, a dict, or an iterable of "
                                 f"(name, tensor), got {pair!r:.80} in it")


# ------------------------------------------------------------------ all ranks


def call(runner: ModelRunner, what: int, *numbers: int,
         tensors: Iterable[tuple[str, torch.Tensor]] = ()) -> Exception | None:
    """On rank 0: have all ranks do it. Returns what failed when weights were loaded."""
    with runner.ranks.together():
        head = torch.zeros(HEAD, dtype=torch.int32)
        head[:2 + len(numbers)] = torch.tensor([CALL, what, *numbers])
        if runner.ranks.size > 1:
            runner.ranks.broadcast_host(head)
        # transformers keeps what it is given, which goes on being trained.
        return answer(runner, head, sent(runner.ranks, tensors,
                                         copies=runner.parts.make_network is not None))


def take_call(runner: ModelRunner, head: torch.Tensor) -> None:
    """On another rank. Rank 0 raises the error."""
    answer(runner, head, received(runner.ranks))


def answer(runner: ModelRunner, head: torch.Tensor, tensors: Tensors) -> Exception | None:
    """The same on every rank."""
    _, what, first, second = head[:4].tolist()
    if what == UNLOAD:
        runner.unload(bool(first), bool(second))
    elif what == START:
        runner.start(first, second)
    else:
        return load_all(runner, tensors if what == UPDATE else None)
    return None


def load_all(runner: ModelRunner, tensors: Tensors | None) -> Exception | None:
    """Make the network of these tensors, or of its files, on all ranks or on none of them. Returns
    what failed."""
    error: Exception | None = None
    try:
        with torch.no_grad():
            runner.load(tensors)
    except Exception as wrong:
        error = wrong
    for _ in tensors or ():  # the rest: all ranks must agree on what comes next
        pass
    if not runner.ranks.least(error is None):
        runner.unload()
        return error or ValueError("another rank could not load the weights")
    return None


def sent(ranks: Ranks, tensors: Iterable[tuple[str, torch.Tensor]], copies: bool) -> Tensors:
    """The tensors, each after the other ranks got it."""
    def say(length: int, content: torch.Tensor | None = None) -> None:
        if ranks.size > 1:
            ranks.broadcast_host(torch.tensor([length]))
            if content is not None:
                ranks.broadcast_host(content)

    try:
        for name, tensor in checked(tensors):
            if ranks.size > 1:
                content = bytearray(save({name: tensor.cpu().contiguous()}))
                say(len(content), torch.frombuffer(content, dtype=torch.uint8))
            yield GIVEN, name, tensor.clone() if copies else tensor
    except Exception:  # of the iterator
        say(BROKEN)
        raise
    say(THE_END)


def received(ranks: Ranks) -> Tensors:
    """On another rank: the tensors that rank 0 sends."""
    while True:
        length = torch.zeros(1, dtype=torch.int64)
        ranks.broadcast_host(length)
        if length == THE_END:
            return
        if length == BROKEN:
            raise ValueError("rank 0 could not read all weights")
        content = torch.empty(int(length), dtype=torch.uint8)
        ranks.broadcast_host(content)
        for name, tensor in load(content.numpy().tobytes()).items():
            yield GIVEN, name, tensor
