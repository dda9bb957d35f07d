"""`LLM` with everything: the plain engine's class, whose stages know all extras.

    nanoserve.llm.LLM          here
    read_options               the options of all extras, and vLLM's words
    read_checkpoint            GGUF files, transformers' networks; options become extras
    settle, check_added        facts: what goes with what (facts.py)
    generate, chat, stream     vLLM's keywords
    __getattr__                the methods of extras, and vLLM's that are missing

`from nanoserve import LLM` gives this class. Nothing of how the engine runs is changed here.
"""

from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from nanoserve import llm as plain
from nanoserve.config import EngineConfig, SamplingParams
from nanoserve.detokenizer import Tokenizer
from nanoserve.device import pick_device
from nanoserve.hooks import Extra
from nanoserve.vllm import missing_method, takes_vllms_words
from nanoserve_extras import METHODS, choose, method_of
from nanoserve_extras.base.checkpoint import find_folder, tokenizer_folder
from nanoserve_extras.base.facts import Fact, check_added, facts_of, own_parts
from nanoserve_extras.engine_args import EngineArgs

AnExtra = TypeVar("AnExtra", bound=Extra)


class LLM(plain.LLM):
    """An engine with one model. `LLM(model, **options)`: the fields of `EngineConfig`, and those of
    the extras, which are added by their options.

    model: a local folder, a hub id, a GGUF file or a bundled model's name; without one, the bundled
    story model.
    extras: objects of your own to be added, in the order in which they are asked (hooks.py).
    Raises `ValueError` for options or checkpoints that can't work, `TypeError` for options that do
    not exist.
    """

    def read_options(self, model: str | Path, options: dict) -> EngineArgs:
        return EngineArgs(model=str(model), **options)

    def read_checkpoint(self, model: str | Path, asked: EngineArgs, given: list[Extra],
                        ) -> tuple[EngineConfig, Path, list[Extra]]:
        folder = find_folder(model, quantization=asked.quantization, revision=asked.revision,
                             weights=asked.load_format != "dummy", code=asked.trust_remote_code)
        config, self.model_config, extras = choose(asked, folder, given)
        self.parts = own_parts(config, pick_device(config.device))
        self.facts = facts_of([*self.parts, *extras])
        self.generates = Fact.GENERATES in self.facts
        return config, folder, extras

    def tokenizer_folder(self, config: EngineConfig, folder: Path) -> Path:
        return tokenizer_folder(config, folder)

    def settle(self, asked: EngineConfig) -> EngineConfig:
        has_graphs = Fact.GRAPHS in self.facts
        return super().settle(replace(asked, enforce_eager=asked.enforce_eager or not has_graphs))

    def check_added(self, extra: Extra) -> None:
        super().check_added(extra)
        check_added(extra, [*self.parts, *self.extras])

    # ------------------------------------------------------------- vLLM's words

    generate = takes_vllms_words("generate()", "call")(plain.LLM.generate)
    stream = takes_vllms_words("stream()", "call")(plain.LLM.stream)
    chat = takes_vllms_words("chat()", "call")(plain.LLM.chat)
    add_request = takes_vllms_words("add_request()", "call")(plain.LLM.add_request)
    reset_prefix_cache = takes_vllms_words("reset_prefix_cache()", "call")(
        plain.LLM.reset_prefix_cache)

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> "LLM":
        """vLLM's way to make an engine whose steps are called by hand."""
        return cls(**vars(engine_args))

    def get_tokenizer(self) -> Tokenizer | None:
        """The Hugging Face tokenizer, None with `skip_tokenizer_init`."""
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What generation_config.json recommends, else the defaults of `SamplingParams`."""
        return self.inputs.default_sampling_params()

    @property
    def llm_engine(self) -> "LLM":
        """What vLLM's `LLM` has: here an `LLM` is the engine."""
        return self

    # ------------------------------------------------------- what the extras have

    def extra(self, kind: type[AnExtra]) -> AnExtra | None:
        """The extra of this class; None if there is none."""
        return next((extra for extra in self.extras if isinstance(extra, kind)), None)

    def __getattr__(self, name: str):
        """Called for missing names only: a method that an extra has, `embed` say. For a method of
        vLLM's that is nowhere, the error names an alternative."""
        if name in METHODS:
            return method_of(self, name)
        raise AttributeError(missing_method(name, [*dir(type(self)), *METHODS]))

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *METHODS]
