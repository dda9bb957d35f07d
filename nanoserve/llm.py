"""The loop and the public API: the one place where the parts are wired together.

    add_request ──► InputProcessor ──► Scheduler.waiting
                                           │ schedule()     who computes how many tokens
                            ┌───────────► Step ──► ModelRunner.launch()    forward, sample
                        next step                       │ tokens, on the device
                            └───────────── Scheduler.update() ──► Request.output()

`LLM._advance()` is that picture; `step` runs it once, `generate`, `chat` and `stream` loop. With
`async_scheduling` a step is launched before the previous one's tokens are looked at (overlap depth
1), otherwise after (depth 0). Both give the same tokens.

Invariants: a request is checked completely before any work starts, so one bad prompt among many
costs nothing; and whatever happens in a step (an error, Ctrl-C), every request that was not
finished can still be aborted or go on, because a step takes effect only in `update()`.

The same loop generates, drafts and pools. An extra may put guesses into a step (`drafter`) or take
the sampler's place (a pooler, inside the runner); others watch (`observers`) and change nothing.
None is imported unless it is asked for.

The names and defaults are vLLM's, so that its users can change one import. What is not supported
raises; nothing is accepted and ignored. Road not taken: a background thread that steps by itself; a
loop one can single-step in a debugger teaches more, and a server can own the thread.
"""

import os
import sys
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import closing, nullcontext
from dataclasses import fields
from pathlib import Path

from nanoserve.checkpoint.hub import find_model
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.checkpoint.tokenizers import load_tokenizer
from nanoserve.config import EngineConfig
from nanoserve.device.choice import fit_to_device, pick_device
from nanoserve.frontend.metrics import Counter, EngineMetrics, Gauge, Histogram, Progress
from nanoserve.frontend.request import InputProcessor, Prompt, Request, as_list, one_for_each
from nanoserve.model_runner import LAST_WORD, ModelRunner, serve_rank
from nanoserve.parallel.processes import start_ranks
from nanoserve.parallel.ranks import Ranks
from nanoserve.sampling_params import RequestOutputKind, SamplingParams
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import RequestOutput, Sequence, Step
from nanoserve.turns import Turns, ctrl_c_held, in_turn, take_all

BUNDLED_MODEL = Path(__file__).parent / "assets" / "storyteller"


class LLM:
    """An engine with one model. `LLM(model, **options)`; the options are `EngineConfig`'s fields.

    model: a local folder or a hub id; without one, the bundled story model. Raises `ValueError` for
    options or checkpoints that can't work, `TypeError` for options that do not exist.
    """

    def __init__(self, model: str | Path = BUNDLED_MODEL, **options):
        known = {f.name for f in fields(EngineConfig)} - {"model"}
        if unknown := sorted(set(options) - known):
            raise TypeError(f"LLM() got unexpected keyword arguments {', '.join(unknown)}; it "
                            f"takes {', '.join(sorted(known))}")
        asked = EngineConfig(model=str(model), **options)
        folder = find_model(model, weights=asked.load_format != "dummy",
                            code=asked.trust_remote_code)
        self.model_config = ModelConfig.from_folder(folder, asked.hf_overrides)
        config = asked.resolved(pick_device(asked.device), self.model_config)
        config, said = fit_to_device(config, asked)
        _say(*said)
        config.check_ranks(self.model_config)
        self.tokenizer = None if config.skip_tokenizer_init else load_tokenizer(
            folder, config.tokenizer, optional=config.load_format == "dummy",
            trust_remote_code=config.trust_remote_code)
        pooler, make_inputs = None, InputProcessor
        if config.runner == "pooling":
            from nanoserve.extras.pooling import prepare  # here: the core runs without extras
            pooler, make_inputs = prepare(config, self.model_config, folder, self.tokenizer)
        if config.speculative_config is not None:
            from nanoserve.extras.speculative import check
            config = check(config, self.model_config, self.tokenizer, _say)
        ranks = _start_ranks(config, folder, pooler)
        # Also when nobody calls shutdown(): the ranks end with the engine, or with the script.
        weakref.finalize(self, ranks.close, LAST_WORD)
        try:
            self.runner = ModelRunner(config, self.model_config, folder, ranks, pooler=pooler)
            num_blocks = self.runner.count_kv_blocks()
            self.config, said = config.fit_to_cache(num_blocks, asked.max_model_len)
            _say(*said)
            self.runner.agree_on_cache(num_blocks, self.config.max_model_len)
            self.runner.allocate_kv_cache(num_blocks, self.config.max_model_len)
            self.runner.record_graphs()
        except BaseException:
            ranks.abort("the engine could not be made")
            raise
        self.scheduler = Scheduler(self.config, num_blocks, self.model_config.window)
        self.metrics = EngineMetrics(config.enable_prefix_caching)
        self.observers, self.trace = [self.metrics], None  # told what happens, they change nothing
        if config.trace is not None:
            from nanoserve.tools.recorder import attach  # here: the core runs without it
            self.trace = attach(self, config.trace, _say)
        self.drafter = None
        if config.speculative_config is not None:
            from nanoserve.extras.speculative import Drafter
            self.drafter = Drafter(self)
        self.inputs = make_inputs(self.config, self.model_config, self.tokenizer)
        self.depth = 1 if config.async_scheduling else 0
        self.in_flight: deque = deque()  # (step, its output on the device)
        self.requests: dict[str, Request] = {}
        self.lock = Turns()  # threads may share an engine: they take turns step by step
        self.inbox: list[RequestOutput] = []  # of requests added by hand: for the next step()
        self.num_arrived = self.num_named = 0
        self.check_every_step = os.environ.get("NANOSERVE_CHECK") == "1"
        _say(self._describe(num_blocks))

    # ----------------------------------------------------------- the engine

    def step(self) -> list[RequestOutput]:
        """Run one step. Returns a `RequestOutput` for each request of `add_request` that got tokens
        or ended; with `output_kind` FINAL_ONLY only where it ended."""
        with self.lock:
            self._advance()
            return take_all(self.inbox)

    @in_turn
    def _advance(self) -> None:
        """schedule -> build batch -> forward -> sample -> update, `depth` steps ahead."""
        self._check_open()
        try:
            with ctrl_c_held():
                step = self.scheduler.schedule()
                for observer in self.observers:
                    observer.scheduled(step)
            if step.num_new_tokens:
                # Ranks that are stopped in the middle of a step would be out of step for good.
                with ctrl_c_held() if self.runner.ranks.size > 1 else nullcontext():
                    self.in_flight.append((step, (self.drafter or self.runner).launch(step)))
            if len(self.in_flight) > self.depth or not step.num_new_tokens:
                self._take_result()
        except BaseException:
            self._drop_in_flight()
            raise

    def _drop_in_flight(self) -> None:
        """Forget the launched steps; no request is lost, their tokens are asked for again."""
        with ctrl_c_held():
            try:
                self.runner.synchronize()
            finally:
                self.in_flight.clear()
                self.scheduler.drop_in_flight()

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

    # ------------------------------------------------- driving it by hand

    def add_request(self, request_id: str, prompt: Prompt,
                    sampling_params: SamplingParams | None = None, priority: int = 0) -> None:
        """Queue one request; `step()` works on it. Raises `ValueError` and queues nothing if it is
        wrong (see `make_request`) or its id is in use."""
        self._submit(self.make_request(request_id, prompt, sampling_params, priority), self.inbox)

    def abort_request(self, request_id: str | list[str]) -> None:
        """End a request, or several, wherever it is and give back its blocks; unknown ids are
        ignored. The next `step()` returns what it has generated, with `finish_reason` "abort". From
        within a step (a signal's handler) it waits for its end."""
        if not isinstance(request_id, (str, Iterable)):
            raise ValueError(f"request_id={request_id!r} must be a str or a list of such")
        request_ids = [request_id] if isinstance(request_id, str) else list(request_id)
        self.lock.run(lambda: self._abort(request_ids))

    @in_turn
    def _abort(self, request_ids: list[str]) -> None:
        """A tokenizer that fails at the rest of a text keeps nothing running, and no output back:
        it is heard of when all of them have ended."""
        errors: list[Exception] = []
        with ctrl_c_held():
            for one in request_ids:
                request = self.requests.pop(one, None)
                if request is None:
                    continue
                for seq in request.sequences:
                    self.scheduler.finish(seq, "abort")
                try:
                    request.flush()
                except Exception as error:
                    errors.append(error)
                for observer in self.observers:
                    observer.ended(request.sequences)
                request.inbox.append(request.output())
        if errors:
            raise errors[0]

    def has_unfinished_requests(self) -> bool:
        """Whether `step()` has work left, or a result to hand over (an aborted one doesn't count:
        whoever aborted it need not wait for it)."""
        return bool(self.requests or self.in_flight) or any(
            not output.aborted for output in self.inbox)

    def make_request(self, request_id: str, prompt: Prompt,
                     sampling_params: SamplingParams | None = None, priority: int = 0) -> Request:
        """Tokenise and check a request without touching the engine's state.

        Raises `ValueError` for whatever `InputProcessor.process` refuses. What passes fits in the
        KV cache, because `max_model_len` does.
        """
        self._check_open()
        return self.inputs.process(request_id, prompt, sampling_params, priority)

    @in_turn
    def _submit(self, request: Request, inbox: list[RequestOutput]) -> None:
        with ctrl_c_held():
            self._check_open()
            if request.request_id in self.requests:
                raise ValueError(f"request_id={request.request_id!r} is in use: choose another")
            sequences = request.start(self.num_arrived, self.config.seed)  # may raise: do it first
            self.num_arrived += 1
            request.inbox = inbox
            self.requests[request.request_id] = request
            for seq in sequences:
                self.scheduler.add(seq)
            for observer in self.observers:
                observer.added(sequences, request.stats, request.prompt)

    # ------------------------------------------------------ offline batches

    def generate(self, prompts: Prompt | list[Prompt],
                 sampling_params: SamplingParams | list[SamplingParams] | None = None, *,
                 use_tqdm: bool = True, priority: list[int] | None = None,
                 summarize: bool = False) -> list[RequestOutput]:
        """Generate for one prompt or many; results come in the order of the prompts.

        prompts: a str, {"prompt": ...}, {"prompt_token_ids": [...]}, a list of token ids, or a list
        of these. sampling_params: one for all, one for each, or None for the model's defaults.
        priority: one for each, the lowest first. summarize: end with a line of what it took.
        Raises `ValueError` before any work starts. After Ctrl-C the engine stays usable.
        """
        self.inputs.check_generates()
        requests = self._make_requests(prompts, sampling_params, priority)
        for request in requests:
            request.params.output_kind = RequestOutputKind.FINAL_ONLY
        results = {}
        with closing(self._drive(requests)) as outputs, Progress(
                len(requests), use_tqdm, _say if summarize else None) as progress:
            for output in outputs:
                results[output.request_id] = output
                progress.finished(output)
        return [results[request.request_id] for request in requests]

    def stream(self, prompts: Prompt | list[Prompt],
               sampling_params: SamplingParams | list[SamplingParams] | None = None, *,
               priority: list[int] | None = None) -> Iterator[RequestOutput]:
        """Like `generate`, but yields each request's outputs while they grow.

        The text of an output never ends in half a character, nor shows the beginning of a stop
        string. With `output_kind` DELTA each output carries only what is new. Closing the iterator
        aborts what is left.
        """
        self.inputs.check_generates()
        return self._drive(self._make_requests(prompts, sampling_params, priority))

    def chat(self, messages: list, sampling_params: SamplingParams | list | None = None, *,
             use_tqdm: bool = True, chat_template: str | None = None,
             add_generation_prompt: bool = True, continue_final_message: bool = False,
             chat_template_kwargs: dict | None = None) -> list[RequestOutput]:
        """`generate` for one conversation, or a list of them, through the chat template.

        messages: dicts with "role" and "content". Raises `ValueError` without a template.
        """
        many = isinstance(messages, (list, tuple)) and not any(
            isinstance(message, dict) for message in messages)
        options = dict(
            chat_template=chat_template, continue_final_message=continue_final_message,
            add_generation_prompt=add_generation_prompt and not continue_final_message)
        options |= chat_template_kwargs or {}
        prompts = [self.inputs.render_chat(conversation, **options)
                   for conversation in (messages if many else [messages])]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def _make_requests(self, prompts, sampling_params, priority) -> list[Request]:
        """Check everything first: a list of params or priorities must match the prompts."""
        self._check_open()
        prompts = as_list(prompts)
        params = one_for_each(sampling_params, len(prompts), "sampling_params")
        priorities = one_for_each(priority, len(prompts), "priority")
        requests = []
        for i, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
            try:
                requests.append(self.make_request("", prompt, param, priorities[i] or 0))
            except ValueError as error:
                where = f"prompt {i}: " if len(prompts) > 1 else ""
                raise ValueError(f"{where}{error}") from error
        return requests

    def _name(self, request: Request) -> None:
        """Give it a number that nobody uses as an id."""
        self.num_named += 1
        while str(self.num_named) in self.requests:
            self.num_named += 1
        request.request_id = str(self.num_named)

    def _drive(self, requests: list[Request]) -> Iterator[RequestOutput]:
        """Submit, step until all are done, and abort the rest if the caller or a step gives up.

        Whoever steps moves all requests on, but an output goes into the inbox of those who asked
        for it: what was added by hand waits for the next `step()`, and a stream's own for it here.
        """
        inbox: list[RequestOutput] = []
        num_unfinished = len(requests)
        try:
            for request in requests:
                with self.lock:
                    self._name(request)  # not earlier: a stream may start long after it was made
                    self._submit(request, inbox)
            while num_unfinished:
                with self.lock:
                    if not inbox:
                        self._advance()
                    outputs = take_all(inbox)
                for output in outputs:
                    num_unfinished -= output.finished
                    yield output
        finally:
            self.lock.run(lambda: self._give_up(requests))

    @in_turn
    def _give_up(self, requests: list[Request]) -> None:
        """Abort those that still run, and end the steps in flight, which may hold their blocks."""
        with ctrl_c_held():
            try:
                self._abort([request.request_id for request in requests
                             if self.requests.get(request.request_id) is request])
                while self.in_flight:
                    self._take_result()
            except BaseException:
                self._drop_in_flight()
                raise
            finally:
                if self.trace:
                    self.trace.write()

    # -------------------------------------------------------------- the rest

    def get_metrics(self) -> list[Counter | Gauge | Histogram]:
        """The engine's numbers now, in vLLM's names: see `metrics.EngineMetrics.read`."""
        self._check_open()
        return self.metrics.read(self.scheduler, self.config.model) + (
            self.drafter.read_metrics() if self.drafter else [])

    def get_tokenizer(self):
        """The Hugging Face tokenizer, None with `skip_tokenizer_init`."""
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What generation_config.json recommends, else the defaults of `SamplingParams`."""
        return self.inputs.default_sampling_params()

    @in_turn
    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, and no change, while requests are running."""
        with ctrl_c_held():
            self._check_open()
            return self.scheduler.blocks.reset_prefix_cache()

    def encode(self, prompts, pooling_params=None, **options) -> list:
        """What prompts, or their tokens, become: see `extras.pooling.PoolingInputs.encode`."""
        return self._pool("encode", prompts, pooling_params, **options)

    def embed(self, prompts, **options) -> list:
        """A vector for each prompt: see `extras.pooling.PoolingInputs.embed`."""
        return self._pool("embed", prompts, **options)

    def classify(self, prompts, **options) -> list:
        """Probabilities of classes: see `extras.pooling.PoolingInputs.classify`."""
        return self._pool("classify", prompts, **options)

    def score(self, data_1, data_2, /, **options) -> list:
        """How well texts go together: see `extras.pooling.PoolingInputs.score`."""
        return self._pool("score", data_1, data_2, **options)

    def _pool(self, method: str, *args, **options) -> list:
        self._check_open()
        if self.runner.pooler is None:
            raise ValueError(f"this engine generates text (runner='generate'): for {method}() make "
                             "it with runner='pooling'")
        return getattr(self.inputs, method)(self, *args, **options)

    def shutdown(self) -> None:
        """Give back all memory. The engine can't be used afterwards; calling it twice is fine. A
        step is waited for: another thread's, or the one into which a signal's handler comes."""
        self.lock.run(self._shutdown)

    @in_turn
    def _shutdown(self) -> None:
        self.requests.clear()
        self.in_flight.clear()
        try:
            if self.trace is not None:
                self.trace.close()
        finally:  # also when Ctrl-C comes while it writes
            if self.runner is not None:
                self.runner.close()
            self.runner = self.scheduler = None

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc_info) -> None:
        self.shutdown()

    def _check_open(self) -> None:
        if self.runner is None:
            raise RuntimeError("this engine was shut down: make a new LLM")
        self.runner.ranks.raise_if_broken()

    def _describe(self, num_blocks: int) -> str:
        """One line: on what, how, and with how much memory. A slow path is never silent."""
        c = self.config
        ranks = f" on {c.tensor_parallel_size} ranks" if c.tensor_parallel_size > 1 else ""
        graphs = f"graphs up to {c.max_num_seqs}" if self.runner.graphs else "no graphs"
        pools = f", {self.runner.pooler}" if self.runner.pooler else ""
        return (f"{Path(c.model).name}: {self.runner.device_name}, {c.dtype}{ranks}, "
                f"{c.kernels} attention, {graphs}{pools} | "
                f"KV cache {num_blocks:,} blocks of {c.block_size} = "
                f"{num_blocks * c.block_size:,} tokens, "
                f"{num_blocks * self.runner.block_bytes / 2 ** 20:,.0f} MB | max_model_len "
                f"{c.max_model_len:,} | up to {c.max_num_batched_tokens:,} tokens and "
                f"{c.max_num_seqs} sequences a step, overlap {self.depth}")


def _start_ranks(config: EngineConfig, folder: Path, pooler) -> Ranks:
    """Rank 0, with the others started or joined.

    Under torchrun the ranks above 0 come here with the same script. They serve until rank 0 shuts
    down, and then their script ends: what follows in it is rank 0's to do.
    """
    ranks = start_ranks(config.tensor_parallel_size, config.device,
                        "nanoserve.model_runner:serve_rank", (config, folder, pooler))
    if ranks.rank > 0:
        with closing(ranks):
            serve_rank(ranks, (config, folder, pooler))
        raise SystemExit(0)
    return ranks


def _say(*lines: str) -> None:
    for line in lines:
        print(f"nanoserve: {line}", file=sys.stderr)
