"""`LLM` with everything: the plain engine's class, whose stages know all extras.

    nanoserve.llm.LLM          here
    read_options               the options of all extras, and vLLM's words
    read_checkpoint            GGUF files, transformers' networks; options become extras
    settle, check_added        facts: what goes with what (facts.py)
    make_request, submit       refuse fields that no extra honours, and requests during a sleep
    greeting                   the line at start-up; `describe()` tells all (start_up.py)
    make_ranks                 heartbeats, and messages between ranks (ranks.py, watch.py)
    generate, chat, stream     vLLM's keywords, a summary
    get_metrics                counters and histograms (metrics.py)
    __getattr__                the methods of extras, and errors for vLLM's that are missing

`from nanoserve import LLM` gives this class. It does not change how the engine runs.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from nanoserve import llm as plain
from nanoserve.detokenizer import Tokenizer
from nanoserve.hooks import Extra
from nanoserve.progress import say
from nanoserve.request import Inbox, RequestOutput
from nanoserve_extras import METHODS, choose, method_of
from nanoserve_extras.base.checkpoint import find_folder, tokenizer_folder
from nanoserve_extras.base.device import pick_device, say_why_unused
from nanoserve_extras.base.engine_config import EngineConfig
from nanoserve_extras.base.facts import Fact, check_added, facts_of, own_parts
from nanoserve_extras.base.inputs import Inputs, Prompt
from nanoserve_extras.base.metrics import EngineMetrics, Metric
from nanoserve_extras.base.plan import Plan
from nanoserve_extras.base.ranks import WatchedRanks
from nanoserve_extras.base.request import Request
from nanoserve_extras.base.runner import Parts, Runner
from nanoserve_extras.base.sampling_params import SamplingParams
from nanoserve_extras.base.start_up import describe, greet
from nanoserve_extras.base.summary import summary
from nanoserve_extras.base.vllm import missing_method, takes_vllms_words
from nanoserve_extras.engine_args import EngineArgs

AnExtra = TypeVar("AnExtra", bound=Extra)


class LLM(plain.LLM):
    """An engine with one model. `LLM(model, **options)`: the options are the fields of
    `EngineConfig` and those of the extras; setting an extra's options adds the extra.

    model: a local folder, a hub id, a GGUF file or a bundled model's name; without one, the bundled
    story model.
    extras: objects of your own to be added, in the order in which they are asked (hooks.py).
    Raises `ValueError` for options or checkpoints that can't work, `TypeError` for options that do
    not exist.
    """

    make_plan = Plan
    make_inputs = Inputs
    make_ranks = WatchedRanks
    make_runner = Runner
    make_parts = Parts

    def read_options(self, model: str | Path, options: dict) -> EngineArgs:
        return EngineArgs(model=str(model), **options)

    def read_checkpoint(self, model: str | Path, asked: EngineArgs, given: list[Extra],
                        ) -> tuple[EngineConfig, Path, list[Extra]]:
        folder = find_folder(model, quantization=asked.quantization, dtype=asked.dtype,
                             revision=asked.revision, weights=asked.load_format != "dummy",
                             code=asked.trust_remote_code)
        config, self.model_config, extras = choose(asked, folder, given)
        say_why_unused(config.device)
        config = replace(config, device=pick_device(config.device))
        self.parts = own_parts(config, config.device)
        self.facts = facts_of([*self.parts, *extras])
        self.generates = Fact.GENERATES in self.facts
        if self.generates and not self.model_config.has_lm_head:
            raise ValueError(f"runner='generate', but {self.model_config.architecture} has no LM "
                             "head: use runner='pooling', or a ...ForCausalLM checkpoint")
        self.metrics = EngineMetrics()
        return config, folder, [self.metrics, *extras]

    def tokenizer_folder(self, config: EngineConfig, folder: Path) -> Path:
        return tokenizer_folder(config, folder)

    def settle(self, asked: EngineConfig) -> EngineConfig:
        """Settle the options: no graphs if an extra can't be recorded; overlap if there are
        pipeline stages, except with tensor parallelism, where there is one step at a time."""
        has_graphs, overlap = Fact.GRAPHS in self.facts, asked.async_scheduling
        if overlap is None and asked.tensor_parallel_size == 1 < asked.pipeline_parallel_size:
            overlap = True
        return super().settle(replace(asked, async_scheduling=overlap,
                                      enforce_eager=asked.enforce_eager or not has_graphs))

    def plan(self, config: EngineConfig, folder: Path, extras: list[Extra]) -> Plan:
        """Without overlap where an extra drafts, and with buffers for its drafts."""
        num_drafts = max((extra.most_drafts for extra in extras), default=0)
        if num_drafts and config.async_scheduling:
            say("overlap is off: drafts follow tokens that the host must have seen")
            config = replace(config, async_scheduling=False)
        self.make_parts = partial(Parts, num_drafts=num_drafts)
        return super().plan(config, folder, extras)

    def greeting(self, plan: Plan, num_blocks: int) -> str:
        made_of = plan, self.config, self.runner, num_blocks
        self.description = describe(*made_of)
        return greet(*made_of)

    def describe(self) -> str:
        """The model, device, backend, limits and memory of this engine, in one line."""
        return self.description

    def make_request(self, request_id: str, prompt: Prompt,
                     sampling_params: SamplingParams | None = None, priority: int = 0,
                     lora_request: object = None) -> Request:
        self.check_ready()
        request = super().make_request(request_id, prompt, sampling_params, priority,
                                       lora_request=lora_request)
        request.check_taken(self.extras)
        return request

    def submit(self, request: Request, inbox: Inbox) -> None:
        with self.turns:
            self.check_ready()
            super().submit(request, inbox)

    def check_ready(self) -> None:
        """Raises `RuntimeError` if no request can be served at the moment, or ever again. Extras
        with a method `ready` are asked: it raises while weights or cache are gone."""
        self.check_open()
        for extra in self.extras:
            getattr(extra, "ready", bool)()

    # ---------------------------------------------------- extras, between two steps

    def check_added(self, extra: Extra) -> None:
        """As the plain engine's; raises `ValueError` also where the facts forbid it (facts.py)."""
        super().check_added(extra)
        check_added(extra, [*self.parts, *self.extras])

    # ---------------------------------------------------- numbers and vLLM's words

    def get_metrics(self) -> list[Metric]:
        """The engine's metrics now, under vLLM's names (`EngineMetrics.read`), and those of extras
        that have a method `metrics`, to which the engine's labels are added."""
        self.check_open()
        labels = {"model_name": self.config.model, "engine": "0"}
        numbers = self.metrics.read(self.scheduler)
        for extra in self.extras:
            numbers += getattr(extra, "metrics", list)()
        return [replace(one, labels=labels | one.labels) for one in numbers]

    @takes_vllms_words("generate()", "call")
    def generate(self, prompts: Prompt | list[Prompt],
                 sampling_params: SamplingParams | list[SamplingParams] | None = None, *,
                 use_tqdm: bool | Callable = True, priority: list[int] | None = None,
                 summarize: bool = False, lora_request: object = None) -> list[RequestOutput]:
        """Generate for one prompt or many; results come in the order of the prompts.

        prompts: a str, {"prompt": ...}, {"prompt_token_ids": [...]}, a list of token ids, or a list
        of these. sampling_params: one for all, one for each, or None for the model's defaults.
        priority: one for each, the lowest first. use_tqdm: whether to show a progress bar, or a
        function that makes one. summarize: print totals and times at the end. lora_request: a
        `LoRARequest` for all, or one or None for each.
        Raises `ValueError` before any work starts. After Ctrl-C the engine stays usable.
        """
        start = time.perf_counter()
        results = super().generate(prompts, sampling_params, use_tqdm=use_tqdm, priority=priority,
                                   lora_request=lora_request)
        if summarize:
            say(summary([output.metrics for output in results], time.perf_counter() - start))
        return results

    stream = takes_vllms_words("stream()", "call", "lora_request")(plain.LLM.stream)
    reset_prefix_cache = takes_vllms_words("reset_prefix_cache()", "call")(
        plain.LLM.reset_prefix_cache)

    @takes_vllms_words("chat()", "call", "lora_request")
    def chat(self, messages: list, sampling_params: SamplingParams | list | None = None,
             use_tqdm: bool | Callable = True, *, stream: bool = False,
             chat_template: str | None = None, add_generation_prompt: bool = True,
             continue_final_message: bool = False, chat_template_kwargs: dict | None = None,
             tools: list | None = None, **given: object,
             ) -> list[RequestOutput] | Iterator[RequestOutput]:
        """`generate` for one conversation, or a list of them, through the chat template.

        messages: dicts with "role" and "content". tools: in OpenAI's form, passed to the template.
        stream: return the iterator of `stream`, which shows no bar. Raises `ValueError` if there is
        no template.
        """
        options = dict(
            chat_template=chat_template, continue_final_message=continue_final_message, tools=tools,
            add_generation_prompt=add_generation_prompt and not continue_final_message)
        return super().chat(messages, sampling_params, use_tqdm, stream=stream,
                            chat_template_kwargs=options | (chat_template_kwargs or {}), **given)

    @takes_vllms_words("add_request()", "call")
    def add_request(self, request_id: str, prompt: Prompt,
                    sampling_params: SamplingParams | None = None, priority: int = 0,
                    lora_request: object = None) -> None:
        """Queue one request, on which `step()` works. Raises `ValueError`."""
        super().add_request(request_id, prompt, sampling_params, priority,
                            lora_request=lora_request)

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> "LLM":
        """vLLM's way to make an engine whose steps are called by hand."""
        return cls(**vars(engine_args))

    def get_tokenizer(self) -> Tokenizer | None:
        """The Hugging Face tokenizer, None with `skip_tokenizer_init`."""
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What generation_config.json recommends, else the defaults of `SamplingParams`."""
        return SamplingParams(**vars(self.inputs.default_sampling_params()))

    @property
    def llm_engine(self) -> "LLM":
        """What vLLM's `LLM` has: here an `LLM` is the engine."""
        return self

    # ------------------------------------------------------- what the extras have

    def extra(self, kind: type[AnExtra]) -> AnExtra | None:
        """The engine's extra of this class; None if there is none."""
        return next((extra for extra in self.extras if isinstance(extra, kind)), None)

    def __getattr__(self, name: str):
        """Called for missing names only. Finds the methods of extras, for example `embed`. For a
        method that only vLLM has, the error names an alternative."""
        if name in METHODS:
            return method_of(self, name)
        raise AttributeError(missing_method(name, [*dir(type(self)), *METHODS]))

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *METHODS]


LLMEngine = LLM  # vLLM's other name: here an `LLM` is the engine, with a way to make it
