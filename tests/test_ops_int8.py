"""Attention to keys and values in 8 bits, in all namespaces, against the oracle of test_ops."""

import pytest
import torch
from quick_interpreter import quick_interpreter  # noqa: F401
from test_ops import (  # noqa: F401
    CASES,
    CPU,
    SHAPES,
    SINKS,
    check_attention,
    close,
    dtype,
    make_batch,
    ops,
    write,
)


@pytest.mark.parametrize("case", CASES)
def test_attention_to_keys_and_values_in_8_bits(ops, dtype, case):  # noqa: F811
    """With the numbers that the oracle's rule leaves of K and V: each token's head has
    whole numbers up to 127 and a scale. Some heads are all zeros, some tiny, some huge."""
    is_slow = ops.__name__.endswith(".triton_attention")  # test_triton_attention has more
    if is_slow and (case != "few" or dtype is torch.float16):
        pytest.skip("the interpreter is slow")
    for shape in SHAPES[3:4] if is_slow else SHAPES if dtype is not torch.float16 else SHAPES[::2]:
        check_attention(ops, dtype, shape, CASES[case], None, None, None, torch.int8)
    if not is_slow:
        check_attention(ops, dtype, SHAPES[0], CASES[case], 9, 5.0, SINKS, torch.int8)


@pytest.mark.parametrize("head_dim", [16, 576])
def test_each_of_many_small_weights_counts(ops, dtype, head_dim):  # noqa: F811
    """One key is looked at, with a value of -1, and 99 others weigh exp(-6) of it each, a fifth in
    all, with values of 1: rounded to 8 bits they were nothing. A latent head has 576 numbers.
    """
    if ops.__name__.endswith(".triton_attention") and head_dim > 16:
        pytest.skip("the interpreter is slow")
    cache = ops.new_cache(7, 16, 1, head_dim, torch.int8, CPU)
    k = torch.ones(100, 1, head_dim)
    k[1:, :, :8] = -1  # their scores are lower by 16
    v = torch.ones(100, 1, head_dim)
    v[0] = -1
    write(ops, cache, k.to(dtype), v.to(dtype), list(range(100)))
    q = torch.ones(1, 1, head_dim, dtype=dtype)
    got = ops.paged_attention(q, *cache, make_batch([[*range(7)]], [1], [100], 16), 6 / 16)
    others = 99 * torch.tensor(-6.0).double().exp()
    close(got, ((others - 1) / (others + 1)).expand(1, 1, head_dim), 2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_does_not_become_one(ops, dtype, bad):  # noqa: F811
    """A key or value of an earlier token: who sees it must get no finite numbers, which would be
    wrong; and others are as ever."""
    k, v = torch.randn(2, 20, 1, 16).to(dtype)
    for which in (k, v):
        caches = []
        for number in (bad, 1.0):
            kept, which[5, 0, 3] = which[5, 0, 3].item(), number
            cache = ops.new_cache(2, 16, 1, 16, torch.int8, CPU)
            write(ops, cache, k, v, list(range(20)))
            which[5, 0, 3] = kept
            caches.append(cache)
        q = torch.ones(2, 1, 16, dtype=dtype)
        batch = make_batch([[0, 1], [0, 1]], [1, 1], [20, 5], 16)  # the second sees 0 to 4
        got, expected = (ops.paged_attention(q, *cache, batch, 0.25) for cache in caches)
        assert not got[0].isfinite().all() and torch.equal(got[1], expected[1])
