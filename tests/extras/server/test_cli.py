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


def refused(words: list[str], capsys) -> str:
    """The one line in which a start is refused."""
    with pytest.raises(SystemExit) as caught:
        cli.main(["--port", "0", *words])
    said = capsys.readouterr().err.strip()
    assert caught.value.code == 2 and "\n" not in said.partition("nanoserve: ")[2]
    return said


def test_without_options_the_engine_gets_its_own_defaults():
    assert parse() == {f.name: f.default for f in fields(EngineArgs) if f.name != "model"}
    assert cli.make_parser().parse_args([]).host == "127.0.0.1"  # nobody else, unless asked


def test_every_option_of_the_engine_is_there():
    text = cli.make_parser().format_help()
    for field in fields(EngineArgs):
        assert field.name == "model" or f"--{field.name.replace('_', '-')}" in text


@pytest.mark.parametrize(("words", "name", "value"), [
    ("--tokenizer=folder", "tokenizer", "folder"), ("--dtype=half", "dtype", "half"),
    ("--seed -3", "seed", -3), ("--gpu-memory-utilization 0.5", "gpu_memory_utilization", 0.5),
    ("--logits-processors a:B c:D", "logits_processors", ["a:B", "c:D"]),
    ('--hf-overrides {"a":1}', "hf_overrides", {"a": 1}),
    ('--pooler-config {"pooling_type":"MEAN"}', "pooler_config", {"pooling_type": "MEAN"}),
    ("--no-enable-prefix-caching", "enable_prefix_caching", False),
    ("--async-scheduling", "async_scheduling", True), ("--trace steps.html", "trace", "steps.html"),
    ("--skip-tokenizer-init", "skip_tokenizer_init", True), ("--model a", "model", "a"),
    # vLLM's forms
    ("--max_model_len=2k", "max_model_len", 2000), ("--max-model-len 2K", "max_model_len", 2048),
    ("--max-num-batched-tokens 1.5k", "max_num_batched_tokens", 1500),
    ("--no-enable_prefix_caching", "enable_prefix_caching", False),
    ("--served_model_name a_b", "served_model_name", ["a_b"]),
    ("-tp 2", "tensor_parallel_size", 2), ("-pp 1", "pipeline_parallel_size", 1),
    ('--lora-modules one=folder {"name":"two","path":"a=b","base_model_name":"a"}',
     "lora_modules", [("one", "folder"), ("two", "a=b")])])
def test_an_option_has_its_type(words, name, value):
    args = cli.make_parser().parse_args([
        *words.split(), "--enable-lora", "--uvicorn-log-level", "info", "--swap-space", "4"])
    cli.check_servers_own(args)
    assert getattr(args, name) == value
    assert "uvicorn_log_level" not in cli.engine_options(args)


def test_vllms_options_are_taken_where_they_ask_for_nothing():
    words = ["a/model", "--enable-expert-parallel", "--disable-log-requests", "--swap-space", "0",
             "--kv-cache-dtype", "auto", "--pipeline-parallel-size", "1"]
    assert EngineArgs(model="m", **parse(*words)) == EngineArgs(model="m", expert_parallel=True)
    assert "--swap-space" not in cli.make_parser().format_help()


@pytest.mark.parametrize("words", [
    ["--max-model-len", "long"], ["--hf-overrides", "[1]"], ["--hf-overrides", "{"],
    ["--max-requests", "0"], ["--drain-seconds", "-1"], ["--no-such-option"], ["a", "b"],
    ["--max-model-len", "1.0005k"], ["--max-model-len", "2q"], ["--lora-modules", "x"],
    ["--lora-modules", "=x"], ["--lora-modules", '{"name": "x"}'],
    ["--lora-modules", '{"name": "x", "path": "y=1", "z": 1}']])
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


@pytest.mark.parametrize("option, ours", [
    ("--ctx-size", "--max-model-len"), ("-c", "--max-model-len"), ("--n_gpu_layers", "layer-plan"),
    ("-m", "name the model without an option"), ("--parallel", "--max-num-seqs")])
def test_options_of_other_programs_get_a_hint(option, ours, capsys):
    with pytest.raises(SystemExit):
        parse(option, "4")
    said = capsys.readouterr().err
    assert f"there is no option {option.replace('_', '-')}: " in said and ours in said


@pytest.mark.parametrize("words, said", [
    (["--dtype", "int3"], "dtype must be one of"), (["--max-num-seqs", "-5"], "max_num_seqs"),
    (["no/such/model"], "no/such/model"), (["--kv-cache-dtype", "fp8"], "kv_cache_dtype"),
    (["--max-num-seqs", "9", "--max-num-batched-tokens", "3"], "max_num_batched_tokens")])
def test_what_an_engine_refuses_is_said_in_one_line(words, said, capsys):
    assert said in refused(words, capsys)


NAMES, ADAPTERS = ["--served-model-name"], ["--enable-lora", "--lora-modules"]


@pytest.mark.parametrize(("words", "said"), [
    (["--chat-template", "no/such/file"], "chat_template"),
    (["--skip-tokenizer-init"], "--skip-tokenizer-init"),
    (["--api-server-count", "2"], "--api-server-count"), (["--ssl-keyfile", "x"], "--ssl-keyfile"),
    (["a", "--model", "b"], "two models are"), (["--api-key", ""], "--api-key is empty"),
    (["--lora-modules", "one=folder"], "--enable-lora"),
    (["--port", "65536"], "from 0 to 65535"), (["--port", "-1"], "from 0 to 65535"),
    (["--host", "no.such.host.invalid"], "no.such.host.invalid"),
    # An adapter named like the model answered in its place, and /v1/models had the name twice.
    ([*NAMES, "a", *ADAPTERS, "b=/x", "a=/x"], "name 'a'"), ([*NAMES, "a", "a"], "name 'a'"),
    ([*NAMES, "a", "b", *ADAPTERS, "b=/x"], "name 'b'"), ([*ADAPTERS, "a=/x", "a=/x"], "name 'a'")])
def test_what_cannot_be_served_is_said_before_the_model_is_loaded(words, said, capsys, monkeypatch):
    monkeypatch.setattr(cli, "LLM", None)
    assert said in refused(words, capsys)


def test_a_port_that_is_taken_is_found_out_before_the_model_is_loaded(capsys, monkeypatch):
    monkeypatch.setattr(cli, "LLM", None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        said = refused(["--port", str(taken.getsockname()[1])], capsys)
    assert "can't listen on 127.0.0.1" in said


def test_two_servers_that_start_at_a_time_get_one_port_and_one_line(capsys, monkeypatch):
    """Both are bound to it while they load; the second one is told when it wants to listen."""
    with cli.listen("127.0.0.1", 0) as other:
        monkeypatch.setattr(cli, "LLM", lambda *_, **__: other.listen())
        said = refused(["--port", str(other.getsockname()[1])], capsys)
    assert "can't listen on 127.0.0.1" in said


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


@pytest.fixture
def connection(started):
    connection = http.client.HTTPConnection("127.0.0.1", started[1], timeout=20)
    yield connection
    connection.close()


def ask(connection, method: str, path: str, body=None, /, **headers):
    """The answer, whose text was read."""
    connection.request(method, path, body, {
        name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    answer.read()
    return answer


SECRET = dict(authorization="Bearer secret")
OFFER = dict(connection="Upgrade, HTTP2-Settings", upgrade="h2c", http2_settings="AAEAAEAAAAIAAAAB")


def test_a_page_of_an_allowed_origin_may_ask(connection):
    """A browser asks first whether it may, and has no key for that."""
    for origin, status, shown in (("http://page", 200, "http://page"), ("http://other", 400, None)):
        answer = ask(connection, "OPTIONS", "/v1/chat/completions", origin=origin,
                     access_control_request_method="POST",
                     access_control_request_headers="authorization,content-type")
        assert answer.status == status
        answer = ask(connection, "GET", "/v1/models", origin=origin, **SECRET)
        assert answer.headers["access-control-allow-origin"] == shown


def test_a_client_that_offers_http2_has_its_body_read(connection):
    """Java's does; uvicorn took such a body for an empty one, and what followed for no HTTP. A body
    that quotes such an offer keeps it: without these bytes the server waited for the rest."""
    for body, status in ((json.dumps(dict(prompt="Once", max_tokens=1)), 200),
                         (b"POST\r\nUpgrade: h2c\r\n", 400)):
        for offer in (OFFER, {}):
            answer = ask(connection, "POST", "/v1/completions", body,
                         content_type="application/json", **SECRET, **offer)
            assert answer.status == status


def test_sigterm_lets_running_requests_finish_and_takes_no_new_ones(started, connection):
    """The last of those that share the server."""
    process, port = started
    body = json.dumps(dict(model="known", prompt="Once", max_tokens=60, ignore_eos=True,
                           stream=True))
    connection.request("POST", "/v1/completions", body,
                       SECRET | {"content-type": "application/json"})
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
