"""New weights in a running engine: for those who train and sample.

A step of reinforcement learning samples texts, trains on them, and samples again with weights that
are a little different. A new engine for each step would read a checkpoint each time; here the same
engine gets the trainer's tensors:

    generate ── train ── update_weights(model.state_dict()) ── generate ── ...
                         tensor by tensor, on all ranks

The old network goes first, since packed weights can't be written in place and there may be no room
for two; then the ordinary loader makes a new one. A trial against a network without memory comes
before that. It reads names and shapes only, so what is wrong with a folder, a dict or a list is an
error that changes nothing.

Invariants: no text is ever computed from two sets of weights, so whatever was computed from the old
ones is forgotten: the prefix cache and what annexes keep (`Extra.reset`). All ranks see all tensors
to the last one, whatever fails on one of them. An engine without its weights refuses requests with
a sentence (elsewhere it wrote garbage: TRL #4571).

Not known here: how a layer takes its tensors (layers.py). Known limits: a draft network keeps its
weights; networks with recurrent states and encoders are refused. Road not taken: memory that both
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
from nanoserve.layers import Placement
from nanoserve.model import Decoder
from nanoserve.model_runner import ModelRunner
from nanoserve.parallel.ranks import Ranks
from nanoserve.parallel.serving import HEAD

WEIGHTS = -3  # in the place of a step's first length: tensors follow
THE_END, BROKEN = 0, -1  # in the place of the length of the next tensor
GIVEN = Path("update_weights()")  # what messages say in the place of a file
# What two folders of one network may differ in. A text's end is settled when the engine is made.
FREE = ("architecture", "dtype", "eos_token_ids", "generation_defaults", "quantization")
NO_WEIGHTS = ("this engine has no weights: call update_weights() with a folder, a dict or an "
              "iterable of (name, tensor), all of which the last call must read")
Weights = str | Path | dict[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


class NewWeights(Extra):
    """`LLM.update_weights`."""

    def prepare(self, plan: Plan) -> Plan:
        calls = plan.parts.calls | {WEIGHTS: receive_weights}
        return replace(plan, parts=replace(plan.parts, calls=calls))

    def attach(self, engine: LLMEngine) -> None:
        self.engine = weakref.proxy(engine)  # which holds this object

    def update(self, weights: Weights) -> None:
        """Put other weights in the place of the present ones, on all ranks.

        weights: a folder or hub id, a dict (`model.state_dict()`) or an iterable of (name, tensor),
        with the names of the checkpoint or of a wrapping around it. All of the network's tensors
        must come, each once. Raises `ValueError` before anything changes for what is wrong with
        the names and shapes of a folder, a dict or a list, and `RuntimeError` while requests run.
        After any other error (an iterator that breaks) the engine has no weights, and refuses
        requests until an update succeeds.
        """
        engine = self.engine
        with engine.turns:
            engine.check_open()
            self.wait_until_idle("update_weights()")
            model_config = engine.runner.model_config
            if model_config.keeps_states or model_config.sees or engine.config.kv_store is not None:
                raise ValueError("update_weights() is not supported with recurrent states, with "
                                 "images, nor with kv_store, whose files are named by the weights: "
                                 "make a new LLM")
            runner, tensors = engine.runner, read(weights, engine.runner)
            if not isinstance(tensors, Iterator):
                try_names(runner, tensors)
            engine.refuse(NO_WEIGHTS)
            if not engine.reset_prefix_cache():  # before: after an error it is of no use either
                raise AssertionError("an idle engine's blocks are free")
            error = send_weights(runner, tensors)
            if error is not None:
                raise error
            engine.refuse("")

    def wait_until_idle(self, what: str) -> None:
        """Take the results of steps in flight that nobody waits for. Raises `RuntimeError`."""
        if self.engine.requests:
            raise RuntimeError(f"{what} while {len(self.engine.requests)} requests are running: "
                               "wait until they have ended, or abort them")
        while self.engine.scheduler.in_flight:
            self.engine.advance()


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


def send_weights(runner: ModelRunner,
                 tensors: Iterable[tuple[str, torch.Tensor]]) -> Exception | None:
    """Rank 0: load, while the others do the same. Returns what failed."""
    with runner.ranks.together():
        head = torch.zeros(HEAD, dtype=torch.int32)
        head[0] = WEIGHTS
        if runner.ranks.size > 1:
            runner.ranks.broadcast_host(head)
        # transformers keeps what it is given, which goes on being trained.
        return load_all(runner, sent(runner.ranks, tensors,
                                     copies=runner.parts.make_network is not None))


def receive_weights(runner: ModelRunner, head: torch.Tensor) -> None:
    """Another rank. Rank 0 raises the error."""
    load_all(runner, received(runner.ranks))


def load_all(runner: ModelRunner, tensors: Tensors) -> Exception | None:
    """Make the network of these tensors on all ranks, or on none of them. Returns what failed."""
    error: Exception | None = None
    try:
        with torch.no_grad():
            runner.load(tensors)
    except Exception as wrong:
        error = wrong
    for _ in tensors:  # the rest: all ranks must agree on what comes next
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
