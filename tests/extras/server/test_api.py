"""The endpoints as any client sees them: what is answered, what is refused, and who is let go.

Oracle for texts: offline `generate` of the same engine with the same seed.
"""

import asyncio
import gzip
from dataclasses import fields
from urllib.parse import quote

import pytest
from serving import CHAT, CHATS, COMPLETIONS, MESSAGES, NAME, PROMPT, RESPONSES, Serving, send
from witness import read

import nanoserve
from nanoserve import LLM, SamplingParams
from nanoserve_extras.server.async_llm import EngineDeadError
from nanoserve_extras.server.guard import EventStream, unless_gone

RIGHT = {COMPLETIONS: dict(prompt="x"), CHATS: dict(messages=CHAT)}


def offline(server, prompt, **params) -> list[str]:
    return [sample.text for sample in server.offline(prompt, **params).outputs]


def texts(answer: dict) -> list[str]:
    return [c["text"] if "text" in c else c["message"]["content"] for c in answer["choices"]]


def joined(events: list[dict]) -> dict[int, str]:
    """The text of each choice of a stream, by its index."""
    found: dict[int, str] = {}
    for event in events:
        for choice in event["choices"]:
            piece = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            found[choice["index"]] = found.get(choice["index"], "") + piece
    return found


# ---------------------------------------------------------------------- texts


def test_a_completion_is_what_generate_gives(server):
    asked = dict(prompt=PROMPT, n=3, seed=7, temperature=1.2, max_tokens=10, top_k=50, top_p=0.9,
                 min_p=0.01, repetition_penalty=1.3, ignore_eos=True, logit_bias={"5": 2.0})
    status, answer = server.ask(COMPLETIONS, asked | dict(priority=-3))
    expected = offline(server, **asked)
    assert status == 200 and texts(answer) == expected
    assert joined(server.events(COMPLETIONS, asked)) == dict(enumerate(expected))
    assert answer["object"] == "text_completion" and answer["model"] == NAME
    assert answer["usage"] == dict(prompt_tokens=4, completion_tokens=30, total_tokens=34,
                                   prompt_tokens_details=dict(cached_tokens=0))
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}


def test_a_chat_is_what_chat_gives(server):
    asked = dict(seed=3, temperature=0.9, max_tokens=12)
    status, answer = server.ask(CHATS, dict(messages=CHAT, **asked))
    [expected] = server.llm.chat(CHAT, SamplingParams(**asked, top_p=0.95), use_tqdm=False)
    assert status == 200 and texts(answer) == [expected.outputs[0].text]
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert joined(server.events(CHATS, dict(messages=CHAT, **asked))) == {
        0: expected.outputs[0].text}


@pytest.mark.parametrize("null", [False, True])
def test_fields_left_out_are_the_models_own(server, null):
    """The bundled model recommends a temperature of 0.8 and a top_p of 0.95."""
    left_out = dict(temperature=None, top_p=None, stop=None, n=None) if null else {}
    _, answer = server.ask(COMPLETIONS, dict(prompt=PROMPT, seed=5, **left_out))
    assert texts(answer) == offline(server, PROMPT, seed=5, temperature=0.8, top_p=0.95,
                                    max_tokens=16)


def test_prompts_come_in_four_forms(server):
    ids = server.llm.tokenizer.encode(PROMPT)
    [text] = offline(server, PROMPT, temperature=0, max_tokens=5)
    for prompt, count in ((PROMPT, 1), (ids, 1), ([PROMPT, PROMPT], 2), ([ids, ids, ids], 3)):
        _, answer = server.ask(COMPLETIONS, dict(prompt=prompt, temperature=0, max_tokens=5))
        assert texts(answer) == [text] * count
    _, answer = server.ask(COMPLETIONS, dict(prompt=["The", PROMPT], n=2, seed=1, max_tokens=4))
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert texts(answer) == [text for prompt in ("The", PROMPT) for text in offline(
        server, prompt, n=2, seed=1, max_tokens=4, temperature=0.8, top_p=0.95)]


def test_a_clients_limit_wins_over_the_least_that_the_model_asks_for(server, monkeypatch):
    monkeypatch.setitem(server.llm.model_config.generation_defaults, "min_new_tokens", 20)
    (eos,) = server.llm.model_config.eos_token_ids
    asked = dict(prompt=PROMPT, temperature=0, logit_bias={str(eos): 100})
    for more, count in (({}, 20), (dict(max_tokens=3), 3), (dict(min_tokens=1), 2)):
        _, answer = server.ask(COMPLETIONS, asked | more)  # the second token may be an EOS
        assert answer["usage"]["completion_tokens"] == count


def test_a_stream_says_who_speaks_and_ends_once(server):
    events = server.events(CHATS, dict(messages=CHAT, n=2, max_tokens=4, seed=1, ignore_eos=True,
                                       stream_options=dict(include_usage=True)))
    choices, last = [e["choices"][0] for e in events[:-1]], events[-1]
    for index in range(2):  # the role comes with the choice's first token
        *rest, end = [one for one in choices if one["index"] == index]
        first, *rest = [one["delta"] for one in rest]
        assert first == dict(role="assistant", content="") and rest[0]["content"]
        assert not any("role" in delta for delta in rest)
        assert end["delta"] == {} and end["finish_reason"] == "length"
    assert sum(one["finish_reason"] is not None for one in choices) == 2
    assert all(e["usage"] is None for e in events[:-1]) and last["choices"] == []
    assert last["usage"]["completion_tokens"] == 8
    assert len({e["id"] for e in events}) == 1
    assert {e["object"] for e in events} == {"chat.completion.chunk"}


def test_echo_puts_the_prompt_in_front(server):
    asked = dict(prompt=[PROMPT, "The"], echo=True, temperature=0, max_tokens=3)
    expected = [p + offline(server, p, temperature=0, max_tokens=3)[0] for p in asked["prompt"]]
    assert texts(server.ask(COMPLETIONS, asked)[1]) == expected
    ids = server.llm.tokenizer.encode(PROMPT)
    assert texts(server.ask(COMPLETIONS, asked | dict(prompt=ids))[1]) == expected[:1]


def test_completions_have_the_older_logprobs(server):
    asked = dict(logprobs=2, temperature=0, max_tokens=3)
    _, answer = server.ask(COMPLETIONS, asked | dict(prompt=PROMPT, echo=True))
    output = server.offline(**asked, prompt_logprobs=2)
    found, text = answer["choices"][0]["logprobs"], answer["choices"][0]["text"]
    ids = output.prompt_token_ids + output.outputs[0].token_ids
    expected = output.prompt_logprobs + output.outputs[0].logprobs
    assert "".join(found["tokens"]) == text
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    assert found["token_logprobs"][1:] == pytest.approx(
        [entries[i].logprob for i, entries in zip(ids[1:], expected[1:], strict=True)])
    assert [set(top) for top in found["top_logprobs"][1:]] == [
        {entry.decoded_token for entry in entries.values()} for entries in expected[1:]]
    assert all(text.startswith(token, at) for token, at in zip(
        found["tokens"], found["text_offset"], strict=True))


def test_a_server_without_a_tokenizer_has_ids_and_no_texts():
    with LLM(dtype="float32", num_gpu_blocks_override=32, skip_tokenizer_init=True) as llm, \
            Serving(llm) as server:
        asked = dict(prompt=[5, 6], max_tokens=2, logprobs=1, return_token_ids=True)
        [choice] = server.ask(COMPLETIONS, asked)[1]["choices"]
        assert choice["text"] == "" and choice["logprobs"]["tokens"] == [
            f"token_id:{token_id}" for token_id in choice["token_ids"]]
        for wrong in (dict(echo=True), dict(prompt="Once"), dict(stop=["x"])):
            error = server.refusal(COMPLETIONS, asked | wrong)
            assert "tokenizer" in error["message"], wrong


def test_chats_have_the_newer_logprobs(server):
    asked = dict(messages=CHAT, logprobs=True, top_logprobs=3, seed=2, max_tokens=5)
    _, answer = server.ask(CHATS, asked)
    choice = answer["choices"][0]
    content = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == choice["message"]["content"]
    for entry in content:
        assert bytes(entry["bytes"]).decode() == entry["token"]
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(values) == 3 and values == sorted(values, reverse=True)
    none = server.ask(CHATS, asked | dict(top_logprobs=0))[1]["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in none] == pytest.approx([e["logprob"] for e in content])
    assert all(entry["top_logprobs"] == [] for entry in none)


def test_every_field_of_sampling_params_is_served_but_those_that_are_offline(server):
    """A new one, too: the bodies are made from the record."""
    _, document = server.ask("/openapi.json")
    for body in ("CompletionBody", "ChatBody"):
        served = document["components"]["schemas"][body]["properties"]
        assert {field.name for field in fields(SamplingParams)} - set(served) == {
            "detokenize", "output_kind", "logits_processors", "extra_args"}


def test_a_request_tells_the_servers_logits_processors_what_it_wants(server):
    """serving.OnlyToken, of all requests, does nothing for those that don't ask."""
    for path, body in RIGHT.items():
        _, answer = server.ask(path, body | dict(
            max_tokens=3, vllm_xargs=dict(only=300), return_token_ids=True))
        assert answer["choices"][0]["token_ids"] == [300, 300, 300]
        error = server.refusal(path, body | dict(vllm_xargs=dict(only="x")))
        assert "OnlyToken: only must be a token id" in error["message"]


# ------------------------------------------------------------------- refusals


def said_by_user(*content) -> dict:
    return dict(messages=[dict(role="user", content=one) for one in content])


TOOL = dict(type="function", function=dict(name="f"))
SCHEMA = dict(type="json_schema", json_schema=dict(schema=dict(type="nothing")))
# Fields, of which the first is to blame. A prompt or messages are there besides.
WRONG = {
    COMPLETIONS: [
        dict(temperature=-1), dict(temperature="hot"), dict(top_p=0), dict(top_p=True), dict(n=0),
        dict(presence_penalty=-3), dict(top_k=-2), dict(min_p=2), dict(repetition_penalty=0),
        dict(max_tokens=0), dict(max_tokens=10 ** 30), dict(max_tokens=4096), dict(seed=1.5),
        dict(stop=[""]), dict(logit_bias={"x": 1}), dict(logit_bias={"99999": 1}),
        dict(logprobs=21), dict(min_tokens=20), dict(stop_token_ids=[5000]), dict(tempratur=1),
        dict(prompt=""), dict(prompt=[]), dict(prompt=[[]]), dict(prompt=[9999]), dict(prompt=5),
        dict(prompt=None), dict(prompt="lone \ud800 surrogate"), dict(prompt=[5] * 4000),
        dict(stream_options={"include_usage": True}), dict(structured_outputs={"regex": "("}),
        dict(response_format=SCHEMA), dict(structured_outputs={"choice": ["so"]}, response_format={
            "type": "json_object"}), dict(n=16384), dict(n=2, prompt=["x"] * 33),
        dict(prompt_logprobs=2, stream=True), dict(cache_salt=""), dict(truncate_prompt_tokens=0)],
    CHATS: [
        *(dict(messages=one) for one in (
            [], "hello", [5], [{}], [{"role": "user"}], [{"role": 5, "content": "x"}],
            [{"role": "", "content": "x"}], [{"content": "x"}])),
        said_by_user("\ud800"), said_by_user(None),
        *(said_by_user([part]) for part in (
            {"type": "image_url", "image_url": {"url": "x"}}, {"type": "file"},
            {"type": "input_audio", "input_audio": {}}, {"type": "text"},
            {"type": "text", "text": 5}, {"type": "song"}, {}, 5)),
        dict(continue_final_message=True, add_generation_prompt=True), dict(top_logprobs=2),
        *(dict(chat_template_kwargs={name: "x"}) for name in (
            "tokenize", "chat_template", "tools", "self"))],
    "/tokenize": [dict(prompt=None), dict(prompt="x", messages=CHAT), dict(prompt=""),
                  dict(prompt="\ud800"), dict(messages=[]),
                  dict(chat_template_kwargs=dict(tokenize=True), messages=CHAT)],
    "/detokenize": [dict(tokens=[9999]), dict(tokens=[]), dict(tokens=[-1])]}


@pytest.mark.parametrize(("path", "fields"), [
    (path, fields) for path, rows in WRONG.items() for fields in rows])
def test_what_is_wrong_is_a_400_that_names_the_field(server, path, fields):
    error = server.refusal(path, RIGHT.get(path, {}) | fields)
    assert error["type"] == "invalid_request_error" and error["param"] == next(iter(fields))


@pytest.mark.parametrize("path, fields, place", [
    (COMPLETIONS, dict(prompt=["a", 5]), "prompt.1"), (COMPLETIONS, dict(stop=["a", 5]), "stop.1"),
    (COMPLETIONS, dict(max_tokens="5"), "max_tokens"),
    (CHATS, dict(tools=[dict(type="function", function={})]), "tools.0.function.name"),
    (CHATS, dict(tools=[TOOL | dict(function=dict(name="f", parameters=dict(properties=dict(
        x=dict(type="integer", minimum="x")))))], tool_choice="required"), "tools"),
    (CHATS, dict(response_format=SCHEMA), "response_format")])
def test_the_place_of_what_is_wrong_is_told(server, path, fields, place):
    """And nothing that the client has not sent: no arm of a union, no grammar that was made."""
    error = server.refusal(path, RIGHT[path] | fields)
    assert error["message"].startswith(f"{place}: ") and "\n" not in error["message"], error
    assert error["param"] == place.partition(".")[0]


def test_bodies_that_are_no_json_objects_are_refused(server):
    for body, says in (
            (b"", "the body"), (b"{", "character 1"), (b"[]", "the body"), (b"null", "the body"),
            (b"\xff\xfe", "character"), (b'"x"', "the body"), (b"[" * 5000, "nested too deep"),
            (b'{"prompt": "\xff"}', "no UTF-8"),
            (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", "thousands of digits")):
        error = server.refusal(COMPLETIONS, body)["message"]
        assert says in error and "error parsing" not in error, body
    error = server.refusal(COMPLETIONS, b'{"prompt": 00}')
    assert error["param"] is None and "character 12" in error["message"]  # no field's name
    for number in (b"Infinity", b"-1e400", b"NaN"):  # Python's JSON reads them, and writes them
        for body, place in ((b'{"prompt": "x", "temperature": %s}', "temperature"),
                            (b'{"user": {"a": [1, {"b": %s}]}, "input": "x"}', "user.a.1.b"),
                            (b'{"prompt": [5, %s]}', "prompt.1"), (b"%s", "the body")):
            for path in (COMPLETIONS, RESPONSES, "/tokenize"):
                error = server.refusal(path, body % number)
                assert error["message"].startswith(f"{place}: a number must be finite, got ")
                assert error["param"] in (place.partition(".")[0], None)
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        error = server.refusal(COMPLETIONS, b'{"prompt": "x"}', 415, content_type=kind)
        assert "Content-Type: application/json" in error["message"]
    packed = gzip.compress(b'{"prompt": "x"}')
    assert "Content-Encoding" in server.refusal(COMPLETIONS, packed, 415,
                                                content_encoding="gzip")["message"]


# OpenAI's fields and vLLM's that are not served: a value that asks for something, and those (beside
# null) that ask for nothing.
NOT_SERVED = [
    ("functions", [{"name": "f"}], []), ("function_call", {"name": "f"}, "none", "auto"),
    ("audio", {"voice": "x"}), ("modalities", ["audio"], ["text"]), ("suffix", "the end", ""),
    ("best_of", 3, 1), ("verbosity", "low", "medium"), ("max_output_tokens", 5),
    ("logprob_token_ids", [5], []), ("enable_thinking", False), ("think", False, ""),
    ("reasoning", {"enabled": False}, {}), ("extra_body", {"top_k": 1}, {}),
    ("thinking_budget", 9, -1), ("truncation_side", "right", "left"),
    ("repetition_detection", {"min_count": 3}, {}), ("web_search_options", {"a": 1}),
    ("chat_template", "{{ x }}"), ("guided_json", {"type": "object"}),
    ("use_beam_search", True, False), ("length_penalty", 0.5, 1.0), ("typical_p", 0.3, 1.0),
    ("mirostat", 2, 0), ("do_sample", False, True), ("n_predict", 5), ("regex", "a+", ""),
    ("extra_args", {"a": 1}, {}), ("kv_transfer_params", {"a": 1}, {}), ("prompt_embeds", "x", ""),
    ("detokenize", False, True), ("documents", ["x"], []), ("mm_processor_kwargs", {"a": 1}, {})]


@pytest.mark.parametrize("field, value, nothing", [(f, v, n) for f, v, *n in NOT_SERVED])
def test_what_would_change_the_text_is_refused_with_a_reason(server, field, value, nothing):
    for path, body in RIGHT.items():
        error = server.refusal(path, body | {field: value})
        assert error["param"] == field
        assert error["message"].startswith(f"{field} is not supported: ")
        for idle in (None, *nothing):
            assert server.ask(path, body | {field: idle, "max_tokens": 1})[0] == 200


def test_harmless_fields_are_passed_over(server):
    expected = offline(server, PROMPT, temperature=0, max_tokens=4)
    for value in ("me", {"a": 1}, False):
        _, answer = server.ask(COMPLETIONS, dict(prompt=PROMPT, temperature=0, max_tokens=4) | {
            field: value for field in (
                "user", "metadata", "store", "service_tier", "safety_identifier", "prediction",
                "prompt_cache_key", "prompt_cache_retention", "parallel_tool_calls")})
        assert texts(answer) == expected


def test_a_templates_variables_may_have_any_name_but_an_arguments(server):
    """`work` is an argument of a method of ours, and was a 500."""
    own = {name: 1 for name in ("work", "func", "messages_", "")}
    body = dict(messages=CHAT, max_tokens=1, chat_template_kwargs=own)
    assert server.ask(CHATS, body)[0] == 200


def test_an_answer_that_the_end_of_the_server_cuts_is_a_503():
    """The web server cancels what takes longer than it may."""
    class Http:
        async def receive(self):
            await asyncio.sleep(60)

    async def cut():
        task = asyncio.ensure_future(unless_gone(Http(), asyncio.sleep(60)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(EngineDeadError, match="--drain-seconds"):
            await task
    asyncio.run(cut())


@pytest.mark.parametrize("num_events", [1, None])
def test_a_stream_that_is_cut_ends_once(num_events):
    """Also where it is cut at the moment in which all was sent."""
    sent, tasks = [], []

    async def receive():
        await asyncio.sleep(60)

    async def keep(message):
        sent.append(message)
        if message.get("more_body") is False and num_events:
            tasks[0].cancel()

    async def pieces():
        while not num_events or len(sent) <= num_events:
            yield b"data: {}\n\n"
            await asyncio.sleep(0.001)

    async def cut():
        task = asyncio.ensure_future(EventStream(pieces(), lambda error: b"cut")(
            {"type": "http", "asgi": {}}, receive, keep))
        tasks.append(task)
        await asyncio.sleep(0.05)
        task.cancel()
        await task
    asyncio.run(cut())
    ends = [one["body"] for one in sent if one.get("more_body") is False]
    assert ends == [b"" if num_events else b"cut"]


def test_an_unknown_model_or_path_is_a_404(server):
    error = server.refusal(COMPLETIONS, dict(prompt="x", model="gpt-\ud800"), 404)
    assert error["code"] == "model_not_found" and error["param"] == "model"
    assert server.refusal("/v1/models/gpt", None, 404)["code"] == "model_not_found"
    assert server.ask(COMPLETIONS, dict(prompt="x", model="other-name", max_tokens=1))[0] == 200
    server.refusal("/v1/files", {}, 404)
    for path, method, allowed in (
            (COMPLETIONS, "GET", "POST"), ("/v1/models", "POST", "GET, HEAD"),
            ("/v1/models/x", "PUT", "GET, HEAD"), ("/docs", "POST", "GET, HEAD"),
            ("/v1/audio/transcriptions", "DELETE", "POST")):
        server.refusal(path, None, 405, method=method)
        with server.connection() as connection:  # RFC 9110: what is allowed stands beside it
            send(connection, path, None, method)
            assert connection.getresponse().headers["allow"] == allowed


def test_a_probe_by_head_gets_the_status_alone(server):
    for path in ("/health", "/ping", "/v1/models", "/v1/models/tested", "/metrics", "/trace"):
        assert server.ask_raw(path, None, "HEAD") == (200, b"")
    assert server.ask_raw("/v1/models/gpt", None, "HEAD") == (404, b"")
    assert "head" not in server.ask("/openapi.json")[1]["paths"]["/health"]


def test_what_only_a_pooling_model_has_says_so(server):
    for path, body in (("/v1/embeddings", dict(input="x")),
                       ("/score", dict(text_1="x", text_2="y")),
                       ("/rerank", dict(query="x", documents=["y"]))):
        assert "--runner pooling" in server.refusal(path, body)["message"]


# ------------------------------------------------------- those who go away, floods


LONG = dict(prompt=PROMPT, max_tokens=2000, ignore_eos=True)
ENDLESS = dict(messages=CHAT, ignore_eos=True)


@pytest.mark.parametrize("path, body", [
    (COMPLETIONS, LONG | dict(stream=True)), (COMPLETIONS, LONG), (COMPLETIONS, LONG | dict(n=2)),
    (CHATS, ENDLESS), (CHATS, ENDLESS | dict(stream=True)),
    (RESPONSES, dict(input="x", ignore_eos=True, stream=True)),
    (MESSAGES, ENDLESS | dict(max_tokens=1500, stream=True))])
def test_a_client_that_goes_away_aborts_its_request(server, path, body):
    """The fixture waits until nothing runs, which for whole texts would be long after."""
    aborted = server.llm.metrics.num_finished["abort"]
    with server.connection() as connection:
        send(connection, path, body)
        server.wait_until(lambda: server.llm.requests)
        if body.get("stream"):
            assert connection.getresponse().read(20)
    server.wait_for_rest()  # the request goes first, and is counted within the same turn
    assert server.llm.metrics.num_finished["abort"] == aborted + body.get("n", 1)


def test_a_flood_ends_in_429(server):
    """64 may be open: as many are, and one more is told to come back."""
    with server.connection() as first, server.connection() as second:
        send(first, COMPLETIONS, LONG | dict(prompt=[PROMPT] * 40))
        send(second, COMPLETIONS, LONG | dict(prompt=[PROMPT] * 24, stream=True))
        server.wait_until(lambda: server.app.num_open == 64)
        error = server.refusal(COMPLETIONS, dict(prompt="x"), 429)
        assert error["code"] == "rate_limit_exceeded"
        assert server.ask("/health")[0] == 200


# --------------------------------------------------------------- looking at it


def test_the_server_says_what_it_is(server):
    assert server.ask("/version") == (200, {"version": nanoserve.__version__})
    assert server.ask("/health") == (200, {"status": "ok"})
    assert server.ask("/ping")[0] == 200 and server.ask("/load") == (200, dict(server_load=0))
    _, models = server.ask("/v1/models")
    assert [model["id"] for model in models["data"]] == [NAME, "other-name"]
    assert models["models"] == []  # Codex logs an error where it is missing
    for model in models["data"]:
        assert server.ask(f"/v1/models/{quote(model['id'])}") == (200, model)
        assert model["root"] == server.llm.config.model and model["parent"] is None
        assert model["max_model_len"] == server.llm.config.max_model_len


def test_the_document_of_the_api_has_every_path_and_body(server):
    _, schema = server.ask("/openapi.json")
    assert set(schema["paths"]) == {
        COMPLETIONS, CHATS, "/v1/embeddings", "/classify", "/pooling", "/score", "/v1/score",
        "/rerank", "/v1/rerank", "/v2/rerank", "/tokenize", "/detokenize", "/tokenizer_info",
        "/v1/models", "/v1/models/{name}", "/health", "/ping", "/load", "/version", "/metrics",
        "/trace", "/live", "/", "/v2/embed", RESPONSES, f"{RESPONSES}/input_tokens", MESSAGES,
        f"{MESSAGES}/count_tokens", "/v1/audio/transcriptions"}
    [(kind, form)] = schema["paths"]["/v1/audio/transcriptions"]["post"]["requestBody"][
        "content"].items()
    assert kind == "multipart/form-data" and form["schema"]["required"] == ["file"]
    assert {"file", "model", "language", "temperature"} < set(form["schema"]["properties"])


def test_the_step_trace_is_a_page_without_anybodys_words(server, tmp_path):
    server.ask(COMPLETIONS, dict(prompt="A secret garden", max_tokens=3, temperature=0))
    status, data = server.ask_raw("/trace")
    (tmp_path / "it.html").write_bytes(data)
    stream = read(tmp_path / "it.html")
    assert status == 200 and data.startswith(b"<!") and "secret" not in str(stream)
    assert stream["requests"]
