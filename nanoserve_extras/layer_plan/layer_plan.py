"""Where layers are: on several ranks, as a pipeline of stages, or on disk (layer_disk.py).

A rank has some whole layers, a *stage* (Huang et al. 2019, "GPipe"; Narayanan et al. 2019,
"PipeDream"), and sends the residual stream to the next stage, once a step. So a network that is
larger than one machine's memory runs on two machines over an ordinary network:

    rank 0     ids ─► embed ─► layers 0..9 ─┐             ┌─► norm ─► head ─► sample ─► tokens
                                            │ stream      │ the stream's rows that sample
    rank 1                                  └─► 10..18 ─┐ │
    rank 2                                              └─► 19..27

With `tensor_parallel_size=n` a stage has n ranks; rank i sends to rank i of the next. **The stream
ends where it began**: rank 0 samples, because requests are there (penalties, grammars, seeds). It
computes the head, too, so the default plan gives it fewer layers. As many steps are in flight as
there are stages; a sequence samples in one of them (`Scheduler`).

Invariant: **not one bit changes.** Between two layers the residual stream is two terms, and the
next norm reads only their rounded sum. So only the sum is sent.

parallel.py notices the death of a rank. The road not taken: sampling on the last stage would need
each row's constraints and counts there.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from nanoserve.batch import Batch
from nanoserve.engine import LLMEngine
from nanoserve.hooks import Extra
from nanoserve.layers import Placement
from nanoserve.model import Decoder, KVCache
from nanoserve.model_config import ModelConfig
from nanoserve.parallel import HEAD
from nanoserve.progress import say
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import Sequence, Step
from nanoserve.turns import ctrl_c_held
from nanoserve_extras.base.facts import Fact
from nanoserve_extras.base.metrics import Counter, Gauge, Metric
from nanoserve_extras.base.plan import Plan
from nanoserve_extras.base.runner import Runner
from nanoserve_extras.engine_args import LayerPlanOptions
from nanoserve_extras.layer_plan.layer_disk import Disk, NoRoom
from nanoserve_extras.new_weights import NewWeights

DEPLOY = -4  # stands for a step's first length: a new plan comes next
AT_RANK_0 = ("embed_tokens.", "norm.", "lm_head.")  # tensors that no later stage has
FEW = 4  # so few rows take as long as one, and are not split among the steps in flight


# ------------------------------------------------------------------- the plan


class Place(NamedTuple):
    """The layers of a stage, and which of them are on disk."""

    layers: range
    on_disk: tuple[int, ...] = ()


def read_plan(asked: dict | list | None, num_stages: int,
              model_config: ModelConfig) -> list[Place]:
    """Where the layers of each stage are. asked: the option `layer_plan`; without one, `num_stages`
    equal parts. Raises `ValueError` for a plan that can't be followed."""
    total = model_config.num_hidden_layers
    if asked is None:
        return places(share_out(model_config, num_stages), [0] * num_stages)
    is_one = isinstance(asked, dict)
    entries = [one if isinstance(one, dict) else {"device": one}
               for one in ([asked] if is_one else asked)]
    for entry in entries:
        if "host" in entry:
            raise ValueError(f"layer_plan={asked!r}: layers in host memory are for "
                             "GPUs, and no GPU has run them yet: leave 'host' out")
        if entry.keys() - {"device", "disk"} or not all(
                type(count) is int and count >= 0 for count in entry.values()):
            raise ValueError(f"layer_plan={asked!r}: an entry is a number of layers, "
                             "or says how many are where: {'device': 10, 'disk': 4}")
    if is_one:  # the rest stands in memory
        entries = [{"device": max(0, total - sum(asked.values()))} | asked]
    counts = [sum(entry.values()) for entry in entries]
    if sum(counts) != total or 0 in counts:
        raise ValueError(f"layer_plan={asked!r}: each stage needs a layer, and all "
                         f"together the {total} that {model_config.architecture} has")
    return places(counts, [entry.get("disk", 0) for entry in entries])


def places(counts: list[int], on_disk: list[int]) -> list[Place]:
    """Places of layers, from the number of layers of each stage and how many of them are on disk,
    evenly spread. Example: [8, 9] and [2, 0] are 0..7, of which 3 and 7 are on disk, and 8..16."""
    found: list[Place] = []
    for count, some in zip(counts, on_disk, strict=True):
        start = found[-1].layers.stop if found else 0
        found.append(Place(range(start, start + count), tuple(
            start + count * (i + 1) // some - 1 for i in range(some))))
    return found


def share_out(model_config: ModelConfig, stages: int) -> list[int]:
    """Equal parts, by weights. Rank 0 has fewer layers, because it has the head, too.

    Example: 28 layers and a head as large as 10 of them are 38 on 2 stages: 9 layers, and 19.
    """
    total = model_config.num_hidden_layers
    if stages > total:
        raise ValueError(f"pipeline_parallel_size={stages}, but there are {total} layers: a stage "
                         "needs one at least")
    network = Decoder(model_config, Placement(torch.float32, torch.device("meta")))
    in_layers = sum(weight.numel() for weight in network.layers.parameters())
    elsewhere = sum(weight.numel() for weight in network.parameters()) - in_layers
    first = round((total + elsewhere * total / in_layers) / stages - elsewhere * total / in_layers)
    first = max(1, min(first, total - stages + 1))
    rest, others = total - first, stages - 1
    return [first, *(rest * (i + 1) // others - rest * i // others for i in range(others))]


# ------------------------------------------------------------------- a stage


@dataclass
class Builder:
    """Builds a rank's stage by the present plan."""

    plan: list[Place]  # all stages, first to last
    traced: bool  # whether each stage reports to rank 0 when it computed
    coming: deque["Later"] = field(default_factory=deque)  # rank 0 has not received these yet

    def __call__(self, *args) -> "Stage":
        return Stage(self, *args)

    def foreign(self, config: ModelConfig, on: Placement):
        """For transformers' network. Imported here, since it imports transformers."""
        from nanoserve_extras.layer_plan.foreign_stage import ForeignStage
        return ForeignStage(Line(self, config, on), config.num_hidden_layers)


class Line:
    """The pipeline as one rank sees it: the rank from which it receives, and that to which it
    sends."""

    def __init__(self, made_by: Builder, config: ModelConfig, on: Placement):
        world = self.world = on.ranks
        self.width = width = world.size // len(made_by.plan)  # ranks of a stage
        self.stage, self.place = world.rank // width, made_by.plan[world.rank // width]
        self.is_alone, self.coming = len(made_by.plan) == 1, made_by.coming
        self.traced = made_by.traced and width == 1
        if not self.is_alone:
            world.post_broadcasts()
        self.before, self.behind = ((world.rank + step) % world.size for step in (-width, width))
        self.row = torch.empty(0, config.hidden_size, dtype=on.dtype)
        self.span: list[float] = []  # from when to when this rank computed its last step

    def receive(self, num_rows: int, number: int | None = None) -> torch.Tensor:
        """number: the step's, if it is not the present one (`WatchedRanks.receive`)."""
        stream = self.row.new_empty(num_rows, self.row.shape[1])
        number = self.world.number if number is None else number
        return self.world.receive(stream, self.before, number) if num_rows else stream

    def begin(self) -> None:
        self.span = [time.time()]

    def send(self, stream: torch.Tensor) -> None:
        self.span.append(time.time())
        if len(stream):
            self.world.send(stream, self.behind)
        if self.stage and self.traced:
            self.world.send(torch.tensor(self.span, dtype=torch.float64), 0)


class Stage(Decoder):
    """The layers of one rank; with the embedding, the last norm and the head on rank 0."""

    def __init__(self, made_by: Builder, config: ModelConfig, on: Placement):
        line = Line(made_by, config, on)
        stage, width, plan = line.stage, line.width, made_by.plan
        if not line.is_alone:
            members = range(stage * width, (stage + 1) * width)
            on = replace(on, ranks=on.ranks.part(f"stage {stage}", members))
        super().__init__(config, on, plan[stage].layers)
        self.line = line
        self.unused += tuple(f"layers.{i}." for i in range(config.num_hidden_layers)
                             if i not in self.here)
        if stage:
            self.embed_tokens = self.norm = self.lm_head = None
            self.unused += AT_RANK_0
        self.disk = Disk() if plan[stage].on_disk else None
        for i in plan[stage].on_disk:
            self.disk.take(self.layers[i], i)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, kv_cache: KVCache,
                batch: Batch, wanted: torch.Tensor) -> torch.Tensor:
        """`Decoder.forward`, from the embedding to the last norm, on rank 0. The other ranks return
        a stand-in, and so does rank 0 if the last stage's result is awaited later."""
        line = self.line
        if line.is_alone:
            return super().forward(input_ids, positions, kv_cache, batch, wanted)
        stream = line.receive(len(input_ids)) if line.stage else self.embed(input_ids)
        line.begin()
        hidden, residual = self.through(stream, positions, kv_cache, batch, wanted)
        stream = hidden + residual
        line.send(stream)
        if line.stage or line.width == 1:
            return stream[:len(wanted)]
        return self.norm(line.receive(len(wanted)))

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        return None if self.line.stage else super().compute_logits(hidden)


class Later:
    """Stands for a step's output: rank 0 receives the hidden states when the engine asks for the
    tokens. hidden: a stand-in for them. finish: makes the output from them. spans: when each stage
    computed, in seconds since 1970; between hosts this is as exact as their clocks."""

    def __init__(self, stage: nn.Module, hidden: torch.Tensor, finish: Callable):
        stage = getattr(stage, "stage", stage)  # transformers' network has one
        self.stage, self.num_rows, self.finish = stage, len(hidden), finish
        self.line = line = stage.line
        self.number, self.spans = line.world.number, [(0, *line.span)]
        if not line.stage:
            line.coming.append(self)

    def to_host(self) -> "Later":
        return self

    @torch.inference_mode()
    def tolist(self) -> tuple[list, dict, list]:
        """Receive the tokens, after the messages of lost steps. Ctrl-C waits, because a message
        can't be received in part."""
        with ctrl_c_held(), self.line.world.together():
            while (one := self.line.coming.popleft()) is not self:
                one.receive()
            hidden, began = self.receive(), time.time()
            output = self.finish(self.stage.norm(hidden))
            self.failed = output.failed
            tokens = output.tolist()
            self.spans.append((0, began, time.time()))
            return tokens

    def receive(self) -> torch.Tensor:
        """The hidden states from the last stage, and the times at which each stage computed."""
        hidden, world = self.line.receive(self.num_rows, self.number), self.line.world
        for rank in range(1, world.size) if self.line.traced else ():
            span = world.receive(torch.empty(2, dtype=torch.float64), rank, self.number)
            self.spans.append((rank, *span.tolist()))
        return hidden


class LayerPlan(Extra):
    """The extra behind `LLM(pipeline_parallel_size=n)` and `LLM(layer_plan=...)`."""

    Options = LayerPlanOptions
    plan: list[Place]

    @property
    def is_staged(self) -> bool:
        return not isinstance(self.options.layer_plan, dict)

    @property
    def name(self) -> str:
        plan = self.options.layer_plan
        return "pipeline_parallel_size=n" if plan is None else f"layer_plan={plan!r}"

    @property
    def needs(self) -> frozenset[Fact]:
        return frozenset([Fact.ON_CPU, Fact.OWN_LINEAR, *[Fact.GENERATES] * self.is_staged])

    @property
    def ends(self) -> frozenset[Fact]:
        return frozenset([Fact.IN_MEMORY, *[Fact.ONE_STAGE] * self.is_staged])

    def prepare(self, plan: Plan) -> Plan:
        config, asked = plan.config, self.options.layer_plan
        stages = config.pipeline_parallel_size
        self.plan = read_plan(asked, stages, plan.model_config)
        if len(self.plan) != stages:
            raise ValueError(f"layer_plan={asked!r} is for {len(self.plan)} stages, and "
                             f"pipeline_parallel_size={stages}: leave one out")
        if len(self.plan) > 1 and config.async_scheduling and config.tensor_parallel_size > 1:
            raise ValueError("async_scheduling=True does not go together with stages of several "
                             "ranks: leave it out, or tensor_parallel_size")
        make, builder = plan.parts.make_network, Builder(self.plan, plan.parts.traced)
        if make is not None and plan.parts.make_adapters is not None and len(self.plan) > 1:
            raise ValueError("enable_lora does not go together with stages of transformers' "
                             "network: leave one of the two out")
        if self.options.max_wait and not any(place.on_disk for place in self.plan):
            raise ValueError(f"max_wait={self.options.max_wait} is for layers on disk: leave it "
                             "out, or put some there with layer_plan={'disk': n}")
        return replace(plan, parts=replace(
            plan.parts, decoder=builder,
            make_network=make and partial(make, make_stage=builder.foreign),
            finish_later=Later if len(self.plan) > 1 and config.tensor_parallel_size == 1 else None,
            calls=plan.parts.calls | {DEPLOY: rebuild}))

    def attach(self, engine: LLMEngine) -> None:
        self.follow(self.plan)

    def cut(self, step: Step, seq: Sequence, start: int, num_new: int) -> int:
        return share_out_rows(self.engine.scheduler, step, num_new)

    def follow(self, plan: list[Place]) -> None:
        """Adopt a plan, and print it: "0 to 9 (4 on disk), 10 to 27", for example."""
        self.plan = plan
        say("layers: " + ", ".join(
            f"{layers.start} to {layers.stop - 1}" + f" ({len(on_disk)} on disk)" * bool(on_disk)
            for layers, on_disk in plan))

    def deploy(self, layer_plan: dict | list) -> None:
        """Move the layers, between two steps, on the present ranks. Each request releases its
        blocks and is recomputed, so none is lost and no text changes.

        Raises `ValueError`, and changes nothing, for a plan that can't be followed. On one rank a
        full disk leaves the layers where they were. Any other error later ends the engine.
        """
        engine = self.engine
        with engine.turns:
            engine.check_ready()
            runner, blocks = engine.runner, engine.scheduler.blocks
            asked = LayerPlanOptions(layer_plan=layer_plan).layer_plan  # by its rule
            plan = read_plan(asked, len(self.plan), runner.model_config)
            if len(plan) != len(self.plan):
                raise ValueError(f"layer_plan={layer_plan!r} is for {len(plan)} stages, and the "
                                 f"engine has {len(self.plan)}: make a new LLM")
            if runner.copier is not None or runner.adapters is not None:
                raise ValueError("deploy() makes cache and layers anew, and blocks in host memory "
                                 "or adapters belong to the present ones: make a new LLM")
            if any(isinstance(one, NewWeights) and one.folder != runner.folder
                   for one in engine.extras):
                raise ValueError("deploy() reads the checkpoint again, and this engine has other "
                                 "weights since update_weights()")
            runner.synchronize()
            engine.scheduler.drop_in_flight()
            for seq in [*engine.scheduler.running]:
                engine.scheduler.preempt(seq)
            blocks.reset_prefix_cache()
            try:
                self.rebuild(plan)
            except NoRoom:
                if runner.ranks.size == 1:
                    self.rebuild(self.plan)
                raise
            self.follow(plan)

    def rebuild(self, plan: list[Place]) -> None:
        runner, head = self.engine.runner, torch.zeros(HEAD, dtype=torch.int32)
        numbers = [DEPLOY, self.engine.scheduler.blocks.num_blocks,
                   self.engine.config.max_model_len, len(plan),
                   *(n for one in plan for n in (len(one.layers), len(one.on_disk)))]
        head[:len(numbers)] = torch.tensor(numbers)
        with runner.ranks.together():
            runner.ranks.broadcast_host(head)
            rebuild(runner, head)

    def metrics(self) -> list[Metric]:
        """The metrics of rank 0's disk."""
        disk = self.engine.runner.model and self.engine.runner.model.disk
        return [] if disk is None else [
            Counter("nanoserve:layer_bytes_read", {}, disk.num_bytes),
            Gauge("nanoserve:layer_seconds_waited", {}, disk.seconds_waited)]


def share_out_rows(scheduler: Scheduler, step: Step, num_new: int) -> int:
    """How many of a prompt's tokens a step computes: none if the step has its share of all rows, so
    that the steps in flight have equal sizes. The prompt is computed in the next one."""
    if scheduler.config.steps_at_once == 1:
        return num_new
    total = min(len(scheduler.running) + len(scheduler.waiting), scheduler.max_num_seqs)
    most = max(FEW, -(-total // scheduler.config.steps_at_once))
    return num_new if len(step.num_new_tokens) < most else 0


def rebuild(runner: Runner, head: torch.Tensor) -> None:
    """On every rank: build the layers that are here now, and a KV cache for them."""
    _, num_blocks, max_model_len, stages = head[:4].tolist()
    counts, on_disk = head[4:4 + 2 * stages].view(-1, 2).T.tolist()
    runner.parts.decoder.plan = places(counts, on_disk)
    runner.unload(kv_cache=True)
    with torch.inference_mode():
        runner.load()
    runner.start(num_blocks, max_model_len)
