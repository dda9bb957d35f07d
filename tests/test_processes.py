"""Ranks as processes: how they come up, serve, idle, end and die.

The rules: a user's script needs no `__main__` guard and ends as it would without ranks; whoever
dies, the others end within half a minute and name it; nobody is declared dead who only waits or was
suspended; and no process or port outlives its engine. The oracle for text is transformers. Nothing
here measures speed, and deadlines are generous, because machines that run tests are busy.
"""

import gc
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import assert_same_text
from safetensors.torch import load_file, save_file

from nanoserve import LLM, SamplingParams, model_runner
from nanoserve.parallel import processes
from nanoserve.batch import MIN_BUFFER, SECTIONS

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc")

ROOT = Path(__file__).parent.parent
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]
MAX_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
SMALL = dict(num_gpu_blocks_override=64, dtype="float32", device="cpu")
PATIENCE = 30  # seconds: what the others may take to notice a death, and to end


def state_of(pid: int) -> str:
    """The process's state by its letter, "" if there is none (left)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def wait_for(condition, what: str, seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} within {seconds} s"
        time.sleep(0.05)


def assert_gone(pids: list[int]) -> None:
    """Ended and, if they were ours, reaped; an orphan may be left for init as a zombie."""
    wait_for(lambda: all(state_of(pid) in ("", "Z") for pid in pids), f"{pids} end")


def assert_closed(port: int) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


def pids_of(llm: LLM) -> list[int]:
    return [child.pid for child in llm.runner.ranks.watch.children]


def run(llm: LLM, prompts=PROMPT, params=GREEDY) -> list:
    return llm.generate(prompts, params, use_tqdm=False)


@pytest.fixture
def expected(references):
    return lambda prompt=PROMPT, n=MAX_TOKENS: references("qwen3", prompt, n)[0]


@pytest.fixture
def start(qwen3):
    """Engines of two ranks (or more), shut down when the test is over, whatever became of them."""
    engines = []

    def make(folder=qwen3, **options) -> LLM:
        engines.append(LLM(folder, **SMALL | dict(tensor_parallel_size=2) | options))
        return engines[-1]

    yield make
    for llm in engines:
        llm.shutdown()


@pytest.fixture
def spawned(monkeypatch):
    """The process ids of all children started from now on, also of engines that never came up."""
    pids, spawn = [], processes._spawn

    def spy(boot):
        child = spawn(boot)
        pids.append(child.pid)
        return child

    monkeypatch.setattr(processes, "_spawn", spy)
    return pids


def in_children(monkeypatch, code: str) -> None:
    """Run this in every child started from now on, before it does anything else."""
    monkeypatch.setattr(processes, "CHILD", processes.CHILD.replace("run_child()", f"{code}; "
                                                                    "run_child()"))


def hasten(monkeypatch, seconds: float = 0.2) -> None:
    """Shorter beats in all ranks started from now on: dead after 3 s instead of 15."""
    monkeypatch.setattr(processes, "HEARTBEAT_SECONDS", seconds)
    in_children(monkeypatch, f"import nanoserve.parallel.processes as p; p.HEARTBEAT_SECONDS = {seconds}")


# -------------------------------------------------------------- a user's script

SCRIPT = """\
import os, signal, sys, time
from nanoserve import LLM, SamplingParams
{setting}
llm = LLM({folder!r}, tensor_parallel_size=2, num_gpu_blocks_override=64, skip_tokenizer_init=True)
params = SamplingParams(temperature=0, max_tokens={max_tokens})
text = lambda: llm.generate({prompt}, params, use_tqdm=False)[0].outputs[0].token_ids
tokens = text()
watch = llm.runner.ranks.watch
pids = [child.pid for child in watch.children]
for pid in ["self", *pids]:  # what is deleted already (tqdm's lock) can't be left over
    shared = [line for line in open(f"/proc/{{pid}}/maps") if " /dev/shm/" in line]
    assert all(line.rstrip().endswith("(deleted)") for line in shared), shared
print(tokens, pids, getattr(watch.store_server, "port", None), flush=True)
del watch
{ending}
"""


class Script:
    """A script in a file of its own, run from another folder, in a session of its own (so that a
    signal may be sent to all its processes as a terminal does). Its ranks find no `__main__` guard,
    and a file in the current folder that must not be imported in place of Python's own."""

    started: list["Script"] = []

    def __init__(self, folder: Path, where: Path, ending: str = "", by_stdin: bool = False,
                 command: tuple[str, ...] = (sys.executable,), setting: str = "", **env: str):
        where.mkdir()
        (where / "app").mkdir()
        script = SCRIPT.format(folder=str(folder), max_tokens=MAX_TOKENS, prompt=PROMPT,
                               ending=ending, setting=setting)
        (where / "app" / "script.py").write_text(script)
        if not by_stdin and len(command) == 1:  # others import from here by themselves
            (where / "queue.py").write_text("raise RuntimeError('not yours')")
        self.process = subprocess.Popen(
            [*command, "-" if by_stdin else "app/script.py"], cwd=where, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True,
            env=os.environ | dict(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1") | env)
        if by_stdin:
            self.process.stdin.write(script)
            self.process.stdin.close()
            self.process.stdin = None
        self.out = self.err = ""
        self.started.append(self)

    def signal_all(self, number: int) -> None:
        os.killpg(self.process.pid, number)

    def line(self) -> str:
        """Its next line on standard output."""
        return self.process.stdout.readline().rstrip()

    def end(self, seconds: float = 90) -> "Script":
        """Wait until it has ended, and everybody who could still write to its standard error."""
        try:
            out, self.err = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.signal_all(signal.SIGKILL)
            raise
        self.out += out
        return self

    def check(self, expected: list[int], code: int) -> None:
        """The right tokens and nothing else on its standard output, and nobody and nothing left."""
        assert self.process.returncode == code, self.err
        tokens, pids, port = re.fullmatch(r"\[(.*)\] \[(.*)\] (\w+)\n", self.out).groups()
        assert [int(token) for token in tokens.split(",")] == expected
        assert_gone([int(pid) for pid in pids.split(",") if pid])
        if port != "None":
            assert_closed(int(port))


@pytest.fixture(autouse=True)
def leave_nobody():
    """Whatever has become of a test: all that is left of its scripts ends with it."""
    yield
    while Script.started:
        try:
            Script.started.pop().signal_all(signal.SIGKILL)
        except ProcessLookupError:
            pass


ENDINGS = {  # what a script ends with: its exit code, what it says last
    "it falls off the end": ("", 0, None),
    "shutdown": ("llm.shutdown(); llm.shutdown()", 0, None),
    "an error in a with": ("with llm: 1 / 0", 1, "ZeroDivisionError"),
    "an error": ("1 / 0", 1, "ZeroDivisionError"),
    "exit": ("sys.exit(3)", 3, None),
    "a fork": ("if os.fork() == 0: sys.exit()\nos.wait()\nassert text() == tokens", 0, None),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)", -15, "rank 0 died"),
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", -9, "rank 0 died"),
}


@pytest.mark.parametrize("names", [*zip([*ENDINGS][::2], [*ENDINGS][1::2])], ids=", ".join)
def test_a_script_ends_and_so_do_its_ranks(qwen3, tmp_path, expected, names):
    """Without a `__main__` guard, from a file or from standard input; however it ends, its exit
    code is its own, and its ranks end with it. Two at a time: they don't meet."""
    scripts = {name: Script(qwen3, tmp_path / name.replace(" ", "-"), ENDINGS[name][0],
                            by_stdin=name in ("shutdown", "exit")) for name in names}
    for name, script in scripts.items():
        _, code, says = ENDINGS[name]
        script.end().check(expected(), code)
        assert "Traceback" not in script.err or says == "ZeroDivisionError", script.err
        if says:
            assert says in script.err
        else:
            assert "died" not in script.err and "ends" not in script.err


def test_ctrl_c_and_a_suspended_terminal(qwen3, tmp_path, expected):
    """Signals reach all processes of a terminal. Ctrl-C in `generate` is rank 0's business: the
    others go on, nothing is lost but the requests. And Ctrl-Z for longer than it takes to declare
    somebody dead kills nobody: heartbeats are not compared with a clock."""
    script = Script(qwen3, tmp_path / "it", """\
import nanoserve.parallel.processes as p
p.HEARTBEAT_SECONDS = 0.1  # rank 0 would declare the other dead after 1.5 s
long = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
for _ in range(2):
    print("generating", flush=True)
    try:
        while True:
            llm.generate([[i + 1, 2, 3] for i in range(9)], long, use_tqdm=False)
    except KeyboardInterrupt:
        blocks = llm.scheduler.blocks
        assert blocks.num_free_blocks == blocks.num_blocks and not llm.requests
        print(text() == tokens, flush=True)
sys.stdin.readline()
print(text() == tokens, [child.pid for child in llm.runner.ranks.watch.children] == pids)
""")
    script.out = script.line() + "\n"
    for _ in range(2):
        assert script.line() == "generating"
        time.sleep(0.5)
        script.signal_all(signal.SIGINT)
        assert script.line() == "True"
    time.sleep(0.5)
    script.signal_all(signal.SIGSTOP)
    time.sleep(4)
    script.signal_all(signal.SIGCONT)
    time.sleep(0.5)
    out, script.err = script.process.communicate("\n", timeout=60)
    assert out == "True True\n", script.err
    script.check(expected(), 0)
    assert "died" not in script.err and "ends" not in script.err


@pytest.mark.parametrize("seconds", [0.1, 1.2])
def test_ctrl_c_while_the_engine_starts(qwen3, tmp_path, seconds):
    """The child's interpreter is just starting, or importing torch."""
    script = Script(qwen3, tmp_path / "it")
    children = Path(f"/proc/{script.process.pid}/task/{script.process.pid}/children")
    wait_for(lambda: children.read_text().strip(), "a child is started", 60)
    [pid] = map(int, children.read_text().split())
    time.sleep(seconds)
    script.signal_all(signal.SIGINT)
    script.end()
    assert script.process.returncode == -signal.SIGINT and script.out == "", script.err
    assert_gone([pid])
    assert "died" not in script.err


CTRL_C_IN_POPEN = """\
import os, signal, subprocess, sys, threading
from nanoserve.parallel.ranks import Ranks
from nanoserve.parallel.processes import Watch, _kill

def interrupted_at(number, call):
    \"\"\"Ctrl-C comes at this line of Python's own subprocess module, if there are so many.\"\"\"
    lines = 0
    def trace(frame, event, arg):
        nonlocal lines
        if frame.f_code.co_filename != subprocess.__file__:
            return None
        lines += event == "line"
        if event == "line" and lines == number:
            signal.raise_signal(signal.SIGINT)
        return trace
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    assert lines < number, "the interrupt was lost"
    return False

for end in ("poll", "kill", "close"):
    number = 0
    again = True
    while again:
        number += 1
        child = subprocess.Popen(["sleep", "600"], stdin=subprocess.PIPE)
        watch = Watch(Ranks(0, 2), None, [child])
        if end == "close":
            child.kill()
        again = interrupted_at(number, {"poll": watch._ended_child, "close": watch.close,
                                        "kill": lambda: _kill([child])}[end])
        killer = threading.Thread(target=_kill, args=([child],), daemon=True)
        killer.start()
        killer.join(20)
        if killer.is_alive():
            print(f"{end}: Ctrl-C at line {number} hangs", flush=True)
            os._exit(1)
    assert number > 5, (end, number)
"""


def test_ctrl_c_in_the_middle_of_asking_after_a_child():
    """Between taking its own lock and promising to give it back, `Popen.poll` can be interrupted,
    and then who waits for the child waits for ever. Tried at every line."""
    run = subprocess.run([sys.executable, "-c", CTRL_C_IN_POPEN], capture_output=True, text=True,
                         timeout=120, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert run.returncode == 0, run.stdout + run.stderr


# ------------------------------------------------------------------ side by side


def test_two_engines_in_a_process_and_a_group_of_the_users_own(start, qwen3, expected):
    """The second one initialised torch's process group twice, or found its port taken
    (nano-vllm). One of three is deleted, one shut down; the others don't notice."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        first, second = start(), start(async_scheduling=True)
        assert dist.get_world_size() == 1 and len({*pids_of(first), *pids_of(second)}) == 2
        for llm in (first, second):
            llm.add_request("it", PROMPT, GREEDY)
        texts = {}
        while first.has_unfinished_requests() or second.has_unfinished_requests():
            for llm in (first, second):
                texts |= {llm: out.outputs[0].token_ids for out in llm.step() if out.finished}
        assert texts == {first: expected(), second: expected()}
        gone, port = pids_of(first), first.runner.ranks.watch.store_server.port
        first.shutdown()
        assert [state_of(pid) for pid in gone] == [""]  # when it returns
        assert_closed(port)
        assert run(second)[0].outputs[0].token_ids == expected()
        third = LLM(qwen3, **SMALL, tensor_parallel_size=2)
        assert run(third)[0].outputs[0].token_ids == expected()
        gone = pids_of(third)
        del third
        gc.collect()
        assert [state_of(pid) for pid in gone] == [""]
        ours = torch.ones(3)
        dist.all_reduce(ours)
        assert ours.tolist() == [1, 1, 1]
    finally:
        dist.destroy_process_group()
    for call in (lambda: run(first), first.step, lambda: first.add_request("r", PROMPT)):
        with pytest.raises(RuntimeError, match="this engine was shut down: make a new LLM"):
            call()
    first.shutdown()


# --------------------------------------------------------------------- the dead


def test_a_child_is_killed_while_all_are_idle(start, capfd):
    """Known within a beat, named in the next call and in all that follow."""
    llm = start()
    run(llm)
    [pid] = pids_of(llm)
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: llm.runner.ranks.broken, "rank 0 notices")
    for call in (lambda: run(llm), llm.step, lambda: llm.add_request("r", PROMPT),
                 llm.reset_prefix_cache, lambda: llm.stream(PROMPT)):
        with pytest.raises(RuntimeError, match=rf"rank 1 \(process {pid}\) died: exit code -9.*"
                                               "make a new LLM"):
            call()
    llm.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        llm.step()
    assert f"rank 1 (process {pid}) died" in capfd.readouterr().err


@pytest.mark.parametrize("overlap", [False, True])
def test_a_child_is_killed_in_the_middle_of_a_step(start, overlap):
    """Rank 0 and two others wait in a collective for one that is stopped, and then killed."""
    llm = start(tensor_parallel_size=4, async_scheduling=overlap)
    run(llm)
    pids = pids_of(llm)
    llm.add_request("mine", PROMPT, GREEDY)
    os.kill(pids[1], signal.SIGSTOP)
    threading.Timer(1, os.kill, (pids[1], signal.SIGKILL)).start()
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=rf"rank 2 \(process {pids[1]}\) died: exit code -9"):
        run(llm, [PROMPT] * 3)
    assert time.monotonic() - began < PATIENCE
    assert_gone(pids)
    with pytest.raises(RuntimeError, match="rank 2.*make a new LLM"):
        llm.step()
    llm.abort_request("mine")  # whatever cleans up may go on
    assert not llm.requests
    began = time.monotonic()
    llm.shutdown()
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("when", ["idle", "in a step"])
def test_a_child_that_hangs_is_dead(start, monkeypatch, expected, when):
    """Before that, an engine that idles for longer than any heartbeat may be missed serves as ever."""
    hasten(monkeypatch)
    llm = start()
    time.sleep(2 * processes.MAX_MISSED_HEARTBEATS * processes.HEARTBEAT_SECONDS)
    assert run(llm)[0].outputs[0].token_ids == expected()
    assert llm.runner.ranks.watch.is_alive() and not llm.runner.ranks.broken
    [pid] = pids_of(llm)
    os.kill(pid, signal.SIGSTOP)
    if when == "idle":
        wait_for(lambda: llm.runner.ranks.broken, "rank 0 notices")
    with pytest.raises(RuntimeError, match="rank 1 died: no heartbeat for 3 s"):
        run(llm)
    assert_gone([pid])


def test_a_child_that_hangs_does_not_hold_up_the_end(start):
    llm = start()
    [pid] = pids_of(llm)
    os.kill(pid, signal.SIGSTOP)
    llm.shutdown()
    assert state_of(pid) == ""


def test_ranks_share_the_threads(start, monkeypatch, capfd):
    """Rank 0 kept all of them: more threads than cores, which wait for each other, made steps five
    times slower. What the user had is restored at the end."""
    in_children(monkeypatch, "import torch; torch.set_num_threads = lambda n: print('child', n)")
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(5)
        llm = start()
        assert torch.get_num_threads() == 2
        llm.shutdown()
        assert torch.get_num_threads() == 5
    finally:
        torch.set_num_threads(before)
    assert "child 2" in capfd.readouterr().err


def test_nobody_waits_with_a_time_out(start):
    """Gloo's own is 30 minutes: an engine that had idled for longer was dead."""
    ranks = start().runner.ranks
    assert ranks.group is ranks.control and ranks.control.options._timeout.days > 30


def test_an_error_in_a_childs_step(start, monkeypatch, capfd):
    in_children(monkeypatch, "import nanoserve.model_runner as m; "
                             "m.ModelRunner._forward = lambda self, batch: 1 / 0")
    llm = start()
    [pid] = pids_of(llm)
    with pytest.raises(RuntimeError, match=rf"rank 1 \(process {pid}\) died: exit code 1"):
        run(llm)
    assert "nanoserve: rank 1 ends: ZeroDivisionError: division by zero" in capfd.readouterr().err
    assert_gone([pid])


def test_an_error_in_rank_0s_step(start, monkeypatch):
    """It is raised as it is; the ranks are out of step, and the engine says so from then on."""
    llm = start()
    pids = pids_of(llm)
    monkeypatch.setattr(model_runner, "sample", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(llm)
    assert [state_of(pid) for pid in pids] == [""]
    with pytest.raises(RuntimeError, match="rank 0 failed in what all ranks do together: division by "
                                           "zero.*make a new LLM"):
        run(llm)


def test_a_step_that_can_not_be_read(start, monkeypatch, capfd):
    """A packed buffer that is nonsense to the others only: an error with a name, and no hang."""
    llm = start()
    broadcast = llm.runner._broadcast

    def corrupt(buffer):
        honest = buffer.clone()
        buffer[SECTIONS.index("cu_seqlens_q")] = 1  # not as many rows as there are sequence lengths
        broadcast(buffer)
        buffer.copy_(honest)

    monkeypatch.setattr(llm.runner, "_broadcast", corrupt)
    with pytest.raises(RuntimeError, match="rank 1"):
        run(llm)
    assert "nanoserve: rank 1 ends: " in capfd.readouterr().err


# -------------------------------------------------------- engines that can't start


def test_what_keeps_an_engine_from_starting(qwen3, tmp_path, spawned):
    """The same errors as with one rank, and nobody is left."""
    damaged = shutil.copytree(qwen3, tmp_path / "damaged")
    tensors = load_file(damaged / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, damaged / "model.safetensors", {"format": "pt"})
    cases = {"tensors are missing.*layers.1.mlp.down_proj": (damaged, {}),
             "max_model_len=200 does not fit": (qwen3, dict(max_model_len=200,
                                                            num_gpu_blocks_override=4)),
             "no room for one KV block": (qwen3, dict(num_gpu_blocks_override=None,
                                                      kv_cache_memory_bytes=1000))}
    for size in (1, 2):
        for message, (folder, options) in cases.items():
            with pytest.raises(ValueError, match=message) as kept:
                LLM(folder, **SMALL | options, tensor_parallel_size=size)
            assert [state_of(pid) for pid in spawned] == [""] * len(spawned), kept
    assert len(spawned) == 3


def test_a_child_that_can_not_start(qwen3, tmp_path, monkeypatch, spawned, capfd):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nexit 7\n")
    broken.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(broken))
        with pytest.raises(RuntimeError, match=r"rank \d \(process \d+\) died: exit code 7, before "
                                               "the engine was up"):
            LLM(qwen3, **SMALL, tensor_parallel_size=4)
    assert [state_of(pid) for pid in spawned] == [""] * 3
    assert "BrokenPipe" not in capfd.readouterr().err


def test_what_is_refused_before_anything_is_started(qwen3, monkeypatch, spawned):
    with pytest.raises(ValueError, match="tensor_parallel_size=8 can't share 4 attention heads "
                                         "with 2 KV heads: choose one of 1, 2, 4"):
        LLM(qwen3, **SMALL, tensor_parallel_size=8)
    for name, value in dict(WORLD_SIZE="4", RANK="0").items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="tensor_parallel_size=2, but torchrun started 4 ranks"):
        LLM(qwen3, **SMALL, tensor_parallel_size=2)
    assert not spawned


# --------------------------------------------------------------------- torchrun


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def torchrun(*options: str) -> tuple[str, ...]:
    return sys.executable, "-m", "torch.distributed.run", *options


SECOND_ENGINE = """
llm.shutdown()
try:
    LLM({folder!r}, tensor_parallel_size=2)
except RuntimeError as error:
    print(error)
"""


def test_torchrun_on_one_machine(qwen3, tmp_path, expected):
    """The same script: rank 0 goes on behind the constructor, the other serves in it and exits."""
    script = Script(qwen3, tmp_path / "it", SECOND_ENGINE.format(folder=str(qwen3)),
                    command=torchrun("--standalone", "--nproc-per-node", "2")).end()
    script.out, _, last = script.out.rstrip("\n").rpartition("\n")
    assert "have served an engine already" in last, script.err
    script.out += "\n"
    script.check(expected(), 0)
    assert "died" not in script.err


def test_torchrun_on_two_machines(qwen3, tmp_path, expected):
    """Both of them this one. Only the first prints; then the same with a rank that is killed."""
    port = str(free_port())
    machines = [Script(qwen3, tmp_path / str(i), command=torchrun(
        "--nnodes", "2", "--node-rank", str(i), "--nproc-per-node", "1", "--master-addr",
        "127.0.0.1", "--master-port", port)) for i in range(2)]
    for script in machines:
        script.end()
    machines[0].check(expected(), 0)
    assert machines[1].process.returncode == 0 and machines[1].out == "", machines[1].err


def started_by_hand(folder: Path, where: Path, ending: str, heartbeat: float) -> list[Script]:
    """Two ranks on their own, with the variables that torchrun or a batch system sets: there is
    nobody who would end the others, and the store is rank 0's."""
    port = str(free_port())
    return [Script(folder, where / str(i), ending, RANK=str(i), WORLD_SIZE="2",
                   MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
                   setting="import nanoserve.parallel.processes as p; p.GRACE_SECONDS = 1; "
                           f"p.HEARTBEAT_SECONDS = {heartbeat}")
            for i in range(2)]


def test_ranks_of_another_starter_end(qwen3, tmp_path, expected):
    """Rank 0 takes its store with it, which looked like its death to whoever counted up a heartbeat
    before it had heard the last word."""
    ranks = [script.end() for script in started_by_hand(qwen3, tmp_path, "", 0.01)]
    ranks[0].check(expected(), 0)
    assert ranks[1].process.returncode == 0 and ranks[1].out == "", ranks[1].err
    assert "died" not in ranks[0].err + ranks[1].err


@pytest.mark.parametrize(("victim", "how"), [(0, "killed"), (1, "killed"), (0, "hangs")])
def test_a_rank_of_another_starter_dies(qwen3, tmp_path, victim, how):
    """A machine without power closes no connection, and neither does a process that hangs: the
    others waited for rank 0's store to answer."""
    ranks = started_by_hand(qwen3, tmp_path, "print('idle', flush=True); time.sleep(1)\n"
                            "while True: text()", 0.2)
    ranks[0].line()
    assert ranks[0].line() == "idle"
    ranks[victim].signal_all(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    survivor = ranks[1 - victim].end(PATIENCE)
    ranks[victim].signal_all(signal.SIGKILL)
    ranks[victim].end()
    assert survivor.process.returncode == 1
    assert f"rank {victim} died" in survivor.err


# ----------------------------------------------------------------------- serving


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "overlap"])
def llm(request, qwen3):
    options = SMALL | dict(num_gpu_blocks_override=256, max_num_batched_tokens=3000)
    with LLM(qwen3, **options, tensor_parallel_size=2, async_scheduling=request.param) as llm:
        llm.check_every_step = True
        yield llm


@pytest.fixture(scope="module")
def one_rank(qwen3):
    return LLM(qwen3, **SMALL, enable_prefix_caching=False)


def test_the_text_is_that_of_one_rank(llm, one_rank, prompts, references):
    """Greedy as transformers; with seeds, several samples, stop strings as one rank alone."""
    for prompt, output in zip(prompts, run(llm, prompts), strict=True):
        assert_same_text(output.outputs[0].token_ids, *references("qwen3", prompt, MAX_TOKENS),
                         f"{len(prompt)} tokens")
    stop = one_rank.get_tokenizer().decode(references("qwen3", PROMPT, MAX_TOKENS)[0][3:5])
    for params in (SamplingParams(seed=5, max_tokens=20), GREEDY,
                   SamplingParams(seed=6, n=2, top_p=0.9, max_tokens=20),
                   SamplingParams(temperature=0, stop=stop, max_tokens=20)):
        ours, theirs = ([(s.token_ids, s.text, s.finish_reason, s.stop_reason)
                         for output in run(engine, prompts[3:8] + [PROMPT], params)
                         for s in output.outputs] for engine in (llm, one_rank))
        assert ours == theirs


def test_abort_in_flight(llm, expected):
    for name in "abc":
        llm.add_request(name, [ord(name), *PROMPT], GREEDY)
    outputs = llm.step() + llm.step()
    llm.abort_request("b")
    while llm.has_unfinished_requests():
        outputs += llm.step()
    last = {output.request_id: output.outputs[0] for output in outputs}
    assert last["b"].finish_reason == "abort"
    for name in "ac":
        assert last[name].token_ids == expected([ord(name), *PROMPT])
    assert llm.scheduler.blocks.num_free_blocks == llm.scheduler.blocks.num_blocks


class Counted:
    """The group between the hosts, with a list of what was broadcast."""

    def __init__(self, group):
        self.group, self.sizes = group, []

    def broadcast(self, tensors, options):
        self.sizes += [tensor.numel() for tensor in tensors]
        return self.group.broadcast(tensors, options)


def test_one_broadcast_a_step(llm, monkeypatch, references):
    """Of the packed step and nothing else, and nothing is pickled. A step with more numbers than a
    first broadcast holds takes a second one."""
    ranks, num_launched = llm.runner.ranks, 0
    counted, launch = Counted(ranks.control), llm.runner.launch

    def counting_launch(step):
        nonlocal num_launched
        num_launched += 1
        return launch(step)

    def refuse(*args, **kinds):
        raise AssertionError("pickled")

    monkeypatch.setattr(ranks, "control", counted)
    monkeypatch.setattr(ranks, "broadcast", ranks.broadcast if llm.depth else refuse)
    monkeypatch.setattr(llm.runner, "launch", counting_launch)
    for name in ("dumps", "dump", "Pickler"):
        monkeypatch.setattr(f"pickle.{name}", refuse)
    assert ranks.group is counted.group  # gloo, too, but not counted: overlap's tokens go there
    llm.reset_prefix_cache()
    run(llm, [PROMPT, [5]])
    assert num_launched >= MAX_TOKENS and counted.sizes == [MIN_BUFFER] * num_launched
    counted.sizes.clear()
    num_launched, prompts = 0, [[i, 7, 9] * 80 for i in range(12)]  # 2,880 tokens
    for prompt, output in zip(prompts, run(llm, prompts, SamplingParams(
            temperature=0, max_tokens=3)), strict=True):
        assert_same_text(output.outputs[0].token_ids, *references("qwen3", prompt, 3), "long")
    # Three numbers a token: the first step's buffer is the only one that is too long.
    assert len(counted.sizes) == num_launched + 1
    assert counted.sizes.pop(1) >= 3 * 2880 - MIN_BUFFER and set(counted.sizes) == {MIN_BUFFER}


def test_block_copies_reach_every_rank(llm, expected, monkeypatch):
    """Seen through the text: a block is spoilt on rank 1 alone (rank 0's is put back), which makes
    the text wrong, and is repaired from a copy."""
    copies, schedule = [], llm.scheduler.schedule

    def copying_schedule():
        step = schedule()
        if step.num_new_tokens:
            step.block_copies, copies[:] = copies[:], []
        return step

    def other_step(*asked):
        copies[:] = asked
        run(llm, [9], SamplingParams(temperature=0, max_tokens=1))

    monkeypatch.setattr(llm.scheduler, "schedule", copying_schedule)
    llm.reset_prefix_cache()
    llm.add_request("it", PROMPT, GREEDY)
    llm.step()
    [seq] = llm.requests["it"].sequences
    block = seq.block_table[0]
    spare, junk = [b for b in range(200, 256) if b not in seq.block_table][:2]
    llm.abort_request("it")
    run(llm)
    before = [[cache[block].clone() for cache in kv] for kv in llm.runner.kv_cache]
    other_step((block, spare))
    other_step((junk, block))
    for kv, saved in zip(llm.runner.kv_cache, before, strict=True):
        for cache, old in zip(kv, saved, strict=True):
            assert not torch.equal(cache[block], old)
            cache[block] = old
    [spoilt] = run(llm)
    assert spoilt.num_cached_tokens == 16 and spoilt.outputs[0].token_ids != expected()
    other_step((spare, block))
    [repaired] = run(llm)
    assert repaired.num_cached_tokens == 16 and repaired.outputs[0].token_ids == expected()
    llm.reset_prefix_cache()
