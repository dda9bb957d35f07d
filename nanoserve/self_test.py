"""Which backend computes, and whether it is right on the machine that it runs on.

A backend may be missing: there is no compiler, no triton, or an old GPU. Then `ops`, the
specification, takes its place where the user left the choice open.

A backend that is there may still be wrong. The tests compare the backends with `ops` on their
makers' machines. A user's GPU, driver or compiler is another, and an error there is mostly silent:
fluent text from wrong numbers. So the first start compares, at the model's shapes and in its dtype:

    numbers ──┬──► a function of the backend ─┐
              └──► its namesake in `ops` ─────┴──► relative error below TOLERANCE, or it is replaced

A function that raises or differs is replaced by that of `ops`, together with all that share a
layout in memory with it, before anything is packed or allocated. A CUDA graph is replayed twice
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
from typing import Any, NamedTuple

import torch

from nanoserve import ops
from nanoserve.batch import Batch, BatchBuilder
from nanoserve.build import cache_folder, digest
from nanoserve.config import EngineConfig, SamplingParams
from nanoserve.device import current, memory_for
from nanoserve.graphs import CudaGraph
from nanoserve.model_config import ModelConfig
from nanoserve.sequence import CoreRequest, Sequence, Step, visible

# Relative to the norm of the right result; it allows for a rounding of each number on the way, and
# one at the end.
TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 1e-5}
WAITS = {"norm_rope_store", "experts"}  # those of `ops` wait for the device: there are no graphs
EPS = 1e-6
ROWS = {f"a batch of {rows}": rows for rows in (1, 9, 64)}
# (query_len, seq_len) of each row: one long row, whose keys are split; many rows; decodes beside
# drafts or chunks.
CROWDS = {"1 row": [(1, 700)], "9 rows": [(1, n) for n in range(1, 80, 9)],
          "64 rows": [(1, 1 + n % 7) for n in range(64)],
          "drafts": [(1, 30), (5, 700), (2, 33)], "chunks": [(1, 30), (40, 70), (17, 17), (2, 33)]}


# ------------------------------------------------------------- the backend is there


def load_backend(kernels: str, failing: tuple[str, ...] = ()) -> ModuleType | SimpleNamespace:
    """`ops`, or the backend that `kernels` names, with the functions of `ops` for those that fail.
    A backend is imported late, because it needs a compiler, or triton, which exists for Linux only.
    Raises `ImportError` where one of these is missing."""
    backend = ops
    if kernels == "triton":
        from nanoserve import triton_attention as backend
    elif kernels == "cpu":
        from nanoserve import cpu as backend
    return with_replaced(backend, failing)


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
    if not config.on_gpu:
        return "" if backend.INTERPRETED else (
            "there is no GPU (the environment variable TRITON_INTERPRET=1, set from the start, "
            "runs them slowly in Python)"), "cpu"
    if backend.INTERPRETED:
        return ("TRITON_INTERPRET is set, with which kernels run in Python and not on the GPU "
                "(unset it)"), "torch"
    if torch.cuda.get_device_capability(config.device) < (7, 5):
        name = torch.cuda.get_device_name(config.device)
        return f"{name} is older than compute capability 7.5", "torch"
    return first_kernel(backend, config.device), "torch"


def first_kernel(backend: ModuleType, device: str) -> str:
    """Launch and compare one tiny kernel: Triton builds its launcher at the first launch, which
    takes more than an import. Returns why that fails, or ""."""
    x, weight = torch.linspace(-1, 1, 64).view(2, 32), torch.linspace(0, 2, 32)
    try:
        with torch.cuda.device(device):
            got = backend.rms_norm(x.to(device), weight.to(device), EPS).cpu()
    except Exception as error:  # a compiler's, Triton's or the driver's
        return (f"Triton can't launch a kernel ({type(error).__name__}: {error!s:.200}; it needs a "
                "C compiler and Python's headers)")
    if not torch.allclose(got, ops.rms_norm(x, weight, EPS), atol=1e-5):
        return "Triton's first kernel gives wrong numbers here (another version may not)"
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
        return cls(getattr(torch, config.dtype), model.hidden_size,
                   model.head_dim + model.head_dim % 2,
                   model.num_attention_heads // model.num_key_value_heads, config.block_size,
                   model.activation or "silu", model.qk_norm, min(model.num_experts, 8),
                   config.kv_cache_dtype == "int8",
                   tuple(sorted(set(model.windows), key=str)), model.attention_softcap,
                   torch.device(config.device))

    def numbers(self, *sizes: int) -> torch.Tensor:
        """Random numbers, the same for the same sizes."""
        drawn = torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes)))
        rounded = drawn.to(self.device, self.dtype)
        return rounded.float() if self.exact else rounded


def failing_functions(config: EngineConfig,
                      model: ModelConfig) -> tuple[tuple[str, ...], list[str]]:
    """The functions that `ops` has to take over in this engine, "graph" for CUDA graphs among them,
    and a sentence if there are any. Raises `ValueError` if a kernel has broken the device."""
    interpreted = config.kernels == "triton" and not config.on_gpu
    if config.kernels == "torch" or interpreted:
        return (), []
    backend, shapes = load_backend(config.kernels), Shapes.of(config, model)
    found = wrong_functions(backend, shapes)
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


def wrong_functions(backend: ModuleType, shapes: Shapes) -> dict[str, str]:
    """What is wrong with a function, by its name; tried once on a machine, and remembered. Raises
    `ValueError` if a kernel has broken the device."""
    key = digest(repr((shapes, machine_of(backend, shapes.device))).encode())
    found = remembered(key)
    if found is not None:
        return found
    with current(shapes.device):
        with memory_for("a trial of the kernels: end other programs that use the memory"):
            tried = trials(backend, shapes)
        found = {name: error for name, (_, error) in tried.items() if error}
        remember(key, found)
        try:
            torch.zeros(1, device=shapes.device).item()
        except RuntimeError as error:
            raise ValueError(f"a kernel has broken the state of the GPU ({found}): start "
                             "again, which leaves it out, or with kernels='torch'") from error
    return found


def machine_of(backend: ModuleType, device: torch.device) -> tuple:
    """All that may make a function right on one machine and wrong on another."""
    if device.type == "cpu":  # the file's name has the CPU's features, the compiler, and a digest
        return torch.__version__, backend.COMPILED._name
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return (torch.__version__, backend.triton.__version__, torch.cuda.get_device_name(device),
            torch.cuda.get_device_capability(device), torch.version.cuda,
            digest(b"".join(path.read_bytes() for path in sources)))


def remembered(key: str) -> dict[str, str] | None:
    """What was found wrong here; None where nothing can be read."""
    with suppress(OSError, ValueError, TypeError):  # no such file, damaged, no folder
        return json.loads(Path(cache_folder(), f"self-test-{key}.json").read_text())
    return None


def remember(key: str, found: dict[str, str]) -> None:
    """A folder that can't be written to is no error: the next start tries again."""
    with suppress(OSError, TypeError):
        path = Path(cache_folder(), f"self-test-{key}.json")
        new = path.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps(found))
        new.replace(path)


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


def replaced(found: Iterable[str], backend: ModuleType) -> tuple[str, ...]:
    """The functions to take from `ops`, if these checks have failed. The functions of a check go
    together, and with them all that read the same memory. If a check's functions are those of `ops`
    already, as a GPU's matrix products are, nothing can replace them."""
    names = {"graph"} & set(found)
    for name in {*found} & set(CHECKS):
        uses = CHECKS[name].uses
        if any(getattr(backend, one) is not getattr(ops, one) for one in uses):
            names |= uses
    for check in CHECKS.values():  # `prepack`, for example, makes what several functions read
        if names & check.uses:
            names |= check.uses
    if names & WAITS:
        names.add("graph")
    return tuple(sorted(names))


def with_replaced(backend: ModuleType, names: tuple[str, ...]) -> ModuleType | SimpleNamespace:
    """The backend, with these functions taken from `ops`."""
    return backend if not names else SimpleNamespace(**vars(backend) | {
        name: getattr(ops, name) for name in names if name in ops.__all__})


# ------------------------------------------------------------------- the comparison


def trials(backend: ModuleType, shapes: Shapes,
           graph_class: type = CudaGraph) -> dict[str, tuple[float, str]]:
    """By function: its largest relative error, and a sentence if that is too large. Raises what
    says that memory ran out, which is no fault of a function: nothing may be remembered then."""
    tried = {name: results(check, backend, shapes) for name, check in CHECKS.items()}
    if shapes.device.type == "cuda" or graph_class is not CudaGraph:
        tried["graph"] = replays(backend, shapes, graph_class)
    tolerance = max(TOLERANCE[shapes.dtype], 6e-3 * shapes.is_int8)  # one step of an int8 more
    found = {}
    for name, compared in tried.items():
        try:
            found[name] = compare(name, compared, tolerance)
        except Exception as raised:  # a compiler's, Triton's or the driver's
            if isinstance(raised, MemoryError) or "out of memory" in str(raised):
                raise
            found[name] = 0.0, f"{name} fails ({type(raised).__name__}: {str(raised):.150})"
    return found


def compare(name: str, compared: Iterable[tuple], tolerance: float) -> tuple[float, str]:
    """The largest relative error of a function's results, and a sentence on the first that is too
    large. compared: what was computed, the result, and what it should be."""
    worst, error = 0.0, ""
    for what, got, expected in compared:
        expected = expected.double()
        apart = float((got.double() - expected).norm() / expected.norm().clamp(min=1e-30))
        worst = max(worst, apart)
        if not apart <= tolerance and not error:  # NaN is wrong, too
            error = f"{name} is wrong ({what}: relative error {apart:.1e})"
    return worst, error


class Check(NamedTuple):
    """How a function is tried. call: (backend, shapes, size), gives its results for numbers of that
    size. sizes: by name. uses: the functions that are called."""

    call: Callable[..., Iterable[torch.Tensor]]
    sizes: dict[str, Any]
    uses: set[str]


def results(check: Check, backend: ModuleType, shapes: Shapes) -> Iterator[tuple]:
    for what, size in check.sizes.items():
        got = check.call(backend, shapes, size)
        expected = check.call(ops, shapes._replace(exact=True), size)
        yield from ((what, *pair) for pair in zip(got, expected, strict=True))


def replays(backend: ModuleType, shapes: Shapes, graph_class: type) -> Iterator[tuple]:
    """Record a step once, replay it twice, each time with other contents at the same addresses."""
    crowd = Crowd(shapes, [(1, 30)] * 4)
    weight = backend.prepack(shapes.numbers(136, 2 * shapes.group * shapes.head_dim))
    caches = crowd.caches(backend)

    def step() -> torch.Tensor:
        return backend.linear(crowd.attend(backend, caches).flatten(1), weight)

    step()  # once without recording: kernels are compiled
    recording = graph_class()
    recording.capture(step)
    for factor in (2, -1):
        crowd.qkv.mul_(factor).add_(1)
        yield f"contents {factor}", recording.replay().clone(), step()


# ---------------------------------------------------------------------- the calls


def norms(backend, shapes: Shapes, rows: int) -> list[torch.Tensor]:
    x, weight = shapes.numbers(rows, shapes.hidden_size), shapes.numbers(shapes.hidden_size).float()
    return [backend.rms_norm(x, weight, EPS), *backend.add_rms_norm(x, 2 * x, weight, EPS)]


def gates(backend, shapes: Shapes, rows: int) -> list[torch.Tensor]:
    return [backend.act_and_mul(shapes.numbers(rows, 2 * 136), shapes.activation)]


def products(backend, shapes: Shapes, rows: int) -> list[torch.Tensor]:
    x, bias = shapes.numbers(rows, shapes.hidden_size), shapes.numbers(136)
    packed = backend.prepack(shapes.numbers(136, shapes.hidden_size))
    return [backend.linear(x, packed, bias), backend.linear(x, packed, None, torch.float32)]


def rows_of_a_matrix(backend, shapes: Shapes, rows: int) -> list[torch.Tensor]:
    ids = torch.arange(rows, device=shapes.device).flip(0)
    return [backend.embed(ids, backend.prepack(shapes.numbers(136, shapes.hidden_size)))]


def mixtures(backend, shapes: Shapes, rows: int) -> list[torch.Tensor]:
    count, size = shapes.num_experts, shapes.hidden_size
    if not count:
        return []
    gate_up = shapes.numbers(count, 2 * 72, size) * size ** -0.5
    down = shapes.numbers(count, size, 72) / 8
    weights, ids = shapes.numbers(rows, count).float().softmax(-1).topk(min(count, 2))
    return [backend.experts(shapes.numbers(rows, size), weights, ids, backend.prepack(gate_up),
                            backend.prepack(down), 0, shapes.activation)]


def attention(backend, shapes: Shapes, rows: list[tuple[int, int]]) -> list[torch.Tensor]:
    crowd = Crowd(shapes._replace(exact=False), rows)  # its scores are as exact as its keys
    caches = crowd.caches(backend)
    return [crowd.attend(backend, caches, window) for window in shapes.windows]


def permutations(shapes: Shapes, rows: int) -> torch.Tensor:
    """Logits, (rows, 200), which every dtype says exactly."""
    order = torch.Generator().manual_seed(0)
    logits = torch.stack([torch.randperm(200, generator=order) for _ in range(rows)]) / 8
    return logits.to(shapes.device, shapes.dtype)


def likeliest(backend, shapes: Shapes, rows: int) -> list[torch.Tensor]:
    return [backend.argmax(permutations(shapes, rows))]


def filters(backend, shapes: Shapes, rows: int) -> Iterable[torch.Tensor]:
    params = torch.tensor([[0.5], [0.9], [1e-3]], device=shapes.device).repeat(1, rows)
    temperature, top_p, min_p = params
    top_k = torch.arange(rows, device=shapes.device).int() % 40
    return backend.thresholds(permutations(shapes, rows), temperature, top_k, top_p, min_p)


def draws(backend, shapes: Shapes, rows: int) -> list[torch.Tensor]:
    """How often each of four tokens is drawn. A backend draws in its own way: less than 0.1, some
    six standard deviations of a share, counts as no difference."""
    logits = torch.tensor([1.0, 2.0, 3.0, 4.0], device=shapes.device)
    temperature = logits.new_full((rows,), 2)
    positions = torch.arange(rows, device=shapes.device)
    drawn = backend.sample_tokens(logits.to(shapes.dtype).repeat(rows, 1), temperature,
                                  positions * 7919, positions)
    share, exact = torch.bincount(drawn, minlength=4) / rows, (logits / 2).softmax(-1)
    return [share if (share - exact).abs().max() > 0.1 else exact]


class Crowd:
    """Rows of an ordinary step on two KV heads, whose earlier tokens are in the cache."""

    def __init__(self, shapes: Shapes, rows: list[tuple[int, int]]):
        self.shapes, self.num_blocks = shapes, 0
        self.before = self.build([(seq_len, seq_len) for _, seq_len in rows])  # fills the cache
        self.batch = self.build(rows)
        heads = 2 * (shapes.group + 2)  # of q, k and v
        self.past = shapes.numbers(self.before.num_tokens, heads, shapes.head_dim)  # its qkv
        self.qkv = shapes.numbers(self.batch.num_tokens, heads, shapes.head_dim)
        self.weight = shapes.numbers(shapes.head_dim).float() if shapes.qk_norm else None

    def build(self, rows: list[tuple[int, int]]) -> Batch:
        """A batch of these rows. A row's blocks lie backwards in memory."""
        step, end, block_size = Step(0), 0, self.shapes.block_size
        for row, (query_len, seq_len) in enumerate(rows):
            start, end = end, end + -(-seq_len // block_size)
            seq = Sequence(CoreRequest(str(row), SamplingParams()), [0] * seq_len, row=row,
                           block_table=[*range(start, end)][::-1])
            step.num_new_tokens[seq] = query_len
            step.starts.append(seq_len - query_len)
        self.num_blocks = end
        lengths = [seq_len for _, seq_len in rows]
        return BatchBuilder(len(rows), sum(lengths), max(lengths), block_size,
                            self.shapes.device).build(step)

    def caches(self, backend) -> tuple[torch.Tensor, torch.Tensor]:
        """Caches with the keys and values of all tokens, also those that `attend` writes again."""
        dtype = torch.int8 if self.shapes.is_int8 else self.past.dtype
        caches = backend.new_cache(self.num_blocks, self.shapes.block_size, 2,
                                   self.shapes.head_dim, dtype, self.shapes.device)
        self.store(backend, self.past, self.before, caches)
        return caches

    def attend(self, backend, caches: tuple, window: int | None = None) -> torch.Tensor:
        q = self.store(backend, self.qkv, self.batch, caches)
        return backend.paged_attention(q, *caches, self.batch, self.shapes.head_dim ** -0.5,
                                       window, self.shapes.softcap)

    def store(self, backend, qkv: torch.Tensor, batch: Batch, caches: tuple) -> torch.Tensor:
        size = self.shapes.head_dim
        frequencies = 1e4 ** (-torch.arange(0, size, 2, device=qkv.device) / size)
        angles = (batch.positions[:, None] * frequencies).repeat(1, 2)
        return backend.norm_rope_store(qkv, self.weight, self.weight, EPS, angles.cos(),
                                       angles.sin(), *caches, batch.slot_mapping)


CHECKS = {
    "rms_norm": Check(norms, ROWS, {"rms_norm", "add_rms_norm"}),
    "act_and_mul": Check(gates, ROWS, {"act_and_mul"}),
    "linear": Check(products, ROWS, {"prepack", "linear"}),
    "embed": Check(rows_of_a_matrix, ROWS, {"prepack", "embed"}),
    "experts": Check(mixtures, ROWS, {"prepack", "experts"}),
    "paged_attention": Check(attention, CROWDS,
                             {"new_cache", "norm_rope_store", "paged_attention"}),
    "argmax": Check(likeliest, ROWS, {"argmax"}),
    "thresholds": Check(filters, {"200 rows": 200}, {"thresholds"}),
    "sample_tokens": Check(draws, {"shares": 1000}, {"argmax", "thresholds", "sample_tokens"})}
