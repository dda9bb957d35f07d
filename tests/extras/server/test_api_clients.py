"""Bodies of real clients beyond the plain one: their fields are used, refused or ignored.

The bodies are written down from the clients' own requests. Oracle for texts and logprobs: offline
`generate` of the same engine; for the shapes: OpenAI's and vLLM's documents.
"""

import re
from itertools import accumulate

import pytest
from pydantic import ValidationError
from serving import CHAT, CHATS, COMPLETIONS, MESSAGES, PROMPT, RESPONSES, Serving, send

from nanoserve import LLM, SamplingParams
from nanoserve_extras.server import protocol
from nanoserve_extras.server.pooling import ScoreBody
from nanoserve_extras.server.protocol import ChatBody, CompletionBody
from nanoserve_extras.server.translate_messages import MessagesBody

MANY = [None] * 10 ** 5
# Values of vLLM's and OpenAI's own requests that ask for nothing.
NOTHING = dict(
    best_of=1, use_beam_search=False, length_penalty=1.0, spaces_between_special_tokens=True,
    include_reasoning=True, kv_transfer_params=None, prompt_embeds=None, request_id="a",
    cache_salt=None, session_id="b", vllm_xargs={}, mm_processor_kwargs={}, media_io_kwargs={},
    documents=None, return_token_ids=False, return_tokens_as_token_ids=False, moderation=None,
    thinking={"type": "disabled"}, truncate_prompt_tokens=None, prompt_logprobs=None,
    structured_outputs=None, response_format={"type": "text"}, logit_bias={}, bad_words=[],
    allowed_token_ids=None, min_p=0.0, top_k=-1, repetition_penalty=1.0, min_tokens=0,
    stop_token_ids=[], skip_special_tokens=True, include_stop_str_in_output=False, priority=0,
    nobodys=None, stream_options=None, user="me", seed=None, stop=None)
TOOL = dict(type="function", function=dict(
    name="get", description="The weather.", strict=True, parameters=dict(
        type="object", properties=dict(city=dict(enum=["Paris", "Rome"])), required=["city"],
        additionalProperties=False)))
EPHEMERAL = dict(cache_control=dict(type="ephemeral"))
OPTIONS = dict(include_usage=True, continuous_usage_stats=True)
AGENT = dict(messages=None, max_tokens=None, max_output_tokens=2, instructions="Be kind.",
             store=False, tools=[dict(type="function", **TOOL["function"])])
# Each has a field, or a form of one, that no other one has.
BODIES = {
    "openai": (CHATS, dict(
        tools=[], tool_choice="none", parallel_tool_calls=True, reasoning_effort=None, store=False,
        metadata={}, service_tier="auto", modalities=["text"], functions=None, audio=None)),
    "openai, an answer sent back": (CHATS, dict(messages=[*CHAT, dict(
        role="assistant", content="Once.", refusal=None, tool_calls=[], function_call=None,
        audio=None), *CHAT])),
    "GuideLLM, a chat in parts": (CHATS, dict(
        messages=[dict(role="user", content=[dict(type="text", text="Tell me a story.")])],
        stream_options=OPTIONS, stream=True, ignore_eos=True, max_tokens=None,
        max_completion_tokens=2)),
    "lm-eval, ids in a batch": (COMPLETIONS, dict(
        prompt=[[0, 347, 676], [0, 261]], echo=True, logprobs=1, max_tokens=1, seed=1234,
        temperature=0)),
    "vLLM, a chat": (CHATS, NOTHING | dict(
        echo=False, top_logprobs=0, add_special_tokens=False, add_generation_prompt=True,
        logprobs=False, chat_template=None, chat_template_kwargs=None)),
    "vLLM, a completion": (COMPLETIONS, NOTHING | dict(add_special_tokens=True, echo=False,
                                                       suffix=None, logprobs=None)),
    "LangGraph": (CHATS, dict(tools=[TOOL], n=2, temperature=0.7, stream=True,
                              stop=["Observation:", "<|im_end|>"])),
    "Vercel's SDK": (CHATS, dict(tools=[TOOL], tool_choice="auto", stream=True, messages=[
        dict(role="system", content="Be kind."), *CHAT,
        dict(role="assistant", content="", tool_calls=[dict(
            id="call_1", type="function", function=dict(name="get", arguments='{"city": "x"}'))]),
        dict(role="tool", tool_call_id="call_1", content='{"sunny": true}')])),
    "openai-agents": (RESPONSES, AGENT | dict(
        input=[dict(role="user", content="The weather?")], include=[], previous_response_id=None,
        truncation=None, top_logprobs=None, prompt_cache_retention=None)),
    "Codex": (RESPONSES, AGENT | dict(
        input=[dict(type="message", role=role, content=[dict(type="input_text", text="Be short.")])
               for role in ("developer", "user")], tool_choice="auto", parallel_tool_calls=False,
        stream=True, reasoning=dict(effort="medium", summary="auto"), prompt_cache_key="k",
        include=["reasoning.encrypted_content"], text=dict(verbosity="medium"))),
    "Claude Code": (MESSAGES, dict(
        system=[dict(type="text", text="Be kind.", **EPHEMERAL)], metadata=dict(user_id="u"),
        messages=[dict(role="user", content=[dict(type="text", text="Hi.", **EPHEMERAL)])],
        stream=True, thinking=dict(type="adaptive"), context_management=dict(edits=[]),
        output_config=dict(effort="high"), tool_choice=dict(type="auto"), tools=[
            dict(name="get", description="d", input_schema=TOOL["function"]["parameters"])])),
    "Claude Code, counting": ("/v1/messages/count_tokens", dict(max_tokens=None)),
    "lm-eval's tokenizer": ("/tokenize", dict(
        prompt=PROMPT, messages=None, max_tokens=None, add_special_tokens=False)),
    "a gateway": (COMPLETIONS, dict(litellm_call_id="x", proxy_hints={"region": 1}))}


def asked(path: str, **fields) -> dict:
    return (dict(prompt=PROMPT) if path == COMPLETIONS else dict(messages=CHAT)) | dict(
        max_tokens=2) | fields


@pytest.mark.parametrize("name", BODIES)
def test_a_clients_body_is_answered(server, name):
    path, fields = BODIES[name]
    status, data = server.ask_raw(path, asked(path, **fields))
    assert status == 200, data


def test_fields_that_ask_for_nothing_leave_the_text_as_it_is(server):
    one = asked(COMPLETIONS, temperature=0, max_tokens=6)
    _, answer = server.ask(COMPLETIONS, NOTHING | one)
    assert answer["choices"][0]["text"] == server.offline(
        temperature=0, max_tokens=6).outputs[0].text


# ------------------------------------------------------------- unknown fields


def test_an_unknown_field_is_logged_once_and_a_mistyped_one_refused(server, capsys):
    for _ in range(2):
        assert server.ask(COMPLETIONS, asked(COMPLETIONS, flux_capacitor=88))[0] == 200
    assert capsys.readouterr().err.count("'flux_capacitor'") == 1
    for name, meant in (("tempratur", "temperature"), ("max_new_tokens", "max_tokens")):
        error = server.refusal(COMPLETIONS, asked(COMPLETIONS, **{name: 1}))
        assert error["param"] == name and meant in error["message"]
        assert server.ask(COMPLETIONS, asked(COMPLETIONS, **{name: None}))[0] == 200
    wrong = dict(stream=True, stream_options=dict(include_usge=True))
    assert "include_usage" in server.refusal(COMPLETIONS, asked(COMPLETIONS, **wrong))["message"]


def test_a_strict_server_refuses_what_nobody_knows():
    with Serving(LLM(dtype="float32", num_gpu_blocks_override=16, max_model_len=64),
                 strict=True) as server:
        error = server.refusal(COMPLETIONS, asked(COMPLETIONS, flux_capacitor=88))
        assert error["param"] == "flux_capacitor" and "--strict" in error["message"]
        assert server.ask(COMPLETIONS, asked(COMPLETIONS, flux_capacitor=None))[0] == 200
        error = server.refusal(RESPONSES, dict(input="Hi", tools=[dict(type="web_search")]))
        assert "web_search (--strict)" in error["message"]
        error = server.refusal(COMPLETIONS, asked(COMPLETIONS, priority=1))
        assert "--scheduling-policy priority" in error["message"]


# --------------------------------------------------------- prompts too long


def test_a_prompt_that_is_too_long_has_openais_code_and_words(server):
    """By these litellm and LangChain know that a history must be shortened."""
    limit = server.llm.config.max_model_len
    for path, fields in ((COMPLETIONS, dict(prompt="word " * 4000)),
                         (COMPLETIONS, dict(prompt="word " * (limit - 20), max_tokens=40)),
                         (CHATS, dict(messages=[CHAT[0] | dict(content="word " * 4000)]))):
        error = server.refusal(path, asked(path, **fields))
        assert error["code"] == "context_length_exceeded"
        assert f"this model's maximum context length is {limit} tok" in error["message"]


@pytest.mark.parametrize(("path", "field"), [
    (COMPLETIONS, "max_tokens"), (CHATS, "max_tokens"), (CHATS, "max_completion_tokens")])
def test_a_short_prompt_is_not_to_blame_for_max_tokens_that_are_too_many(server, path, field):
    """A history of a few words must not be shortened; litellm goes by words, too."""
    limit = server.llm.config.max_model_len
    for asked_for in (limit, 10 * limit):
        error = server.refusal(path, asked(path, **{field: asked_for}))
        assert (error["param"], error["code"]) == (field, "invalid_value")
        _, prompt, room = map(int, re.findall(r"\d+", error["message"]))
        assert prompt + room == limit and "context length" not in error["message"]


@pytest.mark.parametrize(("kind", "wrong"), [
    (ChatBody, dict(messages=CHAT, stop=MANY)), (ChatBody, dict(messages=MANY)),
    (CompletionBody, dict(prompt=MANY)), (ScoreBody, dict(text_1="x", text_2=MANY)),
    (MessagesBody, dict(max_tokens=1, messages=[dict(role="user", content=MANY)]))])
def test_of_many_wrong_items_the_first_is_told(kind, wrong):
    """An error for each would hold the event loop for seconds."""
    with pytest.raises(ValidationError) as caught:
        kind(**wrong)
    assert caught.value.error_count() <= 4  # one for each form that the field may have


def test_of_many_unknown_fields_the_first_are_compared(monkeypatch):
    compared = []
    monkeypatch.setattr(protocol, "nearest", lambda name, names: compared.append(name))
    ChatBody(messages=CHAT, **{f"unknown{i}": 1 for i in range(1000)})
    assert len(compared) == 20


def test_a_whole_number_may_be_written_with_a_point(server):
    """JSON has one kind of number, and Lua's and R's clients write 100 as 100.0."""
    whole = dict(max_tokens=3.0, seed=5.0, top_k=2.0, n=1.0, temperature=1.0)
    for path, plain in ((CHATS, asked(CHATS)), (COMPLETIONS, asked(COMPLETIONS))):
        _, answer = server.ask(path, plain | whole)
        _, expected = server.ask(path, plain | {name: int(value) for name, value in whole.items()})
        assert answer["choices"] == expected["choices"]
        assert answer["usage"]["completion_tokens"] == 3
    for wrong in (2.5, float("inf"), 1e300):
        assert server.refusal(CHATS, asked(CHATS, max_tokens=wrong))["param"] == "max_tokens"
    ids = dict(prompt=[5, 9, 31], allowed_token_ids=[5, 7], stop_token_ids=[7])
    for floats in (dict(prompt=[5.0, 9, 31.0], allowed_token_ids=[5.0, 7.0], stop_token_ids=[7.0]),
                   ids | dict(prompt=[[5.0, 9.0, 31.0]])):
        answers = [server.ask(COMPLETIONS, asked(COMPLETIONS, **one, seed=3, max_tokens=4))[1]
                   for one in (floats, ids)]
        assert answers[0]["choices"] == answers[1]["choices"]
    for wrong in ([5.5], [[5.0], [5.5]], [1e300], [[[5.0]]]):
        assert server.refusal(COMPLETIONS, asked(COMPLETIONS, prompt=wrong))["param"] == "prompt"
    assert server.ask("/detokenize", dict(tokens=[5.0]))[0] == 200
    thinks = dict(thinking=dict(type="enabled", budget_tokens=5.0))
    assert ChatBody(messages=CHAT, **thinks).thinking.budget_tokens == 5


# ------------------------------------------------------------------ a stream


def test_usage_grows_with_every_piece(server):
    for path in (COMPLETIONS, CHATS):
        events = server.events(path, asked(path, max_tokens=5, ignore_eos=True,
                                           stream_options=OPTIONS, return_token_ids=True))
        counts = [event["usage"]["completion_tokens"] for event in events]
        brought = [len(choice.get("token_ids") or ()) for event in events
                   for choice in event["choices"][:1] or [{}]]
        if path == CHATS:  # the role comes with the first token, in front of it
            brought[:2] = brought[1::-1]
        assert counts == list(accumulate(brought)) and counts[-1] == 5
        assert len({event["usage"]["prompt_tokens"] for event in events}) == 1


def test_how_much_of_a_prompt_is_computed_is_told_with_llama_cpps_fields(server):
    text = "A story of a king. " * 9
    for path, prompt in ((COMPLETIONS, dict(prompt=text)),
                         (CHATS, dict(messages=[dict(role="user", content=text)]))):
        request = dict(max_tokens=2, return_progress=True, cache_salt=f"new to {path}",
                       stream_options=dict(include_usage=True)) | prompt
        for hit in (False, True):
            told = server.events(path, request)
            usage, [*_, progress] = told[-1]["usage"], [
                one["prompt_progress"] for one in told if "prompt_progress" in one]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert 0 <= progress.pop("time_ms") and hit == (cached > 0)
            assert progress == dict(total=usage["prompt_tokens"], cache=cached,
                                    processed=usage["prompt_tokens"])


@pytest.mark.parametrize("n", [1, 3])
def test_a_streamed_echo_with_logprobs_adds_up_to_the_whole(server, n):
    """Each sample's first piece begins with the prompt, whose logprobs only the first computes."""
    body = asked(COMPLETIONS, echo=True, logprobs=2, max_tokens=4, seed=3, n=n)
    _, whole = server.ask(COMPLETIONS, body)
    events = server.events(COMPLETIONS, body)
    for choice in whole["choices"]:
        pieces = [event["choices"][0] for event in events
                  if event["choices"][0]["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        for name in ("tokens", "text_offset"):
            assert sum((one["logprobs"][name] for one in pieces), []) == choice["logprobs"][name]
        values = sum((one["logprobs"]["token_logprobs"] for one in pieces), [])
        assert values[0] is None and values[1:] == pytest.approx(
            choice["logprobs"]["token_logprobs"][1:])


# ------------------------------------------------------------- vLLM's fields


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_is_scored_without_a_token_behind_it(server, stream):
    body = asked(COMPLETIONS, echo=True, logprobs=1, max_tokens=0, n=1)
    if stream:
        [choice] = [event["choices"][0] for event in server.events(COMPLETIONS, body)]
    else:
        _, answer = server.ask(COMPLETIONS, body)
        [choice], usage = answer["choices"], answer["usage"]
        assert usage["completion_tokens"] == 0 and usage["total_tokens"] == usage["prompt_tokens"]
    expected = server.offline(max_tokens=1, prompt_logprobs=1)
    assert choice["text"] == PROMPT and choice["finish_reason"] == "length"
    assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(
        [entries[i].logprob for i, entries in zip(
            expected.prompt_token_ids[1:], expected.prompt_logprobs[1:], strict=True)])


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_token_ids_come_where_they_are_asked_for(server, path):
    body = asked(path, return_token_ids=True, temperature=0, max_tokens=4)
    [expected] = [server.offline(temperature=0, max_tokens=4)] if path == COMPLETIONS else (
        server.llm.chat(CHAT, SamplingParams(temperature=0, max_tokens=4), use_tqdm=False))
    _, answer = server.ask(path, body)
    found = answer | answer["choices"][0]  # a chat's prompt stands beside its choices
    assert (found["token_ids"], found["prompt_token_ids"]) == (
        expected.outputs[0].token_ids, expected.prompt_token_ids)
    events = [event | event["choices"][0] for event in server.events(path, body)]
    assert sum((one.get("token_ids", []) for one in events), []) == found["token_ids"]
    first, *others = [one.get("prompt_token_ids") for one in events]
    assert first == expected.prompt_token_ids and not any(others)


def test_tokens_may_be_called_by_their_ids(server):
    body = dict(return_tokens_as_token_ids=True, temperature=0, max_tokens=3)
    ids = server.offline(temperature=0, max_tokens=3).outputs[0].token_ids
    [choice] = server.ask(COMPLETIONS, asked(COMPLETIONS, logprobs=1, **body))[1]["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in ids]
    assert [list(top) for top in choice["logprobs"]["top_logprobs"]] == [
        [f"token_id:{i}"] for i in ids]
    _, answer = server.ask(CHATS, asked(CHATS, logprobs=True, top_logprobs=1, **body))
    for entry in answer["choices"][0]["logprobs"]["content"]:
        assert entry["token"].startswith("token_id:") and entry["top_logprobs"][0]["token"] == (
            entry["token"])


def test_prompt_logprobs_are_those_of_generate(server):
    expected = server.offline(max_tokens=2, prompt_logprobs=2, temperature=0)
    _, answer = server.ask(COMPLETIONS, asked(COMPLETIONS, prompt_logprobs=2, temperature=0))
    first, *found = answer["choices"][0]["prompt_logprobs"]
    assert first is None
    for theirs, ours in zip(found, expected.prompt_logprobs[1:], strict=True):
        assert {int(i): entry["decoded_token"] for i, entry in theirs.items()} == {
            i: entry.decoded_token for i, entry in ours.items()}
    _, answer = server.ask(CHATS, asked(CHATS, prompt_logprobs=0))
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]


def test_a_truncated_prompt_keeps_its_end(server):
    ids = server.llm.tokenizer.encode(PROMPT)
    body = asked(COMPLETIONS, temperature=0, return_token_ids=True)
    for prompt in (PROMPT, ids):
        _, answer = server.ask(COMPLETIONS, body | dict(prompt=prompt, truncate_prompt_tokens=2))
        assert answer["choices"][0]["prompt_token_ids"] == ids[-2:]
    _, answer = server.ask(COMPLETIONS, body | dict(prompt="word " * 4000, max_tokens=5,
                                                    truncate_prompt_tokens=-1))
    assert answer["usage"]["total_tokens"] == server.llm.config.max_model_len


# ------------------------------------------------------------- further paths


def test_texts_become_tokens_and_back(server):
    """As lm-eval's remote tokenizer asks."""
    tokenizer = server.llm.tokenizer
    ids = tokenizer.encode(PROMPT)
    _, answer = server.ask("/tokenize", dict(prompt=PROMPT, return_token_strs=True))
    assert answer == dict(count=len(ids), max_model_len=server.llm.config.max_model_len,
                          tokens=ids, token_strs=tokenizer.convert_ids_to_tokens(ids))
    assert server.ask("/detokenize", dict(tokens=ids)) == (200, dict(prompt=PROMPT))
    for more in ({}, dict(add_generation_prompt=False)):
        _, answer = server.ask("/tokenize", dict(messages=CHAT) | more)
        assert answer["tokens"] == tokenizer.apply_chat_template(
            CHAT, return_dict=False, **dict(add_generation_prompt=True) | more)
    _, info = server.ask("/tokenizer_info")
    assert info["eos_token"] == tokenizer.eos_token
    assert info["chat_template"] == tokenizer.chat_template


# ------------------------------------------------- behind a proxy, in a browser


def test_a_request_has_an_id(server):
    """The client's own, or one made here; OpenAI's client shows it. Errors have one, too."""
    for path, body in (("/v1/models", None), ("/nothing", None), (COMPLETIONS, asked(COMPLETIONS))):
        for headers in (dict(x_request_id="mine"), {}):
            with server.connection() as connection:
                send(connection, path, body, **headers)
                [found] = connection.getresponse().headers.get_all("x-request-id")
                assert found == "mine" if headers else len(found) == 32


def test_a_slash_too_many_is_passed_over(server):
    for path in ("/v1//models", "//v1/models", "/v1/models/"):
        assert server.ask(path)[0] == 200
    assert server.ask("/v1//completions/", asked(COMPLETIONS))[0] == 200


def test_a_proxys_prefix_may_be_left_in_front():
    with Serving(LLM(dtype="float32", num_gpu_blocks_override=16, max_model_len=64),
                 root_path="/deep/inside", api_keys=["key"]) as server:
        for front in ("", "/deep/inside"):
            assert server.ask(f"{front}/health")[0] == 200
            assert server.ask(f"{front}/v1/models")[0] == 401
            assert server.ask(f"{front}/v1/models", authorization="Bearer key")[0] == 200
            assert server.ask(f"{front}//health")[0] == 401
        assert b"/deep/inside/openapi.json" in server.ask_raw("/docs")[1]


def test_a_salt_keeps_a_prompt_from_others_hits(server):
    """By how much of the prompt was cached, in each language; two blocks of 16 can be."""
    text = "Once upon a time there lived in a house by the sea a man who had three sons, " * 2
    for path, body in (
            (COMPLETIONS, dict(prompt=text, max_tokens=1)),
            (COMPLETIONS, dict(prompt=server.llm.tokenizer.encode(text + "!"), max_tokens=1)),
            (CHATS, dict(messages=[dict(role="user", content=text)], max_tokens=1)),
            (RESPONSES, dict(input=text + "?", max_output_tokens=1))):
        found = []
        server.llm.reset_prefix_cache()
        for salt in ("mine", "mine", "yours", None, "yours"):
            _, answer = server.ask(path, body | dict(cache_salt=salt))
            name = "input_tokens_details" if path == RESPONSES else "prompt_tokens_details"
            found.append(answer["usage"][name]["cached_tokens"] >= 16)
        assert found == [False, True, False, False, True]
