"""The loop: `LLMEngine` takes requests in, runs them step by step, and hands outputs over.

    submit ──► Request ──► Scheduler.waiting
                               │ schedule()     who computes how many tokens
                ┌───────────► Step ──► ModelRunner.launch()    forward, sample
            next step                       │ tokens, on the device
                └───────────── Scheduler.update() ──► Request.output() ──► inbox

`_advance` is that picture. With `async_scheduling` a step is launched before the previous one's
tokens are looked at (overlap depth 1), otherwise after (depth 0). Both give the same tokens.

**Who may call what.** Threads share an engine and take turns, step by step. A signal's handler and
the garbage collector, which closes a forgotten stream, come in the middle of a step; they may abort
and shut down, because that only puts an order into a queue that is emptied between two steps
(parallel/interrupts.py).

Invariants: a step takes effect in `Scheduler.update()` and not before, so whatever happens within
it (an error, Ctrl-C), every request that was not finished can be aborted or go on. What
`ctrl_c_held` encloses is done whole. Observers (frontend/metrics.py) watch and change nothing.

Not known here: checkpoints, devices, how prompts are checked. Road not taken: a thread of the
engine's own that steps by itself, as in a server; a loop that one can single-step in a debugger
teaches more, and a server can own the thread.
"""

import os
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any

from nanoserve.config import EngineConfig, RequestOutputKind, SamplingParams
from nanoserve.frontend.metrics import Counter, EngineMetrics, Gauge, Histogram, Observer
from nanoserve.frontend.outputs import RequestOutput
from nanoserve.frontend.prompts import Prompt
from nanoserve.frontend.request import InputProcessor, Request
from nanoserve.model_runner import ModelRunner
from nanoserve.parallel.interrupts import Turns, ctrl_c_held
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import Sequence, Step


class LLMEngine:
    """The engine of one model; `LLM` makes it.

    runner: with its KV cache of `num_blocks` allocated. inputs: checks requests, turns them into
    sequences. Names are those of vLLM's `LLMEngine`.
    """

    def __init__(self, config: EngineConfig, runner: ModelRunner, num_blocks: int,
                 inputs: InputProcessor):
        self.config, self.runner, self.inputs = config, runner, inputs
        self.scheduler = Scheduler(config, num_blocks, runner.model_config.window)
        self.metrics = EngineMetrics(config.enable_prefix_caching)
        self.observers: list[Observer] = [self.metrics]
        self.trace: Any = None  # tools.recorder's, an observer that is written when work has ended
        self.drafter: Any = None  # extras.speculative's, which puts guesses into a step
        self.store: Any = None  # extras.block_store's, which a step may have blocks for
        self.depth = 1 if config.async_scheduling else 0
        self.in_flight: deque = deque()  # (step, its output on the device)
        self.requests: dict[str, Request] = {}
        self.inbox: list[RequestOutput] = []  # of requests added by hand: for the next step()
        self.turns = Turns()  # threads may share an engine: they take turns step by step
        self.num_arrived = self.num_named = 0
        self.check_every_step = os.environ.get("NANOSERVE_CHECK") == "1"

    # ---------------------------------------------------------- requests in

    def make_request(self, request_id: str, prompt: Prompt,
                     params: SamplingParams | None = None, priority: int = 0,
                     lora_request: Any = None) -> Request:
        """Tokenise and check a request without touching the engine's state (an adapter is loaded).

        Raises `ValueError` for whatever `InputProcessor.process` refuses. What passes fits in the
        KV cache, because `max_model_len` does.
        """
        self.check_open()
        request = self.inputs.process(request_id, prompt, params, priority)
        if lora_request is not None:
            if self.runner.adapters is None:
                raise ValueError(f"lora_request={lora_request!r:.80}: make the engine with "
                                 "enable_lora=True")
            self.runner.adapters.assign(request, lora_request)
        return request

    def submit(self, request: Request, inbox: Any) -> None:
        """Queue a request. Its outputs go to `inbox`, which may be anything with `append`. Raises
        `ValueError`, and queues nothing, if its id is in use."""
        with self.turns, ctrl_c_held():
            self.check_open()
            if not request.request_id:
                request.request_id = self._unused_id()
            if request.request_id in self.requests:
                raise ValueError(f"request_id={request.request_id!r} is in use: choose another")
            sequences = request.start(self.num_arrived, self.config.seed)  # may raise: do it first
            self.num_arrived += 1
            request.inbox = inbox
            self.requests[request.request_id] = request
            if request.grammar is not None:
                request.grammar.attach(self)
            for seq in sequences:
                self.scheduler.add(seq)
            for observer in self.observers:
                observer.added(sequences, request.stats, request.prompt)

    def _unused_id(self) -> str:
        """A number that no request has as its id. Given late: a stream may start long after it was
        made."""
        self.num_named += 1
        while str(self.num_named) in self.requests:
            self.num_named += 1
        return str(self.num_named)

    def add_request(self, request_id: str, prompt: Prompt,
                    sampling_params: SamplingParams | None = None, priority: int = 0,
                    lora_request: Any = None) -> None:
        """Queue one request; `step()` works on it. Raises `ValueError` and queues nothing if it is
        wrong (see `make_request`) or its id is in use."""
        self.submit(self.make_request(request_id, prompt, sampling_params, priority, lora_request),
                    self.inbox)

    def abort_request(self, request_id: str | list[str]) -> None:
        """End a request, or several; unknown ids are ignored. See `abort`."""
        if not isinstance(request_id, (str, Iterable)):
            raise ValueError(f"request_id={request_id!r} must be a str or a list of such")
        self.abort([request_id] if isinstance(request_id, str) else list(request_id))

    def has_unfinished_requests(self) -> bool:
        """Whether `step()` has work left, or a result to hand over (an aborted one doesn't count:
        its caller has aborted it and need not wait)."""
        return bool(self.requests or self.in_flight or self._has_saves()) or any(
            not output.aborted for output in self.inbox)

    def _has_saves(self) -> bool:
        return self.store is not None and self.store.has_saves()

    # ---------------------------------------------------------------- the loop

    def step(self) -> list[RequestOutput]:
        """Run one step. Returns a `RequestOutput` for each request of `add_request` that got tokens
        or ended; with `output_kind` FINAL_ONLY only where it ended."""
        with self.turns:
            self._advance()
            return take_all(self.inbox)

    def drive(self, requests: list[Request]) -> Iterator[RequestOutput]:
        """Submit, step until all are done, and abort the rest if the caller or a step gives up.

        A step moves the requests of all callers on; an output goes to the inbox of its own
        request. So one thread's steps may bring another thread's outputs.
        """
        inbox: list[RequestOutput] = []
        num_unfinished = len(requests)
        try:
            for request in requests:
                self.submit(request, inbox)
            while num_unfinished:
                with self.turns:
                    if not inbox:
                        self._advance()
                    outputs = take_all(inbox)
                for output in outputs:
                    num_unfinished -= output.finished
                    yield output
        finally:
            self.abort([request.request_id for request in requests
                        if self.requests.get(request.request_id) is request])

    def _advance(self) -> None:
        """schedule -> build batch -> forward -> sample -> update, `depth` steps ahead."""
        self.check_open()
        try:
            with ctrl_c_held():
                step = self.scheduler.schedule()
                for observer in self.observers:
                    observer.scheduled(step)
            if step.has_work:
                # Ranks that are stopped in the middle of a step would be out of step for good.
                with ctrl_c_held() if self.runner.ranks.size > 1 else nullcontext():
                    self.in_flight.append((step, (self.drafter or self.runner).launch(step)))
            if step.sitting_out and not (step.has_work or self.in_flight):
                self.store.wait()  # its thread reads blocks that they wait for
            elif len(self.in_flight) > self.depth or not step.has_work:
                self._take_result()
        except BaseException:
            self._drop_in_flight()
            raise

    def _take_result(self) -> None:
        """Wait for the oldest step in flight and take its tokens into account.

        Until `fetch` returns a step can be dropped as if it had never been; from `popleft` on it
        counts, and Ctrl-C waits until its outputs lie in an inbox.
        """
        if not self.in_flight:
            assert not self.requests, f"stuck: nothing can be scheduled for {list(self.requests)}"
            return
        step, output = self.in_flight[0]
        token_ids, logprobs, prompt_logprobs = self.runner.fetch(output)
        with ctrl_c_held():
            self.in_flight.popleft()
            self._keep_prompt_logprobs(step, prompt_logprobs)
            grown = self.scheduler.update(step, token_ids)
            for observer in self.observers:
                observer.updated(step, grown)
            self._collect(grown, step.by_sequence(logprobs))
        if self.check_every_step:
            self.scheduler.check()

    def _keep_prompt_logprobs(self, step: Step, logprobs: list[list]) -> None:
        """Hand them to their requests, but for those that were aborted meanwhile."""
        for seq, positions in step.prompt_logprob_positions.items():
            entries, logprobs = logprobs[:len(positions)], logprobs[len(positions):]
            if seq.finish_reason is None:
                self.requests[seq.request_id].history.add_prompt(positions, entries)

    def _collect(self, grown: dict[Sequence, list[int]], logprobs: dict[Sequence, list]) -> None:
        """Turn new tokens into text, look for stop strings, and hand over the outputs.

        `update` has counted the tokens already, so an error here must not keep any of them from its
        caller: a tokenizer that fails ends its own request, and is heard of when all are served.
        """
        touched: dict[str, Request] = {}
        errors: list[Exception] = []
        for seq in grown:
            request = touched[seq.request_id] = self.requests[seq.request_id]
            try:
                stop_string = request.add_tokens(seq, logprobs.get(seq))
            except Exception as error:
                errors.append(error)
                self.scheduler.finish(seq, "abort", None, request.num_read[seq.index])
                continue
            if stop_string is not None:
                self.scheduler.finish(seq, "stop", stop_string, request.num_read[seq.index])
        for observer in self.observers:
            observer.ended([seq for seq in grown if seq.finish_reason is not None])
        for request in touched.values():
            if request.finished:
                del self.requests[request.request_id]
            if request.finished or request.params.output_kind is not RequestOutputKind.FINAL_ONLY:
                request.inbox.append(request.output())
        if errors:
            raise errors[0]

    def _drop_in_flight(self) -> None:
        """Forget the launched steps; no request is lost, their tokens are asked for again."""
        with ctrl_c_held():
            try:
                self.runner.synchronize()
            finally:
                self.in_flight.clear()
                self.scheduler.drop_in_flight()

    # ------------------------------------------------------------------- ends

    def abort(self, request_ids: list[str]) -> None:
        """Order these requests to be ended, wherever they are; unknown ids are ignored. Their
        outputs so far go to their inboxes, with `finish_reason` "abort". Threads, handlers of
        signals and finalizers may call it at any time. Raises what a tokenizer raised at the rest
        of a text."""
        self.turns.order(lambda: self._abort(request_ids))

    def _abort(self, request_ids: list[str]) -> None:
        """A tokenizer that fails keeps nothing running, and no output back: it is heard of when all
        of them have ended. A step in flight that no request is left to wait for ends here, too."""
        errors: list[Exception] = []
        for request in filter(None, (self.requests.pop(one, None) for one in request_ids)):
            for seq in request.sequences:
                self.scheduler.finish(seq, "abort")
            try:
                request.flush()
            except Exception as error:
                errors.append(error)
            for observer in self.observers:
                observer.ended(request.sequences)
            request.inbox.append(request.output())
        if not self.requests:
            self._rest()
        if errors:
            raise errors[0]

    def _rest(self) -> None:
        """No request is left: end the steps in flight, and save what is to be saved."""
        try:
            while self.in_flight:
                self._take_result()
            while self._has_saves() or self.in_flight:
                self._advance()
        except BaseException:
            self._drop_in_flight()
            raise
        finally:
            if self.trace is not None:
                self.trace.write()

    def shutdown(self) -> None:
        """Give back all memory. The engine can't be used afterwards; calling it twice is fine.
        Another thread's step is waited for; from within a step, in a signal's handler, it is put
        off to that step's end."""
        if self.turns.is_within():
            self.turns.order(self._close)
        else:
            with self.turns:
                self._close()

    def _close(self) -> None:
        self.requests.clear()
        self.in_flight.clear()
        try:
            if self.trace is not None:
                self.trace.close()
        finally:  # also when Ctrl-C comes while it writes
            if self.store is not None:
                self.store.close()
            if self.runner is not None:
                self.runner.close()
            self.runner = self.scheduler = self.store = None

    def check_open(self) -> None:
        """Raises `RuntimeError` after `shutdown`, or when a rank has died."""
        if self.runner is None:
            raise RuntimeError("this engine was shut down: make a new LLM")
        self.runner.ranks.raise_if_broken()

    # -------------------------------------------------------------- the rest

    def get_metrics(self) -> list[Counter | Gauge | Histogram]:
        """The engine's numbers now, in vLLM's names: see `metrics.EngineMetrics.read`."""
        self.check_open()
        return self.metrics.read(self.scheduler, self.config.model) + (
            self.drafter.read_metrics() if self.drafter else []) + (
            self.store.read_metrics() if self.store else [])

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, and no change, while requests are running."""
        with self.turns, ctrl_c_held():
            self.check_open()
            done = self.scheduler.blocks.reset_prefix_cache()
            if done and self.store is not None:
                self.store.clear()
            return done


def take_all(inbox: list) -> list:
    """What is in it. The list itself stays, because others hold on to it; and so does what another
    thread adds to it between these two lines."""
    found = inbox[:]
    del inbox[:len(found)]
    return found

