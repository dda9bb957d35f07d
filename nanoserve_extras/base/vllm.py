"""vLLM's names for options that have another name here, are not needed, or are missing: one table.

A script that was written for vLLM uses names that this engine does not have. A row of `TABLE` says
how such a name is treated:

    enable_expert_parallel=True   another name for ours     handed on under our name
    disable_log_stats=True        changes no text           dropped, whatever its value
    tokenizer_mode="auto"         asks for nothing          dropped: leaving it out means the same
    tokenizer_mode="mistral"      asks for what is missing  `ValueError` with what to do instead

Our own names are looked up first, so a new field of config.py is known here at once. A name without
a row is a `TypeError`, which proposes one of our names only if the two are very similar.

Invariant: no option is silently ignored. A name that could change the text is dropped only if its
value asks for what happens anyway: None, one of `Row.nothing`, or else False, 0 or an empty one.

`LLM`, `SamplingParams`, the methods, the command line, the server for its clients' bodies and
tools/as_vllm.py for imports read this table. (A field of a body without a row is ignored, and the
server logs it once; so each field that would change the text needs its row.)
config.py explains our own names. Not all of vLLM's names have a row: scripts use few of them, and a
row that is never used goes out of date.
"""

from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter, signature
from typing import Any, NamedTuple, TypeVar

Decorated = TypeVar("Decorated", bound=Callable)


class Row(NamedTuple):
    """Names that are treated alike. With neither a remedy nor one of our names they are harmless.

    takers: "LLM" (its arguments; the command line, too), "SamplingParams", "call" (keywords of
    methods: generate(), embed() and others), "prompt" (a dict's keys), "pooling" (`PoolerConfig`
    and `PoolingParams`), "method" (of `LLM` and `AsyncLLM`), "AsyncLLM" (what makes one), "serve"
    (options of the server alone), "body" (fields of its clients' requests, besides those of
    "SamplingParams"), "import" (what a script for vLLM imports: classes, functions and modules).
    """

    takers: str
    names: str
    remedy: str = ""  # what to do instead
    nothing: tuple = ()  # the values that ask for nothing, if these are not the empty ones
    ours: str = ""  # our name for it; of an import, its module, ":" and its name there

    def asks_for_nothing(self, value: Any) -> bool:
        """Whether leaving the name out would mean the same. Example: data_parallel_size=1."""
        if value is None or not self.remedy:
            return True
        if self.nothing:  # True == 1, and means something else
            said = value.lower() if isinstance(value, str) else value
            return any(said == one and (value is True) == (one is True) for one in self.nothing)
        return isinstance(value, (bool, int, float, str, list, tuple, dict, set)) and not value


AS_VLLM = "nanoserve_extras.tools.as_vllm"
BEST = "ask for n samples with logprobs=0, and keep those with the largest cumulative_logprob"
UPDATE = ("LLM.update_weights takes a folder, a dict or an iterable of tensors, see "
          "docs/training.md")
STORE = ("say kv_store='folder': engines that name the same folder find each other's blocks "
         "there")
PROFILE = "make the engine with trace='run.html', or put torch.profiler around generate()"
METRICS = "LLM.get_metrics() has the numbers, and the server /metrics"
CHUNKS = ("encode(pooling_task='token_embed') gives a vector for each token: take the mean over "
          "each chunk's")
THOUGHTS = ("thinking_token_budget bounds a thought, and a chat says in "
            "chat_template_kwargs={'enable_thinking': False} that there is none")

TABLE = (
    # The model and its files.
    Row("LLM", "tokenizer_mode", "the tokenizer is the one that transformers' AutoTokenizer reads, "
        "Mistral's own from a tekken.json: leave it out, or name another with tokenizer=",
        ("auto",)),
    Row("LLM", "extras", "LLM(model, extras=[...]) takes them (EngineArgs does not)"),
    Row("LLM", "config_format", "config.json is Hugging Face's: leave it out", ("auto", "hf")),
    Row("LLM", "tokenizer_revision code_revision", "fetch it with huggingface_hub."
        "snapshot_download(..., revision=...), and name its folder"),
    Row("LLM", "download_dir hf_token", "set the environment variables HF_HOME and HF_TOKEN"),
    Row("LLM", "rope_scaling rope_theta", "use hf_overrides={'rope_scaling': {...}, "
        "'rope_theta': ...}"),
    Row("LLM", "override_generation_config", "pass SamplingParams to generate(): it takes nothing "
        "from generation_config.json"),
    Row("LLM", "allowed_local_media_path allowed_media_domains", "nothing is fetched, and a str "
        "names no file: hand over the image or the sound itself"),
    Row("LLM", "enable_mm_embeds", "hand over the image or the sound itself", (False,)),
    Row("LLM", "io_processor_plugin", "prepare the prompts in the script: encode() takes texts and "
        "token ids"),
    Row("LLM", "reasoning_parser tool_call_parser", "the chat template tells how thoughts and calls"
        " are written: leave it out (with structured_outputs a text has its form from the first "
        "token on)", ("",)),
    Row("LLM", "task", "use runner='generate' or 'pooling', and convert='embed' or 'classify'",
        ("auto",)),
    Row("call prompt body", "mm_processor_kwargs", "say it when the engine is made, to LLM() or the"
        " server"),
    Row("prompt", "multi_modal_data", "this engine reads text alone: make it with "
        "limit_mm_per_prompt={'image': 1}, see docs/extras.md"),
    # How it runs.
    Row("LLM", "enable_expert_parallel", ours="expert_parallel"),
    Row("call", "params", ours="sampling_params"),  # of vLLM's add_request
    # Three of our names, whose default is None in vLLM and another value here.
    Row("LLM", "seed enable_prefix_caching enable_chunked_prefill", nothing=(None,)),
    # These change no text: a preempted request is recomputed, whatever memory there is to swap.
    Row("LLM", "disable_log_stats disable_log_requests disable_custom_all_reduce "
        "disable_cascade_attn max_cpu_loras swap_space max_seq_len_to_capture "
        "mm_processor_cache_gb disable_mm_preprocessor_cache disable_chunked_mm_input "
        "enable_sleep_mode"),
    Row("LLM", "data_parallel_size", "all ranks serve one copy of the model with "
        "tensor_parallel_size or pipeline_parallel_size; for several start several processes",
        (1,)),
    Row("LLM call", "data_parallel_rank data_parallel_size_local data_parallel_address "
        "data_parallel_rpc_port data_parallel_backend", "an engine serves one copy of the model: "
        "start several processes, and let each of them make an engine", (1, 0, "mp")),
    Row("LLM", "distributed_executor_backend", "ranks are processes of this machine, or torchrun's:"
        " leave it out, or start the script with torchrun", ("mp",)),
    Row("LLM", "compilation_config cudagraph_capture_sizes", "there is no compiler of models; on a "
        "GPU decode steps are recorded as CUDA graphs, and enforce_eager=True switches that off"),
    Row("LLM", "attention_backend", "choose with kernels='auto', 'triton', 'cpu' or 'torch'"),
    Row("LLM", "worker_cls worker_extension_cls", "write the change into model_runner.py",
        ("auto", "")),
    Row("LLM", "cpu_offload_gb", "use a smaller model, a narrower dtype, tensor_parallel_size or "
        "layer_plan"),
    Row("LLM body", "kv_transfer_config kv_transfer_params", STORE),
    Row("LLM", "speculative_model num_speculative_tokens", "use speculative_config={'method': "
        "'ngram', 'suffix', 'draft_model', 'eagle3' or 'mtp', 'num_speculative_tokens': "
        "..., 'model': ...}"),
    Row("LLM method", "enable_log_requests profiler_config start_profile stop_profile", PROFILE),
    Row("method", "collective_rpc apply_model", "LLM.runner is the model runner of this process, "
        "and LLM.runner.model the network; those of further ranks can't be called"),
    Row("method", "add_lora remove_lora list_loras pin_lora", "an adapter is loaded when a request "
        "names it (lora_request=), and the least recently used one makes room"),
    # What a request asks for.
    Row("LLM", "extra_args vllm_xargs", "they are a request's: SamplingParams(extra_args={...})"),
    Row("SamplingParams", "vllm_xargs", ours="extra_args"),
    Row("LLM SamplingParams call", "structured_outputs_config guided_decoding_backend "
        "guided_decoding guided_options_request guided_json guided_regex guided_choice "
        "guided_grammar regex ebnf grammar json_schema structural_tag",
        "use structured_outputs={'json': ...} of SamplingParams, see docs/api.md"),
    Row("LLM", "logprobs_mode", "logprobs are the model's own, before any control and temperature",
        ("raw_logprobs",)),
    Row("LLM", "max_logprobs", "there is no limit to raise: every request may ask for all with "
        "logprobs=-1", (-1,)),
    Row("SamplingParams", "best_of length_penalty", BEST, (1,)),
    Row("SamplingParams method", "use_beam_search early_stopping beam_search", BEST),
    # Other engines' words, which clients of several engines send.
    Row("SamplingParams", "typical_p tfs_z num_beams repeat_penalty", "use top_p, min_p or "
        "repetition_penalty", (1,)),
    Row("SamplingParams", "mirostat top_a dry_multiplier xtc_probability dynatemp_range "
        "no_repeat_ngram_size watermark watermarking repetition_detection", "use top_p, min_p or "
        "one of the three penalties"),
    Row("SamplingParams", "thinking_budget enable_thinking thinking",
        THOUGHTS, (-1, {}, "")),
    Row("SamplingParams", "think reasoning reasoning_effort", THOUGHTS,
        (True, {"effort": None}, {}, "", "auto", "default")),
    Row("SamplingParams", "logprob_token_ids flat_logprobs", "ask for the logprobs of the likeliest"
        " tokens with logprobs, of all with -1"),
    Row("LLM SamplingParams", "enable_return_routed_experts enable_return_last_hidden_states "
        "return_last_hidden_states", "put a hook of torch's on a layer of LLM.runner.model, with "
        "enforce_eager=True"),
    Row("SamplingParams", "trace_decode_token_ids", "put these tokens behind the prompt, and ask "
        "for prompt_logprobs"),
    Row("SamplingParams", "do_sample", "temperature=0 is greedy", (True,)),
    Row("SamplingParams", "n_predict num_predict max_length", "use max_tokens"),
    Row("SamplingParams", "stop_sequences", "use stop"),
    Row("SamplingParams", "spaces_between_special_tokens"),  # no spaces are written, as with False
    Row("SamplingParams", "skip_clone"),  # a request has a copy of its own anyway
    Row("SamplingParams call", "truncate_prompt_tokens", "pass the last token ids of the prompt; "
        "for a pooling model set it in PoolingParams"),
    Row("LLM prompt body", "enable_prompt_embeds prompt_embeds", "a prompt is a text or token ids"),
    Row("call", "prompt_token_ids", "pass them as the prompts: [{'prompt_token_ids': [...]}, ...]"),
    Row("call", "chat_template_content_format", "a template gets the content of a message as text",
        ("auto", "string")),
    Row("call", "arrival_time", "requests are served as they come, or by priority="),
    Row("call", "tokenization_kwargs", "pass the token ids of the prompt"),
    Row("call", "trace_headers prompt_text"),  # for tracing systems; for outputs
    Row("call", "reset_running_requests", "abort the requests, or wait for their end: it returns "
        "False while any runs"),
    Row("call", "reset_connector reset_external", "the blocks of a kv_store stay: name another "
        "folder"),
    Row("call", "mode", "sleep() is refused while requests run: abort them, or wait for their end",
        ("abort",)),
    Row("call", "offload_tags", "sleep() gives back weights and KV cache, and wake_up(tags=[...]) "
        "brings one of them back"),
    Row("method", "pause_generation resume_generation is_paused", "await AsyncLLM.between_steps"
        "(work) calls work while no step runs. For update_weights or sleep no request may run: "
        "abort them, or wait for their end"),
    Row("method", "reset_mm_cache reset_encoder_cache", "reset_prefix_cache() empties all caches"),
    Row("LLM", "model_loader_extra_config ignore_patterns", "weights are read from the folder's "
        "own files: leave it out"),
    Row("LLM", "kv_events_config", "LLM.get_metrics() has the cache's numbers, and "
        "trace='run.html' its steps"),
    Row("prompt", "multi_modal_uuids"),  # images are told apart by their pixels
    Row("prompt", "encoder_prompt decoder_prompt", "there are no models with an encoder and a "
        "decoder here: use prompt"),
    Row("method", "create_engine_config", "LLM.from_engine_args and AsyncLLM.from_engine_args take "
        "these arguments as they are"),
    Row("LLM", "weight_transfer_config", UPDATE),
    Row("method", "init_weight_transfer_engine start_weight_update finish_weight_update "
        "get_world_size reload_weights", UPDATE),
    Row("method", "enqueue enqueue_chat wait_for_completion", "use add_request() and step()"),
    Row("method", "get_num_unfinished_requests wait_for_requests_to_drain", "LLM.requests has those"
        " that have not ended"),
    Row("method", "release_kv_cache_memory", "sleep() gives back weights and KV cache, and "
        "wake_up(tags=['weights']) brings back the weights alone"),
    Row("method", "is_sleeping", "LLM.check_ready() raises while it sleeps"),
    Row("method", "update_weight_version set_weight_version get_weight_version", "keep the version "
        "in the script: LLM.update_weights returns when all weights are in their place"),
    Row("method", "get_supported_tasks", "LLM.config.runner is 'generate' or 'pooling', and "
        "LLM.runner.pooler.tasks are a pooling model's tasks"),
    Row("method", "renderer preprocess preprocess_chat", "generate() and chat() take prompts and "
        "messages as they are; LLM.get_tokenizer() has the chat template"),
    Row("method", "engine_core", "the engine runs in this process: LLM.scheduler, and LLM.runner, "
        "which has the network"),
    Row("method", "do_log_stats", METRICS),
    Row("method", "is_running is_stopped errored dead_error", "AsyncLLM.check_health() raises when "
        "the engine is dead"),
    Row("method", "vllm_config get_vllm_config get_model_config", "LLM.config is what was chosen, "
        "LLM.model_config what config.json says"),
    Row("AsyncLLM", "vllm_config executor_class log_requests", "make it of an engine, "
        "AsyncLLM(LLM(model)), or by AsyncLLM.from_engine_args(EngineArgs(model=...))"),
    Row("AsyncLLM", "log_stats usage_context start_engine_loop"),  # these change nothing here
    Row("AsyncLLM", "stat_loggers", METRICS),
    Row("method", "set_tokenizer", "name it when the engine is made, with tokenizer="),
    # Pooling.
    Row("call pooling body", "normalize activation softmax", "use use_activation= of "
        "PoolingParams or PoolerConfig", (None,)),
    Row("LLM", "override_pooler_config", "use pooler_config="),
    Row("pooling method", "step_tag_id returned_token_ids reward",
        "encode(pooling_task='token_classify') gives a reward for each token"),
    Row("pooling", "late_chunking_params", CHUNKS),
    # vLLM's options of its server.
    Row("serve", "uvicorn_log_level disable_uvicorn_access_log disable_fastapi_docs max_log_len "
        "enable_request_id_headers enable_server_load_tracking enable_tokenizer_info_endpoint "
        "enable_force_include_usage enable_prompt_tokens_details"),
    Row("serve", "enable_auto_tool_choice tool_call_parser reasoning_parser tool_parser_plugin",
        "the format of calls and thoughts is read from the chat template: leave it out", (True,)),
    Row("serve", "ssl_keyfile ssl_certfile ssl_ca_certs uds", "put a proxy in front of it, nginx "
        "say"),
    Row("serve", "api_server_count", "one process answers: leave it out", (1,)),
    Row("serve", "chat_template_content_format", "a template gets what it expects", ("auto",)),
    # Fields that OpenAI's clients send. Those of the first row change no text: some identify the
    # user, or ask for storage; a prediction, or a key for the prompt cache, is about speed.
    Row("body", "user metadata store service_tier safety_identifier prompt_cache_key "
        "prompt_cache_retention prediction parallel_tool_calls request_id session_id "
        "include_reasoning include context_management output_config"),
    Row("body", "previous_response_id conversation background prompt", "nothing is kept here: send "
        "the whole conversation, and wait for its answer"),
    Row("body", "truncation max_tool_calls container mcp_servers audio web_search_options",
        "leave it out", ("disabled",)),
    Row("body", "functions function_call", "use tools and tool_choice", ([], "none", "auto")),
    Row("body", "tools tool_choice", "calls are a chat's: use /v1/chat/completions",
        ([], "none", "auto")),
    Row("body", "modalities", 'only ["text"] will do: this model writes text', (["text"],)),
    Row("body", "suffix", "text in front of a suffix can't be filled in: put all of it in the "
        "prompt"),
    Row("body", "thinking", "only a chat's template thinks: leave it out",
        ({}, "", {"type": "disabled"})),
    Row("body", "logits_processors", "a server has them for all requests: nanoserve serve "
        "--logits-processors MODULE:CLASS"),
    Row("body", "extra_args", "vLLM's name in a body is vllm_xargs"),
    Row("body", "extra_body", "OpenAI's client sends what is in it: put that into the body itself"),
    Row("body", "truncation_side", "of a prompt that is cut the end stays", ("left",)),
    Row("body", "truncation_direction", "use truncation_side", ("right",)),
    Row("body", "documents", "write them into a message"),
    Row("body", "add_special_tokens", "send token ids", (True,)),
    Row("body", "max_tokens_per_doc max_chunks_per_doc", "cut texts with truncate_prompt_tokens"),
    Row("body", "rank_fields", "documents are ranked by their text", (["text"],)),
    Row("body", "echo", "the last message is yours: put it in front of the answer"),
    Row("body", "detokenize", "ask for the token ids with return_token_ids", (True,)),
    Row("body", "embed_dtype endianness", "vectors are float32, the lowest byte first: leave it "
        "out", ("float32", "native", "little")),
    # A chat's fields in the bodies of another API.
    Row("body", "n", "one message is written at a time: use /v1/chat/completions", (1,)),
    Row("body", "logprobs top_logprobs prompt_logprobs return_token_ids return_tokens_as_token_ids",
        "answers here have no place for it: use /v1/chat/completions"),
    Row("body", "response_format", "say it in text.format (/v1/responses), or in "
        "output_config.format (/v1/messages)"),
    Row("body", "max_completion_tokens max_output_tokens", "the limit of tokens is max_tokens, and "
        "max_output_tokens in /v1/responses"),
    Row("body", "verbosity", "say in the prompt how long the answer is", ("medium",)),
    Row("body", "chat_template", "a template is a program, and comes with the server: nanoserve "
        "serve --chat-template FILE"),
    # What scripts import: where it is (behind ":" its name there, if it has another one), or what
    # to do instead.
    Row("import", "LLM", ours=f"{AS_VLLM}_trl:TrainersLLM"),
    Row("import", "EngineArgs AsyncEngineArgs", ours=f"{AS_VLLM}:CliEngineArgs"),
    Row("import", "AsyncLLM AsyncLLMEngine", ours="nanoserve_extras.server.async_llm:AsyncLLM"),
    Row("import", "FlexibleArgumentParser", ours="nanoserve_extras.base.command:DashedParser"),
    Row("import", "PromptType", ours="nanoserve_extras.base.inputs:Prompt"),
    Row("import", "init_logger", ours="logging:getLogger"),
    Row("import", "cleanup_dist_env_and_memory destroy_model_parallel "
        "destroy_distributed_environment", ours="gc:collect"),
    Row("import", "get_ip trainer_init packed_nccl_broadcast_producer",  # of TRL's mode "server"
        ours=f"{AS_VLLM}_trl:only_server"),
    Row("import", "LogitsProcessor AdapterLogitsProcessor RequestLogitsProcessor BatchUpdate "
        "MoveDirectionality process_dict_updates", ours="nanoserve_extras.logits_processors:"),
    Row("import", "VllmConfig", ours="nanoserve.config:EngineConfig"),  # makes a processor
    Row("import", "cached_get_tokenizer", ours=f"{AS_VLLM}:get_tokenizer"),
    Row("import", "TokenizerLike", ours="nanoserve.detokenizer:Tokenizer"),
    Row("import", "random_uuid get_tokenizer resolve_chat_template print_embeddings",
        ours=f"{AS_VLLM}:"),
    Row("import", "Counter Gauge Histogram Metric Vector", ours="nanoserve_extras.base.metrics:"),
    Row("import", "EmbeddingRequestOutput ClassificationRequestOutput ScoringRequestOutput",
        ours="nanoserve_extras.pooling.pooling:PoolingRequestOutput"),
    Row("import", "BeamSearchParams", BEST),
    Row("import", "KVTransferConfig kv_transfer", STORE),
    Row("import", "ProfilerConfig", PROFILE),
    Row("import", "stat_loggers loggers", METRICS),
    Row("import", "LateChunkingParams", CHUNKS),
    Row("import", "GuidedDecodingParams", "use StructuredOutputsParams"),
    Row("import", "ModelRegistry", "an architecture is a row of FAMILIES in model_config.py, see "
        "CONTRIBUTING.md"),
    Row("import", "envs", "options of LLM(...) say what vLLM's environment variables do"),
    Row("import", "UsageContext", "leave it out: nothing is reported to anybody"),
    Row("import", "current_platform", "torch.cuda.is_available() tells whether there is a GPU"),
    Row("import", "get_open_port", "leave it out: ranks find each other without a port of yours"),
    Row("import", "init_batch_invariance", "leave it out: on CPUs a text's numbers never depend on "
        "the batch"),
    Row("import", "load_chat_template", "chat(chat_template=Path(file).read_text()) takes the text "
        "itself"),
    Row("import", "cached_tokenizer_from_config", "LLM.get_tokenizer() is the engine's"),
    Row("import", "entrypoints", "python -m nanoserve serve is the server, and AsyncLLM what a "
        "server of your own is made of"),
    Row("import", "serial_utils", "base64.b64decode and numpy.frombuffer read what the server "
        "writes"),
    Row("import", "benchmarks", "python bench.py measures, and datasets of Hugging Face have "
        "prompts"),
    Row("import", "watermarking", "texts are written without a watermark"),
    Row("import", "hf_api", "use huggingface_hub"),
    Row("import", "model_executor", "networks are those of nanoserve/model.py, or transformers'"),
    Row("import", "model_loader tensorizer", "a folder's safetensors files are read, each rank its "
        "share: LLM(folder)"),
    Row("import", "weight_transfer WeightTransferConfig WeightTransferInitRequest "
        "WeightTransferUpdateRequest NCCLWeightTransferEngine", UPDATE),
    Row("import", "CompilationConfig CompilationMode CUDAGraphMode AttentionConfig", "leave it out:"
        " on a GPU decode steps are recorded as CUDA graphs by themselves"),
    Row("import", "ImageAsset AudioAsset VideoAsset fetch_image MultiModalDataBuiltins multimodal",
        "hand over an image of PIL, a path or bytes, and a sound as an array: see docs/extras.md"),
)

ROWS = {(taker, name): row for row in TABLE
        for taker in row.takers.split() for name in row.names.split()}


def takes_vllms_words(where: str, taker: str, *more: str) -> Callable[[Decorated], Decorated]:
    """Decorate a class or a function, so that its keyword arguments go through `in_our_words`.
    more: names that it takes through its own `**given`."""
    def decorate(function):
        if isinstance(function, type):
            function.__init__ = decorate(function.__init__)
            return function
        known = {name for name, one in signature(function).parameters.items()
                 if one.kind is not Parameter.VAR_KEYWORD}.union(more)

        @wraps(function)
        def checked(*args, **given):
            return function(*args, **in_our_words(where, taker, given, known))

        return checked

    return decorate


def in_our_words(where: str, taker: str, given: Mapping[str, Any],
                 known: Collection[str]) -> dict[str, Any]:
    """The arguments `given`, under names that are `known`. where: the caller's name in messages.
    taker: selects the rows.

    Raises `ValueError` for a name of the table whose value asks for something, `TypeError` for a
    name that does not exist, or that comes twice.
    """
    ours: dict[str, Any] = {}
    for said, value in given.items():
        row = ROWS.get((taker, said))
        name = row.ours if row is not None and row.ours else said
        if name in ours:
            raise TypeError(f"{where}: {said} is another name of {name}, give one of them")
        if name in known:
            if value is not None or row is None or None not in row.nothing:
                ours[name] = value
        elif row is None or row.ours:
            raise TypeError(f"{where} has no {said}: {_hint(str(said), known)}")
        elif not row.asks_for_nothing(value):
            raise ValueError(f"{where}: {name}={value!r:.80} is not supported: {row.remedy}")
    return ours


def missing_method(name: str, known: Collection[str], where: str = "LLM") -> str:
    """The message for a method of vLLM's class that is missing here, or for a mistyped name."""
    if row := ROWS.get(("method", name)):
        return f"{where}.{name} is not supported: {row.remedy}"
    return f"{where} has no {name}: {_hint(name, [n for n in known if n[0] != '_'])}"


def _hint(word: str, known: Collection[str]) -> str:
    near = nearest(word, known)
    return f"did you mean {near}?" if near else "its help() tells what there is"


def nearest(word: str, known: Collection[str]) -> str | None:
    """The known name that a typing error probably means, or None if no name is close."""
    near = [name for name in known if _parts(name) == _parts(word)]  # max_seq_num: max_num_seqs
    near += get_close_matches(word, known, 1, 0.83)  # max_new_tokens: max_tokens has 0.833
    return near[0] if near else None


def _parts(name: str) -> set[str]:
    return {part.rstrip("s") for part in name.split("_")}
