"""The engine that the tests of a file share; behind each test it must be idle and in order."""

import pytest


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "overlap"])
def engine(request, qwen3):
    from small_engine import make

    llm = make(qwen3, async_scheduling=request.param)
    llm.check_every_step = True  # the variable is set for single tests, this engine is older
    return llm


@pytest.fixture
def llm(engine, monkeypatch):
    from small_engine import assert_idle, drain

    yield engine
    monkeypatch.undo()  # whatever a test put into the engine's way
    try:
        assert_idle(engine)
    finally:  # one failure is enough: the next test finds the engine tidy
        for request_id in list(engine.requests):
            engine.abort_request(request_id)
        drain(engine)


@pytest.fixture
def expected(references):
    """transformers' greedy text: token ids by prompt (text or ids) and length."""
    from small_engine import ids_of

    def tokens(prompt, max_tokens: int = 8) -> list[int]:
        ids = ids_of(prompt) if isinstance(prompt, str) else prompt
        return references("qwen3", ids, max_tokens)[0]
    return tokens


@pytest.fixture
def say(llm, monkeypatch):
    """Put words into the model's mouth: every request's output is this text, then EOS for ever."""
    import torch
    from checkpoints import EOS
    from small_engine import ids_of

    from nanoserve.sampler import SamplerOutput

    def script(text: str | list[int]) -> None:
        words = ids_of(text) if isinstance(text, str) else text
        launch = llm.runner.launch

        def spoken(step):
            launch(step)
            at = [seq.num_tokens - 1 - seq.num_prompt_tokens for seq in step.sampling]
            tokens = torch.tensor([words[i] if i < len(words) else EOS for i in at])
            llm.runner.last_tokens[[seq.row for seq in step.sampling]] = tokens.int()
            return SamplerOutput(tokens)
        monkeypatch.setattr(llm.runner, "launch", spoken)
    return script
