"""A wrong address would not raise: so dtypes, sizes and order of memory are checked before."""

import ctypes
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from quick_interpreter import quick_interpreter  # noqa: F401 - a fixture

from nanoserve import build
from nanoserve.build import functions_of

pytestmark = pytest.mark.skipif(not shutil.which("g++") or sys.platform != "linux",
                                reason="needs g++")
SOURCE = r"""
#include <cstdint>
struct BFloat16 { uint16_t bits; };
template <class T>
void tell(const T *x, const int32_t *y, long number, float factor, int64_t *out, long a, long b,
          long told) {
    const int64_t found[] = {y ? y[b - 1] : -1, number, int64_t(4 * factor), sizeof *x, a, b};
    for (long i = 0; i < told; i++) out[i] = found[i];
}
template <class T> void copy(const T *x, T *out, float *ones, long n) {
    for (long i = 0; i < n; i++) out[i] = x[i], ones[i] = 1;
}
struct Function { const char *signature; void *for_float32, *for_bfloat16; };
#define FUNCTION(name, ...) {#name ": " #__VA_ARGS__, (void *)name<float>, (void *)name<BFloat16>}
extern "C" const Function functions[] = {
    FUNCTION(tell, T x[a _twice b], i32? y[b], long number, float factor -> i64 out[told]),
    FUNCTION(copy, T x[n] -> T out[n], f32 ones[n]),
    {}};
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("library")
    (folder / "some.cpp").write_text(SOURCE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        return functions_of(build.load(folder / "some.cpp"))


@pytest.mark.parametrize("dtype, itemsize", [(torch.float32, 4), (torch.bfloat16, 2)], ids=str)
def test_arguments_arrive_in_their_order_and_sizes_behind_them(library, dtype, itemsize):
    x, y = torch.zeros(3, 10, 5, dtype=dtype), torch.arange(5, dtype=torch.int32)
    got = library.tell(x, y, 7, 0.75, told=6)
    assert got.dtype == torch.int64 and got.tolist() == [4, 7, 3, itemsize, 3, 5]
    assert library.tell(x, None, -7, 2, told=2, b=5, _twice=10).tolist() == [-1, -7]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_float16_goes_through_float32(library, dtype):
    """And only what is of the first argument's dtype comes back as it."""
    x = torch.randn(9).to(dtype)
    out, ones = library.copy(x)
    assert out.dtype == dtype and torch.equal(out, x)
    assert ones.dtype == torch.float32 and torch.equal(ones, torch.ones(9))


def test_no_rows_are_no_special_case(library):
    out, ones = library.copy(torch.zeros(0))
    assert out.shape == ones.shape == (0,)


X, Y = torch.zeros(3, 10, 5), torch.zeros(5, dtype=torch.int32)


@pytest.mark.parametrize("x, y, sizes, argument", [
    (X.double(), None, {}, 1), (X.int(), None, {}, 1),  # T is neither
    (X, Y.long(), {}, 2), (X, Y.float(), {}, 2), (X, X, {}, 2),
    (X, Y[:4], {}, 2), (X, torch.zeros(6, dtype=torch.int32), {}, 2), (X, Y[None], {}, 2),
    (X[0], Y, {}, 1), (X, Y, {"_twice": 6}, 1), (X, Y, {"a": 4}, 1),
    (X.transpose(0, 1), None, {}, 1), (X[:, ::2], None, {}, 1),
    (X, torch.zeros(10, dtype=torch.int32)[::2], {}, 2), (X.to("meta"), Y, {}, 1)])
def test_what_does_not_fit_is_refused(library, x, y, sizes, argument):
    """By dtype, shape, strides, device; the words name the function and the argument."""
    with pytest.raises(ValueError, match=rf"tell .*T x\[a.* argument {argument}\b"):
        library.tell(x, y, 7, 0.75, told=6, **sizes)


@pytest.mark.parametrize("arguments", [
    (None, None, 7, 1.0), (X, None, 7), (X, None, 7, 1.0, 2), (X, 5, 7, 1.0), (X, None, Y, 1.0),
    (X, None, 0.5, 1.0), (X, None, None, 1.0), (X, None, 7, None), (X, None, 7, X)], ids=str)
def test_what_is_no_tensor_or_no_number_is_refused(library, arguments):
    with pytest.raises((TypeError, ValueError, AttributeError, ctypes.ArgumentError)):
        library.tell(*arguments, told=6)


def test_a_plain_weight_is_not_taken_for_a_packed_one():
    from nanoserve import cpu  # here: it is compiled

    x, weight = torch.randn(2, 32), torch.randn(16, 32)
    packed = cpu.prepack(weight)
    for wrong in (weight, packed.memory, cpu.prepack(weight.bfloat16()),
                  cpu.prepack(weight[:, :16])):
        with pytest.raises((ValueError, AttributeError)):
            cpu.linear(x, wrong)
    with pytest.raises(ValueError, match=r"product .*argument 3.*\(15,\)"):
        cpu.linear(x, packed, torch.zeros(15))


def test_a_row_that_is_longer_than_its_blocks_is_refused():
    from nanoserve import cpu

    cache = cpu.new_cache(2, 16, 2, 16, torch.float32, torch.device("cpu"))
    tables, lens, starts = (torch.tensor(x, dtype=torch.int32) for x in ([[1, 0]], [20], [0, 1]))
    batch = SimpleNamespace(block_tables=tables, seq_lens=lens, cu_seqlens_q=starts,
                            seq_lens_host=[20], query_lens=[1])
    short = SimpleNamespace(**vars(batch) | {"block_tables": tables[:, :1].contiguous()})
    assert cpu.paged_attention(torch.zeros(1, 2, 16), *cache, batch, 1.0).shape == (1, 2, 16)
    for q, wrong in ((torch.zeros(0, 2, 16), batch), (torch.zeros(1, 2, 16), short)):
        with pytest.raises(ValueError, match="queries for rows of"):
            cpu.paged_attention(q, *cache, wrong, 1.0)
    with pytest.raises(ValueError, match="paged_attention"):  # 3 heads for 2 of the cache
        cpu.paged_attention(torch.zeros(1, 3, 16), *cache, batch, 1.0)


def test_a_cache_of_other_heads_or_numbers_is_refused():
    from nanoserve import cpu

    cache = cpu.new_cache(4, 16, 2, 24, torch.float32, torch.device("cpu"))
    angles, slots = torch.zeros(1, 24), torch.zeros(1, dtype=torch.int32)
    assert cpu.norm_rope_store(torch.zeros(1, 6, 24), None, None, 1e-6, angles, angles, *cache,
                               slots).shape == (1, 2, 24)
    for size in (16, 33, 40):  # what fits in no panel, is odd, or would need a third panel
        wrong = torch.zeros(1, size)
        with pytest.raises(ValueError, match="norm_rope_store"):
            cpu.norm_rope_store(torch.zeros(1, 6, size), None, None, 1e-6, wrong, wrong, *cache,
                                slots)
    for k, v in (torch.int8,) * 2, (torch.int16,) * 2, (torch.int8, torch.float32):
        wrong = cache[0].to(k), cache[1].to(v)  # in int8 without room for scales
        with pytest.raises(ValueError, match="norm_rope_store"):
            cpu.norm_rope_store(torch.zeros(1, 6, 24), None, None, 1e-6, angles, angles, *wrong,
                                slots)
