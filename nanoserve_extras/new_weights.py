"""New weights in a running engine, and an engine that sleeps: for reinforcement learning.

A step of reinforcement learning samples texts, trains on them, and samples again with slightly
different weights. A new engine for each step would read a checkpoint each time. Here one engine is
kept: it takes the trainer's tensors, and frees its memory while the trainer runs:

    generate ── sleep(2) ── train ── update_weights(model.state_dict()) ── wake_up() ── generate
                weights and          tensor by tensor, on all ranks        the KV cache
                KV cache go

An update deletes the old network first, since packed weights can't be written in place and two
networks may not fit in memory; then the ordinary loader makes a new one. Before that the tensors
are tried on a network without memory (torch's meta device), so a wrong name or shape in a folder, a
dict or a list raises an error and changes nothing. In a sleep all tensors of a network keep their
Python objects and lose their storage. The bytes are kept in host memory and restored exactly,
whatever their format. On a CPU they are in host memory already: there sleep(1) frees the KV cache
alone, and sleep(2) with a later `update_weights(folder)` frees the weights, too.

Invariants: no text is ever computed from two sets of weights, so whatever was computed from the old
ones is forgotten: the prefix cache and what extras keep (`Extra.reset`). If one rank fails, all
ranks still receive all tensors, so that they stay in step. An engine without its weights or without
its KV cache refuses requests with an error (other engines have generated garbage: TRL #4571).

Known limits: an update leaves a draft network as it is. Tensors are copied: memory shared with the
trainer would tie its layout to ours.
"""

import gc
from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import FunctionType, ModuleType

import torch
from safetensors.torch import load, save

from nanoserve.engine import LLMEngine
from nanoserve.hooks import Extra
from nanoserve.layers import Placement
from nanoserve.loader import Tensors, load_weights
from nanoserve.model import Decoder
from nanoserve.parallel import HEAD, Ranks
from nanoserve_extras.base.checkpoint import find_folder
from nanoserve_extras.base.config_files import ModelConfig
from nanoserve_extras.base.plan import Plan
from nanoserve_extras.base.ranks import hand_out
from nanoserve_extras.base.runner import Runner
from nanoserve_extras.base.vllm import takes_vllms_words
from nanoserve_extras.base.weight_files import stored_tensors
from nanoserve_extras.block_store.block_store import BlockStore

CALL = -3  # stands for a step's first length; one of the following numbers comes next
UPDATE, SLEEP, WAKE = range(3)
GIVEN = Path("update_weights()")  # stands for the file in errors
# Fields in which two folders of one network may differ. EOS tokens are set when the engine is made.
FREE = ("architecture", "dtype", "eos_token_ids", "generation_defaults", "quantization")
PARTS = ("weights", "kv_cache")  # vLLM's tags
NO_WEIGHTS = ("this engine has no weights: they were given back by sleep(level=2), or "
              "update_weights() failed. Call update_weights() with a folder, a dict or an iterable")
ASLEEP = "this engine is asleep: call wake_up()"
Weights = str | Path | dict[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


class NewWeights(Extra):
    """`LLM.update_weights`, `LLM.sleep` and `LLM.wake_up`."""

    def prepare(self, plan: Plan) -> Plan:
        calls = plan.parts.calls | {CALL: answer}
        return replace(plan, parts=replace(plan.parts, calls=calls))

    def attach(self, engine: LLMEngine) -> None:
        self.folder: Path | None = engine.runner.folder  # None: the weights are a trainer's tensors
        self.gone: set[str] = set()  # members of `PARTS` that were freed
        self.are_lost = False  # no weights, and no copy to restore them from

    def update_weights(self, weights: Weights) -> None:
        """Replace the weights, on all ranks.

        weights: a folder, a hub id or a GGUF file, a dict (`model.state_dict()`) or an iterable of
        (name, tensor), with the names of the checkpoint or of a wrapping around it. It must hold
        all of the network's tensors, each once. Raises `ValueError`, before anything changes, for
        wrong names and shapes in a folder, a dict or a list, and `RuntimeError` while requests run.
        After any other error (an iterator that breaks) the engine has no weights, and refuses
        requests until an update succeeds.
        """
        with self.engine.turns:
            runner = self.idle_runner("update_weights()")
            folder, tensors = read(weights, self.engine)
            if not isinstance(tensors, Iterator):
                try_names(runner, tensors)
            self.are_lost = True
            self.engine.reset_prefix_cache()
            store = self.engine.extra(BlockStore)
            if store is not None and store.options.kv_store is not None:
                store.rename()
            call(runner, UPDATE, tensors=tensors)
            self.folder, self.are_lost = folder, False
            self.gone.discard("weights")

    @takes_vllms_words("sleep()", "call")
    def sleep(self, level: int = 1) -> None:
        """Free the memory of the KV cache, which is forgotten, and of the weights until `wake_up`.

        level 1: the weights are kept in host memory, and `wake_up` restores them. On a CPU they
        stay where they are. level 2: the weights are dropped, and `update_weights` must bring new
        ones. Raises `RuntimeError` while requests run. After another error (no memory) `wake_up`
        restores the former state."""
        if level not in (1, 2):
            raise ValueError(f"sleep(level={level!r}): choose 1, or 2 to lose the weights, too")
        with self.engine.turns:
            runner = self.idle_runner("sleep()")
            self.engine.scheduler.blocks.reset_prefix_cache()
            for extra in self.engine.extras:  # a block store keeps its blocks, which stay valid
                extra.leave_cache() if isinstance(extra, BlockStore) else extra.reset()
            self.gone.update(PARTS)
            self.are_lost = self.are_lost or level == 2
            call(runner, SLEEP, level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Allocate memory again, and restore the weights after `sleep(level=1)`. tags: "weights",
        "kv_cache", or both. Raises `ValueError` for others."""
        if not set(tags or PARTS).issubset(PARTS):
            raise ValueError(f"wake_up(tags={tags!r}): choose of {', '.join(PARTS)}")
        with self.engine.turns:
            self.engine.check_open()
            runner, tags = self.engine.runner, self.gone.intersection(tags or PARTS)
            call(runner, WAKE, "weights" in tags, "kv_cache" in tags,
                 bool(tags) and tags == self.gone,  # nothing is missing
                 self.engine.scheduler.blocks.num_blocks, self.engine.config.max_model_len)
            self.gone -= tags

    def idle_runner(self, what: str) -> Runner:
        """Return the runner with no step in flight: the results of steps that no caller waits for
        are taken. Raises `RuntimeError` while requests run."""
        self.engine.check_open()
        if self.engine.requests:
            raise RuntimeError(f"{what} while {len(self.engine.requests)} requests are running: "
                               "wait until they have ended, or abort them")
        while self.engine.scheduler.in_flight:
            self.engine.advance()
        return self.engine.runner

    def ready(self) -> None:
        """Raise `RuntimeError` if no request can be served now: `LLM.check_ready` calls it."""
        if self.are_lost or self.gone:
            raise RuntimeError(NO_WEIGHTS if self.are_lost else ASLEEP)


def read(weights: Weights, engine: LLMEngine,
         ) -> tuple[Path | None, Iterable[tuple[str, torch.Tensor]]]:
    """The folder, if weights come from one, and pairs of name and tensor. A folder's tensors are
    mapped, so they can be iterated over twice and take no memory. Raises `ValueError`."""
    if isinstance(weights, dict):
        return None, list(weights.items())
    if not isinstance(weights, (str, Path)):
        return None, weights if isinstance(weights, (list, tuple)) else iter(weights)
    folder, old = find_folder(weights, dtype=engine.config.dtype), engine.runner.model_config
    if engine.runner.parts.make_network is None:
        new = ModelConfig.from_folder(folder, engine.config.hf_overrides)
    else:  # imported here, since it imports transformers
        from nanoserve_extras.foreign.foreign import ForeignNetwork, read_foreign
        _, new, _ = read_foreign(engine.extra(ForeignNetwork).args, folder)
    differing = [f.name for f in fields(ModelConfig) if f.name not in FREE
                 and getattr(old, f.name) != getattr(new, f.name)]
    if differing:
        raise ValueError(f"{folder} holds another network, its config.json differs in "
                         f"{', '.join(differing)}: make a new LLM")
    return folder, [(name, tensor) for _, name, tensor in stored_tensors(folder)]


def try_names(runner: Runner, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Fill a network without memory: the loader checks each name and shape, and reads no weights
    except a tied head that is stored beside its embedding. Raises `ValueError`."""
    config, make_network = runner.model_config, runner.parts.make_network
    if make_network is not None:  # transformers keeps what it gets: one number, expanded
        make_network(runner.placement, trial=True, tensors=(
            (GIVEN, name, torch.zeros((), dtype=tensor.dtype).expand(tensor.shape))
            for name, tensor in checked(tensors)))
        return
    on = Placement(runner.dtype, torch.device("meta"), assemble=runner.placement.assemble)
    model = Decoder(config, on)
    pooler = copy(runner.pooler)
    if pooler is not None:
        pooler.replace_head(model, on)
    named = ((GIVEN, name, tensor) for name, tensor in checked(tensors))
    load_weights(model, runner.parts.weights(model, GIVEN, given=named), GIVEN)


def checked(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The same pairs, detached from the trainer's autograd graph. Raises `ValueError` for anything
    that is no pair of name and tensor."""
    for pair in tensors:
        match pair:
            case (str(name), torch.Tensor() as tensor):
                yield name, tensor.detach()
            case _:
                raise ValueError("update_weights() takes a folder, a dict, or an iterable of "
                                 f"(name, tensor), got {pair!r:.80} in it")


# ------------------------------------------------------------------ all ranks


def call(runner: Runner, what: int, *numbers: int,
         tensors: Iterable[tuple[str, torch.Tensor]] = ()) -> None:
    """On rank 0: run a call on all ranks. Raises the error of a rank that failed."""
    with runner.ranks.together():
        head = torch.zeros(HEAD, dtype=torch.int32)
        head[:2 + len(numbers)] = torch.tensor([CALL, what, *numbers])
        runner.ranks.broadcast_host(head)
        # transformers keeps the tensors it gets, and the trainer goes on to change them: copy.
        error = answer(runner, head, sent(runner.ranks, tensors,
                                          copies=runner.parts.make_network is not None))
    if error is not None:  # raised only here, where all ranks have answered
        raise error


@torch.no_grad()
def answer(runner: Runner, head: torch.Tensor,
           tensors: Tensors | None = None) -> Exception | None:
    """Run the call, on every rank; all but rank 0 receive the tensors. Returns the error of this
    rank, or one which says that another rank failed. Graphs are recorded once all ranks have their
    weights and cache: a rank that recorded alone would wait in a collective for ever."""
    _, what, first, second, is_whole, *sizes = head[:7].tolist()
    tensors, error = tensors or received(runner.ranks), None
    try:
        if what == UPDATE:
            runner.unload()
            bring_back(runner)  # a draft network, adapters
            runner.load(tensors)
        elif what == SLEEP:
            if first == 2:
                runner.unload()
            put_away(runner)
            runner.unload(weights=False, kv_cache=True)
        else:
            if first:
                bring_back(runner)
            if second and not runner.kv_cache:
                runner.allocate_kv_cache(*sizes)
    except Exception as wrong:
        error = wrong
    try:
        for _ in tensors:  # the rest: all ranks must agree on what comes next
            pass
    except Exception as wrong:
        error = error or wrong
    if runner.ranks.least(error is None):
        if what == UPDATE or is_whole:
            runner.record()
        return None
    if what == UPDATE:
        runner.unload()
    return error or RuntimeError("another rank failed")


def sent(ranks: Ranks, tensors: Iterable[tuple[str, torch.Tensor]], copies: bool) -> Tensors:
    """Yield the tensors, each after it was sent to the other ranks. If the iterator breaks, the
    other ranks see its end, and find that tensors are missing."""
    try:
        for name, tensor in checked(tensors):
            if ranks.size > 1:
                hand_out(ranks, save({name: tensor.cpu().contiguous()}))
            yield GIVEN, name, tensor.clone() if copies else tensor
    finally:
        hand_out(ranks)


def received(ranks: Ranks) -> Tensors:
    """On another rank: the tensors that rank 0 sends."""
    while content := hand_out(ranks):
        for name, tensor in load(bytes(content)).items():
            yield GIVEN, name, tensor


# ------------------------------------------------------------- a rank's memory


def put_away(runner: Runner) -> None:
    """Move the bytes of all tensors to the host, where a CPU's are already. For each tensor note
    how to restore its storage, and its place in it: several tensors may share one storage, as an
    embedding and a tied head do."""
    places: dict[int, partial] = {}
    for tensor in tensors_of(runner):
        storage = tensor.untyped_storage()
        if start := storage.data_ptr():  # 0: it was put away already
            if start not in places:
                numbers = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
                places[start] = to_host(numbers, hasattr(tensor, "is_scratch"))
            tensor.away = places[start], tensor.storage_offset(), tensor.shape, tensor.stride()
            tensor.data = tensor.new_empty(0)


def to_host(numbers: torch.Tensor, is_scratch: bool) -> partial:
    """Copy bytes to the host, unless they are there. Returns a function that restores them; scratch
    memory, whose contents nobody needs, is restored as zeros."""
    if is_scratch:
        return partial(torch.zeros, len(numbers), dtype=torch.uint8, device=numbers.device)
    return partial(numbers.cpu().to, numbers.device)


def bring_back(runner: Runner) -> None:
    """Restore the tensors that were put away, and that the networks still reach."""
    fresh: dict[partial, torch.Tensor] = {}
    for tensor in tensors_of(runner):
        if hasattr(tensor, "away"):
            give, *lies = tensor.away
            if give not in fresh:
                fresh[give] = give()
            tensor.data = tensor.new_empty(0).set_(fresh[give].untyped_storage(), *lies)
            del tensor.away


def tensors_of(runner: Runner) -> list[torch.Tensor]:
    """All tensors on the runner's device that its networks and adapters reach, by attributes, lists
    or otherwise."""
    found, seen, ahead = [], {}, [*runner.networks, runner.adapters]
    while ahead:
        thing = ahead.pop()
        if id(thing) in seen or isinstance(thing, (type, ModuleType, FunctionType, Ranks)):
            continue
        seen[id(thing)] = thing  # kept alive, so that its id is not used again
        if not isinstance(thing, torch.Tensor):
            ahead += gc.get_referents(thing)
        elif thing.device.type == runner.device.type and not hasattr(thing, "is_on_disk"):
            found.append(thing)
            ahead.append(thing._base)  # the tensor of which it is a view
    return found
