"""New weights in a running engine, and an engine that sleeps: for those who train and sample.

A step of reinforcement learning samples texts, trains on them, and samples again with weights that
are a little different. A new engine for each step would read a checkpoint each time; here the same
engine gets the trainer's tensors, and the trainer its memory meanwhile:

    generate ── sleep(2) ── train ── update_weights(model.state_dict()) ── wake_up() ── generate
                weights and          tensor by tensor, on all ranks        the KV cache
                KV cache go

In an update the old network goes first, since packed weights can't be written in place and there
may be no room for two; then the ordinary loader makes a new one. A trial against a network without
memory comes before that: so what is wrong with the names and shapes of a folder, a dict or a list
is an error that changes nothing. In a sleep each tensor that a network reaches stays in its place
and loses its memory. Its bytes wait in host memory, and come back as they were, whatever they came
from and however they are packed. On a CPU that is where they are: there sleep(1) gives back the KV
cache alone, and sleep(2) with a later `update_weights(folder)` the weights, too.

Invariants: no text is ever computed from two sets of weights, so whatever was computed from the old
ones is forgotten: the prefix cache and what extras keep (`Extra.reset`). All ranks see all tensors
to the last one, whatever fails on one of them. An engine without its weights, or without its KV
cache, refuses requests with a sentence (elsewhere it wrote garbage: TRL #4571).

Known limit: an update leaves a draft network as it is. Memory that both processes map would tie the
trainer's layout to ours.
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

CALL = -3  # in the place of a step's first length: one of the following comes next
UPDATE, SLEEP, WAKE = range(3)
GIVEN = Path("update_weights()")  # said in the place of a file
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
        calls = plan.parts.calls | {CALL: answer}
        return replace(plan, parts=replace(plan.parts, calls=calls))

    def attach(self, engine: LLMEngine) -> None:
        self.folder: Path | None = engine.runner.folder  # None: the weights are a trainer's tensors
        self.gone: set[str] = set()  # those of `PARTS` that were given back
        self.are_lost = False  # no weights, and nothing to bring them back from

    def update_weights(self, weights: Weights) -> None:
        """Put other weights in the place of the present ones, on all ranks.

        weights: a folder, a hub id or a GGUF file, a dict (`model.state_dict()`) or an iterable of
        (name, tensor), with the names of the checkpoint or of a wrapping around it. All of the
        network's tensors must come, each once. Raises `ValueError` before anything changes for what
        is wrong with the names and shapes of a folder, a dict or a list, and `RuntimeError` while
        requests run.
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
        """Give memory back until `wake_up`: the KV cache, which is forgotten, and the weights.
        level 1: they wait in host memory (on a CPU where they are), and `wake_up` brings them back.
        level 2: they are lost, and only `update_weights` brings others. Raises `RuntimeError` while
        requests run. After another error (no memory) `wake_up` brings back what was there."""
        if level not in (1, 2):
            raise ValueError(f"sleep(level={level!r}): choose 1, or 2 to lose the weights, too")
        with self.engine.turns:
            runner = self.idle_runner("sleep()")
            self.engine.scheduler.blocks.reset_prefix_cache()
            for extra in self.engine.extras:  # a second place keeps blocks that stay right
                extra.leave_cache() if isinstance(extra, BlockStore) else extra.reset()
            self.gone.update(PARTS)
            self.are_lost = self.are_lost or level == 2
            call(runner, SLEEP, level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Take memory again, and weights after `sleep(level=1)`. tags: "weights", "kv_cache", or
        both. Raises `ValueError` for others."""
        if not set(tags or PARTS).issubset(PARTS):
            raise ValueError(f"wake_up(tags={tags!r}): choose of {', '.join(PARTS)}")
        with self.engine.turns:
            self.engine.check_open()
            runner, tags = self.engine.runner, self.gone.intersection(tags or PARTS)
            call(runner, WAKE, "weights" in tags, "kv_cache" in tags,
                 bool(tags) and tags == self.gone,  # all is there
                 self.engine.scheduler.blocks.num_blocks, self.engine.config.max_model_len)
            self.gone -= tags

    def idle_runner(self, what: str) -> Runner:
        """Take the results of steps in flight that no caller waits for. Raises `RuntimeError`."""
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
    """The folder, if it is one, names and tensors: a folder's are mapped, so they may be asked for
    twice and take no memory. Raises `ValueError`."""
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
    """Fill a network that has no memory: the loader checks each name and shape, and reads none of
    the numbers, but of a tied head that comes beside its embedding. Raises `ValueError`."""
    config, make_network = runner.model_config, runner.parts.make_network
    if make_network is not None:  # transformers keeps what it is given: tensors of one number
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
    """The same, without a trainer's graph of gradients. Raises `ValueError` for anything else."""
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
    """On rank 0: have all ranks do it. Raises what failed on one of them."""
    with runner.ranks.together():
        head = torch.zeros(HEAD, dtype=torch.int32)
        head[:2 + len(numbers)] = torch.tensor([CALL, what, *numbers])
        runner.ranks.broadcast_host(head)
        # transformers keeps what it is given, which goes on being trained.
        error = answer(runner, head, sent(runner.ranks, tensors,
                                          copies=runner.parts.make_network is not None))
    if error is not None:  # here: the ranks are still together
        raise error


@torch.no_grad()
def answer(runner: Runner, head: torch.Tensor,
           tensors: Tensors | None = None) -> Exception | None:
    """The same on every rank; all but rank 0 receive the tensors. Returns what failed here, or that
    another rank failed. Graphs are recorded once all ranks have all there is: one that recorded
    alone would wait in a collective for ever."""
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
    """The tensors, each after the other ranks got it. For them an iterator that breaks has ended:
    then tensors are missing."""
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
    """The bytes of all tensors go to the host, where a CPU's are already. Each tensor notes what
    gives them back, and how it lies in them: several may share memory, as an embedding and a head
    do."""
    places: dict[int, partial] = {}
    for tensor in tensors_of(runner):
        storage = tensor.untyped_storage()
        if start := storage.data_ptr():  # 0: it is away already
            if start not in places:
                numbers = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
                places[start] = to_host(numbers, hasattr(tensor, "is_scratch"))
            tensor.away = places[start], tensor.storage_offset(), tensor.shape, tensor.stride()
            tensor.data = tensor.new_empty(0)


def to_host(numbers: torch.Tensor, is_scratch: bool) -> partial:
    """Copies bytes, but not a CPU's. Returns what gives them back: zeros for unneeded bytes."""
    if is_scratch:
        return partial(torch.zeros, len(numbers), dtype=torch.uint8, device=numbers.device)
    return partial(numbers.cpu().to, numbers.device)


def bring_back(runner: Runner) -> None:
    """What was put away, and is still reached."""
    fresh: dict[partial, torch.Tensor] = {}
    for tensor in tensors_of(runner):
        if hasattr(tensor, "away"):
            give, *lies = tensor.away
            if give not in fresh:
                fresh[give] = give()
            tensor.data = tensor.new_empty(0).set_(fresh[give].untyped_storage(), *lies)
            del tensor.away


def tensors_of(runner: Runner) -> list[torch.Tensor]:
    """All on the runner's device that its networks and adapters reach, however they hold them."""
    found, seen, ahead = [], {}, [*runner.networks, runner.adapters]
    while ahead:
        thing = ahead.pop()
        if id(thing) in seen or isinstance(thing, (type, ModuleType, FunctionType, Ranks)):
            continue
        seen[id(thing)] = thing  # held, so that no other gets its id
        if not isinstance(thing, torch.Tensor):
            ahead += gc.get_referents(thing)
        elif thing.device.type == runner.device.type and not hasattr(thing, "is_on_disk"):
            found.append(thing)
            ahead.append(thing._base)  # if it is a view: this holds the memory, too
    return found
