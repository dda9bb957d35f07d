"""The asynchronous engine: one thread owns the steps, an event loop owns the requests.

    event loop                          thread of steps
    generate ─► tokenise, in a thread
             ─► posted: submit ───────► done between two steps
                                        step, step, step ...
    `yield`  ◄── AsyncInbox, one output ◄── AsyncInbox.append(output): merged with the unread one
    cancelled ► posted: abort  ───────► done between two steps

A step may take long (a long prompt on a CPU does), so the event loop never waits for a step.
A call that changes the engine is *posted*: put into a queue that the thread of steps empties before
each step. Prompts are tokenised in a thread of their own.

Invariants: a slow reader costs the memory of one output for each of its requests, because a new
output is merged into the unread one (a CUMULATIVE output replaces it, a DELTA is joined to it).
A waiting generator always gets something: an output, or the error of a failed step or of a dead
engine. A generator that is cancelled, closed or forgotten has its requests aborted.

After a failed step the requests that ran end with an error, and the engine goes on. After
`MAX_FAILURES` failed steps in a row, or when a rank has died, the engine is dead: `check_health`
and every request raise. (vLLM's names: Kwon et al. 2023 and its V1 `AsyncLLM`.)

vLLM runs its steps in a separate process. Here kernels release Python's lock while they compute, so
a thread is enough, and nothing must be serialised.
"""

import asyncio
import ctypes
import time
import traceback
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing, suppress
from functools import partial
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any

import torch

from nanoserve.config import EngineConfig, RequestOutputKind, SamplingParams
from nanoserve.request import Request, RequestOutput
from nanoserve_extras.base.inputs import Prompt
from nanoserve_extras.base.llm import LLM
from nanoserve_extras.base.vllm import ROWS, missing_method, takes_vllms_words
from nanoserve_extras.base.words import words_of
from nanoserve_extras.layer_plan.layer_plan import LayerPlan

MAX_FAILURES = 3  # failed steps in a row, after which the engine takes no more requests


class EngineGenerateError(RuntimeError):
    """A step failed, and this request with it. The engine goes on."""


class EngineDeadError(EngineGenerateError):
    """The engine has ended, by an error or by `shutdown`. It takes no more requests."""


@takes_vllms_words("AsyncLLM()", "AsyncLLM")
class AsyncLLM:
    """An `LLM` for asyncio. llm: from now on only this object runs its steps. pace: the largest
    number of outputs a second that are handed on, see `Doorbell`.

        async with AsyncLLM(LLM(model)) as engine:
            async for output in engine.generate("Once upon a time", SamplingParams(seed=1)):
                print(output.outputs[0].text)

    Other threads may still call `llm.generate`: steps are taken in turns. They must not use
    `add_request` and `step`, whose outputs the thread of steps would take away.
    """

    def __init__(self, llm: LLM, pace: float | None = None):
        self.llm = llm
        # On a CPU the event loop and its tasks take cores away from the steps.
        self.pace = pace or (1000 if llm.config.device == "cpu" else 10_000)
        self.posted: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.inboxes: set[AsyncInbox] = set()  # used only by the thread of steps
        self.num_failures = 0  # steps that failed since the last one that did not
        self.stopping = False
        self.dead: BaseException | None = None  # why the engine takes no more requests
        self.lock = Lock()  # between a call that is posted and the thread's end
        self.bell: Doorbell | None = None
        # One thread: a tokenizer changes its settings while it encodes, and two calls at a time
        # fail with "Already borrowed".
        self.tokenizing = ThreadPoolExecutor(1, "nanoserve-tokenize")
        # Each thread that computes has its own OpenMP threads. Together with those of the thread
        # that made the engine there are more threads than cores, and then GNU's library lets all of
        # them sleep between two products (docs/log). So this thread's OpenMP threads are ended
        # here; they are started again if it computes again.
        with suppress(AttributeError, OSError):  # a library without OpenMP 5.0
            ctypes.CDLL(torch._C.__file__).omp_pause_resource_all(1)
        self.thread = Thread(target=self._run, name="nanoserve-steps", daemon=True)
        self.thread.start()

    @classmethod
    @takes_vllms_words("AsyncLLM.from_engine_args()", "AsyncLLM")
    def from_engine_args(cls, engine_args: EngineConfig) -> "AsyncLLM":
        """vLLM's way to make an asynchronous engine."""
        return cls(LLM.from_engine_args(engine_args))

    # ------------------------------------------------------------- requests

    @takes_vllms_words("generate()", "call")
    async def generate(self, prompt: Prompt, sampling_params: SamplingParams | None = None,
                       request_id: str = "", priority: int = 0, lora_request: Any = None,
                       ) -> AsyncIterator[RequestOutput]:
        """Yield a request's outputs as its text grows; `output_kind` says what each one contains.

        Closing or cancelling the generator aborts the request. Raises `ValueError` for input that
        `LLM.generate` refuses and for an id in use, `EngineGenerateError` when a step fails.
        """
        request = await self.prepare(prompt, sampling_params, request_id, priority, lora_request)
        async with aclosing(self.outputs([request])) as outputs:
            async for output in outputs:
                yield output

    @takes_vllms_words("encode()", "call")
    def encode(self, prompt: Prompt, pooling_params: Any, request_id: str = "", priority: int = 0,
               lora_request: Any = None) -> AsyncIterator[Any]:
        """Yield a pooling model's result for a prompt: one `PoolingRequestOutput`."""
        return self.generate(prompt, pooling_params, request_id, priority, lora_request)

    async def prepare(self, prompt: Prompt, params: Any = None, request_id: str = "",
                      priority: int = 0, lora_request: Any = None) -> Request:
        """Tokenise and check a request, off the event loop. It runs when `outputs` gets it. Raises
        `ValueError`."""
        self.check_health()
        return await self.tokenize(self.llm.make_request, request_id, prompt, params, priority,
                                   lora_request)

    async def tokenize(self, work: Callable, *args, **options) -> Any:
        """Call `work`, which uses the tokenizer, in the one thread that may use it."""
        return await asyncio.get_running_loop().run_in_executor(
            self.tokenizing, partial(work, *args, **options))

    async def outputs(self, requests: list[Request],
                      silence: float | None = None) -> AsyncIterator[RequestOutput | None]:
        """Run requests side by side and yield the outputs of all of them as they come. Those that
        are not finished when the generator ends are aborted. silence: after so many seconds without
        an output None is yielded."""
        inbox = AsyncInbox(self._doorbell())
        self._post(partial(self._submit, inbox, requests))
        num_unfinished = len(requests)
        try:
            while num_unfinished:
                output = await inbox.take(silence)
                num_unfinished -= output is not None and output.finished
                yield output
        finally:  # no `await` here: the garbage collector may close the generator
            self.posted.put(partial(self._leave, inbox))

    async def abort(self, request_id: str | list[str]) -> None:
        """End a request, or several. Their generators end with a last output, whose samples have
        `finish_reason` "abort". Unknown ids are ignored; the call does not wait for the end."""
        with suppress(EngineDeadError):
            self._post(partial(self.llm.abort_request, request_id))

    async def between_steps(self, work: Callable[[], Any]) -> Any:
        """Call `work` in the thread of steps, between two steps. Returns its result."""
        done: Future = Future()
        self._post(partial(_settle, done, work))
        return await asyncio.wrap_future(done)

    def __getattr__(self, name: str):
        """Called for missing names only, mostly vLLM's: the error names an alternative."""
        llm = self.__dict__.get("llm")
        if name[0] != "_" and ("method", name) not in ROWS and hasattr(llm, name):
            raise AttributeError(f"AsyncLLM has no {name}: engine.llm.{name} is the LLM's; what "
                                 "changes it goes between two steps, await "
                                 f"engine.between_steps(engine.llm.{name})")
        raise AttributeError(missing_method(name, dir(type(self)), "AsyncLLM"))

    # --------------------------------------------------------------- health

    def check_health(self) -> None:
        """Raises `EngineDeadError` if the engine is dead, also if a rank died while it was idle."""
        if self.dead is not None:
            raise self._death()
        try:
            self.llm.check_open()
        except RuntimeError as error:
            raise EngineDeadError(f"the engine is dead: {words_of(error)}") from error

    def _death(self) -> EngineDeadError:
        error = EngineDeadError(f"the engine is dead: {words_of(self.dead)}")
        error.__cause__ = self.dead
        return error

    def shutdown(self) -> None:
        """End all requests and give back all memory. Waits for the step that runs, so call it from
        outside the event loop, or use `async with`. Calling it twice is fine."""
        self.posted.put(self._stop)
        self.thread.join()
        self.tokenizing.shutdown()
        self.llm.shutdown()

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(self, *exc_info) -> None:
        await asyncio.to_thread(self.shutdown)

    # -------------------------------------------------- the thread of steps

    def _run(self) -> None:
        reason: BaseException = RuntimeError("it was shut down")
        try:
            while not self.stopping:
                try:
                    work = self.posted.get(timeout=self._patience())
                except Empty:
                    self._step()
                else:
                    self._do(work)
        except BaseException as error:
            reason = error
        self._end(reason)

    def _patience(self) -> float | None:
        """How many seconds to wait for more work before the next step; None: for ever.

        A step that reads its layers from a disk costs as much for one prompt as for many. So the
        first prompts that come to an idle engine wait for others, up to `max_wait`, or until they
        fill a step. While a request runs, new ones don't wait: they join the next step, which reads
        all layers anyway (docs/extras.md).
        """
        if not self.llm.has_unfinished_requests():
            return None
        scheduler, config, waiting = self.llm.scheduler, self.llm.config, self.llm.scheduler.waiting
        if scheduler.running or scheduler.in_flight or not waiting or (
                len(waiting) >= config.max_num_seqs
                or sum(seq.num_tokens for seq in waiting) >= config.max_num_batched_tokens):
            return 0
        first = min(seq.request.arrival_time for seq in waiting)
        plan = self.llm.extra(LayerPlan)
        return max(0, first + (plan.options.max_wait if plan else 0) - time.time())

    def _step(self) -> None:
        """Run one step. Raises when the engine can't go on."""
        try:
            self.llm.step()
            self.num_failures = 0
        except Exception as error:
            traceback.print_exc()
            self.num_failures += 1
            if self.num_failures == MAX_FAILURES:
                raise
            self.llm.check_open()
            failed = EngineGenerateError(f"a step of the engine failed: {type(error).__name__}: "
                                         f"{words_of(error)}")
            failed.__cause__ = error
            self._fail_all(failed)

    def _fail_all(self, error: EngineGenerateError) -> None:
        for inbox in list(self.inboxes):
            inbox.fail(error)
            self._do(partial(self._leave, inbox))

    def _do(self, work: Callable[[], None]) -> None:
        """Do posted work. If it fails (a tokenizer at the rest of an aborted text), other work goes
        on."""
        try:
            work()
        except Exception:
            traceback.print_exc()

    def _submit(self, inbox: "AsyncInbox", requests: list[Request]) -> None:
        if self.dead is not None:
            inbox.fail(self._death())
            return
        self.inboxes.add(inbox)
        try:
            for request in requests:
                self.llm.submit(request, inbox)
                inbox.requests[request.request_id] = request
        except Exception as error:  # an id in use
            inbox.fail(error)
            self._leave(inbox)

    def _leave(self, inbox: "AsyncInbox") -> None:
        """The reader is gone: abort what still runs."""
        self.inboxes.discard(inbox)
        self.llm.abort(list(inbox.requests.values()))

    def _stop(self) -> None:
        self.stopping = True

    def _end(self, reason: BaseException) -> None:
        """Hand the error to all inboxes, also to those that are still in the queue."""
        with self.lock:
            self.dead = reason
        self._fail_all(self._death())
        while not self.posted.empty():
            self._do(self.posted.get())

    # ---------------------------------------------------------------- posting

    def _post(self, work: Callable[[], None]) -> None:
        """Put work into the queue. May be called in any thread, and never waits for a step."""
        with self.lock:
            if self.dead is not None:
                raise self._death()
            self.posted.put(work)

    def _doorbell(self) -> "Doorbell":
        loop = asyncio.get_running_loop()
        if self.bell is None or self.bell.loop is not loop:
            self.bell = Doorbell(loop, self.pace)
        return self.bell


# ------------------------------------------- from the thread to the event loop


class Doorbell:
    """Wakes an event loop once for all inboxes that a step has outputs for, and not too often.

    pace: how many inboxes may be woken in a second. Waking 64 inboxes for one token each takes the
    loop as long as a small model's step. So after waking 64 it pauses for 64 / pace seconds, and
    outputs that come meanwhile are merged. With one inbox the pause is too short to notice.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, pace: float):
        self.loop, self.pace = loop, pace
        self.lock = Lock()  # the inboxes take the same
        self.rung: list[AsyncInbox] = []
        self.resting = False

    def ring(self, inbox: "AsyncInbox") -> None:
        """Call it with the lock held, from any thread. A closed loop has no inboxes left."""
        self.rung.append(inbox)
        if len(self.rung) == 1 and not self.resting:
            with suppress(RuntimeError):
                self.loop.call_soon_threadsafe(self._answer)

    def _answer(self) -> None:
        with self.lock:
            rung, self.rung = self.rung, []
            self.resting = bool(rung)  # and then this is called again
        for inbox in rung:
            inbox.news.set()
        if rung:
            self.loop.call_later(len(rung) / self.pace, self._answer)


class AsyncInbox:
    """The unread outputs of one generator: at most one for each of its requests. The engine hands
    it the outputs of all these requests."""

    def __init__(self, bell: Doorbell):
        self.bell = bell
        self.requests: dict[str, Request] = {}  # those that were submitted, by their ids
        self.unread: dict[str, RequestOutput] = {}
        self.error: BaseException | None = None
        self.news = asyncio.Event()

    def append(self, output: RequestOutput) -> None:
        """Called in the thread of steps. After an error nothing is added: the output of the abort
        that follows would look like a normal end."""
        with self.bell.lock:
            if self.error is not None:
                return
            older = self.unread.get(output.request_id)
            # A pooling request has no `output_kind`, and one output only.
            kind = getattr(self.requests[output.request_id].params, "output_kind", None)
            if older is not None and kind is RequestOutputKind.DELTA:
                output = merged(older, output)
            self.unread[output.request_id] = output
            if older is None:
                self.bell.ring(self)

    def fail(self, error: BaseException) -> None:
        """Let `take` raise this error, after the unread outputs."""
        with self.bell.lock:
            self.error = self.error or error
            self.bell.ring(self)

    async def take(self, seconds: float | None = None) -> RequestOutput | None:
        """The next output, that of the request which has waited longest. None: none came in time.
        """
        while True:
            with self.bell.lock:
                if self.unread:
                    return self.unread.pop(next(iter(self.unread)))
                if self.error is not None:
                    raise self.error
                self.news.clear()  # only the loop sets it: nothing is lost between here and there
            try:
                async with asyncio.timeout(seconds):
                    await self.news.wait()
            except TimeoutError:
                return None


def merged(older: RequestOutput, newer: RequestOutput) -> RequestOutput:
    """Two DELTAs of a request as one. The older one's lists grow: it was not handed out."""
    for before, sample in zip(older.outputs, newer.outputs, strict=True):
        sample.text = before.text + sample.text
        before.token_ids += sample.token_ids
        sample.token_ids = before.token_ids
        if sample.logprobs is not None:
            before.logprobs += sample.logprobs
            sample.logprobs = before.logprobs
    if newer.prompt_logprobs is not None:
        older.prompt_logprobs += newer.prompt_logprobs
        newer.prompt_logprobs = older.prompt_logprobs
    return newer


def _settle(done: Future, work: Callable[[], Any]) -> None:
    try:
        done.set_result(work())
    except BaseException as error:
        done.set_exception(error)
