"""On a real GPU: kernels at real models' shapes in 16 bits, against float64."""

import random
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from gpu_checks import (
    DEVICE,
    VOCAB_SIZE,
    assert_near,
    needs_gpu,
    random_tensor,
    row_numbers,
)
from poison import as_kernels_have_it
from sampling_twins import kept_by_kernel, kept_by_twin, plain_draw

from nanoserve import ops
from nanoserve import triton_attention as kernels
from nanoserve_extras.few_rows.few_rows_triton import product
from nanoserve_extras.quantization.quantized_linear import round_groups, round_rows
from nanoserve_extras.quantization.quantized_triton import TritonWeight
from nanoserve_extras.recurrent import recurrent_triton
from nanoserve_extras.recurrent.recurrent_delta import delta_rule

pytestmark = needs_gpu

# ---------------------------------------------------------------- attention


def exact_attention(q, k, v, scale, window, softcap):
    """One row in float64. q: (queries, heads, head_dim), the last ones of k and v's positions."""
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(len(q) // len(k), dim=0) for x in (k, v))
    key = torch.arange(k.shape[1], device=DEVICE)[None]
    query = key[:, -q.shape[1]:].T
    scores = q @ k.transpose(1, 2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    hidden = (key > query) | (key <= query - (window or k.shape[1]))
    return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(0, 1)


def check_attention(heads, head_dim, block_size, dtype, rows, window=None, softcap=None,
                    stored=lambda x: x):
    """rows: (query_len, seq_len), decodes first. What no row may read is NaN. stored: makes what
    the cache has of K and V."""
    rng, (num_heads, num_kv_heads) = random.Random(0), heads
    widths = [-(-seq_len // block_size) for _, seq_len in rows]
    blocks = rng.sample(range(sum(widths) + 3), sum(widths))
    shape = (sum(widths) + 3, block_size, num_kv_heads, head_dim)
    k_cache, v_cache = (torch.full(shape, torch.nan, dtype=dtype, device=DEVICE) for _ in "kv")
    tables = torch.full((len(rows), max(widths) + 2), 10 ** 6, dtype=torch.int32)
    q = random_tensor(sum(n for n, _ in rows), num_heads, head_dim, dtype=dtype)
    expected, at, scale = [], 0, head_dim ** -0.5
    for row, (query_len, seq_len) in enumerate(rows):
        own = torch.tensor([blocks.pop() for _ in range(widths[row])])
        tables[row, :len(own)] = own
        position = torch.arange(seq_len)
        slots = (own[position // block_size] * block_size + position % block_size).to(DEVICE)
        k, v = (random_tensor(seq_len, num_kv_heads, head_dim, dtype=dtype) for _ in "kv")
        v = v.flip(0)  # not the keys' numbers
        k_cache.view(-1, *k.shape[1:])[slots], v_cache.view(-1, *v.shape[1:])[slots] = k, v
        k, v = ops.restored(stored(k)), ops.restored(stored(v))
        expected.append(exact_attention(q[at:at + query_len], k, v, scale, window, softcap))
        at += query_len
    query_lens = [n for n, _ in rows]
    batch = SimpleNamespace(
        num_decodes=query_lens.count(1), is_padded=False, block_tables=tables.to(DEVICE),
        seq_lens=torch.tensor([n for _, n in rows], dtype=torch.int32, device=DEVICE),
        cu_seqlens_q=torch.tensor([0, *query_lens]).cumsum(0).to(DEVICE, torch.int32))
    caches = [as_kernels_have_it(stored(cache)) for cache in (k_cache, v_cache)]
    got = kernels.paged_attention(q, *caches, batch, scale, window, softcap)
    at = 0
    for row, (query_len, _) in enumerate(rows):
        assert_near(got[at:at + query_len], expected[row], dtype)
        at += query_len


MIX = [(1, 1), (1, 700), (1, 8000), (1, 64), (2, 2), (300, 300), (200, 2500), (513, 4000)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("window, softcap", [(None, None), (1000, None), (None, 30.0)], ids=str)
def test_attention_at_the_shapes_of_8b(block_size, dtype, window, softcap):
    check_attention((32, 8), 128, block_size, dtype, MIX, window, softcap)


@pytest.mark.parametrize("head_dim", range(32, 257, 16))
def test_attention_of_every_head_size(head_dim):
    check_attention((8, 2), head_dim, 16, torch.bfloat16, MIX)
    if head_dim in (64, 80, 256):
        check_attention((4, 2), head_dim, 16, torch.float32, MIX, window=99)


@pytest.mark.parametrize("splits", [1, 2, 8, 32])
def test_splits_are_joined(splits, monkeypatch):
    monkeypatch.setattr(kernels, "_num_splits", lambda *shapes: splits)
    check_attention((16, 8), 128, 16, torch.bfloat16, MIX[:4] + [(1, 8191), (1, 513)])
    check_attention((16, 8), 128, 64, torch.float16, MIX[:4], window=600)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_attention_to_keys_and_values_of_8_bits(head_dim, dtype):
    check_attention((16, 8), head_dim, 16, dtype, MIX, stored=ops.quantised)
    check_attention((8, 8), head_dim, 64, dtype, MIX, 1000, 30.0, stored=ops.quantised)


FEW = [(1, 700), (5, 8000), (2, 2), (16, 3000), (3, 65)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("heads", [(8, 8), (16, 8), (32, 8), (40, 5), (24, 2)], ids=str)
def test_a_few_queries_a_row(heads, dtype):
    """Checked drafts: what each head's group makes of the tile, split and whole."""
    check_attention(heads, 128, 16, dtype, FEW)
    check_attention(heads, 64, 32, dtype, FEW * 12, window=900, softcap=30.0)
    check_attention(heads, 128, 16, dtype, FEW, stored=ops.quantised)


@pytest.mark.parametrize("heads, dtype, rows, window", [
    ((32, 8), torch.bfloat16, [(50, 30_000)], None),  # a prefill of few tiles, whose keys are split
    ((32, 8), torch.bfloat16, [(1, 30_000)] + [(1, 500)] * 31, None),  # a long row beside others
    ((32, 8), torch.float16, [(1, 200), (5, 9000)] * 20, 6000),
    ((16, 8), torch.bfloat16, [(1, random.Random(i).randrange(1, 3000)) for i in range(256)], None),
], ids=["a turn", "decodes", "drafts", "a full batch"])
def test_long_rows_and_many(heads, dtype, rows, window):
    check_attention(heads, 128, 16, dtype, rows, window)


# ---------------------------------------------------- norms, RoPE, gates, MoE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("num_tokens, size", [(1, 1024), (256, 1024), (8192, 1024), (77, 4096),
                                              (3, 5120), (3, 8192)])
def test_norms(num_tokens, size, dtype):
    x, residual = (random_tensor(num_tokens, size, dtype=dtype, scale=i + 2) for i in range(2))
    weight = random_tensor(size)
    got, total = kernels.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    exact = total.double()
    exact = exact * (exact.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    assert_near(got, exact, dtype)
    assert_near(kernels.rms_norm(total, weight, 1e-6), exact, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads, kv_heads, head_dim", [(32, 8, 128), (16, 8, 128), (40, 8, 80),
                                                       (8, 4, 256), (14, 2, 64)])
def test_norm_rope_store(heads, kv_heads, head_dim, dtype):
    """Against the same operations in float32; padding and all other slots stay as they were."""
    n = 333
    qkv = random_tensor(n, heads + 2 * kv_heads, head_dim, dtype=dtype)
    weights = [1 + random_tensor(head_dim, scale=scale) for scale in (.1, .2)]
    angles = random_tensor(n, head_dim // 2).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    slots = torch.randperm(400, generator=torch.Generator().manual_seed(0))[:n].to(
        DEVICE, torch.int32)
    slots[torch.arange(n, device=DEVICE) % 5 == 0] = -1
    caches = [torch.full((25, 16, kv_heads, head_dim), torch.nan, dtype=dtype, device=DEVICE)
              for _ in "kv"]
    exact = [torch.full_like(cache, torch.nan, dtype=torch.float32) for cache in caches]
    got = kernels.norm_rope_store(qkv, *weights, 1e-6, cos, sin, *caches, slots)
    expected = ops.norm_rope_store(qkv.float(), *weights, 1e-6, cos, sin, *exact, slots)
    assert_near(got, expected, dtype)
    for cache, right in zip(caches, exact, strict=True):
        assert torch.equal(cache.isnan(), right.isnan())
        assert_near(cache.nan_to_num(), right.nan_to_num(), dtype)


@pytest.mark.parametrize("activation", ops.ACTIVATIONS)
def test_gates(activation):
    for num_tokens, size in ((1, 3072), (256, 12288), (5000, 3072)):
        gate_up = random_tensor(num_tokens, 2 * size, dtype=torch.bfloat16, scale=3)
        assert_near(kernels.act_and_mul(gate_up, activation),
                    ops.act_and_mul(gate_up.double(), activation), torch.bfloat16)


@pytest.mark.parametrize("num_tokens", [1, 7, 64, 600, 3000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_128_experts(num_tokens, dtype):
    """Qwen3-30B-A3B's: 8 of 128, 2048 wide, 768 inside."""
    gate_up = random_tensor(128, 2 * 768, 2048, dtype=dtype, scale=2048 ** -.5)
    down = random_tensor(128, 2048, 768, dtype=dtype, scale=768 ** -.5)
    hidden = random_tensor(num_tokens, 2048, dtype=dtype)
    weights, ids = random_tensor(num_tokens, 128).softmax(-1).topk(8, dim=-1)
    got = kernels.experts(hidden, weights, ids, gate_up, down, 0, "silu")
    exact = ops.experts(hidden.float(), weights, ids, gate_up.float(), down.float(), 0, "silu")
    assert_near(got, exact, dtype, factor=2)  # the middle is rounded, too
    half = kernels.experts(hidden, weights, ids, gate_up[:64], down[:64], 0, "silu")
    other = kernels.experts(hidden, weights, ids, gate_up[64:], down[64:], 64, "silu")
    assert_near((half.float() + other.float()).to(dtype), exact, dtype, factor=2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_delta_rule(dtype):
    """Qwen3.5-4B's heads; decodes, a chunk, and a row whose tokens each leave a state."""
    lens, sources = torch.tensor([0, 1, 1, 200, 3]), torch.tensor([4, 0, 2, 1], device=DEVICE)
    slots = torch.tensor([4, 0] + [2] * 200 + [3, 1, 5], device=DEVICE)
    starts, n = lens.cumsum(0).to(DEVICE, torch.int32), int(lens.sum())
    qkv = random_tensor(n, 64 * 128, dtype=dtype)
    decay, beta = (random_tensor(n, 32, scale=i + 1).sigmoid() for i in range(2))
    states = random_tensor(6, 32, 128, 128)
    exact = states.clone()
    got = recurrent_triton.delta_rule(qkv, decay, beta, states, sources, slots, starts)
    assert_near(got, delta_rule(qkv.float(), decay, beta, exact, sources, slots, starts), dtype)
    torch.testing.assert_close(states, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_logits_are_not_rounded(dtype):
    """cuBLAS stores the float32 sums of products in 16 bits; also for no row at all."""
    weight = random_tensor(20_011, 1024, dtype=dtype, scale=1 / 32)
    for num_rows in (0, 1, 16, 300):
        x = random_tensor(num_rows, 1024, dtype=dtype)
        got = kernels.linear(x, weight, None, torch.float32)
        assert got.dtype == torch.float32 and got.shape == (num_rows, 20_011)
        torch.testing.assert_close(got.double(), x.double() @ weight.double().T, rtol=1e-4,
                                   atol=1e-4)


# --------------------------------------------------------- quantised weights


# The products of Qwen3-8B, whose head is not tied; one that nothing divides; one row of a matrix.
WIDTHS = [(6144, 4096), (4096, 12288), (151936, 1024), (100, 513), (1, 4096)]


@pytest.mark.parametrize("size", [0, 32, 128, 24])  # of a group in 4 bits; 0: rows in int8
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("outputs, inputs", WIDTHS)
def test_products_of_small_weights(outputs, inputs, dtype, size):
    """Of rows around each tile's, twice: a product has the same bits every time."""
    weight, bias = random_tensor(outputs, inputs, scale=inputs ** -.5), random_tensor(
        outputs, dtype=dtype)
    packed, dense = TritonWeight.of(weight, size), dense_of(weight, size, dtype).double()
    for num_rows in (1, 16, 17, 64, 65, 300):
        x = random_tensor(num_rows, inputs, dtype=dtype)
        got = packed.linear(x, bias)
        assert_near(got, x.double() @ dense.T + bias.double(), dtype)
        assert torch.equal(packed.linear(x, bias), got)


def dense_of(weight, size, dtype):
    """What a packed weight means."""
    return round_groups(weight, size)[:].to(dtype) if size else round_rows(weight)[:]


@pytest.mark.parametrize("size", [0, 32, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("outputs, inputs", [(2048, 768), (100, 513)])
def test_each_expert_multiplies_its_own_rows(outputs, inputs, dtype, size):
    """Of 128, 28 have none. Few rows and many, which take other tiles."""
    weight = random_tensor(128, outputs, inputs, scale=inputs ** -.5)
    packed = TritonWeight.stacked([TritonWeight.of(one, size) for one in weight])
    dense = [dense_of(one, size, dtype) for one in weight]
    for num_rows in (1, 8, 300, 2048, 2049, 9000):
        x = random_tensor(num_rows, inputs, dtype=dtype)
        chosen = torch.arange(num_rows, device=DEVICE) * 37 % 100
        starts = torch.searchsorted(chosen.sort()[0], torch.arange(129, device=DEVICE))
        got = packed.grouped(x, starts)
        exact = torch.cat([some.double() @ one.double().T for some, one in zip(
            x.split(starts.diff().tolist()), dense, strict=True)])
        assert_near(got, exact, dtype)
        assert torch.equal(packed.grouped(x, starts.int()), got)


def test_the_last_program_joins_a_row_as_a_second_kernel_does(monkeypatch):
    """One row of 8,192 keys, and rows of many lengths, a hundred times: a sum that is read before
    it is written would differ."""
    for lengths in ([8192], [1, 300, 4000, 9000, 12, 2049, 777, 8191]):
        width = -(-max(lengths) // 16)
        tables = torch.randperm(len(lengths) * width, device=DEVICE).int().view(-1, width)
        caches = [random_tensor(tables.numel(), 16, 8, 128, dtype=torch.bfloat16, scale=i + 1)
                  for i in range(2)]
        q = random_tensor(len(lengths), 16, 128, dtype=torch.bfloat16)
        batch = SimpleNamespace(
            num_decodes=len(lengths), is_padded=False, block_tables=tables, cu_seqlens_q=None,
            seq_lens=torch.tensor(lengths, dtype=torch.int32, device=DEVICE))
        expected = kernels.paged_attention(q, *caches, batch, 0.1)
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "JOIN", True)
            for _ in range(100):
                assert_near(kernels.paged_attention(q, *caches, batch, 0.1), expected,
                            torch.bfloat16)
            assert not kernels.counters(q.device).any()


# ------------------------------------------------- one to four rows, fused


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@pytest.mark.parametrize("outputs, inputs", [(4096, 1024), (1024, 3072), (6144, 4096), (100, 520)])
def test_fused_products_of_few_rows(rows, outputs, inputs, dtype):
    """Qwen3-0.6B's and 8B's: plain, behind a norm of a sum, with a gate; twice the same bits."""
    x, residual = (random_tensor(rows, inputs, dtype=dtype, scale=i + 1) for i in range(2))
    weight = random_tensor(outputs, inputs, dtype=dtype, scale=inputs ** -0.5)
    gain = 1 + random_tensor(inputs, scale=0.1)
    assert_near(product(x, weight)[0], x.double() @ weight.double().T, dtype)
    total = x + residual
    exact = total.double()
    exact = exact * (exact.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * gain.double()
    exact = exact @ weight.double().T
    got, stream = product(x, weight, None, residual, gain, 1e-6)
    assert torch.equal(stream, total)
    assert_near(got, exact, dtype)
    gated, _ = product(x, weight, None, residual, gain, 1e-6, "silu")
    assert_near(gated, ops.act_and_mul(exact, "silu"), dtype, factor=2)
    assert torch.equal(gated, product(x, weight, None, residual, gain, 1e-6, "silu")[0])


# ----------------------------------------------------------------- sampling


def test_greedy_is_argmax_and_ties_go_to_the_lowest_id():
    logits = random_tensor(256, VOCAB_SIZE, dtype=torch.bfloat16)  # full of ties
    zeros = torch.zeros(256, device=DEVICE)
    got = kernels.sample_tokens(logits, zeros, *row_numbers(256))
    assert torch.equal(got, logits.float().argmax(-1))
    best = logits.float() == logits.float().amax(-1, keepdim=True)
    assert (best.sum(-1) > 1).any(), "no ties were tested"
    assert torch.equal(got, best.int().argmax(-1))


def test_draws_are_the_twins():
    """Log and exp are another author's: a draw in a thousand may be another one."""
    logits = random_tensor(64, VOCAB_SIZE, scale=2)
    heat = torch.linspace(0.3, 2, 64, device=DEVICE)
    same, rows = 0, row_numbers(64)
    for step in range(8):
        numbers = rows[0], rows[1] + 100 * step
        same += int((kernels.sample_tokens(logits, heat, *numbers)
                     == plain_draw(logits, heat, *numbers)).sum())
    assert same >= 8 * 64 - 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_draws_have_the_softmaxs_distribution(dtype):
    """Pearson's chi-square at its 99.9% point, over 11 likely tokens far apart and all the rest."""
    n, likely = 100_000, torch.arange(0, 11 * 1500, 1500, device=DEVICE)
    logits = torch.full((1, 20_000), -3.0, device=DEVICE)
    logits[0, likely] = torch.linspace(4, 6, 11, device=DEVICE)
    logits = logits.to(dtype)
    counts = torch.zeros(12, device=DEVICE)
    bins = torch.full((20_000,), 11, device=DEVICE).scatter(0, likely, torch.arange(
        11, device=DEVICE))
    for start in range(0, n, 10_000):
        positions = torch.arange(start, start + 10_000, device=DEVICE)
        tokens = kernels.sample_tokens(logits.expand(10_000, -1), torch.full(
            (10_000,), 0.8, device=DEVICE), torch.full_like(positions, 7), positions)
        counts += bins[tokens].bincount(minlength=12)
    p = torch.zeros(12, device=DEVICE).index_add(
        0, bins, (logits[0].float() / 0.8).softmax(-1))
    assert ((counts - n * p) ** 2 / (n * p)).sum() < 31.26


def test_filters_keep_what_the_sampler_keeps():
    """But for a few tokens on the edge of top-p, each a millionth of the mass, where the order of a
    sum decides."""
    logits = random_tensor(10, VOCAB_SIZE, dtype=torch.bfloat16, scale=3)
    heat = [1, .7, 1.3, 1, .9, 1, .6, 1, 1, 2]
    min_p = [0, 0, 0, .2, 0, .01, 0, 0, 0, 1]
    k = [0, 1, 0, 0, 40, 30, 3, 1000, 0, 0]
    p = [1, 1, .9, 1, .8, .95, .99, 1, 1e-9, 1]
    differ = (kept_by_kernel(logits, heat, k, p, min_p)
              != kept_by_twin(logits, heat, k, p, min_p)).sum(-1).tolist()
    assert all(n <= (8 if x < 1 else 0) for n, x in zip(differ, p, strict=True)), differ
