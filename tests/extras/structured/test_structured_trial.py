"""Grammars that would crash or block a server are first compiled in a separate process.

Oracle: what can be asked of the same object behind it.
"""

import gc
import json
import os
import signal
import sys
from pathlib import Path

import pytest
from clean_process import run
from grammars import ENDS, TOKENIZER

from nanoserve_extras.structured import structured_trial as module
from nanoserve_extras.structured.structured import Grammars, refusal

LONG = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(5000)} | {"d5000": {}}


@pytest.fixture(scope="module")
def grammars():
    return Grammars(TOKENIZER, len(TOKENIZER))


@pytest.fixture(autouse=True)
def little_time(monkeypatch):
    monkeypatch.setattr(module, "SECONDS", 0)


@pytest.mark.parametrize("asked", [
    {"json": {"$ref": "#/$defs/d0", "$defs": LONG}}, {"json": {"enum": [1, -2 ** 63]}},
    {"json": {"type": "integer", "multipleOf": 99999989}},
    {"grammar": 'start: %json {"const": -9223372036854775500}'},
    {"grammar": "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(5000)) + '\nr5000: "a"'},
    {"grammar": "start: X\nX: " + " & ".join(f"/.*x{i}.*/" for i in range(40))}],
    ids=["references", "a number", "remainders", "a number in Lark", "rules", "all of"])
def test_what_has_no_end_or_ends_the_process_is_refused_and_the_next_is_served(grammars, asked):
    with pytest.raises(ValueError, match="structured_outputs: .*make it smaller"):
        grammars.compile(asked, frozenset(ENDS))
    assert grammars.compile({"json": {"maxLength": 5}}, frozenset(ENDS))


def test_a_schema_alone_is_tried_too():
    assert "make it smaller" in refusal({"$ref": "#/$defs/d0", "$defs": LONG})
    assert refusal({}) == "" and "Invalid type" in refusal({"type": "spoon"})


@pytest.mark.parametrize("asked", [
    {"json": {"type": "string", "description": "multipleOf" + '"' * 60 + "x"}},
    {"grammar": "\n" * 200_000 + 'start: "a"'},
    {"json": {"type": "object", "patternProperties": {"^(a?){30}a{30}$": {}}, "properties": {
        "a" * (30 + i): {} for i in range(31)}}}], ids=["quotes", "lines", "keys"])
def test_our_own_patterns_read_any_grammar_in_time(grammars, asked):
    """They took time that grew with the square of the lines, and twice as long for each quote or
    letter."""
    assert grammars.compile(asked, frozenset(ENDS))


def test_an_interrupted_answer_is_not_the_next_ones(monkeypatch):
    trial = module.Trial(module.byte_tokenizer())
    wrong = json.dumps({"grammars": [{"json_schema": {"type": "spoon"}}]})
    assert "spoon" in trial.refusal(wrong)

    class Interrupted:
        closed = True

        def readline(self):
            raise KeyboardInterrupt

    monkeypatch.setattr(trial.script, "stdout", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        trial.refusal(wrong)
    assert trial.refusal(json.dumps({"grammars": [{"json_schema": {}}]})) == ""


def test_a_script_that_was_killed_is_started_again_and_none_outlives_its_object():
    trial = module.Trial(module.byte_tokenizer())
    right = json.dumps({"grammars": [{"json_schema": {}}]})
    assert trial.refusal(right) == ""
    trial.script.kill()
    trial.script.wait()
    assert trial.refusal(right) == ""
    script = trial.script
    del trial
    gc.collect()
    assert script.returncode is not None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_fork_has_a_script_of_its_own():
    """From one pipe each of two processes would read the other's answers. `poll` says nothing of a
    script that another thread waited for at the fork, and the child may not end the parent's."""
    trial = module.Trial(module.byte_tokenizer())
    right = json.dumps({"grammars": [{"json_schema": {}}]})
    assert trial.refusal(right) == ""
    script = trial.script
    if not (child := os.fork()):
        try:
            signal.alarm(20)  # the parent's script has no end for its child to wait for
            trial.end()
            script._waitpid_lock.acquire()
            answers, own = trial.refusal(right), trial.script
            answers += trial.refusal(right)
            trial.end()
            os._exit(answers != "" or own is script or own is not trial.script)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert trial.refusal(right) == "" and trial.script is script, "it has not been ended"


@pytest.mark.skipif(sys.platform != "linux", reason="another process's limits are read by prlimit")
def test_a_script_is_bounded_in_time_memory_and_stack(monkeypatch):
    import resource

    monkeypatch.setattr(module, "SECONDS", 7)
    trial = module.Trial(module.byte_tokenizer())
    assert trial.refusal(json.dumps({"grammars": [{"json_schema": {}}]})) == ""
    seconds, memory, stack = (resource.prlimit(trial.script.pid, kind)[0] for kind in (
        resource.RLIMIT_CPU, resource.RLIMIT_AS, resource.RLIMIT_STACK))
    pages = int(Path(f"/proc/{trial.script.pid}/statm").read_text().split()[0])
    room = memory - pages * resource.getpagesize()  # of the limit's, it has taken some
    assert 0 < room <= module.ROOM and stack == module.STACK and 8 <= seconds < 20


def test_it_is_there_on_a_system_that_bounds_no_process():
    """Windows has no module of that name, and every engine that generates imports this one."""
    run("import sys; sys.modules['resource'] = None\n"
        "from nanoserve_extras.structured.structured_trial import Trial, byte_tokenizer")
