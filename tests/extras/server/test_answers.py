"""Answers of the server, made of outputs by hand."""

from types import SimpleNamespace

from nanoserve.frontend.outputs import CompletionOutput, Logprob
from nanoserve_extras.server.answers import CompletionAnswer
from nanoserve_extras.server.protocol import CompletionBody


def test_of_tokens_with_one_text_the_own_or_the_likeliest_logprob_stays():
    """`top_logprobs` is keyed by text, and the last of several broken bytes took the place of all:
    of the token itself, and of likelier ones."""
    body = CompletionBody(prompt="x", logprobs=2)
    request = SimpleNamespace(request_id="0", prompt_token_ids=[5])
    answer = CompletionAnswer(body, [request], "model", "id")
    rows = [[(7, -3.0, "\ufffd"), (1, -0.5, "\ufffd"), (2, -1.0, "a"), (3, -2.0, "a")],
            [(2, -1.0, "a"), (1, -0.5, "\ufffd"), (7, -3.0, "\ufffd")],
            [(4, -0.1, None), (5, -9e9, None)]]
    sample = CompletionOutput(0, "", [row[0][0] for row in rows], logprobs=[
        {token_id: Logprob(value, None, text) for token_id, value, text in row} for row in rows])
    made = answer.news(0, request, sample)[0]["logprobs"]
    assert made["tokens"] == ["\ufffd", "a", "token_id:4"]
    assert made["token_logprobs"] == [-3.0, -1.0, -0.1]
    assert made["top_logprobs"] == [{"\ufffd": -3.0, "a": -1.0}, {"a": -1.0, "\ufffd": -0.5},
                                    {"token_id:4": -0.1, "token_id:5": -9999.0}]
