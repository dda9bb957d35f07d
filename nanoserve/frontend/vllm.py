"""vLLM's names for what has another name here, is not needed, or is missing: one table.

A script that was written for vLLM, or a client of its server, uses names that this engine does not
have. What becomes of such a name stands in its row of `TABLE`:

    enable_expert_parallel=True   another name for ours     handed on under our name
    disable_log_stats=True        changes no text           dropped, whatever its value
    tokenizer_mode="auto"         asks for nothing          dropped: leaving it out means the same
    tokenizer_mode="mistral"      asks for what is missing  `ValueError` with what to do instead

Names of ours go first, so a field that config.py gets is known here at once. A name without a row
is a `TypeError`, which proposes a name of ours only if the two are very similar.

Invariant: nothing is accepted and ignored. A name that could change the text is dropped only if its
value asks for what happens anyway: None, one of `Row.nothing`, or else False, 0 or an empty one.

`LLM`, `SamplingParams`, the methods, the server's bodies and its command line read this table. What
our own names mean is said in config.py. This file imports nothing of nanoserve, so that config.py
may use it. Not each of vLLM's names has a row: few of them are in anybody's script, and a row that
nobody meets grows old. But a field of a body that has no row is passed over (the server logs it
once), so a row that keeps a text from being another one stays.
"""

from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from functools import wraps
from inspect import signature
from typing import Any, NamedTuple, TypeVar

Decorated = TypeVar("Decorated", bound=Callable)


class Row(NamedTuple):
    """Names of one kind. With neither a remedy nor a name of ours they are harmless.

    takers: "LLM" (its arguments; the command line, too), "serve" (the server's own options),
    "SamplingParams", "call" (keywords of generate(), embed() and their kin), "prompt" (a dict's
    keys), "pooling" (`PoolerConfig` and `PoolingParams`), "method" (of `LLM`), "import" (a class or
    a function), "body" (a request to the server, where SamplingParams' fields stand as well).
    """

    takers: str
    names: str
    remedy: str = ""  # the way round
    nothing: tuple = ()  # the values that ask for nothing, if these are not the empty ones
    ours: str = ""  # our name for it

    def asks_for_nothing(self, value: Any) -> bool:
        """Whether leaving the name out would mean the same. Example: data_parallel_size=1."""
        if value is None or not self.remedy:
            return True
        if self.nothing:  # True == 1, and means something else
            said = value.lower() if isinstance(value, str) else value
            return any(said == one and (value is True) == (one is True) for one in self.nothing)
        return isinstance(value, (bool, int, float, str, list, tuple, dict, set)) and not value


BEST = "ask for n samples with logprobs=0, and keep those with the largest cumulative_logprob"
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
    Row("LLM", "generation_config override_generation_config", "pass SamplingParams to generate(): "
        "it takes nothing from generation_config.json", ("auto", {})),
    Row("LLM", "task", "use runner='generate' or 'pooling', and convert='embed' or 'classify'",
        ("auto",)),
    Row("call prompt body", "mm_processor_kwargs", "say it when the engine is made, to LLM() or the"
        " server"),
    Row("prompt", "multi_modal_data", "this engine reads text alone: make it with "
        "limit_mm_per_prompt={'image': 1}, see docs/vision.md"),
    # How it runs.
    Row("LLM", "enable_expert_parallel", ours="expert_parallel"),
    # Three names of ours, for which vLLM writes None where we have another default.
    Row("LLM", "seed enable_prefix_caching enable_chunked_prefill", nothing=(None,)),
    # They change no text: a preempted request is computed again, whatever room there is for it.
    Row("LLM", "disable_log_stats disable_log_requests disable_custom_all_reduce "
        "disable_cascade_attn max_cpu_loras swap_space max_seq_len_to_capture "
        "mm_processor_cache_gb disable_mm_preprocessor_cache disable_chunked_mm_input "
        "enable_sleep_mode"),
    Row("LLM", "data_parallel_size", "all ranks serve one copy of the model with "
        "tensor_parallel_size or pipeline_parallel_size; for several start several processes",
        (1,)),
    Row("LLM", "distributed_executor_backend", "ranks are processes of this machine, or torchrun's:"
        " leave it out, or start the script with torchrun", ("mp",)),
    Row("LLM", "compilation_config cudagraph_capture_sizes", "there is no compiler of models; on a "
        "GPU decode steps are recorded as CUDA graphs, and enforce_eager=True switches that off"),
    Row("LLM", "attention_backend", "choose with kernels='auto', 'triton', 'cpu' or 'torch'"),
    Row("LLM", "worker_cls worker_extension_cls", "write the change into model_runner.py",
        ("auto", "")),
    Row("LLM", "cpu_offload_gb", "use a smaller model, a narrower dtype, tensor_parallel_size or "
        "layer_plan"),
    Row("LLM body", "kv_transfer_config kv_transfer_params", "say kv_store='folder': engines "
        "that name the same folder find each other's blocks there"),
    Row("LLM", "speculative_model num_speculative_tokens", "use speculative_config={'method': "
        "'ngram', 'suffix', 'draft_model', 'eagle3' or 'mtp', 'num_speculative_tokens': "
        "..., 'model': ...}"),
    Row("LLM method", "enable_log_requests profiler_config start_profile stop_profile", "make the "
        "engine with trace='run.html', or put torch.profiler around generate()"),
    Row("method", "collective_rpc apply_model", "LLM.runner is the model runner of this process, "
        "and LLM.runner.model the network; those of further ranks can't be called"),
    Row("method", "add_lora remove_lora list_loras pin_lora", "an adapter is loaded when a request "
        "names it (lora_request=), and the least recently used one makes room"),
    # What a request asks for.
    Row("LLM SamplingParams", "extra_args vllm_xargs", "use logit_bias, allowed_token_ids and "
        "bad_words of SamplingParams, or write a control into controls.py"),
    Row("LLM body", "logits_processors", "they are functions of a request in this process: use "
        "SamplingParams(logits_processors=[f]) of LLM.generate"),
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
    Row("SamplingParams", "do_sample", "temperature=0 is greedy", (True,)),
    Row("SamplingParams", "n_predict num_predict max_length", "use max_tokens"),
    Row("SamplingParams", "stop_sequences", "use stop"),
    Row("SamplingParams", "spaces_between_special_tokens"),  # there are none, as with False
    Row("SamplingParams call", "truncate_prompt_tokens", "pass the last token ids of the prompt; "
        "for a pooling model set it in PoolingParams"),
    Row("LLM prompt body", "enable_prompt_embeds prompt_embeds", "a prompt is a text or token ids"),
    Row("call", "prompt_token_ids", "pass them as the prompts: [{'prompt_token_ids': [...]}, ...]"),
    Row("call", "chat_template_content_format", "a template gets the content of a message as text",
        ("auto", "string")),
    Row("method", "vllm_config", "LLM.config is what was chosen, LLM.model_config what config.json "
        "says"),
    Row("method", "set_tokenizer", "name it when the engine is made, with tokenizer="),
    # Pooling.
    Row("call pooling body", "normalize activation softmax", "use use_activation= of "
        "PoolingParams or PoolerConfig", (None,)),
    Row("body", "embed_dtype endianness", "vectors are float32, the lowest byte first: leave it "
        "out", ("float32", "native", "little")),
    Row("LLM", "override_pooler_config", "use pooler_config="),
    Row("pooling method", "step_tag_id returned_token_ids reward",
        "encode(pooling_task='token_classify') gives a reward for each token"),
    # What scripts import.
    Row("import", "BeamSearchParams", BEST),
    Row("import", "GuidedDecodingParams", "use StructuredOutputsParams"),
    Row("import", "KVTransferConfig", "say kv_store='folder' to LLM(...)"),
    Row("import", "CompilationConfig CompilationMode CUDAGraphMode AttentionConfig", "leave it "
        "out: on a GPU decode steps are recorded as CUDA graphs by themselves"),
    Row("import", "ImageAsset AudioAsset VideoAsset fetch_image MultiModalDataBuiltins",
        "hand over an image of PIL, a path or bytes, and a sound as an array: see "
        "docs/vision.md"),
    Row("import", "ModelRegistry", "an architecture is a row in checkpoint/, see docs/models.md"),
    Row("import", "logits_processor", "they are functions of a request here: use "
        "SamplingParams(logits_processors=[f])"),
    Row("import", "envs", "options of LLM(...) say what vLLM's environment variables do"),
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
    # What OpenAI's clients send to the server. Of the first row some tell who asks, or what is to
    # be kept; a prediction, or a key for the prompt cache, is about speed.
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
    Row("body", "extra_body", "OpenAI's client sends what is in it: put that into the body itself"),
    Row("body", "truncation_side", "of a prompt that is cut the end stays", ("left",)),
    Row("body", "truncation_direction", "use truncation_side", ("right",)),
    Row("body", "documents", "write them into a message"),
    Row("body", "add_special_tokens", "send token ids", (True,)),
    Row("body", "max_tokens_per_doc max_chunks_per_doc", "cut texts with truncate_prompt_tokens"),
    Row("body", "rank_fields", "documents are ranked by their text", (["text"],)),
    Row("body", "echo", "the last message is yours: put it in front of the answer"),
    Row("body", "detokenize", "ask for the token ids with return_token_ids", (True,)),
    # A chat's, where they come in another language.
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
)
ROWS = {(taker, name): row for row in TABLE
        for taker in row.takers.split() for name in row.names.split()}


def takes_vllms_words(where: str, taker: str) -> Callable[[Decorated], Decorated]:
    """Decorate a class or a function, so that its keyword arguments go through `in_our_words`."""
    def decorate(function):
        if isinstance(function, type):
            function.__init__ = decorate(function.__init__)
            return function
        known = set(signature(function).parameters)

        @wraps(function)
        def checked(*args, **given):
            return function(*args, **in_our_words(where, taker, given, known))

        return checked

    return decorate


def in_our_words(where: str, taker: str, given: Mapping[str, Any],
                 known: Collection[str]) -> dict[str, Any]:
    """The arguments `given`, under names that are `known`. where: for messages. taker: of the rows.

    Raises `ValueError` for a name of the table whose value asks for something, `TypeError` for a
    name that nobody has, or that comes twice.
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
        elif row is None:
            raise TypeError(f"{where} has no {name}: {_hint(str(name), known)}")
        elif not row.asks_for_nothing(value):
            raise ValueError(f"{where}: {name}={value!r:.80} is not supported: {row.remedy}")
    return ours


def missing_method(name: str, known: Collection[str]) -> str:
    """The message for a method of vLLM's `LLM` that is missing here, or for a mistyped name."""
    if row := ROWS.get(("method", name)):
        return f"LLM.{name} is not supported: {row.remedy}"
    return f"LLM has no {name}: {_hint(name, [n for n in known if n[0] != '_'])}"


def _hint(word: str, known: Collection[str]) -> str:
    near = nearest(word, known)
    return f"did you mean {near}?" if near else "its help() tells what there is"


def nearest(word: str, known: Collection[str]) -> str | None:
    """For typing errors: the name that was meant, if one is really near."""
    near = [name for name in known if _parts(name) == _parts(word)]  # max_seq_num: max_num_seqs
    near += get_close_matches(word, known, 1, 0.83)  # max_new_tokens: max_tokens has 0.833
    return near[0] if near else None


def _parts(name: str) -> set[str]:
    return {part.rstrip("s") for part in name.split("_")}
