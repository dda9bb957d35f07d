"""One server for the tests of a file: the bundled model, in float32, with few blocks."""

import pytest


@pytest.fixture(scope="module")
def running():
    from serving import OnlyToken, Serving

    from nanoserve import LLM

    with Serving(LLM(dtype="float32", num_gpu_blocks_override=160, max_num_seqs=16,
                     scheduling_policy="priority", logits_processors=[OnlyToken]),
                 max_requests=64, max_body_bytes=100_000) as server:
        yield server


@pytest.fixture
def server(running):
    """Behind each test nothing runs, all blocks are free, and nobody's place is taken."""
    yield running
    running.wait_for_rest()
