"""The plain twins of the kernels that sample, and the kernels' filters in the same form."""

import torch

from nanoserve import ops
from nanoserve import triton_sampling as kernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NAN, INF = float("nan"), float("inf")


def unaligned(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, an item behind an aligned address: as they lie in a batch."""
    return torch.cat((x[:1], x))[1:]


# ----------------------------------------------------------------- sampling

MASK = 2 ** 64 - 1


def signed(x: int) -> int:
    """64 bits as the int64 that has them."""
    return (x & MASK) - (2 ** 64 if x >> 63 & 1 else 0)


def mix64(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64's output function on the bits of int64, whose own shift drags the sign along."""
    def shift(x: torch.Tensor, n: int) -> torch.Tensor:
        return (x >> n) & (2 ** (64 - n) - 1)

    x = (x ^ shift(x, 30)) * signed(0xBF58476D1CE4E5B9)
    x = (x ^ shift(x, 27)) * signed(0x94D049BB133111EB)
    return x ^ shift(x, 31)


def gumbel(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """seeds, positions (s,) int64 -> (s, vocab_size) float32, -log(-log(1 - u))."""
    golden = signed(0x9E3779B97F4A7C15)
    keys = mix64(seeds + positions * golden)
    ids = torch.arange(vocab_size, device=seeds.device)
    bits = mix64(keys[:, None] + ids * golden) >> 32 & 0xFFFFFFFF
    u = ((bits.float() + 0.5) * 2.0 ** -32).clamp(max=1 - 2.0 ** -24)
    series = u * (1 + u * (0.5 + u * (1 / 3 + u * 0.25)))
    return -torch.where(u < 1 / 64, series, -(1 - u).log()).log()


def plain_draw(logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor,
               positions: torch.Tensor, thresholds: ops.Thresholds | None = None) -> torch.Tensor:
    """The plain twin of the kernel: `ops.sample_tokens` takes another random number."""
    scaled = logits.float() * (1 / torch.where(temperature == 0, 1.0, temperature))[:, None]
    drawn = scaled
    if thresholds is not None:
        ids = torch.arange(logits.shape[1], device=logits.device)
        floor, last_id = thresholds[0][:, None], thresholds[1][:, None]
        drawn = scaled.masked_fill((scaled < floor) | (scaled == floor) & (ids > last_id), -INF)
    drawn = drawn + gumbel(seeds, positions, logits.shape[1])
    scores = torch.where(temperature[:, None] == 0, scaled, drawn)
    best, ids = scores.masked_fill(scores.isnan(), INF).max(-1)
    return torch.where(best.abs() < INF, ids, -1)


# --------------------------------------------------------------- the filters


def kept_by_kernel(logits: torch.Tensor, heat: list, k: list, p: list, min_p: list) -> torch.Tensor:
    heats, ks, ps, min_ps = (unaligned(x) for x in as_tensors(heat, k, p, min_p))
    thresholds = kernels.thresholds(logits, heats, ks, ps, min_ps)
    return above(thresholds, logits.float() * (1 / heats)[:, None])


def kept_by_twin(logits: torch.Tensor, heat: list, k: list, p: list, min_p: list) -> torch.Tensor:
    """The same of `ops.thresholds`, which divides where the kernel multiplies."""
    heats, *filters = as_tensors(heat, k, p, min_p)
    return above(ops.thresholds(logits, heats, *filters), logits.float() / heats[:, None])


def as_tensors(heat: list, k: list, p: list, min_p: list) -> list[torch.Tensor]:
    dtypes = torch.float32, torch.int32, torch.float32, torch.float32
    return [torch.tensor(values, dtype=dtype, device=DEVICE)
            for values, dtype in zip((heat, k, p, min_p), dtypes, strict=True)]


def above(thresholds: ops.Thresholds, scaled: torch.Tensor) -> torch.Tensor:
    """Which tokens stay, (s, vocab_size) bool."""
    floor, last_id = thresholds[0][:, None], thresholds[1][:, None]
    ids = torch.arange(scaled.shape[1], device=scaled.device)
    return ~((scaled < floor) | (scaled == floor) & (ids > last_id))
