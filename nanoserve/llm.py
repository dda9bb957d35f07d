"""The public API: `LLM` finds a checkpoint, wires the parts together, and generates.

    read_options      the options of the user                       EngineConfig
    read_checkpoint   the model's description                       ModelConfig
    settle            values for open options                       EngineConfig, resolved
    plan              the tokenizer, and what extras add            Plan
    start_runner      the ranks, the weights, the KV cache          ModelRunner
                                                                    └──► LLMEngine: the loop
    generate, chat, stream ──► make_requests ──► drive ──► RequestOutput

This is the one place where the parts meet. `LLM` is the engine of engine.py, plus the stages that
make it from a checkpoint, and methods that take whole lists of prompts. Each stage is a method that
a subclass may override, as `LLM` of nanoserve_extras/base/llm.py does, which takes all extras.

Invariant: all requests are checked before any work starts, so one bad prompt among many wastes no
computation.

Names and defaults are vLLM's, so that its users need to change only one import. An argument that
is not supported raises an error; none is accepted and ignored.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from nanoserve import device, hooks, parallel, progress, self_test
from nanoserve.config import EngineConfig, SamplingParams
from nanoserve.detokenizer import load_tokenizer
from nanoserve.engine import LLMEngine
from nanoserve.inputs import InputProcessor, Prompt
from nanoserve.loader import find_model
from nanoserve.model_config import ModelConfig
from nanoserve.model_runner import ModelRunner, RankParts
from nanoserve.request import RequestOutput

BUNDLED_MODEL = Path(__file__).parent / "assets" / "storyteller"


@dataclass(frozen=True)
class Plan:
    """The parts of an engine to be made. `Extra.prepare` returns a copy with its additions."""

    config: EngineConfig  # resolved
    model_config: ModelConfig
    folder: Path  # the checkpoint's
    tokenizer: Any  # transformers', or None
    make_inputs: Callable  # makes the `InputProcessor`
    parts: RankParts = field(default_factory=RankParts)  # for the runner of each rank


class LLM(LLMEngine):
    """An engine with one model. The options are the fields of `EngineConfig`.

    model: a local folder, a hub id or a bundled model's name; without one, the bundled story model.
    extras: objects to be added, in the order in which they are called (hooks.py).
    Raises `ValueError` for options or checkpoints that can't work, `TypeError` for options that do
    not exist.
    """

    generates = True  # requests write text; a subclass may serve models that pool

    # The classes of the parts, which a subclass may replace.
    make_plan: Callable = Plan
    make_inputs: Callable = InputProcessor
    make_ranks: Callable = parallel.Ranks
    make_runner: Callable = ModelRunner
    make_parts: Callable = RankParts

    def __init__(self, model: str | Path = BUNDLED_MODEL, *, extras: Iterable[hooks.Extra] = (),
                 **options):
        given = hooks.checked(extras, options.get("scheduling_policy", "fcfs"))
        asked = self.read_options(model, options)
        with device.collector_off():
            asked, folder, extras = self.read_checkpoint(model, asked, given)
            plan = self.plan(self.settle(asked), folder, extras)
            config, runner, num_blocks = self.start_runner(plan, asked.max_model_len)
        inputs = plan.make_inputs(config, self.model_config, self.tokenizer)
        super().__init__(config, runner, num_blocks, inputs, extras)
        progress.say(self.greeting(plan, num_blocks))

    def read_options(self, model: str | Path, options: dict) -> EngineConfig:
        """The options as a config, each field checked. Raises `ValueError`, `TypeError`."""
        return EngineConfig(model=str(model), **options)

    def read_checkpoint(self, model: str | Path, asked: EngineConfig, given: list[hooks.Extra],
                        ) -> tuple[EngineConfig, Path, list[hooks.Extra]]:
        """Find the checkpoint, and set `model_config`. Returns the options, the checkpoint's
        folder, and the extras. A subclass may change options to suit the checkpoint, and put extras
        that options or checkpoint ask for before the given ones."""
        folder = find_model(model, weights=asked.load_format != "dummy",
                            code=asked.trust_remote_code, revision=asked.revision)
        self.model_config = ModelConfig.from_folder(folder, asked.hf_overrides)
        return asked, folder, given

    def tokenizer_folder(self, config: EngineConfig, folder: Path) -> Path:
        """The folder that the option `tokenizer` names, or the model's."""
        if config.tokenizer is None:
            return folder
        return find_model(config.tokenizer, "tokenizer", weights=False,
                          code=config.trust_remote_code)

    def settle(self, asked: EngineConfig) -> EngineConfig:
        """The options, with values for this machine and this model in place of `None` and "auto".
        Prints a line where the machine can't do what was asked for."""
        model = self.model_config
        config = asked.resolved(device.pick_device(asked.device), model, self.generates)
        parallel.take_gpu(config.num_ranks, config.device)
        config, lines = device.fit_dtype(config, asked, model)
        progress.say(*lines)
        config, lines = self_test.fit_kernels(config, asked)
        progress.say(*lines)
        parallel.check_shares(config.tensor_parallel_size, model.num_attention_heads,
                              model.num_key_value_heads)
        return config

    def plan(self, config: EngineConfig, folder: Path, extras: list[hooks.Extra]) -> Plan:
        """Load the tokenizer, let each extra add its parts, and test the backend's functions on
        this machine: those that fail are replaced."""
        self.tokenizer = None
        if not config.skip_tokenizer_init:
            self.tokenizer = load_tokenizer(
                self.tokenizer_folder(config, folder), optional=config.load_format == "dummy",
                trust_remote_code=config.trust_remote_code)
        plan = self.make_plan(config, self.model_config, folder, self.tokenizer, self.make_inputs,
                              self.make_parts())
        for extra in extras:
            plan = extra.prepare(plan)
        names, lines = self_test.failing_functions(plan.config, self.model_config)
        progress.say(*lines)
        return replace(plan, parts=replace(plan.parts, replaced=names))

    def start_runner(self, plan: Plan, asked_len: int | None,
                     ) -> tuple[EngineConfig, ModelRunner, int]:
        """Start the ranks' processes, load the weights, and allocate a KV cache of as many blocks
        as there is room for. Returns the config, with the `max_model_len` that fits; rank 0's
        runner; and the number of blocks. asked_len: the `max_model_len` that the user asked for,
        which is not lowered."""
        config = plan.config
        make_runner = partial(self.make_runner, config, plan.model_config, plan.folder,
                              parts=plan.parts)
        serve = partial(parallel.serve_rank, make_runner=make_runner)
        ranks = parallel.start_ranks(config.num_ranks, config.device, serve, self.make_ranks)
        # Even without a call of shutdown() the ranks end with the engine, or with the script.
        weakref.finalize(self, ranks.close)
        try:
            runner = make_runner(ranks=ranks)
            num_blocks = runner.count_kv_blocks()
            config, lines = device.fit_to_cache(
                runner.config, num_blocks, asked_len, self.generates)
            progress.say(*lines)
            ranks.agree(num_blocks, config.max_model_len)
            runner.start(num_blocks, config.max_model_len)
        except BaseException:
            ranks.abort("the engine could not be made")
            raise
        return config, runner, num_blocks

    def greeting(self, plan: Plan, num_blocks: int) -> str:
        """The line printed at the start. It names kernels and graphs: a slow path must be seen."""
        config = self.config
        graphs = "graphs" if self.runner.graphs else "no graphs"
        return (f"{Path(config.model).name}, {config.device}, {config.dtype}, {config.kernels} "
                f"kernels, {graphs}, a KV cache of {num_blocks * config.block_size:,} tokens, "
                f"max_model_len {config.max_model_len:,}")

    # ------------------------------------------------------ offline batches

    def generate(self, prompts: Prompt | list[Prompt],
                 sampling_params: SamplingParams | list[SamplingParams] | None = None, *,
                 use_tqdm: bool | Callable = True, priority: list[int] | None = None,
                 **given: object) -> list[RequestOutput]:
        """Generate for one prompt or many; results come in the order of the prompts.

        prompts: a str, {"prompt": ...}, {"prompt_token_ids": [...]}, a list of token ids, or a list
        of these. sampling_params: one for all prompts, a list with one for each, or None for the
        model's defaults. priority: one for each prompt; the lowest is served first. use_tqdm:
        whether to show a progress bar, or a function that makes one. given: arguments for extras,
        each a value for all prompts or a list with one for each.
        Raises `ValueError` before any work starts. After Ctrl-C the engine stays usable.
        """
        requests = self.make_requests(prompts, sampling_params, priority=priority, **given)
        for request in requests:
            request.keep_to_the_end()
        return self.results_of(requests, use_tqdm)

    def results_of(self, requests: list, use_tqdm: bool | Callable) -> list:
        """The final output of each request, in the order of `requests`. Shows a progress bar."""
        results = {}
        with closing(self.drive(requests)) as outputs, progress.prompts_bar(
                len(requests), use_tqdm) as bar:
            for output in outputs:
                results[output.request_id] = output
                bar.update()
        return [results[request.request_id] for request in requests]

    def stream(self, prompts: Prompt | list[Prompt],
               sampling_params: SamplingParams | list[SamplingParams] | None = None, *,
               priority: list[int] | None = None,
               **given: object) -> Iterator[RequestOutput]:
        """Like `generate`, but yields the outputs of each request as its text grows.

        The text of an output never ends in half a character, nor shows the beginning of a stop
        string. With `output_kind` DELTA each output carries only the new text. Closing the iterator
        aborts the requests that have not finished.
        """
        return self.drive(self.make_requests(prompts, sampling_params, priority=priority,
                                             **given))

    def chat(self, messages: list, sampling_params: SamplingParams | list | None = None,
             use_tqdm: bool | Callable = True, *, stream: bool = False,
             chat_template_kwargs: dict | None = None, **given: object,
             ) -> list[RequestOutput] | Iterator[RequestOutput]:
        """`generate` for one conversation, or a list of them, through the chat template.

        messages: dicts with "role" and "content". stream: return the iterator of `stream`, which
        shows no bar. chat_template_kwargs: for the template, "tools" in OpenAI's form say, or a
        "chat_template" in the place of the tokenizer's. Raises `ValueError` if there is none.
        """
        options = {"add_generation_prompt": True} | (chat_template_kwargs or {})
        prompts = self.inputs.render_chats(messages, **options)
        if stream:
            return self.stream(prompts, sampling_params, **given)
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, **given)

    # -------------------------------------------------------------- the rest

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc_info) -> None:
        self.shutdown()
