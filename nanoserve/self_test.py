"""Which backend computes, and whether it is right on the machine that it runs on.

A backend may be missing: there is no compiler, no triton, or an old GPU. Then `ops`, the
specification, takes its place where the user left the choice open.

A backend that is there may still be wrong. The tests compare the backends with `ops` on their
makers' machines. A user's GPU, driver or compiler may differ, and an error there is mostly silent:
fluent text from wrong numbers. So the first start compares, at the model's shapes and in its dtype:

    numbers ──┬──► functions of the backend ───┐
              └──► their namesakes in `ops` ───┴──► relative error below TOLERANCE, or replaced

The table is `CHECKS`. Functions that share a layout in memory are replaced together by those of
`ops`, before anything is packed or allocated. A CUDA graph is replayed twice
with other contents; if a replay gives wrong numbers, the engine runs without graphs. The outcome is
kept in the cache folder, by device, library, versions, dtype and shapes: later starts read a file.

Invariant: checks take the backend and the graph's class as arguments, so tests can pass broken
ones. `nanoserve doctor` prints the same checks.

Not known here: the kernels of extras, which check these themselves. Road not taken: comparing while
the engine runs, which would find more and slow down each step.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from textwrap import shorten
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import torch

from nanoserve import ops
from nanoserve.batch import Batch, BatchBuilder
from nanoserve.build import cache_folder, digest
from nanoserve.config import EngineConfig, SamplingParams
from nanoserve.device import current, full_float32, memory_for
from nanoserve.graphs import CudaGraph
from nanoserve.model_config import ModelConfig
from nanoserve.sequence import CoreRequest, Sequence, Step, visible

# Relative to the norm of the right result; it allows for a rounding of each number on the way, and
# one at the end.
TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 1e-5}
# These functions of `ops` wait for the device: with them no graph can be recorded.
WAITS = {"norm_rope_store", "experts"}
EPS = 1e-6
ROWS = (1, 9, 64)
KV_HEADS = 2
# (query_len, seq_len) of each row: one long row, whose keys are split; many rows; decodes with
# drafts or chunks.
CROWDS = {
    "1 row": [(1, 700)],
    "9 rows": [(1, n) for n in range(1, 80, 9)],
    "64 rows": [(1, 1 + n % 7) for n in range(64)],
    "drafts": [(1, 30), (5, 700), (2, 33)],
    "chunks": [(1, 30), (40, 70), (17, 17), (2, 33)]}

Backend = ModuleType | SimpleNamespace
Results = Iterator[tuple[str, torch.Tensor]]  # name of a result, its numbers
Pairs = Iterable[tuple[str, torch.Tensor, torch.Tensor]]  # name, numbers, the right numbers


# ------------------------------------------------------------- the backend is there


def load_backend(kernels: str, failing: Iterable[str] = ()) -> Backend:
    """`ops`, or the backend that `kernels` names, with the functions of `ops` for those that fail.
    A backend is imported late, because it needs a compiler, or triton, which exists for Linux only.
    Raises `ImportError` where one of these is missing."""
    backend = ops
    if kernels == "triton":
        from nanoserve import triton_attention as backend
    elif kernels == "cpu":
        from nanoserve import cpu as backend
    replaced = {name: getattr(ops, name) for name in failing if name in ops.__all__}
    if not replaced:
        return backend
    # What is fused calls the backend's own functions.
    without_fused = vars(backend) | dict(FusedLayer=None, FusedExperts=None, run_layers=None)
    return SimpleNamespace(**without_fused | replaced)


def fit_kernels(config: EngineConfig, asked: EngineConfig) -> tuple[EngineConfig, list[str]]:
    """A config whose kernels can run here, and a sentence if they are others than wanted. config:
    resolved. Raises `ValueError` where the user asked for what can't run."""
    reason, instead = what_is_missing(config)
    if not reason:
        return config, []
    if asked.kernels != "auto":
        raise ValueError(f"kernels={asked.kernels!r}, but {reason}: install what is missing, or "
                         f"use kernels={instead!r}")
    return replace(config, kernels=instead), [
        f"{shorten(reason, 500)}. kernels={instead!r} takes its place, which is slower"]


def what_is_missing(config: EngineConfig) -> tuple[str, str]:
    """Why `config.kernels` can't run here, "" if they can; and what can."""
    if config.kernels == "cpu" and config.on_gpu:
        return "these kernels are for CPUs and the device is a GPU", "triton"
    try:
        backend = load_backend(config.kernels)
    except ImportError as error:
        return str(error), "torch"
    if config.kernels != "triton":
        return "", ""
    if config.on_gpu:
        return why_no_triton(backend, config.device), "torch"
    return "" if backend.INTERPRETED else (
        "there is no GPU (the environment variable TRITON_INTERPRET=1, set from the start, "
        "runs them slowly in Python)"), "cpu"


def why_no_triton(backend: Backend, device: str) -> str:
    """Why Triton's kernels can't run on this GPU, "" if they can. One is launched: Triton builds
    its launcher then, which takes more than an import."""
    if backend.INTERPRETED:
        return "TRITON_INTERPRET is set, with which kernels run in Python (unset it)"
    if torch.cuda.get_device_capability(device) < (7, 5):
        return f"{torch.cuda.get_device_name(device)} is older than compute capability 7.5"
    try:
        with torch.cuda.device(device):
            backend.rms_norm(torch.ones(2, 32, device=device), torch.ones(32, device=device), EPS)
    except Exception as error:  # a compiler's, Triton's or the driver's
        return (f"Triton can't launch a kernel ({type(error).__name__}: {error!s:.200}; it needs a "
                "C compiler and Python's headers)")
    return ""


# ------------------------------------------------------------------ the backend is right


class Shapes(NamedTuple):
    """What a model asks of the functions. group: query heads that share a KV head."""

    dtype: torch.dtype
    hidden_size: int
    head_dim: int
    group: int = 2
    block_size: int = 16
    activation: str = "silu"
    qk_norm: bool = False
    num_experts: int = 0
    is_int8: bool = False  # the KV cache is int8
    windows: tuple[int | None, ...] = (None,)
    softcap: float | None = None
    device: torch.device = torch.device("cpu")
    exact: bool = False  # `numbers` are rounded to `dtype`, and then kept in float32

    @classmethod
    def of(cls, config: EngineConfig, model: ModelConfig) -> "Shapes":
        """config: resolved. A network of transformers' may have no activation: "silu" is tried.
        RoPE turns pairs, so an odd head is tried as the next even one."""
        return cls(
            dtype=getattr(torch, config.dtype),
            hidden_size=model.hidden_size,
            head_dim=model.head_dim + model.head_dim % 2,
            group=model.num_attention_heads // model.num_key_value_heads,
            block_size=config.block_size,
            activation=model.activation or "silu",
            qk_norm=model.qk_norm,
            num_experts=min(model.num_experts, 8),
            is_int8=config.kv_cache_dtype == "int8",
            windows=tuple(sorted(set(model.windows), key=str)),
            softcap=model.attention_softcap,
            device=torch.device(config.device))

    def numbers(self, *sizes: int) -> torch.Tensor:
        """Random numbers, the same for the same sizes."""
        drawn = torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes)))
        rounded = drawn.to(self.device, self.dtype)
        return rounded.float() if self.exact else rounded


def failing_functions(config: EngineConfig,
                      model: ModelConfig) -> tuple[tuple[str, ...], list[str]]:
    """The functions that `ops` has to take over in this engine, "graph" for CUDA graphs among them,
    and sentences that say so. Raises `ValueError` if a kernel has broken the device."""
    interpreted = config.kernels == "triton" and not config.on_gpu
    if config.kernels == "torch" or interpreted:
        return (), []
    shapes = Shapes.of(config, model)
    found = wrong_functions(load_backend(config.kernels), shapes)
    if not sees_as_backends(shapes.windows, config.max_model_len or model.max_position_embeddings):
        found = found | {"paged_attention": "attention does not see what `visible` in nanoserve/"
                         "sequence.py says, which was changed (see CONTRIBUTING.md)"}
    if not found:
        return (), []
    names = {name for together in found for name in together.split(", ")}
    for together in CHECKS:  # all that reads what `prepack` makes, for example
        if not names.isdisjoint(together):
            names.update(together)
    if names & WAITS:
        names.add("graph")
    replaced = tuple(sorted(names))
    return replaced, [
        f"kernels={config.kernels!r} on this machine: {'; '.join(found.values())}. "
        f"{', '.join(replaced)} are those of kernels='torch' here, which is slower. Please report "
        "what you have not changed yourself, with what nanoserve doctor prints"]


def wrong_functions(backend: Backend, shapes: Shapes) -> dict[str, str]:
    """Sentences on what is wrong, by the names of the functions that are then replaced. Tried once
    on a machine, and remembered where there is a folder for that."""
    key = digest(repr((shapes, machine_of(backend, shapes.device))).encode())
    kept = Path(cache_folder() or os.devnull, f"self-test-{key}.json")  # else nothing is kept
    with suppress(OSError, ValueError):  # no such file, or a damaged one
        return json.loads(kept.read_text())
    with full_float32(), current(shapes.device), memory_for(
            "a trial of the kernels: end other programs that use the memory"):
        tried = trials(backend, shapes)
    found = {", ".join(names): error for names, (_, error) in tried.items() if error}
    with suppress(OSError):
        kept.write_text(json.dumps(found))
    try:
        torch.zeros(1, device=shapes.device).item()
    except RuntimeError as error:
        raise ValueError(f"a kernel has broken the state of the GPU ({found}): start again, which "
                         "leaves it out, or with kernels='torch'") from error
    return found


def machine_of(backend: Backend, device: torch.device) -> tuple:
    """All that may make a function right on one machine and wrong on another."""
    if device.type == "cpu":  # the file's name has the CPU's features, the compiler, and a digest
        return torch.__version__, backend.COMPILED._name
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return (torch.__version__, backend.triton.__version__, torch.cuda.get_device_name(device),
            torch.cuda.get_device_capability(device), torch.version.cuda,
            digest(b"".join(path.read_bytes() for path in sources)))


def sees_as_backends(windows: tuple[int | None, ...], max_model_len: int) -> bool:
    """Whether `visible` is still the rule that the backends have in their own code. Asked at each
    start: after a change of `visible` the kernels would go on with the old rule, silently."""
    keys = torch.arange(max_model_len)
    queries = keys[::max_model_len // 16 | 1][:, None]
    for window in windows:
        for last in (queries, queries + 5):  # a query's own position, and one in the same image
            rule = torch.as_tensor(visible(queries, keys, window, last))
            in_kernels = (keys <= last) & (keys > queries - (window or max_model_len))
            if not torch.equal(rule, in_kernels):
                return False
    return True


# ------------------------------------------------------------------- the comparison


def trials(backend: Backend, shapes: Shapes,
           graph_class: type = CudaGraph) -> dict[tuple[str, ...], tuple[float, str]]:
    """By functions that go together: see `compare`. What a backend takes from `ops` isn't tried."""
    tolerance = max(TOLERANCE[shapes.dtype], 6e-3 * shapes.is_int8)  # one step of an int8 more
    found = {}
    for names, check in CHECKS.items():
        if any(getattr(backend, name) is not getattr(ops, name) for name in names):
            found[names] = compare(names, beside_ops(check, backend, shapes), tolerance)
    if shapes.device.type == "cuda" or graph_class is not CudaGraph:
        found["graph",] = compare(("graph",), replays(backend, shapes, graph_class), tolerance)
    return found


def compare(names: Iterable[str], pairs: Pairs, tolerance: float) -> tuple[float, str]:
    """The largest relative error, and a sentence if one is too large, or if a function fails.
    Raises what says that memory ran out, which is no fault of a function."""
    worst = 0.0
    try:
        for what, got, expected in pairs:
            expected = expected.double()
            apart = float((got.double() - expected).norm() / expected.norm().clamp(min=1e-30))
            if not apart <= tolerance:  # NaN is wrong, too
                return apart, f"{what} is wrong (relative error {apart:.1e})"
            worst = max(worst, apart)
    except Exception as raised:  # a compiler's, Triton's or the driver's
        if isinstance(raised, MemoryError) or "out of memory" in str(raised):
            raise
        return worst, f"{' or '.join(names)} fails ({type(raised).__name__}: {str(raised):.150})"
    return worst, ""


def beside_ops(check: Callable[[Backend, Shapes], Results], backend: Backend,
               shapes: Shapes) -> Pairs:
    expected = check(ops, shapes._replace(exact=True))
    for (what, got), (_, right) in zip(check(backend, shapes), expected, strict=True):
        yield what, got, right


def replays(backend: Backend, shapes: Shapes, graph_class: type) -> Pairs:
    """A step is recorded once and replayed twice, each time with other contents in place."""
    crowd = Crowd(backend, shapes, [(1, 30)] * 4)
    weight = backend.prepack(shapes.numbers(136, 2 * shapes.group * shapes.head_dim))

    def step() -> torch.Tensor:
        return backend.linear(crowd.attend().flatten(1), weight)

    step()  # once without recording: kernels are compiled
    recording = graph_class()
    recording.capture(step)
    for factor in (2, -1):
        crowd.qkv.mul_(factor).add_(1)
        yield f"a graph's replay with contents {factor}", recording.replay().clone(), step()


def norms(backend: Backend, shapes: Shapes) -> Results:
    weight = shapes.numbers(shapes.hidden_size).float()
    for rows in ROWS:
        x = shapes.numbers(rows, shapes.hidden_size)
        yield f"rms_norm of a batch of {rows}", backend.rms_norm(x, weight, EPS)
        for out in backend.add_rms_norm(x, 2 * x, weight, EPS):
            yield f"add_rms_norm of a batch of {rows}", out


def activations(backend: Backend, shapes: Shapes) -> Results:
    for rows in ROWS:
        gate_up = shapes.numbers(rows, 2 * 136)
        yield f"act_and_mul of a batch of {rows}", backend.act_and_mul(gate_up, shapes.activation)


def products(backend: Backend, shapes: Shapes) -> Results:
    bias = shapes.numbers(136)
    packed = backend.prepack(shapes.numbers(136, shapes.hidden_size))
    for rows in ROWS:
        x = shapes.numbers(rows, shapes.hidden_size)
        ids = torch.arange(rows, device=shapes.device).flip(0)
        yield f"linear of a batch of {rows}", backend.linear(x, packed, bias)
        yield f"linear of a batch of {rows}", backend.linear(x, packed, None, torch.float32)
        yield f"embed of a batch of {rows}", backend.embed(ids, packed)


def mixtures(backend: Backend, shapes: Shapes) -> Results:
    count, size = shapes.num_experts, shapes.hidden_size
    if not count:
        return
    gate_up = backend.prepack(shapes.numbers(count, 2 * 72, size) * size ** -0.5)
    down = backend.prepack(shapes.numbers(count, size, 72) / 8)
    for rows in ROWS:
        x = shapes.numbers(rows, size)
        scores = shapes.numbers(rows, count).float().softmax(-1)
        weights, ids = scores.topk(min(count, 2))
        out = backend.experts(x, weights, ids, gate_up, down, 0, shapes.activation)
        yield f"experts of a batch of {rows}", out


def attention(backend: Backend, shapes: Shapes) -> Results:
    for what, rows in CROWDS.items():
        crowd = Crowd(backend, shapes._replace(exact=False), rows)  # no more exact than its keys
        for window in shapes.windows:
            yield f"paged_attention of {what}", crowd.attend(window)


def choices(backend: Backend, shapes: Shapes) -> Results:
    for rows in ROWS:
        yield f"argmax of a batch of {rows}", backend.argmax(permutations(shapes, rows))
    logits = permutations(shapes, 200)
    temperature, top_p, min_p = (
        torch.full((200,), value, device=shapes.device) for value in (0.5, 0.9, 1e-3))
    top_k = torch.arange(200, device=shapes.device).int() % 40
    for one in backend.thresholds(logits, temperature, top_k, top_p, min_p):
        yield "thresholds", one
    yield "sample_tokens", shares(backend, shapes, 1000)


def permutations(shapes: Shapes, rows: int) -> torch.Tensor:
    """Logits, (rows, 200), which every dtype says exactly."""
    order = torch.Generator().manual_seed(0)
    logits = torch.stack([torch.randperm(200, generator=order) for _ in range(rows)]) / 8
    return logits.to(shapes.device, shapes.dtype)


def shares(backend: Backend, shapes: Shapes, rows: int) -> torch.Tensor:
    """How often each of four tokens is drawn. A backend draws in its own way: less than 0.1, some
    six standard deviations of a share, counts as no difference."""
    logits = torch.tensor([1.0, 2.0, 3.0, 4.0], device=shapes.device)
    temperature = logits.new_full((rows,), 2)
    positions = torch.arange(rows, device=shapes.device)
    drawn = backend.sample_tokens(logits.to(shapes.dtype).repeat(rows, 1), temperature,
                                  positions * 7919, positions)
    share = torch.bincount(drawn, minlength=4) / rows
    exact = (logits / 2).softmax(-1)
    return share if (share - exact).abs().max() > 0.1 else exact


CHECKS: dict[tuple[str, ...], Callable[[Backend, Shapes], Results]] = {
    ("rms_norm", "add_rms_norm"): norms,
    ("act_and_mul",): activations,
    ("prepack", "linear", "embed"): products,
    ("prepack", "experts"): mixtures,
    ("new_cache", "norm_rope_store", "paged_attention"): attention,
    ("argmax", "thresholds", "sample_tokens"): choices}


class Crowd:
    """Rows of an ordinary step, whose earlier tokens are in the cache."""

    def __init__(self, backend: Backend, shapes: Shapes, rows: list[tuple[int, int]]):
        self.backend, self.shapes = backend, shapes
        self.weight = shapes.numbers(shapes.head_dim).float() if shapes.qk_norm else None
        whole = batch_of([(seq_len, seq_len) for _, seq_len in rows], shapes)
        dtype = torch.int8 if shapes.is_int8 else shapes.dtype
        self.caches = backend.new_cache(int(whole.block_tables.max()) + 1, shapes.block_size,
                                        KV_HEADS, shapes.head_dim, dtype, shapes.device)
        self.store(self.qkv_of(whole), whole)  # also the tokens that `attend` writes again
        self.batch = batch_of(rows, shapes)
        self.qkv = self.qkv_of(self.batch)

    def qkv_of(self, batch: Batch) -> torch.Tensor:
        heads = KV_HEADS * (self.shapes.group + 2)  # heads of q, k and v
        return self.shapes.numbers(batch.num_tokens, heads, self.shapes.head_dim)

    def attend(self, window: int | None = None) -> torch.Tensor:
        q = self.store(self.qkv, self.batch)
        return self.backend.paged_attention(q, *self.caches, self.batch,
                                            self.shapes.head_dim ** -0.5, window,
                                            self.shapes.softcap)

    def store(self, qkv: torch.Tensor, batch: Batch) -> torch.Tensor:
        size = self.shapes.head_dim
        exponents = torch.arange(0, size, 2, device=qkv.device) / size
        angles = (batch.positions[:, None] * 1e4 ** -exponents).repeat(1, 2)
        return self.backend.norm_rope_store(qkv, self.weight, self.weight, EPS, angles.cos(),
                                            angles.sin(), *self.caches, batch.slot_mapping)


def batch_of(rows: list[tuple[int, int]], shapes: Shapes) -> Batch:
    """A batch of these rows. A row's blocks lie backwards in memory."""
    step = Step(0)
    num_blocks = 0
    for row, (query_len, seq_len) in enumerate(rows):
        blocks = range(num_blocks, num_blocks + -(-seq_len // shapes.block_size))
        num_blocks = blocks.stop
        request = CoreRequest(str(row), SamplingParams())
        seq = Sequence(request, [0] * seq_len, row=row, block_table=[*reversed(blocks)])
        step.num_new_tokens[seq] = query_len
        step.starts.append(seq_len - query_len)
    lengths = [seq_len for _, seq_len in rows]
    builder = BatchBuilder(len(rows), sum(lengths), max(lengths), shapes.block_size, shapes.device)
    return builder.build(step)
