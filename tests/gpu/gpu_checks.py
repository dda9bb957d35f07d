"""What the tests on a real GPU share."""

import os

import pytest
import torch
from checkpoints import assert_same_text
from helpers import poisoned

from nanoserve import LLM, SamplingParams
from nanoserve.graphs import Size

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Without a GPU: kernels in the interpreter and graphs by the stand-in, where a test can do with it.
DRY = DEVICE.type == "cpu" and os.environ.get("NANOSERVE_GPU_TESTS") == "dry"
needs_gpu = pytest.mark.skipif(DEVICE.type == "cpu" and not DRY, reason="torch sees no GPU")
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


VOCAB_SIZE = 151936


def row_numbers(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.randint(-2 ** 62, 2 ** 62, (n,), generator=torch.Generator().manual_seed(n))
    return numbers.to(DEVICE), torch.arange(n, device=DEVICE)


def start(folder, **options) -> LLM:
    """In float32, with a cache full of NaN until it is written (graphs hold its address)."""
    here = dict(device="cpu", kernels="triton", async_scheduling=True) if DRY else {}
    return poisoned(LLM(folder, **dict(dtype="float32", num_gpu_blocks_override=64,
                                       max_num_seqs=2 if DRY else 12) | here | options))


def watch_replays(engine) -> list[Size]:
    """The sizes of the recordings that are replayed from here on."""
    graphs, replayed = engine.runner.graphs, []
    replay = graphs.replay
    graphs.replay = lambda batch: replayed.append(Size(*batch.graph)) or replay(batch)
    return replayed


def assert_texts(outputs, references, name: str, where: str) -> None:
    for output in outputs:
        ids = output.outputs[0].token_ids
        expected, gaps = references(name, output.prompt_token_ids, 12)
        assert_same_text(ids, expected[:len(ids)], gaps, where)


GREEDY = SamplingParams(temperature=0, max_tokens=12)
