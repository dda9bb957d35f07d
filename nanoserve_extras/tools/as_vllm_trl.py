"""vLLM's interface for a trainer in the same process: TRL's `vllm_mode="colocate"`.

    GRPOTrainer     LLM(...) ─► sleep(2) ─► wake_up(["weights"]) ─► load_weights, a tensor a call
                      ┌──────── train ◄─── sleep(2) ◄─── generate ◄─ wake_up(["kv_cache"]) ◄┘
                      └───────► wake_up(["weights"]) ─► ...          behind reset_prefix_cache

vLLM takes one tensor per call. Here an update must be complete, so the tensors are collected,
without a copy, until the trainer resets the prefix cache, as it does after the last one.

Invariant: logprobs are those of the distribution from which tokens were drawn, or there is an
error. The engine's logprobs are the model's own; the two are equal unless penalties, temperature or
filters change the distribution.

TRL's `vllm_mode="server"`, which sends weights by NCCL to another process, is refused at its start.
"""

import weakref
from copy import copy
from types import SimpleNamespace

from nanoserve.config import SamplingParams
from nanoserve_extras.base.checkpoint import find_folder
from nanoserve_extras.base.llm import LLM

# Fields that change the distribution; the others don't, or are rarely used.
NEUTRAL = dict(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)


def only_server(*args, **options):
    """Stands for the functions that TRL's other mode imports. Raises `ValueError`."""
    raise ValueError("vllm_mode='server' sends weights by NCCL, which is not supported: use "
                     "vllm_mode='colocate'")


# vLLM's older word for what an engine is made for.
TASKS = dict(auto={}, generate=dict(runner="generate"), score=dict(runner="pooling"))
TASKS |= {task: dict(runner="pooling", convert=kind) for task, kind in dict(
    embed="embed", embedding="embed", classify="classify", reward="reward").items()}


def translated(model: str, options: dict) -> dict:
    """Options of scripts for vLLM under today's names, without those that ask for what happens
    anyway. All of vLLM's options may be `None`, unknown ones, too."""
    options = {name: value for name, value in options.items() if value is not None}
    if options.get("task") in TASKS:
        options = TASKS[options.pop("task")] | options
    if options.get("tokenizer_mode") == "mistral":
        files = {file.name for file in find_folder(model, weights=False).glob("*")}
        if "tekken.json" in files and "tokenizer.json" not in files:
            del options["tokenizer_mode"]  # Mistral's own rules read it anyway
    if options.get("model_impl") == "vllm":
        options["model_impl"] = "auto"
    if (options.get("distributed_executor_backend") == "external_launcher"
            and options.get("tensor_parallel_size", 1) == 1):
        del options["distributed_executor_backend"]
    return options


class TrainersLLM(LLM):
    """`LLM` with the options and the inner parts of vLLM's that TRL and others know."""

    def __init__(self, model: str, **options):
        options = translated(model, options)
        self.logprobs_mode = options.get("logprobs_mode")
        if self.logprobs_mode == "processed_logprobs":
            del options["logprobs_mode"]  # see `generate`
        super().__init__(model, **options)
        self.model_config = copy(self.model_config)  # vLLM's has the length as well, ...
        object.__setattr__(self.model_config, "max_model_len", self.config.max_model_len)
        self.collected: dict = {}
        take = weakref.WeakMethod(self.load_weights)  # a circle would keep a forgotten engine
        runner = SimpleNamespace(model=SimpleNamespace(load_weights=lambda pairs: take()(pairs)))
        self.model_executor = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))

    def load_weights(self, pairs) -> None:
        """Collect some of the new weights."""
        self.collected.update(pairs)

    def reset_prefix_cache(self, **theirs) -> bool:
        """Called after the last weight: update the engine, if there are new weights."""
        collected, self.collected = self.collected, {}
        if collected:
            self.update_weights(collected)
        return super().reset_prefix_cache(**theirs)

    def generate(self, *args, **options) -> list:
        """Raises `ValueError` for processed logprobs that would not be the model's own."""
        sampling_params = options.get("sampling_params", args[1] if len(args) > 1 else None)
        one_or_many = sampling_params if isinstance(sampling_params, list) else [sampling_params]
        for params in filter(None, one_or_many):
            if self.logprobs_mode == "processed_logprobs" and params.logprobs is not None:
                refuse_processed(params)
        return super().generate(*args, **options)


def refuse_processed(params: SamplingParams) -> None:
    wrong = [f"{name}={getattr(params, name)}" for name, value in NEUTRAL.items()
             if getattr(params, name) not in (value, -1)] + sorted(params.controls())
    if wrong:
        raise ValueError(f"logprobs_mode='processed_logprobs' with {', '.join(wrong)}: logprobs are"
                         " the model's own here, so draw from that: leave it out")
