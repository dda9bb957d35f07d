"""vLLM's names of options, fields and methods: each is handed on, renamed, dropped or refused.

A script that was written for vLLM names options, fields and methods that this engine may not have.
There are five cases:

    max_model_len=512             a name of ours            handed on
    enable_expert_parallel=True   another name for ours     handed on under our name
    kv_cache_dtype="auto"         asks for nothing          dropped: leaving it out means the same
    kv_cache_dtype="fp8"          asks for what is missing  `ValueError` with an alternative
    max_modle_len=512             in neither engine         `TypeError` with the nearest name

Invariant: nothing is accepted and ignored. A name is dropped only if its value asks for what
happens anyway: None, a value listed in `NOTHING`, or, for a name that isn't listed there, False, 0
or an empty text or collection.

`takes_vllms_words` checks the arguments of a class or a function so. When a feature is added, its
line leaves the tables below. Not known here: what our own options mean; that is config.py. This
file imports nothing of nanoserve, so that config.py may use it. Road not taken: to write all of
vLLM's options into our signatures, where they would hide those that do something.
"""

from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from functools import wraps
from inspect import signature
from typing import Any, TypeVar

Decorated = TypeVar("Decorated", bound=Callable)

# vLLM's name, and ours.
RENAMED = {"enable_expert_parallel": "expert_parallel"}
# Our options whose default is not None, and for which vLLM takes None to mean "the default".
LEFT_OPEN = ("seed", "enable_prefix_caching", "enable_chunked_prefill")
# Values that ask for nothing, of words for which this isn't simply False, 0 or an empty one.
NOTHING: dict[str, tuple] = {
    "tokenizer_mode": ("auto",), "config_format": ("auto",),
    "kv_cache_dtype": ("auto",), "generation_config": ("auto",), "task": ("auto",),
    "logprobs_mode": ("raw_logprobs",), "max_logprobs": (-1,), "use_tqdm_on_load": (True,),
    "disable_log_stats": (True, False), "disable_log_requests": (True, False),
    "disable_cascade_attn": (True, False), "disable_custom_all_reduce": (True, False),
    "distributed_executor_backend": ("mp",),
    "pipeline_parallel_size": (1,), "data_parallel_size": (1,),
    "decode_context_parallel_size": (1,), "prefill_context_parallel_size": (1,),
    "max_num_partial_prefills": (1,), "max_long_partial_prefills": (1,),
    "num_scheduler_steps": (1,), "compilation_config": (0,),
    "best_of": (1,), "length_penalty": (1.0,), "spaces_between_special_tokens": (True,),
    "chat_template_content_format": ("auto", "string")}

# ----------------------------------------------------------- what is refused

LORA = ("give generate(), stream(), chat(), embed() or add_request() a lora_request=, or merge the "
        "adapter into the weights (peft's merge_and_unload) and load the merged folder")
ONE_COPY = ("all ranks serve one copy of the model with tensor_parallel_size; for several copies "
            "start several processes")
PATTERNS = "use SamplingParams(structured_outputs={'json': ...}), see docs/structured.md"
IMAGES = "models here read text alone: leave it out"
GRAPHS = ("there is no compiler of models; on a GPU decode steps are recorded as CUDA graphs, and "
          "enforce_eager=True switches that off")
NO_SWAP = ("a preempted request is computed again, and most of it is found in the prefix cache: "
           "leave it out")
TEMPLATES = "options of a tokenizer are not handed on: tokenize first, and pass the token ids"

# Options of `LLM(...)`.
OPTIONS: dict[str, str] = {
    "kv_cache_dtype": "the KV cache has the dtype of the model, which the option dtype chooses",
    "calculate_kv_scales": "the KV cache is not quantized: leave it out",
    "max_cpu_loras": "adapters are read from their folders again: leave it out, or raise max_loras",
    "fully_sharded_loras": LORA, "lora_dtype": LORA, "lora_modules": LORA,
    "pipeline_parallel_size": "use tensor_parallel_size, which shares out every layer",
    "data_parallel_size": ONE_COPY, "data_parallel_backend": ONE_COPY, "enable_eplb": ONE_COPY,
    "decode_context_parallel_size": "use tensor_parallel_size",
    "prefill_context_parallel_size": "use tensor_parallel_size",
    "distributed_executor_backend": "ranks are processes of this machine, or torchrun's: leave it "
                                    "out, or start the script with torchrun",
    "disable_custom_all_reduce": "the ranks use torch's collectives: leave it out",
    "worker_cls": "write the change into model_runner.py",
    "worker_extension_cls": "write the change into model_runner.py",
    "swap_space": NO_SWAP, "preemption_mode": NO_SWAP,
    "cpu_offload_gb": "weights stay on the device: use a smaller model, a narrower dtype or "
                      "tensor_parallel_size",
    "kv_transfer_config": "say kv_store='folder': engines that name the same folder find each "
                          "other's blocks there",
    "kv_events_config": "an observer (LLM.observers) is told what each step does",
    "kv_offloading_size": "say kv_offload_bytes, in bytes",
    "kv_offloading_backend": "say kv_offload_bytes or kv_store: blocks go to memory or a folder",
    "prefix_caching_hash_algo": "keys are 128 bits of xxhash, and a hit compares the tokens, too: "
                                "leave it out",
    "enable_sleep_mode": "shutdown() gives the memory back, and a new LLM takes it again",
    "structured_outputs_config": PATTERNS, "guided_decoding_backend": PATTERNS,
    "logits_processors": "use logit_bias, allowed_token_ids and bad_words of SamplingParams, or "
                         "write a control into controls.py",
    "logprobs_mode": "logprobs are the model's own, before any control and temperature",
    "max_logprobs": "there is no limit to raise: every request may ask for all with logprobs=-1",
    "compilation_config": GRAPHS, "optimization_level": GRAPHS, "cudagraph_capture_sizes": GRAPHS,
    "cuda_graph_sizes": GRAPHS, "max_seq_len_to_capture": GRAPHS,
    "attention_backend": "choose with kernels='auto', 'triton', 'cpu' or 'torch'",
    "disable_cascade_attn": "there is none: leave it out",
    "config_format": "config.json is Hugging Face's: leave it out",
    "tokenizer_mode": "the tokenizer is the one that transformers' AutoTokenizer reads: name "
                      "another with tokenizer=",
    "tokenizer_revision": "fetch it with huggingface_hub.snapshot_download(..., revision=...), and "
                          "name its folder with tokenizer=",
    "code_revision": "fetch it with huggingface_hub.snapshot_download(..., revision=...), and name "
                     "the folder",
    "download_dir": "set the environment variable HF_HOME",
    "hf_token": "set the environment variable HF_TOKEN, or log in with the command hf auth login",
    "hf_config_path": "config.json is read from the model's folder; hf_overrides lays entries over "
                      "it",
    "rope_scaling": "use hf_overrides={'rope_scaling': {...}}",
    "rope_theta": "use hf_overrides={'rope_theta': ...}",
    "generation_config": "pass SamplingParams() to generate(): it takes nothing from "
                         "generation_config.json",
    "override_generation_config": "pass SamplingParams with these values to generate()",
    "override_pooler_config": "use pooler_config=",
    "task": "use runner='generate' or 'pooling', and convert='embed' or 'classify'",
    "speculative_model": "use speculative_config={'method': 'draft_model', 'model': ..., "
                         "'num_speculative_tokens': ...}",
    "num_speculative_tokens": "use speculative_config={'method': 'ngram', "
                              "'num_speculative_tokens': ...}",
    "num_scheduler_steps": "use async_scheduling=True, which plans a step while another one runs",
    "max_num_partial_prefills": "the token budget alone decides: lower max_num_batched_tokens",
    "max_long_partial_prefills": "the token budget alone decides: lower max_num_batched_tokens",
    "long_prefill_token_threshold": "the token budget alone decides: lower max_num_batched_tokens",
    "limit_mm_per_prompt": IMAGES, "mm_processor_kwargs": IMAGES, "mm_processor_cache_gb": IMAGES,
    "allowed_local_media_path": IMAGES, "skip_mm_profiling": IMAGES,
    "enable_prompt_embeds": "prompts are texts or token ids",
    "disable_log_stats": "nothing is logged (LLM.get_metrics() returns the numbers): leave it out",
    "disable_log_requests": "no requests are logged: leave it out",
    "enable_log_requests": "use trace='run.html', a file in which every step is recorded",
    "profiler_config": "use trace='run.html', or torch.profiler around generate()",
    "use_tqdm_on_load": "set the environment variable TQDM_DISABLE=1",
    "served_model_name": "the model has the name of its folder or hub id: leave it out",
    "additional_config": "write the change into the file that it concerns"}

# Fields of `SamplingParams`.
SAMPLING: dict[str, str] = {
    "guided_decoding": PATTERNS, "response_format": PATTERNS,
    "best_of": "ask for n samples with logprobs=0, and keep those with the largest "
               "cumulative_logprob",
    "use_beam_search": "ask for n samples with logprobs=0, and keep those with the largest "
                       "cumulative_logprob",
    "length_penalty": "it belongs to beam search, which is not supported: leave it out",
    "early_stopping": "it belongs to beam search, which is not supported: leave it out",
    "logits_processors": "use logit_bias, allowed_token_ids and bad_words, or write a control into "
                         "controls.py",
    "truncate_prompt_tokens": "cut the prompt: tokenize it, and pass its last token ids",
    "spaces_between_special_tokens": "special tokens have no space between them; "
                                     "skip_special_tokens=True leaves them out of the text",
    "flat_logprobs": "logprobs are a list with a dict for each token: leave it out",
    "thinking_token_budget": "use max_tokens",
    "repetition_detection": "use repetition_penalty or frequency_penalty",
    "skip_reading_prefix_cache": "call LLM.reset_prefix_cache() first, or make the engine with "
                                 "enable_prefix_caching=False",
    "extra_args": "write a control into controls.py", "skip_clone": "params are always copied",
    "lora_request": LORA}

# Keywords of `generate`, `chat` and of the pooling methods.
CALLS: dict[str, str] = {
    "lora_request": LORA,
    "prompt_token_ids": "pass token ids as the prompts: [{'prompt_token_ids': [...]}, ...]",
    "prompt_adapter_request": LORA, "guided_options_request": PATTERNS,
    "tools": "hand them to the template with chat_template_kwargs={'tools': [...]}, and read the "
             "calls from the text",
    "chat_template_content_format": "a template gets the content of a message as text",
    "mm_processor_kwargs": IMAGES, "tokenization_kwargs": TEMPLATES,
    "truncate_prompt_tokens": "set it in PoolingParams, or pass the last token ids of the prompt",
    "normalize": "use PoolingParams(use_activation=...)"}

# Keys of a prompt that is a dict.
PROMPTS: dict[str, str] = {
    "multi_modal_data": IMAGES, "multi_modal_uuids": IMAGES, "mm_processor_kwargs": IMAGES,
    "prompt_embeds": "a prompt is a text or token ids",
    "encoder_prompt": "models here are decoders: give one prompt",
    "decoder_prompt": "models here are decoders: give one prompt",
    "cache_salt": "make the engine with enable_prefix_caching=False, and no request can tell what "
                  "another one has said",
    "token_type_ids": "decoders know no types of tokens: leave it out"}

# Fields of `PoolerConfig` and `PoolingParams`.
POOLING: dict[str, str] = {
    "normalize": "use use_activation=", "activation": "use use_activation=",
    "softmax": "use use_activation=",
    "seq_pooling_type": "use pooling_type=", "tok_pooling_type": "use pooling_type='ALL'",
    "step_tag_id": "encode(pooling_task='token_classify') gives a reward for each token",
    "returned_token_ids": "encode() returns all numbers: choose among them",
    "enable_chunked_processing": "prompts are computed in chunks anyway, for every pooling_type",
    "max_embed_len": "use max_model_len", "logit_bias": "subtract it from the outputs",
    "extra_kwargs": "leave it out"}

# Methods and attributes of `LLM`.
METHODS: dict[str, str] = {
    "beam_search": "generate() with n samples and logprobs=0, and keep those with the largest "
                   "cumulative_logprob",
    "sleep": "shutdown() gives the memory back, and a new LLM takes it again",
    "wake_up": "shutdown() gives the memory back, and a new LLM takes it again",
    "collective_rpc": "LLM.runner is the model runner of this process; one of a rank can't be "
                      "called",
    "apply_model": "LLM.runner.model is the network",
    "start_profile": "make the engine with trace='run.html', or put torch.profiler around "
                     "generate()",
    "stop_profile": "make the engine with trace='run.html', or put torch.profiler around "
                    "generate()",
    "reward": "encode(prompts, pooling_task='token_classify') gives a reward for each token",
    "set_tokenizer": "name it when the engine is made, with tokenizer=",
    "preprocess_chat": "use get_tokenizer().apply_chat_template()",
    "enqueue": "use add_request() and step()", "wait_for_completion": "use step() until "
    "has_unfinished_requests() is False",
    "get_num_unfinished_requests": "use has_unfinished_requests()",
    "is_sleeping": "an engine here never sleeps", "reset_mm_cache": IMAGES,
    **dict.fromkeys(("add_lora", "remove_lora", "list_loras", "pin_lora"),
                    "an adapter is loaded when a request names it (lora_request=), and the least "
                    "recently used one makes room")}


# --------------------------------------------------------------- how it is used


def takes_vllms_words(where: str, refused: Mapping[str, str]) -> Callable[[Decorated], Decorated]:
    """Decorate a class or a function, so that its keyword arguments go through `in_our_words`."""
    def decorate(function):
        if isinstance(function, type):
            function.__init__ = decorate(function.__init__)
            return function
        known = set(signature(function).parameters)

        @wraps(function)
        def checked(*args, **given):
            return function(*args, **in_our_words(where, given, known, refused))

        return checked

    return decorate


def in_our_words(where: str, given: Mapping[str, Any], known: Collection[str],
                 refused: Mapping[str, str]) -> dict[str, Any]:
    """The arguments `given`, under names that are `known`.

    where: the function's name, for messages. Raises `ValueError` for a name in `refused` whose
    value asks for something, `TypeError` for a name that neither engine has, or that comes twice.
    """
    ours: dict[str, Any] = {}
    for said, value in given.items():
        word = RENAMED[said] if RENAMED.get(said) in known else said
        if word in ours:
            raise TypeError(f"{where}: {said} is another name of {word}, give one of them")
        if word in known:
            if value is not None or word not in LEFT_OPEN:
                ours[word] = value
        elif word not in refused:
            raise TypeError(f"{where} has no {word}: {_nearest(str(word), known)}")
        elif not _asks_for_nothing(word, value):
            raise ValueError(f"{where}: {word}={value!r:.80} is not supported: {refused[word]}")
    return ours


def missing_method(name: str, known: Collection[str]) -> str:
    """The message for a method of vLLM's `LLM` that is missing here, or for a mistyped name."""
    if name in METHODS:
        return f"LLM.{name} is not supported: {METHODS[name]}"
    return f"LLM has no {name}: {_nearest(name, [n for n in known if n[0] != '_'])}"


def _asks_for_nothing(word: str, value: Any) -> bool:
    """Whether leaving the word out would mean the same. Example: pipeline_parallel_size=1."""
    if value is None:
        return True
    if word in NOTHING:  # True == 1, and means something else
        return any(value == one and (value is True) == (one is True) for one in NOTHING[word])
    return isinstance(value, (bool, int, float, str, list, tuple, dict, set)) and not value


def _nearest(word: str, known: Collection[str]) -> str:
    """For typing errors: the name that was probably meant."""
    if found := get_close_matches(word, known, 1):
        return f"did you mean {found[0]}?"
    return "its help() tells what there is"
