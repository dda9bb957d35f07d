"""Random workloads on the real engine: whatever happens around a request, it gets its own text."""

import pytest
from engine_workloads import SHARED, engines, run_random_workloads


@pytest.fixture(scope="module", autouse=True)
def forget_the_engines():
    yield
    for llm in engines.values():
        llm.shutdown()
    engines.clear()


@pytest.mark.parametrize(("name", "which", "max_examples"), [
    ("qwen3", range(SHARED[0]), 50), ("qwen3", SHARED, 20), ("mistral", range(SHARED[0]), 40)],
    ids=["qwen3", "qwen3, two ranks", "mistral"])
def test_random_workloads_of_the_engine(checkpoints, references, ranks_in_threads, name, which,
                                        max_examples):
    run_random_workloads(checkpoints, references, name, which, max_examples)
