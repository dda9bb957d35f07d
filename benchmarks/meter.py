"""Serve requests at their times, and note when each token came and where the time went.

    arrival          added            first token      ...   last token
       │───────────────│──────────────────│──────────────────────│
       │◄── the engine was in a step ──►│
       └────────────── TTFT ──────────────┘◄─── inter-token ────►│
       └────────────────────── end to end ───────────────────────┘

A clock starts when a request *arrives*: had it started when the engine took the request, an engine
that is too slow to take any would have short latencies.

Where the time went is found with a stopwatch around the calls that make up a step. The host's are
there everywhere. The device's parts (the layers' matrices, attention, the LM head) can be timed
only where a call returns when it is done: on a CPU. The stopwatch itself costs little there.

Invariant: a `Meter` observes; it is put around the engine for one run and leaves no trace. Not
known here: what is good or bad. Road not taken: torch.profiler, which knows every operator, and
costs more than most of them; `benchmarks.throughput --profile` is for that.
"""

import sys
import time as clock
from collections import Counter, defaultdict, deque
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from torch import nn
from tqdm import tqdm

from benchmarks.workloads import Request, summarize
from nanoserve import LLM, model_runner
from nanoserve.config import RequestOutputKind, SamplingParams
from nanoserve.hooks import Extra
from nanoserve.layers import Experts, Linear
from nanoserve.sequence import Sequence, Step


class Meter(Extra):
    """Watches one engine. time: whether the stopwatch runs, too."""

    def __init__(self, llm: LLM, bar: tqdm, time: bool):
        self.llm, self.bar, self.time = llm, bar, time
        self.steps: list[Step] = []
        self.token_times: dict[str, list[float]] = defaultdict(list)  # by request, time.monotonic
        self.seconds: Counter[str] = Counter()
        self.on_gpu = llm.runner.device.type == "cuda"

    def scheduled(self, step: Step) -> None:
        """Keep the step: its minimum is computed after the run."""
        if step.num_new_tokens:
            self.steps.append(step)

    def updated(self, step: Step, accepted: dict[Sequence, list[int]]) -> None:
        """A token's time is when the engine has it; several of a step, as with drafts, have the
        same one."""
        now = clock.monotonic()
        for seq, tokens in accepted.items():
            self.token_times[seq.request.request_id] += [now] * len(tokens)
            self.bar.update(len(tokens))

    @contextmanager
    def watching(self):
        """Around a run: what is replaced is put back."""
        with ExitStack() as stack:
            for part, owner, name in self.calls() if self.time else []:
                timed = self.timed(part, getattr(owner, name))
                stack.enter_context(mock.patch.object(owner, name, timed))
            self.llm.add(self)
            stack.callback(self.llm.remove, self)
            yield

    def calls(self) -> list[tuple[str, object, str]]:
        """(part, owner, name) of the calls that are timed.

        Some lie in others (`linear` and `attention` in `forward`, `head` in `sampling`), which
        `parts` takes apart. On a
        GPU a call only queues work and returns at once; of the device's time only the host's wait
        for samples can be seen.
        """
        llm, runner = self.llm, self.llm.runner
        calls = [("schedule", llm.scheduler, "schedule"), ("build", runner.builder, "write"),
                 ("update", llm.scheduler, "update")]
        if self.on_gpu:
            return [*calls, ("waiting for the device", runner, "fetch")]
        matrices = [module for module in runner.model.layers.modules()
                    if isinstance(module, (Linear, Experts, nn.Linear))]
        return [*calls, ("forward", runner.model, "forward"),
                ("head", runner.model, "compute_logits"), ("sampling", model_runner, "sample"),
                ("attention", runner.ops, "paged_attention"),
                *(("linear", module, "forward") for module in matrices)]

    def timed(self, part: str, call):
        """`call` with a stopwatch around it. One that fails counts, too: its time has passed."""
        seconds = self.seconds

        def timed_call(*args, **kwargs):
            start = clock.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                seconds[part] += clock.perf_counter() - start

        return timed_call

    def parts(self, total: float) -> dict[str, float]:
        """Seconds by part, which add up to `total` on a CPU; of the host's, "host" is the sum.

        "other" is what is left of a forward: norms, RoPE, activations, writing K and V.
        """
        found = {part: self.seconds[part] for part in ("schedule", "build", "update")}
        if self.on_gpu:
            name = "waiting for the device"
            return dict(found, host=sum(found.values()), **{name: self.seconds[name]})
        s = self.seconds
        return dict(
            found, linear=s["linear"], head=s["head"], attention=s["attention"],
            other=s["forward"] - s["linear"] - s["attention"], sampling=s["sampling"] - s["head"],
            host=total - s["forward"] - s["sampling"])


def serve(llm: LLM, requests: list[Request], temperature: float = 0.0, label: str = "",
          time: bool = False) -> tuple[dict, Meter]:
    """Run requests, from an empty prefix cache on. Returns `summarize`'s numbers and the meter.

    Ctrl-C aborts what is left: the result counts the tokens until then, and has `interrupted` set.
    label: of the progress bar; without one there is none.
    """
    llm.reset_prefix_cache()
    todo = deque(sorted(range(len(requests)), key=lambda i: requests[i].arrival))
    params = [SamplingParams(temperature=temperature, max_tokens=request.max_tokens,
                             ignore_eos=True, detokenize=False,
                             output_kind=RequestOutputKind.FINAL_ONLY) for request in requests]
    interrupted = False
    with tqdm(total=sum(request.max_tokens for request in requests), desc=label, unit=" tokens",
              leave=False, disable=None if label else True) as bar:
        meter = Meter(llm, bar, time)
        with meter.watching():
            start = clock.monotonic()
            try:
                while todo or llm.has_unfinished_requests():
                    now = clock.monotonic() - start
                    while todo and requests[todo[0]].arrival <= now:
                        i = todo.popleft()
                        llm.add_request(str(i), requests[i].prompt, params[i])
                    if llm.has_unfinished_requests():
                        llm.step()
                    else:
                        clock.sleep(requests[todo[0]].arrival - now)
            except KeyboardInterrupt:
                interrupted = True
                llm.abort_request(list(llm.requests))
                tqdm.write("interrupted: what follows is about the part that was done",
                           file=sys.stderr)
            seconds = clock.monotonic() - start
    times = {int(i): times for i, times in meter.token_times.items()}
    result = summarize(
        seconds, sum(len(requests[i].prompt) for i in times),
        [[at - start - requests[i].arrival for at in times[i]] for i in sorted(times)])
    return result | dict(interrupted=interrupted), meter


def peak_memory(device: torch.device) -> dict[str, int]:
    """The most bytes there ever were, of this process and of torch on its GPU."""
    peak = {}
    try:
        import resource  # not on Windows
        unit = 1 if sys.platform == "darwin" else 1024
        peak["host"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    except ImportError:
        pass
    if device.type == "cuda":
        peak["device"] = torch.cuda.max_memory_allocated(device)
    return peak


def profile(llm: LLM, requests: list[Request], num_steps: int, path: str) -> None:
    """A Chrome trace of some steps from the second one on; ui.perfetto.dev opens it.

    The first step, of prompts alone, is left out; where prompts are long or many, the next are of
    prompts, too, and with overlap the end of the first one is still seen. Before the end the device
    is waited for: its last kernels would be missing otherwise.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if llm.runner.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    llm.reset_prefix_cache()
    for i, request in enumerate(requests):
        llm.add_request(str(i), request.prompt, SamplingParams(
            temperature=0, max_tokens=request.max_tokens, ignore_eos=True, detokenize=False))
    llm.step()
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(num_steps):
            if llm.has_unfinished_requests():
                llm.step()
        llm.runner.synchronize()
    profiler.export_chrome_trace(path)
    llm.abort_request(list(llm.requests))
