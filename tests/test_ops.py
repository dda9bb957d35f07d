"""One specification and its twins: the same names, the same signatures, the same oracle.

Every test here runs once for each namespace that this machine has. The oracles are written in
float64, token by token and head by head, and share no code with any of them. A cache's order of
memory is a namespace's own affair, so the tests write to it only by `norm_rope_store`.
"""

import inspect
import math
import shutil
import sys
from contextlib import suppress

import pytest
import torch
from helpers import sequence
from quick_interpreter import quick_interpreter  # noqa: F401

from nanoserve.batch import Batch, BatchBuilder
from nanoserve.config import KERNELS, SamplingParams
from nanoserve.graphs import Size
from nanoserve.self_test import load_backend
from nanoserve.sequence import Step

NAMES = ["act_and_mul", "add_rms_norm", "argmax", "sample_tokens", "experts", "thresholds",
         "linear", "embed", "new_cache", "norm_rope_store", "prepack", "paged_attention",
         "rms_norm"]
# How far a result may be from float64's, relative to the largest number: of one rounding.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
CPU = torch.device("cpu")


def available() -> list[str]:
    found = []
    for name in KERNELS[1:]:  # all but "auto"
        with suppress(ImportError):
            load_backend(name)
            found.append(name)
    return found


@pytest.fixture(params=available())
def ops(request):
    return load_backend(request.param)


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=str)
def dtype(request, ops):
    if ops.__name__.endswith(".triton_attention") and request.param is torch.bfloat16:
        pytest.skip("Triton's interpreter computes bfloat16 wrongly")
    return request.param


def close(got: torch.Tensor, expected: torch.Tensor, factor: float = 1.0, where: str = "") -> None:
    assert got.shape == expected.shape
    error = (got.double() - expected).abs().max() / max(expected.abs().max(), 1e-3)
    assert error <= factor * TOLERANCE[got.dtype], f"an error of {error:.2e}{where}"


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


# ---------------------------------------------------------- names and signatures


@pytest.mark.skipif(not shutil.which("g++") or sys.platform != "linux", reason="needs g++")
def test_where_there_is_a_compiler_the_compiled_twin_is_tested():
    """Otherwise all of this would pass without it, by a library that no longer compiles: then this
    raises the compiler's words."""
    load_backend("cpu")


def test_a_namespace_has_all_names_and_no_others(ops):
    assert ops.__all__ == NAMES
    assert all(callable(getattr(ops, name)) for name in ops.__all__)


def parameters(function) -> list[tuple]:
    return [(p.name, p.default) for p in inspect.signature(function).parameters.values()]


def test_signatures_are_those_of_the_specification(ops):
    """Parameters in the same order with the same defaults: a layer can't tell them apart."""
    plain = load_backend("torch")
    for name in NAMES:
        assert parameters(getattr(ops, name)) == parameters(getattr(plain, name)), name


# ------------------------------------------------------------- products and norms


@pytest.mark.parametrize("outputs, inputs", [(1, 1), (48, 64), (33, 40), (200, 37), (16, 129)])
def test_linear(ops, dtype, outputs, inputs):
    weight, bias = numbers(outputs, inputs, dtype=dtype), numbers(outputs, dtype=dtype)
    kept = weight.clone()
    packed = ops.prepack(weight)
    for rows in (0, 1, 5, 17, 70):  # of a larger matrix, which lie further apart; and packed ones
        x = numbers(rows, inputs + rows % 2 * 7, dtype=dtype)[:, :inputs]
        expected = x.double() @ kept.double().T
        for got, exact in ((ops.linear(x, packed), expected),
                           (ops.linear(x, packed, bias), expected + bias.double())):
            assert got.dtype == dtype and got.shape == (rows, outputs)
            if rows:
                close(got, exact, 2)
        for given, exact in ((None, expected), (bias, expected + bias.double())):
            got = ops.linear(x, packed, given, torch.float32)  # not rounded to x's dtype
            assert got.dtype == torch.float32 and got.shape == (rows, outputs)
            if rows:
                close(got, exact)
    ids = torch.tensor([outputs - 1, 0, outputs // 2, 0])
    rows = ops.embed(ids, packed)
    assert torch.equal(rows.to(dtype), kept[ids])
    assert rows.is_contiguous()  # as norms and collectives want their input
    assert ops.embed(ids[:0], packed).shape == (0, inputs)


@pytest.mark.parametrize("size", [8, 31, 100, 1024])
@pytest.mark.parametrize("tokens", [1, 3, 20])
def test_norms(ops, dtype, tokens, size):
    x, residual = numbers(tokens, size, dtype=dtype), numbers(tokens, size, dtype=dtype)
    weight, eps = 1 + 0.1 * numbers(size), 1e-5
    before = x.clone(), residual.clone()

    def norm(wide: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()

    close(ops.rms_norm(x, weight, eps), norm(x.double(), weight))
    got, total = ops.add_rms_norm(x, residual, weight, eps)
    assert torch.equal(total, x + residual)
    close(got, norm((x + residual).double(), weight))
    got, total = ops.add_rms_norm(x, None, weight, eps)
    assert torch.equal(total, x)
    close(got, norm(x.double(), weight))
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


ACTIVATIONS = {"silu": lambda x: x / (1 + (-x).exp()),
               "gelu_tanh": lambda x: x / 2 * (1 + torch.tanh(
                   math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3)))}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("tokens, size", [(1, 8), (3, 37), (9, 96)])
@pytest.mark.filterwarnings("ignore:overflow encountered")  # as Triton's interpreter remarks
def test_gated_mlps(ops, dtype, activation, tokens, size):
    gate_up = 3 * numbers(tokens, 2 * size, dtype=dtype)
    gate_up[0, 0] = -178  # exp overflows on the way, and nothing happens
    gate, up = gate_up.double().chunk(2, -1)
    close(ops.act_and_mul(gate_up, activation), ACTIVATIONS[activation](gate) * up)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("tokens", [1, 7, 40])
@pytest.mark.parametrize("first, here, chosen", [(0, 5, 2), (2, 2, 3), (1, 1, 1), (0, 0, 2)])
def test_experts(ops, dtype, activation, tokens, first, here, chosen):
    """Some experts live on other ranks, whose share counts zero; one may be hit by nobody."""
    total, size, inner = 5, 24, 20
    hidden = numbers(tokens, size, dtype=dtype)
    gate_up = 0.3 * numbers(here, 2 * inner, size)
    down = 0.3 * numbers(here, size, inner)
    gate_up, down = gate_up.to(dtype), down.to(dtype)
    weights = torch.rand(tokens, chosen)
    ids = torch.stack([torch.randperm(total)[:chosen] for _ in range(tokens)])
    expected = torch.zeros(tokens, size, dtype=torch.float64)
    for token in range(tokens):
        for weight, i in zip(weights[token].double(), (ids[token] - first).tolist(), strict=True):
            if 0 <= i < here:
                gate, up = (gate_up[i].double() @ hidden[token].double()).chunk(2)
                inside = (ACTIVATIONS[activation](gate) * up).to(dtype).double()
                expected[token] += weight * (down[i].double() @ inside)
    got = ops.experts(hidden, weights, ids, ops.prepack(gate_up.clone()), ops.prepack(down.clone()),
                      first, activation)
    assert got.dtype == dtype
    close(got, expected, 3)


# ------------------------------------------------------------ the cache and attention


def write(ops, cache, k: torch.Tensor, v: torch.Tensor, slots: list[int]) -> None:
    """Keys and values as they are to the cache: no norm, and RoPE by an angle of 0."""
    num_tokens, _, head_dim = k.shape
    ones = torch.ones(num_tokens, head_dim)
    qkv = torch.cat((torch.zeros_like(k), k, v), 1)
    ops.norm_rope_store(qkv, None, None, 1e-6, ones, ones * 0, *cache,
                        torch.tensor(slots, dtype=torch.int32))


def make_batch(tables: list[list[int]], query_lens: list[int], seq_lens: list[int],
               block_size: int, padded_to: int | None = None) -> Batch:
    """A real step's batch."""
    step = Step(0)
    for row, (table, query_len, seq_len) in enumerate(zip(tables, query_lens, seq_lens,
                                                          strict=True)):
        seq = sequence(str(row), [0] * seq_len, SamplingParams(), row=row, block_table=table)
        step.num_new_tokens[seq] = query_len
        step.starts.append(seq_len - query_len)
        step.sampling.append(seq)
    builder = BatchBuilder(max(len(tables), padded_to or 0), sum(query_lens) + 64,
                           max(seq_lens) + 64, block_size, CPU)
    return builder.build(step, padded_to and Size(padded_to, padded_to))


# query heads, KV heads, head size, block size
SHAPES = [(4, 2, 16, 16), (3, 3, 32, 16), (8, 1, 24, 32), (6, 2, 20, 5), (2, 2, 64, 48),
          (5, 1, 8, 1)]
# each row's query length and sequence length: decodes first, as a batch has them
CASES = {"few": [(1, 1), (1, 20), (3, 19)], "decodes": [(1, 1), (1, 7), (1, 16), (1, 17), (1, 100)],
         "prompts": [(5, 5), (16, 16), (33, 33)],
         "mixed": [(1, 40), (1, 3), (7, 7), (20, 50), (2, 18)],
         "long chunk": [(70, 200)], "many rows": [(1, n) for n in range(1, 40)]}


def scatter(rows: list[tuple[int, int]], block_size: int) -> tuple[list[list[int]], int]:
    """A block table for each row, out of order, with blocks in between that belong to nobody."""
    needed = [-(-seq_len // block_size) for _, seq_len in rows]
    num_blocks = 2 * sum(needed) + 3
    order = torch.randperm(num_blocks).tolist()
    tables = []
    for n in needed:
        tables.append(order[:n])
        order = order[n:]
    return tables, num_blocks


def naive(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, position: int, scale: float,
          window: int | None, softcap: float | None, sinks: torch.Tensor | None = None,
          last: int | None = None) -> torch.Tensor:
    """One query, in float64. q: (heads, head_dim); keys, values: (tokens, KV heads, head_dim). A
    sink is one more key, whose value is 0: it adds to the sum of weights alone."""
    first, group = 0 if window is None else max(0, position - window + 1), len(q) // keys.shape[1]
    keys, values = (x[first:(last or position) + 1].double().repeat_interleave(group, 1)
                    for x in (keys, values))
    scores = (keys * q.double()).sum(-1) * scale  # (tokens, heads)
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    weights, sink = scores.exp(), 0 if sinks is None else sinks.double().exp()
    return (weights[..., None] * values).sum(0) / (weights.sum(0) + sink)[:, None]


# Sinks far below all scores, among them, and far above: then hardly anything of V is left.
SINKS = torch.tensor([-1e38, -2.0, 0.5, 1.0, 3.0, 60.0, 0.0, -0.5])


@pytest.mark.parametrize("window, softcap, sinks, image", [
    (None, None, None, 0), (9, None, None, 0), (30, 5.0, None, 0), (None, None, SINKS, 0),
    (None, None, None, 7), (9, 5.0, SINKS, 23)],
    ids=["plain", "window", "softcap", "sinks", "images", "all"])
@pytest.mark.parametrize("case", CASES)
def test_attention(ops, dtype, case, window, softcap, sinks, image):
    """Against a loop over queries and keys. Dead slots hold infinities and NaN, other requests'
    numbers, which must not leak in, not even multiplied by zero. image: all tokens are in images of
    so many, which see each other."""
    shapes = SHAPES if dtype is not torch.float16 else SHAPES[1::2]
    if ops.__name__.endswith(".triton_attention"):  # slow here: test_triton_attention has more
        if case != "few" or dtype is not torch.float32:
            return
        shapes = SHAPES[3:4] if window == 30 else SHAPES[:1]
    for shape in shapes:
        check_attention(ops, dtype, shape, CASES[case], window, softcap, sinks, image=image)


def in_8_bits(x: torch.Tensor) -> torch.Tensor:
    scale = x.float().abs().amax(-1, keepdim=True) / 127
    return (x.float() / scale.clamp(min=1e-37)).round().double() * scale


def check_attention(ops, dtype, shape, rows, window, softcap, sinks, stored=None, image=0) -> None:
    num_heads, num_kv_heads, head_dim, block_size = shape
    tables, num_blocks = scatter(rows, block_size)
    cache = ops.new_cache(num_blocks, block_size, num_kv_heads, head_dim, stored or dtype, CPU)
    poison = torch.full((num_blocks * block_size, num_kv_heads, head_dim), math.inf, dtype=dtype)
    poison[::2] = math.nan
    write(ops, cache, poison, -poison, list(range(num_blocks * block_size)))
    kvs = []
    for table, (_, seq_len) in zip(tables, rows, strict=True):
        k, v = (numbers(seq_len, num_kv_heads, head_dim, dtype=dtype) for _ in range(2))
        if stored is not None:
            v[::3, 0] *= torch.tensor([0, 1e-4, 100.0])[torch.arange(len(v[::3])) % 3, None].to(v)
        kvs.append((k, v) if stored is None else (in_8_bits(k), in_8_bits(v)))
        slots = [table[i // block_size] * block_size + i % block_size for i in range(seq_len)]
        if window is not None:  # what no query of the row sees may be somebody else's by now
            seen_from = max(0, seq_len - rows[len(kvs) - 1][0] + 1 - window)
            k, v, slots = k[seen_from:], v[seen_from:], slots[seen_from:]
        write(ops, cache, k, v, slots)
    query_lens = [query_len for query_len, _ in rows]
    batch = make_batch(tables, query_lens, [seq_len for _, seq_len in rows], block_size)
    q = numbers(sum(query_lens), num_heads, head_dim, dtype=dtype)
    scale = head_dim ** -0.5
    if sinks is not None:
        sinks = sinks.repeat(-(-num_heads // len(sinks)))[:num_heads]
    ends = [min(position - position % image + image, seq_len) - 1 if image else position
            for n, seq_len in rows for position in range(seq_len - n, seq_len)]
    last = torch.tensor(ends, dtype=torch.int32) if image else None
    got = ops.paged_attention(q, *cache, batch, scale, window, softcap, sinks, last)
    expected, places = torch.zeros(q.shape, dtype=torch.float64), []
    for (query_len, seq_len), (k, v) in zip(rows, kvs, strict=True):
        for position in range(seq_len - query_len, seq_len):
            expected[len(places)] = naive(q[len(places)], k, v, position, scale, window, softcap,
                                          sinks, ends[len(places)])
            places.append(f", the largest at position {position} in a row of {seq_len} tokens, "
                          f"{query_len} of them queries; {num_heads} heads, {num_kv_heads} for KV")
    worst = (got.double() - expected).abs().amax((1, 2)).argmax()  # NaN is more than any number
    close(got, expected, 2, places[worst])


def test_rows_of_padding_attend_to_nothing(ops):
    """A graph's batch has more rows than sequences: these give zeros and write nothing."""
    cache = ops.new_cache(4, 16, 2, 16, torch.float32, CPU)
    k, v = numbers(5, 2, 16), numbers(5, 2, 16)
    write(ops, cache, k, v, [16, 17, 18, 19, 20])
    batch = make_batch([[1]], [1], [5], 16, padded_to=4)
    q = numbers(4, 2, 16)
    got = ops.paged_attention(q, *cache, batch, 0.25)
    assert got[0].abs().min() > 0 and not got[1:].any()
    write(ops, cache, k + 1, v + 1, [-1] * 5)
    assert torch.equal(ops.paged_attention(q, *cache, batch, 0.25), got)


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norm_rope_store(ops, dtype, shape, tokens, norms):
    """q comes back normalised and turned. What was stored is seen through attention: a query in
    the direction of one key, far away from all others, gets that key's value."""
    if ops.__name__.endswith(".triton_attention") and tokens == 40 and shape != SHAPES[0]:
        pytest.skip("the interpreter is slow: test_triton_attention has more")
    num_heads, num_kv_heads, head_dim, block_size = shape
    qkv = numbers(tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    qkv[0] *= 1e-3  # beside its squares eps counts
    weights = [1 + 0.2 * numbers(head_dim) if norms else None for _ in range(2)]
    angles = torch.rand(tokens, head_dim // 2).repeat(1, 2) * 6
    eps, kept = 1e-6, qkv.clone()
    num_blocks = -(-tokens // block_size) + 2
    cache = ops.new_cache(num_blocks, block_size, num_kv_heads, head_dim, dtype, CPU)
    order = torch.randperm(num_blocks)[:-(-tokens // block_size)].tolist()
    slots = [order[i // block_size] * block_size + i % block_size for i in range(tokens)]
    got = ops.norm_rope_store(qkv, *weights, eps, angles.cos(), angles.sin(), *cache,
                              torch.tensor(slots, dtype=torch.int32))
    assert torch.equal(qkv, kept)

    def turned(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        x = x.double()
        if weight is not None:
            x = x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()
        pairs = torch.complex(*x.chunk(2, -1)) * torch.polar(
            torch.ones(tokens, 1, head_dim // 2, dtype=torch.float64),
            angles[:, None, :head_dim // 2].double())
        return torch.cat((pairs.real, pairs.imag), -1)

    q, k, v = qkv.split((num_heads, num_kv_heads, num_kv_heads), 1)
    close(got, turned(q, weights[0]), 2)
    # Attention over what was stored, with an oracle's keys: each token sees itself and the past.
    expected_k, expected_v = turned(k, weights[1]).to(dtype).double(), v.double()
    batch = make_batch([order], [tokens], [tokens], block_size)
    probe = numbers(tokens, num_heads, head_dim, dtype=dtype)
    seen = ops.paged_attention(probe, *cache, batch, head_dim ** -0.5)
    for token in range(tokens):
        one = naive(probe[token], expected_k, expected_v, token, head_dim ** -0.5, None, None)
        close(seen[token], one, 8)


# ------------------------------------------------------------------------- threads


@pytest.fixture
def count_threads():
    """Sets their number; the tests' own is one (conftest.py)."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_cpu_a_row_alone_has_the_bits_of_a_row_in_a_crowd(dtype):
    """Many rows may take another way: tiles of registers, a panel's part at a time."""
    if "cpu" not in available():
        pytest.skip("needs a compiler")
    ops = load_backend("cpu")
    x, weight = numbers(300, 1100, dtype=dtype), ops.prepack(numbers(40, 1100, dtype=dtype))
    crowd = ops.linear(x, weight)
    for count in (1, 2, 5, 17, 60, 129):
        assert torch.equal(ops.linear(x[-count:], weight), crowd[-count:]), count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_compiled_twins_numbers_do_not_depend_on_the_threads(count_threads, dtype):
    """To the last bit; several times, because threads that write to one place need not meet."""
    if "cpu" not in available():
        pytest.skip("needs a compiler")
    ops, rows = load_backend("cpu"), CASES["mixed"]
    tables, num_blocks = scatter(rows, 16)
    batch = make_batch(tables, *map(list, zip(*rows, strict=True)), 16)
    x = numbers(70, 256, dtype=dtype)
    weight, bias = ops.prepack(numbers(600, 256, dtype=dtype)), numbers(600, dtype=dtype)
    gate_up, down = (ops.prepack(numbers(5, *size, dtype=dtype))
                     for size in ((192, 256), (256, 96)))
    ids = torch.stack([torch.randperm(5)[:2] for _ in range(70)])
    qkv, q = numbers(70, 12, 32, dtype=dtype), numbers(batch.num_tokens, 8, 32, dtype=dtype)
    angles, slots = torch.rand(70, 32), torch.randperm(num_blocks * 16)[:70].int()
    stored = [numbers(num_blocks * 16, 2, 32, dtype=dtype) for _ in range(2)]
    logits, seeds = numbers(33, 5000, dtype=dtype), torch.arange(33)

    def everything() -> list[torch.Tensor]:
        cache = ops.new_cache(num_blocks, 16, 2, 32, dtype, CPU)
        write(ops, cache, *stored, list(range(num_blocks * 16)))
        return [ops.linear(x, weight, bias), ops.act_and_mul(x, "silu"),
                *ops.add_rms_norm(x, x, torch.ones(256), 1e-6),
                ops.experts(x, torch.rand(70, 2).fill_(0.5), ids, gate_up, down, 0, "silu"),
                ops.norm_rope_store(qkv, None, None, 1e-6, angles.cos(), angles.sin(), *cache,
                                    slots), *cache,
                ops.paged_attention(q, *cache, batch, 0.2), ops.argmax(logits),
                ops.sample_tokens(logits, torch.ones(33), seeds, seeds)]

    expected = everything()
    count_threads(4)
    for _ in range(5):
        for i, (got, alone) in enumerate(zip(everything(), expected, strict=True)):
            assert torch.equal(got, alone), i


def test_a_cache_can_be_asked_for_its_size_alone(ops):
    """A block's bytes are counted before any cache is made: a real one could take gigabytes."""
    for one in ops.new_cache(16, 16, 2, 24, torch.float32, torch.device("meta")):
        assert one.is_meta and one.nbytes >= 16 * 16 * 2 * 24 * 4
