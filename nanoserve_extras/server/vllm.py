"""Options of vLLM's server, and fields of its clients' bodies, that are missing here: one table.

It continues base/vllm.py, whose rows for `LLM` also hold for the command line, and whose rows for
`SamplingParams` also hold for a body. A field without a row is ignored, and the server logs it
once; so each field that would change the text needs its row.

Invariant, as there: no option is silently ignored. A field that could change the answer is dropped
only if its value asks for what happens anyway.
"""

from nanoserve_extras.base import vllm
from nanoserve_extras.base.vllm import Row, rows_of

# takers: "serve" (vLLM's own options of its server), "body" (a request).
TABLE = (
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
)
ROWS = vllm.ROWS | rows_of(TABLE)
# Options that LLM(), or a call, refuses are refused in a body with the same message.
for taker, names in (("LLM", "kv_transfer_config kv_transfer_params "
                      "enable_prompt_embeds prompt_embeds"),
                     ("call", "mm_processor_kwargs normalize activation softmax")):
    ROWS |= {("body", name): vllm.ROWS[taker, name] for name in names.split()}
