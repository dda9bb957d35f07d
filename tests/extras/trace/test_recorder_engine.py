"""The step trace of a real engine, however its run ends."""

import json
import random
import subprocess
import sys
from itertools import pairwise

import pytest
from witness import Witness, read

from nanoserve import LLM, SamplingParams
from nanoserve_extras.trace import recorder
from nanoserve_extras.trace.recorder import Recorder


def watch(llm: LLM) -> Witness:
    witness = Witness(llm.extra(Recorder).trace, llm.scheduler)
    llm.add(witness)
    return witness


PARAMS = dict(temperature=0, max_tokens=20, ignore_eos=True)


@pytest.mark.parametrize("name, options", [
    ("qwen3", {}), ("qwen3", dict(async_scheduling=True)),
    ("qwen3", dict(async_scheduling=True, num_gpu_blocks_override=16, max_model_len=64)),
    ("qwen3", dict(num_gpu_blocks_override=16, max_model_len=64, max_num_batched_tokens=9)),
    ("qwen3", dict(num_gpu_blocks_override=16, max_model_len=64, kv_offload_bytes=2 ** 22,
                   kernels="torch")),
    ("qwen3", dict(enable_prefix_caching=False)), ("mistral", {}),
    ("mistral", dict(async_scheduling=True, max_num_batched_tokens=11))], ids=str)
def test_a_real_run_can_be_replayed(checkpoints, tmp_path, name, options):
    """Overlap, preemption, sliding windows (blocks given back from the front), n samples, stop
    tokens in the middle of a step in flight, and an abort: the ledger agrees at every step, the
    text is the same as without a trace, and the file is written when `generate` ends."""
    rng = random.Random(3)
    common = rng.choices(range(256), k=9)
    prompts = [common * (i % 2) + rng.choices(range(256), k=rng.randint(1, 20)) for i in range(7)]
    options = dict(block_size=4, num_gpu_blocks_override=60) | options

    def params(stop):
        return [SamplingParams(**PARAMS, stop_token_ids=stop if i % 3 == 0 else None)
                for i in range(7)] + [SamplingParams(n=2, seed=5, max_tokens=12, ignore_eos=True)]

    prompts.append(prompts[0])
    with LLM(checkpoints[name], **options) as llm:
        first = llm.generate(prompts[0], SamplingParams(**PARAMS), use_tqdm=False)[0]
        stop = first.outputs[0].token_ids[6:7]
        llm.reset_prefix_cache()
        plain = llm.generate(prompts, params(stop), use_tqdm=False)
    path = tmp_path / "run.html"
    with LLM(checkpoints[name], **options, trace=str(path)) as llm:
        witness = watch(llm)
        llm.add_request("aborted", prompts[3], SamplingParams(**PARAMS))
        for _ in range(4):
            llm.step()
        llm.abort_request("aborted")
        traced = llm.generate(prompts, params(stop), use_tqdm=False)
        assert path.exists()
        assert llm.scheduler.blocks.num_free_blocks == llm.scheduler.blocks.num_blocks
        witness.compare_stream(llm.extra(Recorder).trace.stream())
    assert ("aborted", "abort") in {end[:2] for end in witness.endings}
    assert [[s.token_ids for s in out.outputs] for out in traced] == [
        [s.token_ids for s in out.outputs] for out in plain]


def test_a_run_that_fails_leaves_a_trace(checkpoints, tmp_path, capsys):
    """A step that breaks in the middle is a frame that never ended; its request ends as an abort,
    and the same engine goes on recording."""
    path = tmp_path / "run.html"
    with LLM(checkpoints["qwen3"], block_size=4, trace=str(path)) as llm:
        witness = watch(llm)
        launch, calls = llm.runner.launch, []

        def breaks(step):
            calls.append(step)
            if len(calls) == 4:
                raise KeyboardInterrupt
            return launch(step)

        llm.runner.launch = breaks
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[1, 2, 3], [4, 5]], SamplingParams(**PARAMS), use_tqdm=False)
        frames = read(path)["frames"]
        assert [frame["d"] >= 0 for frame in frames] == [True, True, True, False, True]
        assert frames[-1]["f"] == [0, "abort", 3, 1, "abort", 3]
        llm.generate([7, 8, 9], SamplingParams(**PARAMS), use_tqdm=False)
        witness.compare_stream(llm.extra(Recorder).trace.stream())
    assert len(read(path)["frames"]) == 4 + 20 + 1
    assert f"24 steps of 3 requests in {path}" in capsys.readouterr().err


def test_a_script_that_just_ends_leaves_a_trace(checkpoints, tmp_path):
    """Without shutdown(), by an error or by Ctrl-C: what was stepped by hand is written."""
    code = (f"import os\nfrom nanoserve import LLM, SamplingParams\nchild = os.fork()\n"
            f"llm = LLM({str(checkpoints['qwen3'])!r}, trace=f'{tmp_path}/{{child == 0}}.html')\n"
            f"llm.add_request('x', [1, 2, 3], SamplingParams(max_tokens=9, ignore_eos=True))\n"
            f"for _ in range(5): llm.step()\n"
            f"if child == 0: raise RuntimeError\n"
            f"os.waitpid(child, 0)\nos.kill(os.getpid(), 2)\n")
    subprocess.run([sys.executable, "-c", code], capture_output=True)
    for name in ("True", "False"):
        assert len(read(tmp_path / f"{name}.html")["frames"]) == 6


def test_a_json_target_writes_a_chrome_trace(checkpoints, tmp_path):
    """With overlap a step is scheduled before the last one has ended; slices still lie in line."""
    with LLM(checkpoints["qwen3"], trace=str(tmp_path / "run.json"),
             async_scheduling=True) as llm:
        llm.generate([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    assert [e["args"]["tokens"] for e in events if e["ph"] == "X" and e["pid"] == 2] == [3, 3]
    steps = [e for e in events if e["ph"] == "X" and e["pid"] == 1]
    assert len(steps) == 4 and all(e["dur"] > 0 for e in steps)
    assert all(one["ts"] + one["dur"] <= other["ts"] for one, other in pairwise(steps))


def test_an_abort_after_the_last_step_is_written(checkpoints, tmp_path):
    with LLM(checkpoints["qwen3"], trace=str(tmp_path / "run.html"),
             async_scheduling=False) as llm:
        llm.add_request("x", [1, 2, 3], SamplingParams(**PARAMS))
        llm.step()
        llm.extra(Recorder).trace.write(always=True)
        llm.abort_request("x")
    assert [frame.get("f") for frame in read(tmp_path / "run.html")["frames"]] == [
        None, [0, "abort", 1]]


def test_a_step_in_flight_when_the_trace_fills_up_has_its_time(checkpoints, tmp_path, monkeypatch):
    monkeypatch.setattr(recorder, "MAX_STEPS", 5)
    with LLM(checkpoints["qwen3"], trace=str(tmp_path / "run.html"),
             async_scheduling=True) as llm:
        llm.generate([1, 2, 3], SamplingParams(**PARAMS), use_tqdm=False)
    *frames, _ = read(tmp_path / "run.html")["frames"]
    assert len(frames) == 5 and all(frame["d"] >= 0 for frame in frames)


@pytest.mark.parametrize("text", [5, b"bytes"])
def test_a_prompts_text_that_is_no_text_is_shown_as_it_is(checkpoints, tmp_path, text):
    """With token ids beside it the engine passes it through and never looks at it."""
    with LLM(checkpoints["qwen3"], trace=str(tmp_path / "run.html")) as llm:
        llm.generate({"prompt": text, "prompt_token_ids": [1, 2]}, SamplingParams(max_tokens=2),
                     use_tqdm=False)
    assert read(tmp_path / "run.html")["requests"][0][3] == str(text)
