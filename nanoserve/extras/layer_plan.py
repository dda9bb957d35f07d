"""Where layers are: a network whose layers stand on several ranks, one part behind the other.

Tensor parallelism cuts every matrix, and its ranks add up two sums a layer. Here a rank has whole
layers instead, a *stage* (Huang et al. 2019, "GPipe"; Narayanan et al. 2019, "PipeDream"), and
sends on what the next stage needs, once a step. So a network that is larger than one machine's
memory runs on two of them, over a plain cable:

    rank 0     ids ─► embed ─► layers 0..9 ─┐             ┌─► norm ─► head ─► sample ─► tokens
                                            │ stream      │ the stream's rows that sample
    rank 1                                  └─► 10..18 ─┐ │
    rank 2                                              └─► 19..27

With `tensor_parallel_size=n` each stage has n ranks, which share its layers' matrices as ever; rank
i of a stage sends to rank i of the next.

Invariant: **not one bit changes.** Between two layers the residual stream is two terms, and the
next norm reads nothing but their rounded sum. So the sum alone is sent, and begins a stream.

**The stream ends where it began.** Rank 0 has the embedding, the last norm and the head, and
samples there, where the requests are: penalties, grammars, logprobs and seeds work as with one
rank, and none of them is sent. The price is that rank 0 computes the head; the plan that is made
for the user gives it fewer layers for that.

**As many steps are in flight as there are stages**, of disjoint sequences (`Scheduler`), so that no
stage waits for another. A stage sends and goes on; rank 0 asks for a step's hidden states when the
engine fetches its tokens.

Not known here: the queue, requests, how a rank's death is noticed (parallel/processes.py). Road not
taken: to sample on the last stage, which would need each row's rules there, and all it counts.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from nanoserve.batch import Batch
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.engine import Extra, LLMEngine, Plan
from nanoserve.frontend.metrics import say
from nanoserve.layers import Placement
from nanoserve.model import Decoder, KVCache

AT_RANK_0 = ("embed_tokens.", "norm.", "lm_head.")  # tensors that no later stage has


# ------------------------------------------------------------------- the plan


def read_plan(config: EngineConfig, model_config: ModelConfig) -> list[range]:
    """The layers of each stage. Raises `ValueError` for a plan that can't be followed."""
    total, asked, stages = (model_config.num_hidden_layers, config.layer_plan,
                            config.pipeline_parallel_size)
    if asked is None:
        return share_out(model_config, stages)
    if isinstance(asked, dict):
        raise ValueError(f"layer_plan={asked!r}: layers stand in the memory of ranks, as yet: give "
                         "a list of how many each stage has")
    if not all(type(count) is int and count > 0 for count in asked) or sum(asked) != total:
        raise ValueError(f"layer_plan={asked!r} must say how many layers each stage has, at least "
                         f"1, and {total} together, which is what {model_config.architecture} has")
    if stages not in (1, len(asked)):
        raise ValueError(f"layer_plan={asked!r} is for {len(asked)} stages, and "
                         f"pipeline_parallel_size={stages}: leave one of them out")
    return spans(asked)


def spans(counts: list[int]) -> list[range]:
    """[10, 9, 9] -> 0..9, 10..18, 19..27"""
    ends = [sum(counts[:i + 1]) for i in range(len(counts))]
    return [range(end - count, end) for count, end in zip(counts, ends, strict=True)]


def share_out(model_config: ModelConfig, stages: int) -> list[range]:
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
    return spans([first] + [rest * (i + 1) // others - rest * i // others for i in range(others)])


# ------------------------------------------------------------------- a stage


class Stage(Decoder):
    """The layers of one rank; with the embedding, the last norm and the head on rank 0.

    plan: the layers of all stages. waits: whether rank 0 waits for a step's hidden states before
    it takes another one.
    """

    def __init__(self, plan: list[range], waits: bool, config: ModelConfig, on: Placement,
                 expert_parallel: bool = False):
        world = on.ranks
        width = world.size // len(plan)  # ranks of a stage
        stage = world.rank // width
        part = world.part(f"stage {stage}", range(stage * width, (stage + 1) * width))
        super().__init__(config, replace(on, ranks=part), expert_parallel, plan[stage])
        self.world, self.stage, self.waits = world, stage, waits
        self.before, self.behind = ((world.rank + step) % world.size for step in (-width, width))
        if stage:
            self.embed_tokens = self.norm = self.lm_head = None
            self.elsewhere += AT_RANK_0
        self.dtype, self.device = on.dtype, on.device

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, kv_cache: KVCache,
                batch: Batch, wanted: torch.Tensor) -> torch.Tensor | Callable:
        """`Decoder.forward`, from the embedding to the last norm, on rank 0; or what waits for its
        result. The other ranks return what stands in for it: as many rows."""
        stream = self.receive(len(input_ids)) if self.stage else self.embed(input_ids)
        hidden, residual = self.through(stream, positions, kv_cache, batch, wanted)
        stream = hidden + residual
        if len(stream):
            self.world.send(stream, self.behind)
        if not self.waits:
            return partial(self.finish, len(wanted))
        return stream[:len(wanted)] if self.stage else self.finish(len(wanted))

    def finish(self, num_rows: int) -> torch.Tensor:
        """On rank 0: the hidden states of a step, of which the last stage has sent the rows that
        are wanted."""
        return self.norm(self.receive(num_rows))

    def receive(self, num_rows: int) -> torch.Tensor:
        stream = torch.empty(num_rows, self.config.hidden_size, dtype=self.dtype)
        return self.world.receive(stream, self.before) if num_rows else stream

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        return None if self.stage else super().compute_logits(hidden)


class LayerPlan(Extra):
    """What `LLM(pipeline_parallel_size=n)` or `LLM(layer_plan=[...])` adds."""

    plan: list[range]

    def prepare(self, plan: Plan) -> Plan:
        config = plan.config
        if config.model_impl == "transformers":
            raise ValueError("pipeline_parallel_size and layer_plan do not go together with "
                             "model_impl='transformers', whose networks run on one rank")
        self.plan = read_plan(config, plan.model_config)
        for option, value, nothing in (
                ("device", config.device, "cpu"), ("kv_offload_bytes", config.kv_offload_bytes, 0),
                ("kv_store", config.kv_store, None), ("runner", config.runner, "generate"),
                ("speculative_config", config.draft_model and config.speculative_config, None),
                ("enable_lora", config.enable_lora, False),
                ("async_scheduling", config.async_scheduling and config.tensor_parallel_size > 1,
                 False)):
            if value != nothing:
                raise ValueError(f"{option}={value!r} does not go together with stages "
                                 "(pipeline_parallel_size, layer_plan): leave one of them out")
        decoder = partial(Stage, self.plan, config.steps_at_once == 1)
        return replace(plan, parts=replace(plan.parts, decoder=decoder))

    def attach(self, engine: LLMEngine) -> None:
        say("stages: " + ", ".join(f"layers {one.start} to {one.stop - 1}" for one in self.plan))
