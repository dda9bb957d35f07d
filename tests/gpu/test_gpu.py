"""On a real GPU: what the interpreter and the stand-ins promise is what the device does.

    python -m pytest -n 8 tests/gpu      kernels, graphs, the engine; skipped where there is no GPU
    python -m pytest -n 0 tests/gpu      the same, and what it does with memory: alone on the GPU

Kernels at real models' shapes in 16 bits against float64; the engine's greedy text in float32
against transformers'; graphs against eager steps; and what only a device has: queues that the host
runs ahead of, waiting, memory that is given back.
"""

import gc
import json
import os
import random
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import CHECKPOINTS, assert_same_text

pytest.importorskip("triton")

from measure import MODELS, config_json
from test_kernels_engine import MODES, few
from test_kernels_fused import kept_by_kernel, kept_by_twin
from test_kernels_fused import sample_tokens as sample_twin

from nanoserve import LLM, SamplingParams, ops
from nanoserve.device import kernels
from nanoserve.batch import BatchBuilder
from nanoserve.sequence import Sequence, Step

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(DEVICE.type == "cpu", reason="torch sees no GPU")
alone = pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ,
                           reason="others use the GPU's memory: run it with -n 0")
# Of the norm of what is right: a rounding at the end, and one of each weight on the way.
TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 1e-5}
MB = 2 ** 20


def assert_near(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype,
                factor: float = 1) -> None:
    assert got.dtype == dtype and got.shape == expected.shape
    expected = expected.double()
    error = (got.double() - expected).norm() / expected.norm().clamp(min=1e-30)
    assert error < factor * TOLERANCE[dtype], f"relative error {float(error):.2e}"


def random_tensor(*shape: int, dtype=torch.float32, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator, device=DEVICE) * scale).to(dtype)


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


def check_attention(heads, head_dim, block_size, dtype, rows, window=None, softcap=None):
    """rows: (query_len, seq_len), decodes first. What no row may read is NaN."""
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
        expected.append(exact_attention(q[at:at + query_len], k, v, scale, window, softcap))
        at += query_len
    query_lens = [n for n, _ in rows]
    batch = SimpleNamespace(
        num_decodes=query_lens.count(1), block_tables=tables.to(DEVICE),
        seq_lens=torch.tensor([n for _, n in rows], dtype=torch.int32, device=DEVICE),
        cu_seqlens_q=torch.tensor([0, *query_lens]).cumsum(0).to(DEVICE, torch.int32))
    got = kernels.paged_attention(q, k_cache, v_cache, batch, scale, window, softcap)
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


def test_a_full_batch_of_decodes():
    rows = [(1, random.Random(i).randrange(1, 3000)) for i in range(256)]
    check_attention((16, 8), 128, 16, torch.bfloat16, rows)


# ---------------------------------------------------- norms, RoPE, gates, MoE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("num_tokens, size", [(1, 1024), (256, 1024), (8192, 1024), (77, 4096),
                                              (3, 5120), (3, 8192)])
def test_norms(num_tokens, size, dtype):
    x, residual = (random_tensor(num_tokens, size, dtype=dtype, scale=i + 2) for i in range(2))
    weight = random_tensor(size, dtype=dtype)
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
    q_weight, k_weight = (1 + random_tensor(1, head_dim, dtype=dtype, scale=s) for s in (.1, .2))
    weight = torch.stack([q_weight] * (heads // kv_heads) + [k_weight])
    angles = random_tensor(n, 1, 1, head_dim // 2)
    cos, sin = angles.cos().repeat(1, 1, 1, 2), angles.sin().repeat(1, 1, 1, 2)
    slots = torch.randperm(400, generator=torch.Generator().manual_seed(0))[:n].to(
        DEVICE, torch.int32)
    real = torch.arange(n, device=DEVICE) % 5 > 0
    caches = [torch.full((25, 16, kv_heads, head_dim), torch.nan, dtype=dtype, device=DEVICE)
              for _ in "kv"]
    exact = [torch.full_like(cache, torch.nan, dtype=torch.float32) for cache in caches]
    got = kernels.norm_rope_store(qkv, weight, 1e-6, cos, sin, *caches,
                                  torch.where(real, slots, -1))
    expected = ops.norm_rope_store(qkv[real].float(), weight.float(), 1e-6, cos[real], sin[real],
                                   *exact, ops.places_of(slots[real], 16))
    assert_near(got[real], expected, dtype)
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


# ----------------------------------------------------------------- sampling

VOCAB_SIZE = 151936


def row_numbers(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.randint(-2 ** 62, 2 ** 62, (n,), generator=torch.Generator().manual_seed(n))
    return numbers.to(DEVICE), torch.arange(n, device=DEVICE)


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
                     == sample_twin(logits, heat, *numbers)).sum())
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
    differ = (kept_by_kernel(logits, heat, min_p, k, p)
              != kept_by_twin(logits, heat, min_p, k, p)).sum(-1).tolist()
    assert all(n <= (8 if x < 1 else 0) for n, x in zip(differ, p, strict=True)), differ


# --------------------------------------------------------------- the engine


def start(folder, **options) -> LLM:
    """In float32, with a cache full of NaN until it is written (graphs hold its address)."""
    engine = LLM(folder, **dict(dtype="float32", num_gpu_blocks_override=64,
                                max_num_seqs=12) | options)
    for cache in engine.runner.kv_cache:
        for tensor in cache:
            tensor.fill_(torch.nan)
    return engine


def assert_texts(outputs, references, name: str, where: str) -> None:
    for output in outputs:
        ids = output.outputs[0].token_ids
        expected, gaps = references(name, output.prompt_token_ids, 12)
        assert_same_text(ids, expected[:len(ids)], gaps, where)


GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.mark.parametrize("how", [dict(), dict(enforce_eager=True), dict(async_scheduling=False),
                                 dict(enforce_eager=True, async_scheduling=False),
                                 dict(kernels="torch")], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_equals_transformers(checkpoints, references, prompts, mode, how):
    engine = start(checkpoints["qwen3"], **MODES[mode] | how)
    steps, schedule = [], engine.scheduler.schedule
    engine.scheduler.schedule = lambda: steps.append(schedule()) or steps[-1]
    outputs = engine.generate(few(prompts), GREEDY, use_tqdm=False)
    assert_texts(outputs, references, "qwen3", f"{mode} {how}")
    assert any(step.preempted for step in steps) == ("preempted" in mode)
    assert (engine.runner.graphs is None) == bool(
        how.get("enforce_eager") or how.get("kernels") == "torch")


@pytest.mark.parametrize("name", [name for name in CHECKPOINTS if name != "qwen3"])
def test_every_family_equals_transformers(checkpoints, references, prompts, name):
    """With graphs and overlap, chunked, cached; what is left open is what a GPU's user gets."""
    engine = start(checkpoints[name], max_num_batched_tokens=60, max_num_seqs=5)
    assert engine.depth == 1 and engine.runner.graphs is not None
    assert_texts(engine.generate(prompts, GREEDY, use_tqdm=False), references, name, name)


def test_graphs_equal_eager_for_every_batch_size(checkpoints, references):
    engines = {eager: start(checkpoints["qwen3"], max_num_seqs=20, num_gpu_blocks_override=128,
                            enforce_eager=eager) for eager in (False, True)}
    graphs, replayed = engines[False].runner.graphs, []
    replay = graphs.replay
    graphs.replay = lambda size: replayed.append(size) or replay(size)
    assert graphs.sizes[-1] == 20
    for count in [*range(1, 21), 3, 20]:
        prompts = [[10 * count + i, 7, 60 + i] + [40 + i] * (5 * i) for i in range(count)]
        params = [SamplingParams(temperature=0, ignore_eos=True, max_tokens=4 + i % 7)
                  for i in range(count)]
        replayed.clear()
        texts = {eager: engine.generate(prompts, params, use_tqdm=False)
                 for eager, engine in engines.items()}
        assert max(replayed) == graphs.size_for(count)
        for graph, eager in zip(texts[False], texts[True], strict=True):
            ours, theirs = graph.outputs[0].token_ids, eager.outputs[0].token_ids
            if ours != theirs:  # then one of them must be a near-tie of the reference's
                assert_texts([graph, eager], references, "qwen3", f"{count} rows")


KINDS = [dict(temperature=0), dict(temperature=0.8), dict(top_k=5, top_p=.7), dict(min_p=.2),
         dict(frequency_penalty=1.5, presence_penalty=.5, repetition_penalty=1.2),
         dict(logit_bias={65: 4.0}, temperature=0), dict(allowed_token_ids=[65, 66, 67]),
         dict(bad_words=["ab", "c"]), dict(min_tokens=4, ignore_eos=False), dict(logprobs=3),
         dict(prompt_logprobs=2), dict(temperature=0, logprobs=0, top_k=1)]


def asked(**more) -> list[SamplingParams]:
    return [SamplingParams(**dict(seed=i, max_tokens=8, ignore_eos=True) | kind | more)
            for i, kind in enumerate(KINDS)]


def ids_of(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_seeds_and_controls_do_not_depend_on_the_company(checkpoints, prompts):
    """Alone and together, in graphs and without, with overlap and without, in chunks."""
    some = [prompts[i % len(prompts)][:40] for i in range(len(KINDS))]
    texts = []
    for how in (dict(), dict(enforce_eager=True), dict(async_scheduling=False),
                dict(max_num_batched_tokens=24), dict(block_size=32)):
        engine = start(checkpoints["qwen3"], **how)
        texts.append(ids_of(engine.generate(some, asked(), use_tqdm=False)))
    engine = start(checkpoints["qwen3"])
    texts.append([ids_of(engine.generate([prompt], params, use_tqdm=False))[0]
                  for prompt, params in zip(some, asked(), strict=True)])
    assert all(text == texts[0] for text in texts), texts


# ----------------------------------------------------- the host runs ahead


def guard(engine, mode: str = "error") -> None:
    """A launch that waits for the device is an error."""
    launch = engine.runner.launch

    def guarded(step):
        torch.cuda.set_sync_debug_mode(mode)
        try:
            return launch(step)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    engine.runner.launch = guarded


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe", "gemma2", "mistral"])
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_a_launch_never_waits_for_the_device(checkpoints, prompts, name, enforce_eager):
    engine = start(checkpoints[name], enforce_eager=enforce_eager, max_num_batched_tokens=60)
    some = [prompts[i % len(prompts)][:40] for i in range(len(KINDS))]
    expected = ids_of(engine.generate(some, asked(), use_tqdm=False))
    engine.reset_prefix_cache()
    guard(engine)
    assert ids_of(engine.generate(some, asked(), use_tqdm=False)) == expected


def test_the_guard_sees_who_waits(checkpoints):
    engine = start(checkpoints["qwen3"], enforce_eager=True)
    forward = engine.runner._forward
    engine.runner._forward = lambda batch: (int(batch.positions[0]), forward(batch))[1]
    guard(engine)
    with pytest.raises(RuntimeError, match="synchroniz"):
        engine.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
    engine.runner._forward = forward
    assert engine.generate([[1, 2, 3]], GREEDY, use_tqdm=False)


@pytest.mark.parametrize("waits", [True, False])
def test_a_pinned_buffer_is_not_written_before_its_copy_has_ended(waits):
    """Behind a device that is busy, the host packs six steps into two buffers (mini-sglang #103).
    Without the wait it would overwrite them: that, too, is shown. Steps are large: a copy of a few
    bytes might travel with its command."""
    n = 20_000
    builder = BatchBuilder(4, n, n, 16, DEVICE)
    if not waits:
        builder.copied = [None] * len(builder.copied)
    seen = torch.zeros(6, n, dtype=torch.int32, device=DEVICE)
    torch.cuda.synchronize()
    torch.cuda._sleep(500_000_000)  # a quarter of a second
    for i in range(6):
        seq = Sequence(str(i), [i + 1] * n, SamplingParams(), row=0, block_table=[*range(n // 16)])
        seen[i].copy_(builder.build(Step(i, {seq: n}, [0], [seq])).input_ids)
    torch.cuda.synchronize()
    expected = torch.arange(1, 7, device=DEVICE)[:, None].expand(-1, n)
    assert bool((seen == expected).all()) == waits


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_a_slow_device_changes_nothing(checkpoints, references, prompts, enforce_eager):
    engine = start(checkpoints["qwen3"], enforce_eager=enforce_eager, max_num_batched_tokens=60)
    launch = engine.runner.launch

    def late(step):
        torch.cuda._sleep(10_000_000)  # some milliseconds
        return launch(step)

    engine.runner.launch = late
    assert_texts(engine.generate(prompts, GREEDY, use_tqdm=False), references, "qwen3", "slow")


@pytest.mark.parametrize("where", ["launch", "fetch"])
def test_steps_in_flight_can_be_dropped(checkpoints, references, prompts, where):
    """Ctrl-C in the middle of a step, again and again: no token is lost, and none comes twice."""
    engine = start(checkpoints["qwen3"], max_num_batched_tokens=60)
    function, count = getattr(engine.runner, where), 0

    def interrupted(argument):
        nonlocal count
        count += 1
        if where == "launch":
            result = function(argument)  # it is queued, and nobody will hear of it
        if count % 3 == 0:
            raise KeyboardInterrupt
        return result if where == "launch" else function(argument)

    setattr(engine.runner, where, interrupted)
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, GREEDY)
    outputs, dropped = {}, 0
    while engine.has_unfinished_requests():
        try:
            outputs |= {output.request_id: output for output in engine.step()}
        except KeyboardInterrupt:
            dropped += 1
            assert not engine.in_flight
    assert dropped > 3 and len(outputs) == len(prompts)
    assert_texts(outputs.values(), references, "qwen3", where)


# ------------------------------------------------------------------- memory


def used() -> int:
    """Bytes of the GPU, by the driver; torch's pool has given back what it need not keep."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


@pytest.fixture
def large(tmp_path):
    """Qwen3-0.6B's shapes with fewer layers: a folder to make random weights from."""
    sizes = MODELS["Qwen3-0.6B"] | dict(L=6)
    (tmp_path / "config.json").write_text(json.dumps(config_json(sizes, "bfloat16")))
    return tmp_path


def start_large(folder, share: float) -> LLM:
    engine = LLM(folder, load_format="dummy", skip_tokenizer_init=True, max_num_seqs=200,
                 gpu_memory_utilization=share)
    engine.generate([[1, 2, 3], [4] * 900], SamplingParams(max_tokens=4, ignore_eos=True),
                    use_tqdm=False)
    return engine


@alone
def test_engines_leave_no_memory_behind(large):
    """One after the other, shut down or only forgotten. The first one's kernels and libraries stay,
    as they do for every program."""
    start_large(large, 0.5).shutdown()
    before, allocated = used(), torch.cuda.memory_allocated()
    blocks = []
    for end in ("shutdown", "del", "del", "shutdown"):
        engine = start_large(large, 0.5)
        blocks.append(engine.scheduler.blocks.num_blocks)
        assert used() - before > 0.3 * torch.cuda.mem_get_info()[1]
        if end == "shutdown":
            engine.shutdown()  # and somebody still holds it
        else:
            del engine
        assert used() - before < 64 * MB, f"after {end}: {(used() - before) / MB:.0f} MB are left"
        assert torch.cuda.memory_allocated() - allocated < MB
    assert max(blocks) - min(blocks) < 0.01 * max(blocks), blocks


@alone
def test_an_engine_after_a_forgotten_one_finds_all_memory(large):
    """Nothing is collected or emptied in between: what the first one left in torch's pool must
    neither be counted as others' nor be of no use in pieces."""
    engine = start_large(large, 0.8)
    blocks = engine.scheduler.blocks.num_blocks
    del engine
    engine = start_large(large, 0.8)
    assert abs(engine.scheduler.blocks.num_blocks - blocks) < 0.01 * blocks
    engine.shutdown()


@alone
def test_the_memory_of_others_is_subtracted(large):
    """A tensor of this process, then another process: as many blocks fewer as they are large."""
    engine = start_large(large, 0.6)
    blocks, block_bytes = engine.scheduler.blocks.num_blocks, engine.runner.block_bytes
    engine.shutdown()
    del engine
    total = torch.cuda.mem_get_info()[1]
    size = total // 5
    mine = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    engine = start_large(large, 0.6)
    assert blocks - engine.scheduler.blocks.num_blocks == pytest.approx(size / block_bytes,
                                                                        rel=0.03)
    assert used() < 0.65 * total
    engine.shutdown()
    del engine, mine
    before = used()
    with subprocess.Popen([sys.executable, "-c", (
            "import torch, sys\n"
            f"x = torch.empty({size}, dtype=torch.uint8, device='cuda')\n"
            "print('ready', flush=True)\nsys.stdin.read()\n")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout.readline() == b"ready\n"
            taken = used() - before
            engine = start_large(large, 0.6)
            assert blocks - engine.scheduler.blocks.num_blocks == pytest.approx(
                taken / block_bytes, rel=0.03)
            engine.shutdown()
        finally:
            other.stdin.close()
            other.wait(timeout=60)


@alone
def test_no_room_is_said_with_the_numbers(large):
    hog = torch.empty(torch.cuda.mem_get_info()[0] // 2, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(ValueError, match=r"no room for one KV block.*GB that others use"):
        start_large(large, 0.3)
    del hog
    start_large(large, 0.3).shutdown()


@alone
def test_graphs_find_room_beside_a_cache_of_the_usual_size(large):
    """They share one pool and keep no logits: what they take is far less than what is kept free."""
    engine = start_large(large, 0.9)
    graphs, total = engine.runner.graphs, torch.cuda.mem_get_info()[1]
    assert 0 < graphs.memory < 400 * MB, f"{graphs.memory / MB:.0f} MB"
    assert used() < 0.93 * total
    engine.shutdown()
