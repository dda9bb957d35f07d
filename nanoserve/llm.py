"""The loop and the public API: the one place where the parts are wired together.

    add_request ──► Scheduler.waiting
                        │ schedule()            who computes how many tokens
         ┌──────────► Step ──► ModelRunner.launch()        integers, forward, sample
         │                          │ tokens, on the device
    next step                       ▼
         └───────────── Scheduler.update() ──► Detokenizer ──► RequestOutput

`LLM.step()` is that picture; `generate`, `chat` and `stream` are loops around it. With
`async_scheduling` a step is launched before the previous one's tokens are looked at (overlap depth
1), otherwise after (depth 0). Both give the same tokens.

Invariants: a request is checked completely before any work starts, so one bad prompt among many
costs nothing; and whatever happens in a step (an error, Ctrl-C), every request that was not
finished can still be aborted or go on, because a step takes effect only in `update()`.

The names and defaults are vLLM's, so that its users can change one import. What is not supported
raises; nothing is accepted and ignored. Road not taken: a background thread that steps by itself; a
loop one can single-step in a debugger teaches more, and a server can own the thread.
"""

import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import xxhash
from tqdm import tqdm
from transformers import AutoTokenizer

from nanoserve.config import EngineConfig, ModelConfig, find_model
from nanoserve.detokenizer import Detokenizer
from nanoserve.model_runner import ModelRunner, pick_device
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import (
    CompletionOutput,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    Sequence,
)

BUNDLED_MODEL = Path(__file__).parent / "assets" / "storyteller"

Prompt = str | dict | list[int]


@dataclass(eq=False)
class Request:
    """A checked request: its sequences (one a sample), and what has been told to its caller."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    sequences: list[Sequence]
    detokenizers: list[Detokenizer | None]
    told: list[tuple[int, int]] = field(default_factory=list)  # (characters, tokens) a sample

    @property
    def finished(self) -> bool:
        return all(seq.finish_reason is not None for seq in self.sequences)


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
        folder = find_model(model)
        self.model_config = ModelConfig.from_folder(folder, asked.hf_overrides)
        config = asked.resolved(pick_device(asked.device), self.model_config)
        self.tokenizer = _load_tokenizer(config, folder)
        self.runner = ModelRunner(config, self.model_config, folder)
        num_blocks = self.runner.count_kv_blocks()
        self.config = _fit_max_model_len(config, asked.max_model_len, num_blocks)
        self.runner.allocate_kv_cache(num_blocks, self.config.max_model_len)
        self.scheduler = Scheduler(self.config, num_blocks)
        self.depth = 1 if config.async_scheduling else 0
        self.in_flight: deque = deque()  # (step, its tokens on the device)
        self.requests: dict[str, Request] = {}
        self.undelivered: list[RequestOutput] = []  # for the next step() to return
        self.num_arrived = 0
        self.check_every_step = os.environ.get("NANOSERVE_CHECK") == "1"
        _say(self._describe(num_blocks))

    # ----------------------------------------------------------- the engine

    def step(self) -> list[RequestOutput]:
        """Run one step. Returns an output for each request that got on, or has ended."""
        self._advance()
        outputs, self.undelivered = self.undelivered, []
        return outputs

    def _advance(self) -> None:
        """schedule -> build batch -> forward -> sample -> update, `depth` steps ahead."""
        self._check_open()
        try:
            with _ctrl_c_held():
                step = self.scheduler.schedule()
            if step.num_new_tokens:
                self.in_flight.append((step, self.runner.launch(step)))
            if len(self.in_flight) > self.depth or not step.num_new_tokens:
                self._take_result()
        except BaseException:
            self.in_flight.clear()
            self.scheduler.drop_in_flight()
            raise

    def _take_result(self) -> None:
        """Wait for the oldest step in flight and take its tokens into account."""
        if not self.in_flight:
            assert not self.requests, f"stuck: nothing can be scheduled for {list(self.requests)}"
            return
        step, sampled = self.in_flight[0]
        token_ids = sampled.tolist()
        with _ctrl_c_held():
            self.in_flight.popleft()
            self.undelivered += self._collect(self.scheduler.update(step, token_ids))
        if self.check_every_step:
            self.scheduler.check()

    def _collect(self, grown: list[Sequence]) -> list[RequestOutput]:
        """Turn new tokens into text, look for stop strings, and make the outputs."""
        touched: dict[str, Request] = {}
        for seq in grown:
            request = touched[seq.request_id] = self.requests[seq.request_id]
            detokenizer = request.detokenizers[seq.index]
            if detokenizer is None:
                continue
            # The token that ended it, EOS say, is no text, unless the caller wants to see it.
            if seq.finish_reason != "stop" or request.params.include_stop_str_in_output:
                stop_string = detokenizer.add(seq.token_ids[-1:])
                if stop_string is not None:
                    self.scheduler.finish(seq, "stop", stop_string)
            if seq.finish_reason is not None:
                detokenizer.flush()
        outputs = []
        for request in touched.values():
            if request.finished:
                del self.requests[request.request_id]
            if request.finished or request.params.output_kind is not RequestOutputKind.FINAL_ONLY:
                outputs.append(self._output(request))
        return outputs

    def _output(self, request: Request) -> RequestOutput:
        completions = []
        for seq, detokenizer in zip(request.sequences, request.detokenizers, strict=True):
            done = seq.finish_reason is not None
            text = "" if detokenizer is None else (
                detokenizer.text if done else detokenizer.visible_text)
            token_ids = seq.output_token_ids
            if request.params.output_kind is RequestOutputKind.DELTA:
                told = request.told[seq.index]
                request.told[seq.index] = (len(text), len(token_ids))
                text, token_ids = text[told[0]:], token_ids[told[1]:]
            completions.append(CompletionOutput(seq.index, text, token_ids,
                                                finish_reason=seq.finish_reason,
                                                stop_reason=seq.stop_reason))
        return RequestOutput(
            request.request_id, request.prompt, request.prompt_token_ids, None, completions,
            request.finished, num_cached_tokens=request.sequences[0].num_cached_tokens)

    # ------------------------------------------------- driving it by hand

    def add_request(self, request_id: str, prompt: Prompt,
                    sampling_params: SamplingParams | None = None, priority: int = 0) -> None:
        """Queue one request; `step()` works on it. Raises `ValueError` and queues nothing if it is
        wrong (see `make_request`) or its id is in use."""
        self._check_open()
        self._submit(self.make_request(request_id, prompt, sampling_params, priority))

    def abort_request(self, request_id: str) -> None:
        """End a request wherever it is and give back its blocks; unknown ids are ignored.

        The next `step()` returns what it has generated, with `finish_reason` "abort".
        """
        with _ctrl_c_held():
            request = self.requests.pop(request_id, None)
            if request is None:
                return
            for seq, detokenizer in zip(request.sequences, request.detokenizers, strict=True):
                if seq.finish_reason is None and detokenizer is not None:
                    detokenizer.flush()
                self.scheduler.finish(seq, "abort")
            self.undelivered.append(self._output(request))

    def has_unfinished_requests(self) -> bool:
        """Whether `step()` has something left to do, or a result to hand over."""
        waits = any(out.outputs[0].finish_reason != "abort" for out in self.undelivered)
        return bool(self.requests or self.in_flight or waits)

    def make_request(self, request_id: str, prompt: Prompt,
                     sampling_params: SamplingParams | None = None, priority: int = 0) -> Request:
        """Tokenise and check a request without touching the engine's state.

        Raises `ValueError` for an empty or over-long prompt, a token outside the vocabulary,
        parameters out of range, or a request that could never fit in the KV cache.
        """
        if type(priority) is not int:
            raise ValueError(f"priority must be a whole number, got {priority!r}")
        if priority and self.config.scheduling_policy != "priority":
            raise ValueError(f"priority={priority} has no effect with scheduling_policy='fcfs': "
                             "make the engine with scheduling_policy='priority'")
        # A copy: it checks the fields once more, and the caller may change theirs meanwhile.
        params = replace(sampling_params or self.get_default_sampling_params())
        text, ids = self._read_prompt(prompt)
        limit = self.config.max_model_len
        if len(ids) >= limit:
            raise ValueError(
                f"the prompt has {len(ids)} tokens and max_model_len is {limit}, prompt and at "
                "least one output token together: shorten the prompt, or raise max_model_len (and "
                "kv_cache_memory_bytes, if the KV cache is what limits it)")
        if params.stop and self.tokenizer is None:
            raise ValueError(f"stop={params.stop!r} needs a tokenizer: use stop_token_ids")
        max_num_tokens = limit if params.max_tokens is None else min(
            limit, len(ids) + params.max_tokens)
        self.scheduler.check_fits(max_num_tokens)
        eos_ids = frozenset() if params.ignore_eos else frozenset(self._eos_ids())
        self.num_arrived += 1
        seed = params.seed if params.seed is not None else f"{self.config.seed} {self.num_arrived}"
        sequences = [
            Sequence(request_id, list(ids), params, self.num_arrived, priority, index,
                     seed=xxhash.xxh3_64_intdigest(f"{seed} {index}".encode()),
                     stop_ids=eos_ids | frozenset(params.stop_token_ids), eos_ids=eos_ids,
                     max_num_tokens=max_num_tokens)
            for index in range(params.n)]
        detokenize = params.detokenize and self.tokenizer is not None
        return Request(request_id, text, ids, params, sequences,
                       [Detokenizer(self.tokenizer, params, ids) if detokenize else None
                        for _ in sequences], [(0, 0)] * params.n)

    def _submit(self, request: Request) -> None:
        if request.request_id in self.requests:
            raise ValueError(f"request_id={request.request_id!r} is in use: choose another")
        with _ctrl_c_held():
            self.requests[request.request_id] = request
            for seq in request.sequences:
                self.scheduler.add(seq)

    def _eos_ids(self) -> tuple[int, ...]:
        """generation_config.json's, else config.json's, else the tokenizer's."""
        if self.model_config.eos_token_ids:
            return self.model_config.eos_token_ids
        eos = getattr(self.tokenizer, "eos_token_id", None)
        return () if eos is None else (eos,)

    def _read_prompt(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """A prompt in any of its forms -> its text, if it has one, and its token ids."""
        text, ids = None, prompt
        if isinstance(prompt, dict):
            if unknown := set(prompt) - {"prompt", "prompt_token_ids"} or not prompt:
                raise ValueError(f"a prompt dict takes 'prompt' or 'prompt_token_ids', got "
                                 f"{sorted(prompt) if unknown is True else sorted(unknown)}")
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        elif isinstance(prompt, str):
            text, ids = prompt, None
        if ids is None:
            if not isinstance(text, str) or not text:
                raise ValueError(f"the prompt is empty or no text: {text!r}")
            ids = self._tokenizer_for("a text prompt").encode(text)
        if not isinstance(ids, (list, tuple)) or not all(type(i) is int for i in ids):
            raise ValueError(f"a prompt must be a str, a dict or a list of token ids, got "
                             f"{type(prompt).__name__}: {str(prompt)[:80]}")
        if not ids:
            raise ValueError("the prompt is empty: it needs at least one token")
        vocab_size = self.model_config.vocab_size
        if min(ids) < 0 or max(ids) >= vocab_size:
            wrong = next(i for i in ids if not 0 <= i < vocab_size)
            raise ValueError(f"token id {wrong} of the prompt is outside the vocabulary of "
                             f"{vocab_size} (0 to {vocab_size - 1})")
        return text, list(ids)

    # ------------------------------------------------------ offline batches

    def generate(self, prompts: Prompt | list[Prompt],
                 sampling_params: SamplingParams | list[SamplingParams] | None = None, *,
                 use_tqdm: bool = True, priority: list[int] | None = None) -> list[RequestOutput]:
        """Generate for one prompt or many; results come in the order of the prompts.

        prompts: a str, {"prompt": ...}, {"prompt_token_ids": [...]}, a list of token ids, or a list
        of these. sampling_params: one for all, one for each, or None for the model's defaults.
        Raises `ValueError` before any work starts. After Ctrl-C the engine stays usable.
        """
        requests = self._make_requests(prompts, sampling_params, priority)
        for request in requests:
            request.params.output_kind = RequestOutputKind.FINAL_ONLY
        results = {}
        with closing(self._drive(requests)) as outputs, _Progress(requests, use_tqdm) as progress:
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
        return self._drive(self._make_requests(prompts, sampling_params, priority))

    def chat(self, messages: list, sampling_params: SamplingParams | list | None = None, *,
             use_tqdm: bool = True, chat_template: str | None = None,
             add_generation_prompt: bool = True, continue_final_message: bool = False,
             chat_template_kwargs: dict | None = None) -> list[RequestOutput]:
        """`generate` for one conversation, or a list of them, through the chat template.

        messages: dicts with "role" and "content". Raises `ValueError` without a template.
        """
        tokenizer = self._tokenizer_for("chat()")
        if not (chat_template or tokenizer.chat_template):
            raise ValueError("the tokenizer has no chat template: pass chat_template=, or use "
                             "generate()")
        conversations = [messages] if messages and isinstance(messages[0], dict) else messages
        prompts = []
        for conversation in conversations:
            text = tokenizer.apply_chat_template(
                conversation, tokenize=False, chat_template=chat_template,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message, **(chat_template_kwargs or {}))
            # The template has written the special tokens, BOS included.
            prompts.append({"prompt": text, "prompt_token_ids": tokenizer.encode(
                text, add_special_tokens=False)})
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def _make_requests(self, prompts, sampling_params, priority) -> list[Request]:
        """Check everything first: a list of params or priorities must match the prompts."""
        self._check_open()
        if isinstance(prompts, (str, dict)) or (
                isinstance(prompts, (list, tuple)) and prompts and type(prompts[0]) is int):
            prompts = [prompts]
        if not isinstance(prompts, (list, tuple)):
            raise ValueError(f"prompts must be a str, a dict or a list, got "
                             f"{type(prompts).__name__}")
        params = _one_for_each(sampling_params, len(prompts), "sampling_params")
        priorities = _one_for_each(priority, len(prompts), "priority")
        requests, number = [], self.num_arrived
        for i, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
            while str(number) in self.requests:
                number += 1
            try:
                requests.append(self.make_request(str(number), prompt, param, priorities[i] or 0))
            except ValueError as error:
                where = f"prompt {i}: " if len(prompts) > 1 else ""
                raise ValueError(f"{where}{error}") from error
            number += 1
        return requests

    def _drive(self, requests: list[Request]) -> Iterator[RequestOutput]:
        """Submit, step until all are done, and abort the rest if the caller or a step gives up.

        Outputs of requests that were added by hand are kept for the next `step()`.
        """
        mine = {request.request_id for request in requests}
        try:
            for request in requests:
                self._submit(request)
            while mine:
                self._advance()
                outputs = [o for o in self.undelivered if o.request_id in mine]
                self.undelivered = [o for o in self.undelivered if o.request_id not in mine]
                for output in outputs:
                    if output.finished:
                        mine.remove(output.request_id)
                    yield output
        finally:
            with _ctrl_c_held():
                for request_id in mine:
                    self.abort_request(request_id)
                while self.in_flight:  # a step with a wasted token may still hold blocks
                    self._take_result()
                self.undelivered = [o for o in self.undelivered if o.request_id not in mine]

    # -------------------------------------------------------------- the rest

    def get_tokenizer(self):
        """The Hugging Face tokenizer, None with `skip_tokenizer_init`."""
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What generation_config.json recommends, else the defaults of `SamplingParams`."""
        names = dict(temperature="temperature", top_k="top_k", top_p="top_p", min_p="min_p",
                     repetition_penalty="repetition_penalty", max_new_tokens="max_tokens")
        defaults = self.model_config.generation_defaults
        return SamplingParams(**{ours: defaults[theirs] for theirs, ours in names.items()
                                 if defaults.get(theirs) is not None})

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, and no change, while requests are running."""
        return self.scheduler.blocks.reset_prefix_cache()

    def encode(self, *args, **kwargs):
        """Not for a generator: raises `ValueError`, as do `embed`, `classify` and `score`."""
        raise ValueError("this engine generates text (runner='generate'): pooling models are not "
                         "supported yet")

    embed = classify = score = encode

    def shutdown(self) -> None:
        """Give back all memory. The engine can't be used afterwards; calling it twice is fine."""
        self.requests.clear()
        self.in_flight.clear()
        self.runner = self.scheduler = None

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc_info) -> None:
        self.shutdown()

    def _check_open(self) -> None:
        if self.runner is None:
            raise RuntimeError("this engine was shut down: make a new LLM")

    def _tokenizer_for(self, what: str):
        if self.tokenizer is None:
            raise ValueError(f"{what} needs a tokenizer, and this engine has none "
                             "(skip_tokenizer_init): use token ids")
        return self.tokenizer

    def _describe(self, num_blocks: int) -> str:
        """One line: on what, how, and with how much memory. A slow path is never silent."""
        c = self.config
        return (f"{Path(c.model).name}: {c.device}, {c.dtype}, torch attention, no graphs | "
                f"KV cache {num_blocks:,} blocks of {c.block_size} = "
                f"{num_blocks * c.block_size:,} tokens, "
                f"{num_blocks * self.runner.block_bytes / 2 ** 20:,.0f} MB | max_model_len "
                f"{c.max_model_len:,} | up to {c.max_num_batched_tokens:,} tokens and "
                f"{c.max_num_seqs} sequences a step, overlap {self.depth}")


class _Progress:
    """The tqdm bar of `generate`: prompts done, prompt and output tokens per second."""

    def __init__(self, requests: list[Request], enabled: bool):
        self.bar = tqdm(total=len(requests), desc="Processed prompts", unit="prompt",
                        disable=not enabled or not requests, dynamic_ncols=True)
        self.start = time.perf_counter()
        self.num_prompt_tokens = self.num_output_tokens = 0

    def finished(self, output: RequestOutput) -> None:
        self.num_prompt_tokens += len(output.prompt_token_ids)
        self.num_output_tokens += sum(len(sample.token_ids) for sample in output.outputs)
        seconds = max(time.perf_counter() - self.start, 1e-9)
        self.bar.set_postfix_str(f"input: {self.num_prompt_tokens / seconds:.1f} tok/s, "
                                 f"output: {self.num_output_tokens / seconds:.1f} tok/s", False)
        self.bar.update()

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *exc_info) -> None:
        self.bar.close()


@contextmanager
def _ctrl_c_held():
    """Let Ctrl-C wait until the block is done, so that it never meets half-changed books.

    Signals reach only the main thread; elsewhere, and inside another such block, nothing is done.
    """
    if (threading.current_thread() is not threading.main_thread()
            or signal.getsignal(signal.SIGINT) is not signal.default_int_handler):
        yield
        return
    seen = []
    signal.signal(signal.SIGINT, lambda *_: seen.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if seen:
        raise KeyboardInterrupt


def _one_for_each(value, count: int, name: str) -> list:
    """Broadcast a single value; a list must have one entry for each prompt."""
    if not isinstance(value, (list, tuple)):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"{name} has {len(value)} entries for {count} prompts: give one for each, "
                         "or a single one for all")
    return list(value)


def _load_tokenizer(config: EngineConfig, folder: Path):
    """The tokenizer beside the model, or the one that was named. None if it is not wanted."""
    if config.skip_tokenizer_init:
        return None
    source = find_model(config.tokenizer) if config.tokenizer else folder
    if config.load_format == "dummy" and not any(source.glob("*token*")):
        _say(f"{source} has no tokenizer: this engine takes and returns token ids only")
        return None
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=config.trust_remote_code)
    except Exception as error:  # transformers raises whatever its parsers raise
        raise ValueError(f"{source}: the tokenizer can't be loaded ({error}): name another with "
                         "tokenizer=, or use skip_tokenizer_init=True and token ids") from error


def _fit_max_model_len(config: EngineConfig, asked: int | None, num_blocks: int) -> EngineConfig:
    """Lower `max_model_len` to what the KV cache holds; an explicit one is an error instead."""
    capacity = num_blocks * config.block_size
    if config.max_model_len <= capacity:
        return config
    remedy = "raise kv_cache_memory_bytes (or gpu_memory_utilization, num_gpu_blocks_override)"
    if asked is not None:
        raise ValueError(f"max_model_len={asked} does not fit in the KV cache of {capacity} tokens "
                         f"({num_blocks} blocks of {config.block_size}): lower it, or {remedy}")
    _say(f"max_model_len is lowered from {config.max_model_len:,} to {capacity:,}, what the KV "
         f"cache holds; {remedy} for more")
    return replace(config, max_model_len=capacity)


def _say(line: str) -> None:
    print(f"nanoserve: {line}", file=sys.stderr)
