"""The gated delta rule in Triton. Its formula is in recurrent_delta.py.

A program has some columns of one row's state, for one head. They stay in registers from the row's
first token to its last, and no two programs share a number:

    state of a head, (key_dim, value_dim)     | 0..15 | 16..31 | ... |    a program for each part
                                                 ▲ k, q: all of them; v, out: 16 numbers each

Known limit: a chunk is computed token by token, without tensor cores. The rule's chunked form would
sum in another order.
"""

import torch
import triton
import triton.language as tl

from nanoserve.triton_fused import FMA

STATE_COLUMNS = 16  # with 128 keys 64 numbers a lane of the only warp: sums meet there


@triton.jit(do_not_specialize_on_alignment=["sources", "slots", "starts"])
def _delta_rule_kernel(qkv, decay, beta, states, sources, slots, starts, out, qkv_stride, heads,
                       group, v_offset, scale, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
                       KEYS: tl.constexpr, COLUMNS: tl.constexpr):
    """Some columns of a row's state, which stay in registers from its first token to its last."""
    row, head = tl.program_id(0), tl.program_id(1)
    i, column = tl.arange(0, KEYS), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    is_key, inside = i < KEY_DIM, column < VALUE_DIM
    mask = is_key[:, None] & inside[None, :]
    states += head * KEY_DIM * VALUE_DIM + i[:, None] * VALUE_DIM + column[None, :]
    size = heads * KEY_DIM * VALUE_DIM
    state = tl.load(states + tl.load(sources + row) * size, mask, 0)
    first, end = tl.load(starts + row), tl.load(starts + row + 1)
    qkv += first.to(tl.int64) * qkv_stride
    at = first.to(tl.int64) * heads + head
    for t in range(first, end):
        q = tl.load(qkv + head // group * KEY_DIM + i, is_key, 0).to(tl.float32)
        k = tl.load(qkv + v_offset // 2 + head // group * KEY_DIM + i, is_key, 0).to(tl.float32)
        v = tl.load(qkv + v_offset + head * VALUE_DIM + column, inside, 0).to(tl.float32)
        q *= scale * tl.rsqrt(tl.sum(q * q, 0) + 1e-6)
        k *= tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
        state *= tl.load(decay + at)
        error = v - tl.sum(state * k[:, None], 0)
        state += k[:, None] * (error * tl.load(beta + at))[None, :]
        tl.store(out + at * VALUE_DIM + column, tl.sum(state * q[:, None], 0), inside)
        qkv += qkv_stride
        at += heads
        slot = tl.load(slots + t)
        if tl.load(slots + t + 1, t + 1 < end, -1) != slot:
            tl.store(states + slot * size, state, mask)


def delta_rule(qkv: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, states: torch.Tensor,
               sources: torch.Tensor, slots: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """`recurrent_delta.delta_rule`, with the same arguments and meaning."""
    heads, key_dim, value_dim = states.shape[1:]
    assert decay.is_contiguous() and beta.is_contiguous() and states.is_contiguous()
    out = torch.empty(len(qkv), heads, value_dim, dtype=qkv.dtype, device=qkv.device)
    v_offset = qkv.shape[1] - heads * value_dim
    _delta_rule_kernel[len(sources), heads, triton.cdiv(value_dim, STATE_COLUMNS)](
        qkv, decay, beta, states, sources, slots, starts, out, qkv.stride(0), heads,
        2 * heads * key_dim // v_offset, v_offset, key_dim ** -0.5, key_dim, value_dim,
        triton.next_power_of_2(key_dim), STATE_COLUMNS, num_warps=1, **FMA)
    return out
