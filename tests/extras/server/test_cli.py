"""`nanoserve serve`: every option of the engine, errors in a line, and an end in good order.

Oracle for the options: the dataclass. The end is tried with a process of its own and a signal.
"""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import pytest

pytest.importorskip("uvicorn")

from nanoserve_extras.engine_args import EngineArgs  # noqa: E402
from nanoserve_extras.server import cli  # noqa: E402

SERVE = [sys.executable, "-m", "nanoserve", "serve"]


def parse(*words: str) -> dict:
    return cli.engine_options(cli.make_parser().parse_args(list(words)))


def test_without_options_the_engine_gets_its_own_defaults():
    assert parse() == {f.name: f.default for f in fields(EngineArgs) if f.name != "model"}


def test_every_option_of_the_engine_is_there():
    """Each is given a value of its type, by its name with dashes."""
    given = dict(tokenizer="folder", dtype="half", max_model_len=99, gpu_memory_utilization=0.5,
                 seed=-3, hf_overrides={"a": 1}, pooler_config={"pooling_type": "MEAN"},
                 speculative_config={"method": "ngram"}, enable_prefix_caching=False,
                 async_scheduling=True, skip_tokenizer_init=True, trace="steps.html")
    words = []
    for name, value in given.items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            words.append(option if value else option.replace("--", "--no-", 1))
        else:
            words += [option, json.dumps(value) if isinstance(value, dict) else str(value)]
    assert {name: value for name, value in parse(*words).items() if name in given} == given
    text = cli.make_parser().format_help()
    assert "serve" in text
    for field in fields(EngineArgs):
        assert field.name == "model" or f"--{field.name.replace('_', '-')}" in text


def test_vllms_options_are_taken_where_they_ask_for_nothing():
    words = ["a/model", "--enable-expert-parallel", "--disable-log-requests", "--swap-space", "0",
             "--kv-cache-dtype", "auto", "--pipeline-parallel-size", "1"]
    assert EngineArgs(model="m", **parse(*words)) == EngineArgs(model="m", expert_parallel=True)
    assert "--swap-space" not in cli.make_parser().format_help()


@pytest.mark.parametrize("words", [
    ["--max-model-len", "long"], ["--hf-overrides", "[1]"], ["--hf-overrides", "{"],
    ["--max-requests", "0"], ["--drain-seconds", "-1"], ["--no-such-option"], ["a", "b"],
    ["--max-model-len", "1.0005k"], ["--max-model-len", "2q"], ["--lora-modules", "x"],
    ["--lora-modules", '{"name": "x"}'], ["--lora-modules", '{"name": "x", "path": "y", "z": 1}']])
def test_options_of_the_wrong_type_are_refused(words, capsys):
    with pytest.raises(SystemExit) as caught:
        parse(*words)
    said = capsys.readouterr().err
    assert caught.value.code == 2 and said.startswith("nanoserve serve: error: ")
    assert said.count("\n") == 1  # no usage of sixty lines above it


def test_an_option_is_never_a_beginning_of_another(capsys):
    for word, meant in (("--dtyp", "dtype"), ("--model-imp", "model-impl")):
        with pytest.raises(SystemExit):
            parse(word, "float32")
        assert f"no option {word}: did you mean --{meant}?" in capsys.readouterr().err


def test_options_come_in_vllms_forms():
    args = cli.make_parser().parse_args(
        ["--max_model_len=2k", "--served_model_name", "a_b", "--no-enable_prefix_caching"])
    assert (args.max_model_len, args.served_model_name) == (2000, ["a_b"])
    assert not args.enable_prefix_caching
    assert parse("--max-model-len", "2k")["max_model_len"] == 2000
    assert parse("--max-model-len", "2K")["max_model_len"] == 2048
    assert parse("--max-num-batched-tokens", "1.5k")["max_num_batched_tokens"] == 1500
    assert parse("--seed", "-3")["seed"] == -3
    assert parse("-tp", "2")["tensor_parallel_size"] == 2
    args = cli.make_parser().parse_args(
        ["--model", "a", "-pp", "1", "--enable-lora", "--lora-modules", "one=folder",
         '{"name": "two", "path": "other=folder", "base_model_name": "a"}',
         "--uvicorn-log-level", "info", "--swap-space", "4"])
    cli.check_servers_own(args)
    assert args.model == "a" and args.lora_modules == [("one", "folder"), ("two", "other=folder")]
    assert cli.engine_options(args)["pipeline_parallel_size"] == 1
    assert "uvicorn_log_level" not in cli.engine_options(args)


@pytest.mark.parametrize("words, said", [
    (["--dtype", "int3"], "dtype must be one of"), (["--max-num-seqs", "-5"], "max_num_seqs"),
    (["no/such/model"], "no/such/model"), (["--chat-template", "no/such/file"], "chat_template"),
    (["--skip-tokenizer-init"], "without text"), (["--api-server-count", "2"], "one process"),
    (["--ssl-keyfile", "x"], "put a proxy in front"), (["a", "--model", "b"], "two models are"),
    (["--kv-cache-dtype", "fp8"], "kv_cache_dtype must be auto or int8"),
    (["--max-num-seqs", "9", "--max-num-batched-tokens", "3"], "max_num_batched_tokens")])
def test_what_cannot_be_served_is_said_in_one_line(words, said, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["--port", "0", *words])
    error = capsys.readouterr().err.strip()
    assert caught.value.code == 2 and said in error and "Traceback" not in error


def test_a_port_that_is_taken_is_found_out_before_the_model_is_loaded(capsys, monkeypatch):
    monkeypatch.setattr(cli, "LLM", None)
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(SystemExit):
        cli.main(["--port", str(taken.getsockname()[1])])
    assert "can't listen on 127.0.0.1" in capsys.readouterr().err


def test_two_servers_that_start_at_a_time_get_one_port_and_one_line(capsys, monkeypatch):
    """Both are bound to it while they load; the second one is told when it wants to listen."""
    with cli.listen("127.0.0.1", 0) as other:
        monkeypatch.setattr(cli, "LLM", lambda *_, **__: other.listen())
        with pytest.raises(SystemExit) as caught:
            cli.main(["--port", str(other.getsockname()[1])])
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("nanoserve: can't listen on 127.0.0.1")


@pytest.mark.parametrize(("words", "local", "seconds"), [
    ([], True, 75), (["--api-key", "k"], False, 75), (["--host", "0.0.0.0"], False, 75),
    (["--host", "localhost", "--keep-alive-seconds", "620"], True, 620)])
def test_a_server_without_a_key_on_this_machine_takes_local_names(words, local, seconds,
                                                                  monkeypatch):
    made = []
    monkeypatch.setattr(cli, "LLM", lambda *_, **__: None)
    monkeypatch.setattr(cli, "AsyncLLM", lambda llm: llm)
    monkeypatch.setattr(cli, "create_app", lambda *_, **limits: made.append(limits))
    monkeypatch.setattr(cli, "run", lambda server, *_: made.append(server.config))
    monkeypatch.delenv(cli.KEY_VARIABLE, raising=False)
    cli.main(["--port", "0", *words])
    assert made[0]["only_local"] is local and made[1].timeout_keep_alive == seconds


@pytest.mark.parametrize(("words", "said"), [
    (["--lora-modules", "one=folder"], "--lora-modules has no effect without --enable-lora"),
    (["--api-key", ""], "--api-key is empty")])
def test_what_can_not_be_meant_is_found_out_before_the_model_is_loaded(
        words, said, capsys, monkeypatch):
    monkeypatch.setattr(cli, "LLM", None)
    with pytest.raises(SystemExit):
        cli.main(["--port", "0", *words])
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("host", "port", "said"), [
    ("127.0.0.1", "65536", "from 0 to 65535"), ("127.0.0.1", "-1", "from 0 to 65535"),
    ("no.such.host.invalid", "0", "no.such.host.invalid")])
def test_an_address_that_there_is_not_is_refused_before_the_model_is_loaded(
        host, port, said, capsys, monkeypatch):
    monkeypatch.setattr(cli, "LLM", None)
    with pytest.raises(SystemExit):
        cli.main(["--host", host, "--port", port])
    assert said in capsys.readouterr().err


def test_nobody_but_this_machine_is_served_unless_asked():
    assert cli.make_parser().parse_args([]).host == "127.0.0.1"
    with cli.listen("127.0.0.1", 0) as sock:
        assert sock.getsockname()[0] == "127.0.0.1"


@pytest.fixture(scope="module")
def started():
    """A server in a process of its own, with a key and a limit for its end; its port."""
    env = os.environ | {cli.KEY_VARIABLE: "secret", "NANOSERVE_CHECK": "1"}
    process = subprocess.Popen(
        [*SERVE, "--port", "0", "--dtype", "float32", "--num-gpu-blocks-override", "160",
         "--allowed-origins", "http://page",
         "--served-model-name", "known", "--drain-seconds", "30", "--kernels", "torch"],
        stderr=subprocess.PIPE, text=True, env=env, cwd=Path(__file__).parent)
    for line in process.stderr:
        if "serving known on http://127.0.0.1:" in line:
            assert "with a key" in line and "secret" not in line
            port = int(line.split("http://127.0.0.1:")[1].split()[0])
            break
    yield process, port
    process.kill()
    process.communicate()


def test_a_page_of_an_allowed_origin_may_ask(started):
    """A browser asks first whether it may, and has no key for that."""
    _, port = started
    for origin, allowed in (("http://page", 200), ("http://other", 400)):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("OPTIONS", "/v1/chat/completions", headers={
            "Origin": origin, "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type"})
        answer = connection.getresponse()
        answer.read()
        assert answer.status == allowed
        connection.request("GET", "/v1/models", headers={
            "Origin": origin, "Authorization": "Bearer secret"})
        answer = connection.getresponse()
        shown = answer.headers["access-control-allow-origin"]
        assert shown == ("http://page" if allowed == 200 else None)
        connection.close()


def test_a_client_that_offers_http2_has_its_body_read(started):
    """Java's does; uvicorn took such a body for an empty one, and what followed for no HTTP."""
    _, port = started
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = json.dumps(dict(prompt="Once", max_tokens=1))
    for _ in range(2):
        connection.request("POST", "/v1/completions", body, {
            "content-type": "application/json", "authorization": "Bearer secret",
            "connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c",
            "http2-settings": "AAEAAEAAAAIAAAAB"})
        answer = connection.getresponse()
        assert answer.status == 200 and json.load(answer)["usage"]["completion_tokens"] == 1


def test_a_body_that_quotes_an_offer_of_http2_keeps_it(started):
    """A form's field may. Without these bytes the server waited for the rest of the body."""
    _, port = started
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("POST", "/v1/completions", b"POST\r\nUpgrade: h2c\r\n", {
        "content-type": "application/json", "authorization": "Bearer secret"})
    answer = connection.getresponse()
    assert answer.status == 400 and "no JSON" in json.load(answer)["error"]["message"]


def test_sigterm_lets_running_requests_finish_and_takes_no_new_ones(started):
    """The last of those that share the server."""
    process, port = started
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = json.dumps(dict(model="known", prompt="Once", max_tokens=60, ignore_eos=True,
                           stream=True))
    headers = {"content-type": "application/json", "authorization": "Bearer secret"}
    connection.request("POST", "/v1/completions", body, headers)
    answer = connection.getresponse()
    first = answer.readline()
    process.send_signal(signal.SIGTERM)
    for line in process.stderr:  # uvicorn says so just before it closes the door, and then waits
        if "Shutting down" in line:
            break
    with pytest.raises((ConnectionRefusedError, ConnectionResetError)):
        for _ in range(100):
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
            time.sleep(0.01)
    events = (first + answer.read()).decode().strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    assert json.loads(events[-2][6:])["choices"][0]["finish_reason"] == "length"
    assert process.wait(30) == 0
    assert "Traceback" not in process.stderr.read()
