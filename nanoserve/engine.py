"""The loop: `LLMEngine` takes requests in, runs them step by step, and hands outputs over.

    submit ──► Request ──► Scheduler.waiting
                               │ schedule()     how many tokens of which sequence
                ┌───────────► Step ──► ModelRunner.launch()    forward, sample
            next step                       │ tokens, on the device
                └───────────── Scheduler.update() ──► Request.output() ──► inbox

With `async_scheduling` a step is launched before the host has read the previous step's tokens
(overlap depth 1), otherwise after (depth 0). Both give the same tokens.

Threads share an engine and take turns, step by step. A signal handler, or the garbage collector
closing a forgotten stream, may call `abort` and `shutdown` in the middle of a step: the work is
then posted, and done between two steps (turns.py).

Invariant: a step takes effect in `Scheduler.update()` and not before. So after an error or Ctrl-C
within a step, every unfinished request can go on or be aborted. Ctrl-C waits for the turn's end,
except while an engine of one rank launches a step.

Not known here: checkpoints, devices, how prompts are checked. Optional ideas are *extras*
(hooks.py); the engine does not know their names. Road not taken: an engine that steps by itself in
a thread of its own, as in a server; a loop in the caller's thread can be followed in a debugger.
"""

import os
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, nullcontext
from itertools import count

from nanoserve import hooks
from nanoserve.config import EngineConfig, SamplingParams
from nanoserve.inputs import InputProcessor, Prompt
from nanoserve.model_runner import ModelRunner
from nanoserve.progress import say
from nanoserve.request import Inbox, Request, RequestOutput
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import Sequence, Step
from nanoserve.turns import Turns


class LLMEngine:
    """The engine of one model; `LLM` makes it. Names are those of vLLM's `LLMEngine`.

    runner: already has its KV cache of `num_blocks` blocks. inputs: makes a checked request from a
    prompt and its parameters.
    """

    def __init__(self, config: EngineConfig, runner: ModelRunner, num_blocks: int,
                 inputs: InputProcessor, extras: list[hooks.Extra]):
        self.config, self.runner, self.inputs = config, runner, inputs
        self.extras, self.hooks = list(extras), hooks.Hooks()
        self.scheduler = Scheduler(config, num_blocks, runner.window, self.hooks,
                                   runner.parts.num_drafts or None,
                                   runner.model_config.vocab_size)
        self.depth = max(1, config.steps_at_once - 1) if config.async_scheduling else 0
        self.requests: dict[str, Request] = {}
        self.inbox: list[RequestOutput] = []  # outputs of `add_request`'s requests, for step()
        self.turns, self.in_step = Turns(), False
        self.num_arrived, self.names = 0, count(1)  # names: ids for requests without one
        self.check_every_step = os.environ.get("NANOSERVE_CHECK") == "1"
        for extra in extras:
            extra.engine = weakref.proxy(self)
            extra.attach(self)
        self.hooks.keep(self.extras)

    # ---------------------------------------------------------- extras, between two steps

    def check_added(self, extra: hooks.Extra) -> None:
        """Raises `ValueError` for an extra that changes how an engine is made: this engine's
        weights, cache and buffers exist already."""
        hooks.checked([*self.extras, extra], self.config.scheduling_policy)
        if extra.most_drafts and self.scheduler.most_drafts is None:
            raise ValueError(f"{extra.name} drafts: it needs an engine with no overlap, and with "
                             "buffers for drafts: make the engine with extras=[...]")
        if type(extra).prepare is not hooks.Extra.prepare:
            raise ValueError(f"{extra.name} can't be added to an engine that runs, because it "
                             "changes how one is made: make the engine with extras=[...]")

    def add(self, extra: hooks.Extra) -> None:
        """Add one more extra, between two steps. Its hooks are called after those of all others.
        If `check_added` raises `ValueError`, nothing is added."""
        with self.turns:
            self.check_added(extra)
            extra.engine = weakref.proxy(self)
            extra.attach(self)  # an error in it leaves the engine as it was
            self.extras.append(extra)
            self.hooks.keep(self.extras)

    def remove(self, extra: hooks.Extra) -> None:
        """Remove an extra, between two steps. Its `close` is not called. Raises `ValueError` for
        one that the engine doesn't have."""
        with self.turns:
            if extra not in self.extras:
                raise ValueError(f"{extra!r} can't be removed: it is not among llm.extras")
            self.extras.remove(extra)
            self.hooks.keep(self.extras)
            self.scheduler.sort()  # the removed extra may have defined the order

    # ---------------------------------------------------------- requests in

    def make_request(self, request_id: str, prompt: Prompt,
                     sampling_params: SamplingParams | None = None, priority: int = 0,
                     **given: object) -> Request:
        """Tokenise and check a request. Queues nothing; raises `ValueError`. Every accepted request
        fits in the KV cache, because a sequence of `max_model_len` tokens does. given: arguments
        for extras, such as an adapter."""
        self.check_open()
        request = self.inputs.process(request_id, prompt, sampling_params, priority, **given)
        for check in self.hooks.check:
            check(request)
        return request

    def make_requests(self, prompts: Prompt | list[Prompt], sampling_params: object = None,
                      priority: object = None, **given: object) -> list[Request]:
        """Make one request for each prompt. Queues nothing; raises `ValueError` if any prompt is
        invalid. sampling_params, priority, and each argument in `given`: a value for all prompts,
        or a list with one for each."""
        self.check_open()
        prompts = self.inputs.list_prompts(prompts)
        given["sampling_params"] = sampling_params
        given["priority"] = 0 if priority is None else priority
        requests = []
        for i, own in enumerate(self.inputs.arguments_of(len(prompts), given)):
            try:
                requests.append(self.make_request("", prompts[i], **own))
            except ValueError as error:
                requests.clear()  # the traceback would keep them and their adapters alive
                where = f"prompt {i}: " if len(prompts) > 1 else ""
                raise ValueError(f"{where}{error}") from error
        return requests

    def submit(self, request: Request, inbox: Inbox) -> None:
        """Queue a request. Its outputs go to `inbox`, which may be anything with `append`. Raises
        `ValueError`, and queues nothing, if its id is in use."""
        with self.turns:
            self.check_open()
            if not request.request_id:  # chosen late: a stream may start long after it was made
                request.request_id = next(
                    name for name in map(str, self.names) if name not in self.requests)
            if request.request_id in self.requests:
                raise ValueError(f"request_id={request.request_id!r} is in use: choose another")
            sequences = request.start(self.num_arrived, self.config.seed)  # first, as it may raise
            self.num_arrived += 1
            request.inbox = inbox
            self.requests[request.request_id] = request
            for seq in sequences:
                self.scheduler.add(seq)
            for tell in self.hooks.added:
                tell(request)

    def add_request(self, request_id: str, prompt: Prompt,
                    sampling_params: SamplingParams | None = None, priority: int = 0,
                    **given: object) -> None:
        """`make_request` and `submit`: queue one request, whose outputs `step()` returns."""
        self.submit(self.make_request(request_id, prompt, sampling_params, priority, **given),
                    self.inbox)

    def abort_request(self, request_id: str | list[str]) -> None:
        """Abort requests by id, one or several; unknown ids are ignored."""
        if not isinstance(request_id, (str, Iterable)):
            raise ValueError(f"request_id={request_id!r} must be a str or a list of such")
        ids = [request_id] if isinstance(request_id, str) else request_id
        self.abort([self.requests[one] for one in ids if one in self.requests])

    def has_unfinished_requests(self) -> bool:
        """Whether `step()` has work left, or an output to return that is not of an abort."""
        return bool(self.requests or self.scheduler.in_flight
                    or any(not output.aborted for output in self.inbox))

    # ---------------------------------------------------------------- the loop

    def step(self) -> list[RequestOutput]:
        """Run one step. Returns a `RequestOutput` for each request of `add_request` that got tokens
        or ended; with `output_kind` FINAL_ONLY only for those that ended."""
        with self.turns:
            self.advance()
            self.turns.deliver_ctrl_c()  # now, while the outputs are still in the inbox
            outputs, self.inbox[:] = self.inbox[:], []  # the list object stays: requests have it
            return outputs

    def drive(self, requests: list[Request]) -> Iterator[RequestOutput]:
        """Submit, step until all are done, and abort the rest if a step fails or the caller stops.

        A step computes tokens for the requests of all callers, and each output goes to the inbox of
        its own request. So one thread's steps may deliver another thread's outputs.
        """
        inbox: list[RequestOutput] = []
        num_unfinished = len(requests)
        try:
            for request in requests:
                self.submit(request, inbox)
            while num_unfinished:
                with self.turns:
                    if not inbox:
                        self.advance()
                    outputs, inbox[:] = inbox[:], []
                for output in outputs:
                    num_unfinished -= output.finished
                    yield output
        finally:
            self.abort(requests)

    def advance(self) -> None:
        """schedule -> build batch -> forward -> sample -> update, with `depth` steps in flight.
        Call it within a turn only. After an error no request is lost: the tokens that were in
        flight are scheduled again."""
        if self.in_step:
            raise RuntimeError("a signal handler can't step in the middle of a step: abort instead")
        try:
            self.in_step = True
            self.check_open()
            step = self.scheduler.schedule()
            if self.hooks.force or self.hooks.draft:
                self.scheduler.add_drafts(step)
            for tell in self.hooks.scheduled:
                tell(step)
            if step.num_new_tokens:
                self._launch(step)
            in_flight = self.scheduler.in_flight
            if len(in_flight) > self.depth or (in_flight and not step.num_new_tokens):
                self._take_result()
            else:
                assert self.scheduler.has_unfinished() or not self.requests, (
                    f"nothing is left of {list(self.requests)}, which have not ended")
        except BaseException:
            try:
                if self.runner is not None:
                    self.runner.synchronize()
            finally:
                self.scheduler.drop_in_flight()
            raise
        finally:
            self.in_step = False

    def _launch(self, step: Step) -> None:
        # A rank stopped inside a step would no longer match the others' collectives.
        is_alone = self.runner.ranks.size == 1
        interruptible = self.turns.interruptible() if is_alone else nullcontext()
        with interruptible, self.runner.on_device():
            for call in self.hooks.launching:
                call(step)
            step.output = self.runner.launch(step)

    def _take_result(self) -> None:
        """Wait for the oldest step in flight and take its tokens into account. They count as soon
        as `update` is called; Ctrl-C is held until the outputs are in their inboxes."""
        step = self.scheduler.in_flight[0]
        token_ids, logprobs, prompt_logprobs = self.runner.fetch(step.output)
        self._fail(step.failed | step.output.failed)
        if without_token := step.without_token(token_ids):
            self._fail(dict.fromkeys(without_token, no_numbers("its logits", self.config.dtype)))
        self._keep_prompt_logprobs(step, prompt_logprobs)
        try:
            self.scheduler.update(step, token_ids)
            for tell in self.hooks.updated:
                tell(step, step.accepted)
        except BaseException:  # an extra failed; the ones after it were not told of the step
            for tell in self.hooks.dropped:
                tell(step)
            raise
        finally:  # tokens that count must reach their callers
            self._collect(step.accepted, step.by_sequence(logprobs))
        if self.check_every_step:
            self.scheduler.check()

    def _keep_prompt_logprobs(self, step: Step, entries: list[list]) -> None:
        """Give each request its entries. entries: one for each prompt position that the step has
        scored, sequence by sequence."""
        start = 0
        for seq, positions in step.prompt_logprob_positions.items():
            end = start + len(positions)
            own = entries[start:end]
            start = end
            if seq.finish_reason is not None:
                continue  # the sequence was aborted meanwhile
            try:
                self.requests[seq.request.request_id].add_prompt_logprobs(
                    positions, own)
            except FloatingPointError as error:
                self._fail({seq: no_numbers(error, self.config.dtype)})
            except Exception as error:  # the tokenizer may raise any
                self._fail({seq: str(error)})

    def _fail(self, failed: dict[Sequence, str]) -> None:
        """End the requests of some sequences, and no others. failed: sequence -> reason."""
        for seq, error in failed.items():
            if seq.finish_reason is None:
                why = f"request {seq.request.request_id}: {error}"
                say(why)
                self._end([self.requests[seq.request.request_id]], why)

    def _collect(self, accepted: dict[Sequence, list[int]], logprobs: dict[Sequence, list]) -> None:
        """Turn new tokens into text, look for stop strings, and hand over the outputs.

        `update` has counted the tokens already, so every caller must get them. If the tokenizer
        fails on a request, only that request ends; the error is raised after all outputs are handed
        over.
        """
        errors: list[Exception] = []
        request_of = {seq: self.requests[seq.request.request_id] for seq in accepted}
        for seq, request in request_of.items():
            try:
                is_over = request.add_tokens(seq, logprobs.get(seq))
            except Exception as error:
                errors.append(error)
                self.scheduler.finish(seq, "abort", None, request.samples[seq.index].num_read)
                continue
            if is_over:
                sample = request.samples[seq.index]
                self.scheduler.finish(seq, "stop", sample.detokenizer.stop_string, sample.num_read)
        self._hand_over(dict.fromkeys(request_of.values()),
                        [seq for seq in accepted if seq.finish_reason is not None])
        if errors:
            raise errors[0]

    def _hand_over(self, requests: Iterable[Request], ended: list[Sequence]) -> None:
        """Put outputs into inboxes, and forget finished requests. Extras are called after that, so
        that no output waits for their work."""
        for request in requests:
            finished = request.finished
            if finished:
                del self.requests[request.request_id]
            if finished or request.is_streamed:
                request.inbox.append(request.output())
        for tell in self.hooks.ended:
            tell(ended)
        if self.hooks.idle and not self.scheduler.has_unfinished():
            for work in self.hooks.idle:
                work()

    # ------------------------------------------------------------------- ends

    def abort(self, requests: list[Request]) -> None:
        """End those of the requests that are unfinished, now or after the current step. Their
        outputs so far go to their inboxes, with `finish_reason` "abort". May be called at any time
        and from anywhere. An error of a tokenizer or an extra is raised after all outputs."""
        def work() -> None:
            try:
                self._end(requests)
            finally:
                # No caller would step for these.
                while self.scheduler.in_flight and not self.requests:
                    self.advance()  # schedules nothing, and takes the result of one step
        self.turns.post(work)

    def _end(self, requests: list[Request], why: str | None = None) -> None:
        """Abort requests and hand over their outputs. After that, the error of a tokenizer or an
        extra is raised. why: the `stop_reason`, if the engine ends them."""
        with ExitStack() as ends:  # it calls all of them, the last one first
            for request in reversed(requests):
                ends.callback(self._abort, request, why)

    def _abort(self, request: Request, why: str | None) -> None:
        if self.requests.get(request.request_id) is not request:
            return  # it has ended or was never submitted; another request may have its id now
        for seq in request.sequences:
            self.scheduler.finish(seq, "abort", why)
        try:
            request.flush()
        finally:
            self._hand_over([request], request.sequences)

    def shutdown(self) -> None:
        """Give back all memory; a second call is harmless. Waits for another thread's step. Within
        a step, in a signal handler say, it takes effect when that step ends."""
        if self.turns.is_within():
            self.turns.post(self._close)
        else:
            with self.turns, self.turns.interruptible():
                self._close()

    def _close(self) -> None:
        self.requests.clear()
        self.scheduler.drop_in_flight()
        # The stack calls all of them, last one first, even if one fails or Ctrl-C comes meanwhile.
        with ExitStack() as ends:
            ends.callback(setattr, self, "runner", None)
            for part in filter(None, (self.runner, *self.extras)):
                ends.callback(part.close)

    def check_open(self) -> None:
        """Raises `RuntimeError` after `shutdown`, or when a rank has died."""
        if self.runner is None:
            raise RuntimeError("this engine was shut down: make a new LLM")
        self.runner.ranks.raise_if_broken()

    # -------------------------------------------------------------- the rest

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. Returns False, and changes nothing, while requests run."""
        with self.turns:
            self.check_open()
            done = self.scheduler.blocks.reset_prefix_cache()
            if done:
                for reset in self.hooks.reset:
                    reset()
            return done


def no_numbers(what: object, dtype: str) -> str:
    """The reason for which a request ends. what: the result that has NaN or infinity in it."""
    return f"NaN or infinity in {what}, with dtype={dtype!r}: " + (
        "float16 ends at 65,504, use 'bfloat16' or 'float32'" if dtype == "float16" else
        "look at the weights, the adapter, and what logits_processors return")
