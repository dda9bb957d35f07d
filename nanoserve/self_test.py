"""A backend is used after a self-test on the machine that it runs on.

The tests hold the backends against `ops` on their makers' machines. A user's GPU, driver or
compiler is another, and what goes wrong there is mostly silent: fluent text from wrong numbers. So
the first start compares, at the model's shapes and in its dtype:

    numbers ──┬──► a function of the backend ─┐
              └──► its namesake in `ops`  ───┴──► relative error below TOLERANCE, or it is replaced

One that raises or differs is replaced by that of `ops`, *together with all that share its memory's
layout*, or its check (`TOGETHER`), before anything is packed or allocated. A CUDA graph is replayed
twice with other contents; where that is stale there are no graphs. The outcome is kept in the cache
folder, by device, library, versions, dtype and shapes: later starts read a line.

Invariant: each check gets the backend that it tries as an argument, and the graph's class, too:
tests hand in broken ones. `nanoserve doctor` prints the same checks.

Extras try what they multiply by themselves. To compare while the engine runs would find more, and
cost each step.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch

from nanoserve import ops
from nanoserve.batch import Batch, BatchBuilder
from nanoserve.build import cache_folder, digest
from nanoserve.config import EngineConfig, SamplingParams
from nanoserve.graphs import CudaGraph
from nanoserve.memory import current, memory_for
from nanoserve.sequence import CoreRequest, Sequence, Step, visible

# Of the norm of what is right: a rounding at the end, and one of each number on the way.
TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 1e-5}
# These share a layout in memory, or one check.
TOGETHER = ({"new_cache", "norm_rope_store", "paged_attention"},
            {"prepack", "linear", "embed", "experts"}, {"rms_norm", "add_rms_norm"},
            {"argmax", "thresholds", "sample_tokens"})
# The functions that a check calls, where it is not the one of its name.
USES = {"rms_norm": ["rms_norm", "add_rms_norm"], "linear": ["prepack", "linear", "embed"],
        "experts": ["prepack", "experts"],
        "sample_tokens": ["argmax", "thresholds", "sample_tokens"],
        "paged_attention": ["new_cache", "norm_rope_store", "paged_attention"]}
WAITS = {"norm_rope_store", "experts"}  # those of `ops` wait for the device: there are no graphs
ROWS = (1, 9, 64)
# (query_len, seq_len) of each row: a long one, whose keys are split; many; decodes beside others.
CROWDS = {"1 row": [(1, 700)], "9 rows": [(1, n) for n in range(1, 80, 9)],
          "64 rows": [(1, 1 + n % 7) for n in range(64)],
          "drafts": [(1, 30), (5, 700), (2, 33)], "chunks": [(1, 30), (40, 70), (17, 17), (2, 33)]}
Compared = Iterator[tuple[str, torch.Tensor, torch.Tensor]]  # a name, a result, the right one


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

    @classmethod
    def of(cls, config: EngineConfig, model: Any) -> "Shapes":
        """config: resolved; model: its `ModelConfig`, without an activation for a network of
        transformers'. RoPE turns pairs: an odd head is tried as the next even one."""
        return cls(getattr(torch, config.dtype), model.hidden_size,
                   model.head_dim + model.head_dim % 2,
                   model.num_attention_heads // model.num_key_value_heads, config.block_size,
                   model.activation or "silu", model.qk_norm, min(model.num_experts, 8),
                   config.kv_cache_dtype == "int8",
                   tuple(sorted(set(model.windows), key=str)), model.attention_softcap)


def failing_functions(config: EngineConfig, model: Any,
              backend: ModuleType) -> tuple[tuple[str, ...], list[str]]:
    """The functions that `ops` has to take over in this engine, "graph" for CUDA graphs among them,
    and a sentence if there are any. Raises `ValueError` if a kernel has broken the device."""
    device = torch.device(config.device)
    interpreted = device.type == "cpu" and config.kernels == "triton"
    if backend is ops or interpreted:
        return (), []
    shapes = Shapes.of(config, model)
    found = wrong_functions(backend, shapes, device)
    report = "Please report this, with what nanoserve doctor prints"
    longest = config.max_model_len or model.max_position_embeddings
    if not sees_as_backends(shapes.windows, longest):
        found = found | {"paged_attention": "its attention does not see what `visible` says"}
        report = "`visible` in nanoserve/sequence.py was changed: CONTRIBUTING.md says what is next"
    if not found:
        return (), []
    names = replaced(found, backend)
    instead = (f"{', '.join(names)} are those of kernels='torch' here, which is slower" if names
               else "They are torch's own, and nothing can take their place")
    return names, [f"kernels={config.kernels!r} on this machine: {'; '.join(found.values())}. "
                   f"{instead}. {report}"]


def wrong_functions(backend: ModuleType, shapes: Shapes, device: torch.device) -> dict[str, str]:
    """What is wrong with a function, by its name; tried once on a machine, and remembered. Raises
    `ValueError` if a kernel has broken the device."""
    folder = cache_folder()
    key = digest(repr((shapes, machine_of(backend, device))).encode())
    found = remembered(folder).get(key)
    if found is not None:
        return found
    with current(device):
        with memory_for("a trial of the kernels: end other programs that use the memory"):
            tried = trials(backend, shapes, device)
        found = {name: error for name, (_, error) in tried.items() if error}
        remember(folder, remembered(folder) | {key: found})  # another may have written
        try:
            torch.zeros(1, device=device).item()
        except RuntimeError as error:
            raise ValueError(f"a kernel has broken the state of the GPU ({found}): start "
                             "again, which leaves it out, or with kernels='torch'") from error
    return found


def sees_as_backends(windows: tuple[int | None, ...], max_model_len: int) -> bool:
    """Whether `visible` is still the rule that the backends have in their own code. Asked at each
    start: who changes that function shall not get the old text from a kernel."""
    keys = torch.arange(max_model_len)
    queries = keys[::max_model_len // 16 | 1][:, None]
    return all(torch.equal(
        torch.as_tensor(visible(queries, keys, window, last)),
        (keys <= last) & (keys > queries - (window or max_model_len)))
        for window in windows for last in (queries, queries + 5))


def with_replaced(backend: ModuleType, names: tuple[str, ...]) -> ModuleType | SimpleNamespace:
    """The backend with these functions of `ops`."""
    return backend if not names else SimpleNamespace(**vars(backend) | {
        name: getattr(ops, name) for name in names if name in ops.__all__})


def replaced(found: dict[str, str], backend: ModuleType) -> tuple[str, ...]:
    """All that has to go with what was found to be wrong. Nothing goes for a function that the
    backend has from `ops`, such as a GPU's products."""
    own = {name for name in found if any(
        vars(backend).get(used) is not vars(ops).get(used, backend)
        for used in USES.get(name, [name]))}
    names = own.union(*(group for group in TOGETHER if group & own))
    return tuple(sorted(names | ({"graph"} if names & WAITS else set())))


def trials(backend: ModuleType, shapes: Shapes, device: torch.device,
           graph_class: type = CudaGraph) -> dict[str, tuple[float, str]]:
    """By function: its largest relative error, and a sentence if that is too large. Raises what
    says that memory ran out, which is no fault of a function: nothing may be remembered then."""
    checks = dict(CHECKS)
    if device.type == "cuda" or graph_class is not CudaGraph:
        checks["graph"] = lambda *given: check_graph(*given, graph_class)
    tolerance = max(TOLERANCE[shapes.dtype], 6e-3 * shapes.is_int8)  # one step of an int8 more
    found = {}
    for name, check in checks.items():
        try:
            found[name] = compare(name, check(backend, shapes, device), tolerance)
        except Exception as raised:  # a compiler's, Triton's or the driver's
            if isinstance(raised, MemoryError) or "out of memory" in str(raised):
                raise
            found[name] = 0.0, f"{name} fails ({type(raised).__name__}: {str(raised):.150})"
    return found


def compare(name: str, results: Iterable[tuple[str, torch.Tensor, torch.Tensor]],
            tolerance: float) -> tuple[float, str]:
    """The largest relative error of a function's results, and a sentence on the first that is too
    large. results: what was computed, the result, and what it should be."""
    worst, error = 0.0, ""
    for what, got, expected in results:
        expected = expected.double()
        apart = float((got.double() - expected).norm() / expected.norm().clamp(min=1e-30))
        worst = max(worst, apart)
        if not apart <= tolerance and not error:  # NaN is wrong, too
            error = f"{name} is wrong ({what}: relative error {apart:.1e})"
    return worst, error


# ------------------------------------------------------------- the outcome is kept


def machine_of(backend: ModuleType, device: torch.device) -> tuple:
    """Whatever may make a function right on one machine and wrong on another."""
    if device.type == "cpu":  # the file's name has the CPU's features, the compiler, and a digest
        return torch.__version__, backend.COMPILED._name
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return (torch.__version__, backend.triton.__version__, torch.cuda.get_device_name(device),
            torch.cuda.get_device_capability(device), torch.version.cuda,
            digest(b"".join(path.read_bytes() for path in sources)))


def remembered(folder: Path | None) -> dict[str, dict[str, str]]:
    """By machine and shapes what was wrong. Nothing where nothing can be read."""
    with suppress(OSError, ValueError, TypeError):
        return dict(json.loads(Path(folder, "trials.json").read_text()))
    return {}


def remember(folder: Path | None, known: dict[str, dict[str, str]]) -> None:
    """A folder that can't be written to is no error: the next start tries again."""
    with suppress(OSError, TypeError):
        path = Path(folder, f"trials-{os.getpid()}.new")
        path.write_text(json.dumps(known, indent=1))
        path.replace(Path(folder, "trials.json"))


# ---------------------------------------------------------------------- the checks


def numbers(shapes: Shapes, device: torch.device, *sizes: int) -> torch.Tensor:
    drawn = torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes)))
    return drawn.to(device, shapes.dtype)


def check_norms(backend: ModuleType, shapes: Shapes, device: torch.device) -> Compared:
    weight = numbers(shapes, device, shapes.hidden_size).float()
    for rows in ROWS:
        x, residual = (numbers(shapes, device, rows, shapes.hidden_size) * k for k in (1, 2))
        got, expected = ([space.rms_norm(x, weight, 1e-6), *space.add_rms_norm(
            x, residual, weight, 1e-6)] for space in (backend, ops))
        yield f"a batch of {rows}", torch.stack(got), torch.stack(expected)


def check_gates(backend: ModuleType, shapes: Shapes, device: torch.device) -> Compared:
    for rows in ROWS:
        x = numbers(shapes, device, rows, 2 * 136)
        yield (f"a batch of {rows}", backend.act_and_mul(x, shapes.activation),
               ops.act_and_mul(x.float(), shapes.activation))


def check_products(backend: ModuleType, shapes: Shapes, device: torch.device) -> Compared:
    weight, bias = numbers(shapes, device, 136, shapes.hidden_size), numbers(shapes, device, 136)
    packed = backend.prepack(weight)
    for rows in ROWS:
        x = numbers(shapes, device, rows, shapes.hidden_size)
        yield (f"a batch of {rows}", backend.linear(x, packed, bias),
               ops.linear(x.float(), weight.float(), bias.float()))
        yield (f"logits of {rows}", backend.linear(x, packed, None, torch.float32),
               ops.linear(x.float(), weight.float()))
    yield "rows", backend.embed(torch.arange(136, device=device).flip(0), packed), weight.flip(0)


def check_experts(backend: ModuleType, shapes: Shapes, device: torch.device) -> Compared:
    count, size = shapes.num_experts, shapes.hidden_size
    both = numbers(shapes, device, count, 2 * 72, size) * size ** -0.5
    down = numbers(shapes, device, count, size, 72) / 8
    packed = [backend.prepack(weight) for weight in (both, down)] if count else []
    for rows in ROWS if count else ():
        x = numbers(shapes, device, rows, size)
        chosen = numbers(shapes, device, rows, count).float().softmax(-1).topk(min(count, 2))
        yield (f"a batch of {rows}", backend.experts(x, *chosen, *packed, 0, shapes.activation),
               ops.experts(x.float(), *chosen, both.float(), down.float(), 0, shapes.activation))


def check_attention(backend: ModuleType, shapes: Shapes, device: torch.device) -> Compared:
    """And `norm_rope_store`, whose keys and values it reads."""
    for what, rows in CROWDS.items():
        crowd = Crowd(shapes, device, rows)
        for window in shapes.windows:
            got, expected = crowd.attend(backend, window), crowd.attend(ops, window)
            yield f"{what}, window {window}", got, expected


def check_sampling(backend: ModuleType, shapes: Shapes, device: torch.device) -> Compared:
    """Which tokens filters leave, and how often each of four is drawn."""
    rows, order = 200, torch.Generator().manual_seed(0)
    logits = torch.stack([torch.randperm(200, generator=order) for _ in range(rows)])
    logits = (logits / 8).to(device, shapes.dtype)  # exact in every dtype
    heat, top_p, min_p = (torch.full((rows,), x, device=device) for x in (0.5, 0.9, 1e-3))
    top_k = torch.arange(rows, device=device).int() % 40
    yield "argmax", backend.argmax(logits), ops.argmax(logits)
    yield "filters", *(torch.stack(space.thresholds(logits, heat, top_k, top_p, min_p))
                       for space in (backend, ops))
    few, many = torch.tensor([1.0, 2.0, 3.0, 4.0], device=device), torch.arange(1000, device=device)
    logits, heat = few.to(shapes.dtype).repeat(1000, 1), torch.full_like(many, 2).float()
    drawn = backend.sample_tokens(logits, heat, many * 7919, many)
    share, expected = torch.bincount(drawn, minlength=4) / 1000, (few / 2).softmax(-1)
    # A backend draws in its own way: 0.1 is some six standard deviations of a share.
    yield "shares", share.where((share - expected).abs().max() > 0.1, expected), expected


def check_graph(backend: ModuleType, shapes: Shapes, device: torch.device,
                graph_class: type) -> Compared:
    """Recorded once, replayed twice, each time with other contents at the same addresses."""
    crowd = Crowd(shapes, device, [(1, 30)] * 4)
    weight = backend.prepack(numbers(shapes, device, 136, 2 * shapes.group * shapes.head_dim))
    caches = crowd.caches(backend)

    def step() -> torch.Tensor:
        return backend.linear(crowd.step(backend, caches).flatten(1), weight)

    step()  # once for real: kernels are compiled
    recording = graph_class()
    recording.capture(step)
    for factor in (2, -1):
        crowd.qkv.mul_(factor).add_(1)
        yield f"contents {factor}", recording.replay().clone(), step()


CHECKS: dict[str, Callable[..., Compared]] = {
    "rms_norm": check_norms, "act_and_mul": check_gates, "linear": check_products,
    "experts": check_experts, "paged_attention": check_attention, "sample_tokens": check_sampling}


class Crowd:
    """Rows of an ordinary step on two KV heads, whose earlier tokens are in the cache."""

    def __init__(self, shapes: Shapes, device: torch.device, rows: list[tuple[int, int]]):
        self.shapes, self.device, self.num_blocks = shapes, device, 0
        before, step = Step(0), Step(0)
        for row, (query_len, seq_len) in enumerate(rows):
            seq = self.sequence(row, seq_len)
            before.num_new_tokens[seq], step.num_new_tokens[seq] = seq_len, query_len
            before.starts.append(0)
            step.starts.append(seq_len - query_len)
        self.before, self.batch = self.build(before), self.build(step)
        self.past, self.qkv = self.random_qkv(self.before), self.random_qkv(self.batch)
        self.weight = numbers(shapes, device, shapes.head_dim).float() if shapes.qk_norm else None

    def sequence(self, row: int, seq_len: int) -> Sequence:
        """Its blocks lie backwards in memory."""
        end = self.num_blocks + -(-seq_len // self.shapes.block_size)
        blocks, self.num_blocks = list(range(self.num_blocks, end)), end
        request = CoreRequest(str(row), SamplingParams())
        return Sequence(request, [0] * seq_len, row=row, block_table=blocks[::-1])

    def build(self, step: Step) -> Batch:
        lengths = [len(seq.token_ids) for seq in step.num_new_tokens]
        builder = BatchBuilder(len(lengths), sum(lengths), max(lengths), self.shapes.block_size,
                               self.device)
        return builder.build(step)

    def random_qkv(self, batch: Batch) -> torch.Tensor:
        heads = 2 * (self.shapes.group + 2)
        return numbers(self.shapes, self.device, batch.num_tokens, heads, self.shapes.head_dim)

    def attend(self, space: Any, window: int | None) -> torch.Tensor:
        return self.step(space, self.caches(space), window)

    def caches(self, space: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """With all keys and values, also those that a step then writes anew."""
        dtype = torch.int8 if self.shapes.is_int8 else self.shapes.dtype
        caches = space.new_cache(self.num_blocks, self.shapes.block_size, 2, self.shapes.head_dim,
                                 dtype, self.device)
        self.store(space, self.past, self.before, caches)
        return caches

    def step(self, space: Any, caches: tuple, window: int | None = None) -> torch.Tensor:
        q = self.store(space, self.qkv, self.batch, caches)
        return space.paged_attention(q, *caches, self.batch, self.shapes.head_dim ** -0.5, window,
                                     self.shapes.softcap)

    def store(self, space: Any, qkv: torch.Tensor, batch: Batch, caches: tuple) -> torch.Tensor:
        size = self.shapes.head_dim
        frequencies = 1e4 ** (-torch.arange(0, size, 2, device=self.device) / size)
        angles = (batch.positions[:, None] * frequencies).repeat(1, 2)
        return space.norm_rope_store(qkv, self.weight, self.weight, 1e-6, angles.cos(),
                                     angles.sin(), *caches, batch.slot_mapping)
