"""The fused kernels and those that sample do what plain torch twins do: shown without a GPU.

Oracles: the functions of the same name in `ops`, and for draws a twin in sampling_twins.
Kernels run in Triton's interpreter, in float32 and float16 (its bfloat16 is wrong). It checks no
bounds: so tensors are views into larger ones, whose other parts are poisoned and must be neither
read nor written. What the compiler makes of these kernels: tests/benchmarks/test_kernels.py.
"""


import numpy as np
import pytest
import torch
from quick_interpreter import quick_interpreter  # noqa: F401 - a fixture

from nanoserve import ops
from nanoserve.layers import RotaryEmbedding
from nanoserve.model_config import Rope

pytest.importorskip("triton")

from sampling_twins import (
    DEVICE,
    INF,
    NAN,
    gumbel,
    kept_by_kernel,
    kept_by_twin,
    mix64,
    plain_draw,
    signed,
    unaligned,
)

from nanoserve import triton_attention as namespace
from nanoserve import triton_fused as kernels
from nanoserve import triton_sampling as kernels_sampling

# Infinities meet here on purpose, and numpy, in which the interpreter computes, remarks on it.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
DTYPES = [torch.float32, torch.float16]


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """Whatever a kernel allocates is full of NaN, or of numbers that are no index of anything."""
    def poison(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.fill_(NAN if tensor.is_floating_point() else
                            2 ** 30 % torch.iinfo(tensor.dtype).max)

    empty, empty_like, new_empty = torch.empty, torch.empty_like, torch.Tensor.new_empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: poison(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poison(empty_like(*a, **k)))
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: poison(new_empty(*a, **k)))


def random_tensor(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0,
                  seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=generator) * scale).to(dtype).to(DEVICE)


def framed(x: torch.Tensor) -> torch.Tensor:
    """The same numbers as a view into a larger matrix, NaN all around."""
    frame = torch.full((len(x) + 2, x.shape[1] + 7), NAN, dtype=x.dtype, device=x.device)
    frame[1:-1, 3:-4] = x
    return frame[1:-1, 3:-4]


def assert_same(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Up to the last bit or two: sums over a row have another order, log and exp another author."""
    assert got.dtype == expected.dtype and got.shape == expected.shape
    loose = dict(rtol=2e-3, atol=2e-3) if got.dtype == torch.float16 else dict(rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(got, expected, **loose)


def assert_rounded_alike(got: torch.Tensor, expected: torch.Tensor, share: float = .999) -> None:
    """float16 numbers are the same bit for bit, but for one in a thousand, or a single one, where
    another order of a sum turns the scale. One rounding too few or too many shows in a tenth."""
    assert_same(got, expected)
    flips, allowed = int((got != expected).sum()), max(1, (1 - share) * got.numel())
    assert got.dtype == torch.float32 or flips <= allowed


def test_every_architecture_has_a_line_in_every_table():
    lines = {c: kernels.line_of(*c) for c in ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0),
                                               (12, 0))}
    assert {c for c, line in lines.items() if line == "sm_90"} == {(9, 0), (10, 0)}
    for table in (namespace.LAUNCHES, kernels.EXPERT_LAUNCHES):
        assert {line for line, _ in table} == set(lines.values())
    with pytest.raises(AssertionError, match="compute capability 7.0"):
        kernels.line_of(7, 0)


# ---------------------------------------------- norm, RoPE, cache; add, norm


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim, heads, kv_heads, norms", [
    (64, 4, 2, True), (80, 3, 1, True), (96, 18, 9, True), (128, 9, 17, False), (16, 33, 1, True)])
def test_norm_rope_store(dtype, head_dim, heads, kv_heads, norms):
    num_tokens, block_size, eps = 5, 4, 1e-6
    qkv = framed(random_tensor(num_tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype))
    qkv = qkv.view(num_tokens, -1, head_dim)
    weights = [1 + random_tensor(head_dim, scale=.1, seed=seed) if norms else None
               for seed in range(2)]
    positions = torch.tensor([0, 3, 70, 4097, 131071], device=DEVICE)
    rope = Rope(tuple(1e4 ** (-2 * i / head_dim) for i in range(head_dim // 2)))
    cos, sin = RotaryEmbedding(rope, DEVICE)(positions)
    slots = torch.tensor([13, -1, 0, -1, 7], dtype=torch.int32, device=DEVICE)  # -1: padding

    before = torch.full((6, block_size, kv_heads, head_dim), NAN, dtype=dtype, device=DEVICE)
    k_cache, v_cache = before.clone(), before.clone()
    got = kernels.norm_rope_store(qkv, *weights, eps, cos, sin, k_cache[1:-1], v_cache[1:-1],
                                  unaligned(slots))

    expected_k_cache, expected_v_cache = before.clone(), before.clone()
    expected_q = ops.norm_rope_store(qkv, *weights, eps, cos, sin, expected_k_cache[1:-1],
                                     expected_v_cache[1:-1], slots)
    assert_rounded_alike(got, expected_q)
    torch.testing.assert_close(v_cache, expected_v_cache, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(k_cache.isnan(), expected_k_cache.isnan())  # nothing beside the slots
    assert_rounded_alike(k_cache.nan_to_num(), expected_k_cache.nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim, heads, kv_heads", [(80, 3, 1), (128, 18, 9), (16, 4, 40)])
def test_keys_and_values_are_rounded_to_8_bits_as_the_twin_rounds(dtype, head_dim, heads, kv_heads):
    """Bit for bit where nothing is normed or turned before. Halves are rounded to even; heads of
    zeros, and of the smallest numbers there are, get a scale; other slots stay as they were."""
    num_tokens, block_size = 6, 4
    qkv = random_tensor(num_tokens, heads + 2 * kv_heads, head_dim, dtype=dtype, scale=3)
    qkv[1] = 0
    qkv[2], qkv[2, :, ::2] = 127, torch.arange(head_dim // 2).to(dtype) + 0.5
    qkv[3] *= torch.finfo(dtype).tiny
    ones = torch.ones(num_tokens, head_dim, device=DEVICE)
    slots = torch.tensor([13, 14, 2, -1, 7, 0], dtype=torch.int32, device=DEVICE)
    plain, got = ([cache.fill_(77) for cache in ops.new_cache(
        4, block_size, kv_heads, head_dim, torch.int8, DEVICE)] for _ in range(2))
    ops.norm_rope_store(qkv, None, None, 0.0, ones, ones * 0, *plain, slots)
    kernels.norm_rope_store(qkv, None, None, 0.0, ones, ones * 0, *got, unaligned(slots))
    for ours, theirs in zip(got, plain, strict=True):
        numbers, scales = kernels.numbers_and_scales(ours)
        assert torch.equal(numbers, theirs[..., :-4])
        assert torch.equal(scales.transpose(1, 2)[..., None].contiguous().view(torch.int8),
                           theirs[..., -4:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 64, 97, 2048, 5000])
def test_add_rms_norm(dtype, size):
    x, residual = (random_tensor(3, size, dtype=dtype, scale=9, seed=i) for i in range(2))
    x[0], residual[0] = x[0] * 1e-4, residual[0] * 1e-4  # beside their squares eps counts
    x, residual = framed(x), framed(torch.cat((residual, residual), 1))[:, :size]
    weight = random_tensor(size)
    for other in (residual, None):
        got, total = kernels.add_rms_norm(x, other, weight, 1e-5)
        expected, expected_total = ops.add_rms_norm(x, other, weight, 1e-5)
        assert torch.equal(total, expected_total)  # rounded before it is normalised
        assert_rounded_alike(got, expected)
    assert torch.equal(kernels.rms_norm(x, weight, 1e-5), got)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ops.ACTIVATIONS)
@pytest.mark.parametrize("size", [1, 96, 1024, 1500])
def test_act_and_mul(dtype, activation, size):
    gate_up = framed(random_tensor(3, 2 * size, dtype=dtype, scale=4))
    gate_up[0, 0], gate_up[1, 0], gate_up[2, 0] = -200, 200, 0  # exp overflows, and nothing happens
    got = kernels.act_and_mul(gate_up, activation)
    assert_same(got, ops.act_and_mul(gate_up, activation))
    # In float64, since torch's 1 + tanh loses digits where tanh is nearly -1; ours doesn't.
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_rounded_alike(got, (ops.ACTIVATIONS[activation](gate) * up).to(dtype))


# -------------------------------------------------------- mixture of experts


def make_experts(count: int, size: int, inner: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """gate_up_proj and down_proj"""
    return [random_tensor(count, 2 * inner, size, dtype=dtype, scale=size ** -.5),
            random_tensor(count, size, inner, dtype=dtype, scale=inner ** -.5)]


def route(num_tokens: int, experts: int, per_token: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As MoE.forward routes: `per_token` different experts each, with weights in float32."""
    scores = random_tensor(num_tokens, experts).softmax(-1)
    return scores.topk(per_token, dim=-1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens, total, local, per_token, size, inner, activation", [
    (1, 8, (0, 8), 2, 64, 96, "silu"),  # a single token: most experts have nothing to do
    (37, 5, (0, 5), 3, 100, 70, "gelu_tanh"),  # sizes that no tile divides
    (50, 6, (2, 5), 2, 64, 48, "silu"),  # the middle one of several ranks
    (3, 4, (3, 4), 1, 32, 32, "silu"),  # tokens of which few or none are for this rank
    (130, 3, (1, 3), 2, 64, 64, "silu"),  # at 32 pairs an expert, 16-bit rows go by 128
])
def test_experts(dtype, num_tokens, total, local, per_token, size, inner, activation):
    matrices = make_experts(local[1] - local[0], size, inner, dtype)
    hidden = random_tensor(num_tokens, size, dtype=dtype)
    routed = route(num_tokens, total, per_token)
    got = kernels.experts(hidden, *routed, *matrices, local[0], activation)
    assert_same(got, ops.experts(hidden, *routed, *matrices, local[0], activation))
    elsewhere = routed[0], torch.full_like(routed[1], local[1])
    assert not kernels.experts(hidden, *elsewhere, *matrices, local[0], activation).any()


# ----------------------------------------------------------------- sampling


def a_batch(s: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Seeds of any 64 bits, and positions."""
    rng = np.random.default_rng(seed)
    seeds = rng.integers(-2 ** 63, 2 ** 63, s)
    return torch.tensor(seeds).to(DEVICE), torch.tensor(rng.integers(0, 2 ** 20, s)).to(DEVICE)


def test_row_keys_are_the_numbers_of_the_sampler():
    """The same SplitMix64 state as `ops.uniforms`, which shows its upper 40 bits."""
    seeds, positions = a_batch(50)
    keys = mix64(seeds + positions * signed(0x9E3779B97F4A7C15))
    ours = (keys >> 24 & 2 ** 40 - 1).double() * 2.0 ** -40
    assert torch.equal(ours, ops.uniforms(seeds, positions))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [1, 7, 2048, 8191, 20011])
def test_samples_are_the_twins(dtype, vocab_size):
    logits = framed(random_tensor(8, vocab_size, dtype=dtype, scale=3))
    logits[3, ::2] = -INF
    for heats in ([0.] * 8, [1.] * 8, [0, .7, 1, 1, 0, 2, 1e-3, 50]):
        heat = torch.tensor(heats, device=DEVICE)
        got = kernels_sampling.sample_tokens(logits, heat, *a_batch(8))
        assert got.dtype == torch.int64
        assert torch.equal(got, plain_draw(logits, heat, *a_batch(8)))
        greedy = heat == 0
        assert torch.equal(got[greedy], ops.argmax(logits[greedy]))
        assert not logits[torch.arange(8), got].isinf().any() or vocab_size == 1


def test_ties_go_to_the_lowest_id_and_broken_rows_end_no_batch():
    logits = torch.zeros(7, 20011, device=DEVICE)
    logits[0, [9000, 4, 19000]] = 1.  # in three chunks
    logits[1, [19000, 9001]] = 1.
    logits[2] = NAN
    logits[3, 10007] = NAN
    logits[4] = -INF
    logits[5, 30] = INF
    for heat in (0., 1.):
        heats = torch.full((7,), heat, device=DEVICE)
        got = kernels_sampling.sample_tokens(logits, heats, *a_batch(7))
        assert got[2:6].tolist() == [-1] * 4
        if heat == 0:
            assert got.tolist() == [4, 9001, -1, -1, -1, -1, 0] == ops.argmax(logits).tolist()


@pytest.mark.parametrize("stream", ["positions of one seed", "seeds at one position"])
def test_draws_have_the_softmaxs_distribution(stream):
    """Pearson's chi-square, 99.9% points: 40,000 draws of the twin, some of them of the kernel."""
    n, vocab_size = 40_000, 12
    logits = random_tensor(1, vocab_size, scale=1.5)
    heat, count = torch.full((n,), 0.8, device=DEVICE), torch.arange(n, device=DEVICE)
    where = (torch.full_like(count, 42), count) if "positions" in stream else (
        count, torch.full_like(count, 42))
    tokens = plain_draw(logits.expand(n, -1), heat, *where)
    some = slice(0, 200)
    assert torch.equal(tokens[some], kernels_sampling.sample_tokens(
        logits.expand(200, -1), heat[some], where[0][some], where[1][some]))
    expected = n * (logits[0] / 0.8).softmax(-1)
    assert expected.min() > 20
    chi_square = ((tokens.bincount(minlength=vocab_size) - expected) ** 2 / expected).sum()
    assert chi_square < 31.26  # 11 degrees of freedom


@pytest.mark.full
def test_draws_from_a_large_vocabulary_are_even():
    """Winners have a tiny u; were it coarse, the lowest ids would win ties. 16 bins of equal ids.
    """
    n, vocab_size, tokens = 1600, 32768, []
    for start in range(0, n, 100):
        count = torch.arange(start, start + 100, device=DEVICE)
        tokens.append(gumbel(count, count + 7, vocab_size).argmax(-1))
    counts = torch.cat(tokens).mul(16).div(vocab_size, rounding_mode="floor").bincount(minlength=16)
    assert ((counts - n / 16) ** 2 / (n / 16)).sum() < 37.70  # 15 degrees of freedom


# --------------------------------------------------------------- the filters


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [5, 257, 20011])
def test_filters_keep_what_the_twin_keeps(dtype, vocab_size):
    """Rows that ask for one filter, for several, and for none. In float16 ties are common."""
    logits = framed(random_tensor(10, vocab_size, dtype=dtype, scale=2))
    logits[6, 1:] = torch.where(logits[6, 1:] < 0, -INF, logits[6, 1:])
    logits[7, 0] = torch.finfo(dtype).min
    heat = [1, .7, 1.3, 1, .9, 1, .6, 1, 1, 2]
    min_p = [0, 0, 0, .2, 0, .01, 0, 0, 0, 1]
    k = [0, 1, 0, 0, 40, 30, 3, vocab_size - 1, 0, 0]
    p = [1, 1, .9, 1, .8, .95, .99, 1, 1e-9, 1]
    k = [min(x, vocab_size) for x in k]
    expected = kept_by_twin(logits, heat, k, p, min_p)
    got = kept_by_kernel(logits, heat, k, p, min_p)
    possible = logits > -INF  # whether an impossible token is "kept" makes no difference
    assert torch.equal(got & possible, expected & possible)
    assert got[0].all() and (got & possible).any(-1).all()


def test_filters_and_ties():
    """Example: eight equals, top-p .5: before them lie 0 .125 .25 .375 .5: the first four stay."""
    logits = torch.full((6, 18000), -INF, device=DEVICE)
    logits[:, 2000::2000] = 2.  # eight equals, the last of them in the second block
    logits[3:, 77] = 3.
    asked = [1.] * 6, [0, 3, 0, 0, 2, 1], [.5, 1, 1e-30, .5, 1, .3], [0.] * 6
    got = kept_by_kernel(logits, *asked) & (logits > -INF)
    assert torch.equal(got, kept_by_twin(logits, *asked) & (logits > -INF))
    # e / (e + 8) = .25 of the mass is the best one's; .5 takes another .25, of .093 each.
    assert got.sum(-1).tolist() == [4, 8, 1, 4, 9, 1]
    assert got[2].nonzero()[0] == 2000 and got[0].nonzero()[-1] == 8000


def test_filtered_samples():
    """Both kernels together, greedy and broken rows among them, and -0 beside 0."""
    logits = random_tensor(7, 5003, scale=2)
    logits[4], logits[5], logits[6] = NAN, -INF, -0.
    logits[6, ::2] = 0.
    heat = torch.tensor([0, 1, .5, 1.5, 1, 1, 1], device=DEVICE)
    min_p, k = torch.zeros(7, device=DEVICE), torch.tensor([5, 5, 0, 20, 2, 2, 0], device=DEVICE)
    p = torch.tensor([.1, 1, .2, .9, .5, .5, .01], device=DEVICE)
    thresholds = kernels_sampling.thresholds(logits, heat, k, p, min_p)
    got = kernels_sampling.sample_tokens(logits, heat, *a_batch(7), thresholds)
    assert torch.equal(got, plain_draw(logits, heat, *a_batch(7), thresholds))
    assert got[0] == logits[0].argmax() and got[4] == got[5] == -1 and got[6] < 60
    assert got[1] in logits[1].topk(5).indices
