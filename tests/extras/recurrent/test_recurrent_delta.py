"""`delta_rule`, in plain torch and for each backend, against the paper's formula in float64, token
by token.
"""

import math

import pytest
import torch
from test_ops import available, close, count_threads, dtype, numbers, parameters  # noqa: F401

from nanoserve.self_test import load_backend
from nanoserve_extras.recurrent.recurrent_delta import delta_rule as specification
from nanoserve_extras.recurrent.recurrent_delta import delta_rule_for

# key heads, heads, key size, value size
DELTAS = {"two a key": (2, 4, 8, 6), "one a key": (2, 2, 16, 64), "three a key": (1, 3, 12, 80)}
# each row's tokens, where its state lies, and where its tokens leave it: in one place, or each in
# its own. 4 is read by two rows.
ROWS = {"none": ([], [], []), "decodes": ([1, 1, 1], [4, 0, 2], [[4], [0], [2]]),
        "mixed": ([1, 1, 5, 33], [3, 5, 0, 1], [[3], [5], [0], [1]]),
        "drafts": ([1, 3, 1, 4, 9], [4, 2, 0, 8, 4],
                   [[1], [2, 3, 5], [0], [7, 8, 9, 7], [11]])}


@pytest.fixture(params=available())
def kernels(request):
    return request.param


@pytest.fixture
def ops(kernels):
    """For `dtype`."""
    return load_backend(kernels)


@pytest.fixture
def delta_rule(kernels):
    """As a network of these kernels takes it."""
    return delta_rule_for(kernels)


def test_the_signature_is_that_of_the_specification(delta_rule):
    assert parameters(delta_rule) == parameters(specification)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("case", DELTAS)
def test_the_delta_rule(delta_rule, dtype, case, rows):  # noqa: F811
    """Against the paper's own form, S = decay S (I - beta k k^T) + beta v k^T. Gates are at both
    ends, too; a row begins with nothing, one with ones; states of others are NaN, and stay so."""
    (key_heads, heads, key_dim, size), (lens, sources, left) = DELTAS[case], ROWS[rows]
    tokens, states = sum(lens), torch.full((13, heads, key_dim, size), math.nan)
    slots = [slot for n, each in zip(lens, left, strict=True) for slot in each * (n // len(each))]
    qkv = numbers(tokens, 2 * key_heads * key_dim + heads * size, dtype=dtype)
    decay, beta = torch.rand(tokens, heads), torch.rand(tokens, heads)
    decay[torch.rand(tokens, heads) < 0.2], decay[torch.rand(tokens, heads) < 0.1] = 1, 0
    beta[torch.rand(tokens, heads) < 0.2], beta[torch.rand(tokens, heads) < 0.1] = 1, 0
    for i, source in enumerate(sources):
        states[source] = (torch.zeros, torch.ones, torch.randn)[i % 3](heads, key_dim, size)
    before, given = states.clone(), (qkv, decay, beta)
    kept = [one.clone() for one in given]
    expected, ends = states.double(), torch.tensor([0, *lens]).cumsum(0)
    out = torch.zeros(tokens, heads, size, dtype=torch.float64)
    for source, start, end in zip(sources, ends, ends[1:], strict=False):
        for t in range(start, end):
            for head in range(heads):
                at, wide = head * key_heads // heads * key_dim, qkv[t].double()
                q = wide[at:at + key_dim]
                k = wide[key_heads * key_dim + at:][:key_dim]
                q, k = (one / (one.dot(one) + 1e-6).sqrt() for one in (q, k))
                v = wide[2 * key_heads * key_dim + head * size:][:size]
                a, b = decay[t, head].double(), beta[t, head].double()
                forget = torch.eye(key_dim).double() - b * torch.outer(k, k)
                state = a * expected[source, head].T @ forget + b * torch.outer(v, k)
                expected[slots[t], head], out[t, head] = state.T, state @ q / key_dim ** 0.5
            source = slots[t]
    got = delta_rule(qkv, decay, beta, states, torch.tensor(sources, dtype=torch.int64),
                     torch.tensor(slots, dtype=torch.int64), ends.int())
    assert got.dtype == dtype and got.shape == out.shape
    assert all(map(torch.equal, given, kept))
    if tokens:
        close(got, out, 2)
        close(states[slots], expected[slots], 2)
    for i in set(range(13)) - set(slots):
        assert torch.equal(states[i].nan_to_num(9), before[i].nan_to_num(9))


def test_a_state_does_not_depend_on_how_its_tokens_are_cut(delta_rule):
    """Nor on who else is in the batch."""
    heads, key_dim, size = 2, 8, 16

    def fold(states, x, *gates):
        one = torch.ones(len(x), dtype=torch.int64)
        return delta_rule(x, *gates, states, one[:1], one, torch.tensor([0, len(x)]).int())

    qkv, gates = numbers(41, 4 * key_dim + heads * size), torch.rand(2, 41, heads)
    whole = torch.ones(2, heads, key_dim, size)
    parts = whole.clone()
    expected = fold(whole, qkv, *gates)
    cut = [one.split([1, 7, 33]) for one in (qkv, *gates)]
    got = [fold(parts, *one) for one in zip(*cut, strict=True)]
    assert torch.equal(torch.cat(got), expected) and torch.equal(parts, whole)


def test_the_compiled_numbers_do_not_depend_on_the_threads(count_threads):  # noqa: F811
    """To the last bit; several times, because threads that write to one place need not meet."""
    if "cpu" not in available():
        pytest.skip("needs a compiler")
    delta_rule, gates = delta_rule_for("cpu"), torch.rand(2, 70, 2)
    qkv, before = numbers(70, 256), numbers(3, 2, 16, 96)
    rows = torch.tensor([2, 0]), torch.tensor([2] + [0] * 69), torch.tensor([0, 1, 70]).int()

    def everything() -> list[torch.Tensor]:
        states = before.clone()
        return [delta_rule(qkv, *gates, states, *rows), states]

    expected = everything()
    count_threads(4)
    for _ in range(5):
        assert all(map(torch.equal, everything(), expected))
