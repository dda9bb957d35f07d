"""vLLM's words: each is taken, renamed, dropped where it asks for nothing, or refused.

The oracle is vLLM's own signatures, written down here by hand with their defaults.
"""

import dataclasses
import re

import pytest

from nanoserve import SamplingParams
from nanoserve_extras.base import vllm
from nanoserve_extras.engine_args import EngineArgs

pytestmark = pytest.mark.floor

# What a script says that writes vLLM's defaults out: all of it means "as usual".
ENGINE_DEFAULTS = dict(
    tokenizer=None, tokenizer_mode="auto", skip_tokenizer_init=False, trust_remote_code=False,
    tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1, dtype="auto",
    quantization=None, revision=None, tokenizer_revision=None, code_revision=None, seed=None,
    gpu_memory_utilization=0.9, cpu_offload_gb=0, enforce_eager=False, enable_prefix_caching=None,
    enable_chunked_prefill=None, disable_custom_all_reduce=False, hf_token=None, hf_overrides=None,
    mm_processor_kwargs=None, limit_mm_per_prompt={}, pooler_config=None, compilation_config=None,
    structured_outputs_config=None, logits_processors=None, enable_lora=False,
    kv_cache_dtype="auto", kv_transfer_config=None, distributed_executor_backend=None,
    enable_expert_parallel=False, download_dir=None, load_format="auto", config_format="auto",
    max_logprobs=-1, model_impl="auto", generation_config="auto",
    enable_sleep_mode=False, speculative_config=None, async_scheduling=None, runner="auto",
    convert="auto", scheduling_policy="fcfs", max_model_len=None, block_size=16)
SAMPLING_DEFAULTS = dict(
    n=1, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0, temperature=1.0,
    top_p=1.0, top_k=0, min_p=0.0, seed=None, stop=None, stop_token_ids=None, ignore_eos=False,
    max_tokens=16, min_tokens=0, logprobs=None, prompt_logprobs=None, detokenize=True,
    skip_special_tokens=True, spaces_between_special_tokens=True, include_stop_str_in_output=False,
    structured_outputs=None, guided_decoding=None, logit_bias=None, allowed_token_ids=None,
    extra_args=None, bad_words=None, truncate_prompt_tokens=None,
    best_of=None, logits_processors=None)


def test_vllms_defaults_written_out_change_nothing():
    assert EngineArgs(model="m", **ENGINE_DEFAULTS) == EngineArgs(model="m")
    assert SamplingParams(**SAMPLING_DEFAULTS) == SamplingParams()
    assert SamplingParams(logprobs=True, prompt_logprobs=False) == SamplingParams(logprobs=1)


@pytest.mark.parametrize(("given", "same"), [
    (dict(enable_expert_parallel=True), dict(expert_parallel=True)),
    (dict(seed=None), dict(seed=0)),
    (dict(disable_log_stats=True, max_cpu_loras=4), {}), (dict(disable_log_stats=False), {}),
    (dict(swap_space=4, data_parallel_size=1, disable_custom_all_reduce=True), {})], ids=str)
def test_words_that_are_taken(given, same):
    assert EngineArgs(model="m", **given) == EngineArgs(model="m", **same)


@pytest.mark.parametrize("given", [
    dict(data_parallel_size=2), dict(data_parallel_size=True), dict(tokenizer_mode="mistral"),
    dict(kv_transfer_config={"kv_connector": "x"}), dict(worker_cls=object),
    dict(weight_transfer_config={"backend": "nccl"}), dict(enable_return_routed_experts=True),
    dict(allowed_local_media_path="/")], ids=str)
def test_an_option_that_is_missing_here_is_refused_with_its_value_and_a_way_round(given):
    [(word, value)] = given.items()
    with pytest.raises(ValueError, match=rf"LLM\(\): {word}={re.escape(repr(value))} .+: \w+"):
        EngineArgs(model="m", **given)


@pytest.mark.parametrize("given", [
    dict(guided_decoding={"regex": "a"}), dict(best_of=3), dict(length_penalty=0.0),
    dict(trace_decode_token_ids=[5]), dict(return_last_hidden_states=True)], ids=str)
def test_a_field_of_sampling_params_is_refused_as_well(given):
    [word] = given
    with pytest.raises(ValueError, match=rf"SamplingParams: {word}=.*: \w+"):
        SamplingParams(**given)


@pytest.mark.parametrize(("call", "meant"), [
    (lambda: EngineArgs(model="m", max_modle_len=1), "max_model_len"),
    (lambda: EngineArgs(model="m", gpu_memory_utilisation=0.5), "gpu_memory_utilization"),
    (lambda: SamplingParams(temprature=0), "temperature"),
    (lambda: SamplingParams(max_new_tokens=3), "max_tokens")])
def test_a_typing_error_names_the_nearest_word_and_no_list(call, meant):
    with pytest.raises(TypeError) as error:
        call()
    said = str(error.value)
    assert meant in said and "block_size" not in said and "top_p" not in said


def test_a_word_like_no_other_is_still_explained():
    with pytest.raises(TypeError, match=r"SamplingParams .*xyzzy.*help\(\)"):
        SamplingParams(xyzzy=None)  # nobody's word, whatever its value


def test_our_name_is_taken_only_where_it_is_one_of_the_calls():
    with pytest.raises(TypeError, match="has no params"):  # dropped, it would be ignored
        vllm.in_our_words("encode()", "call", dict(params=5), {"pooling_params"})


def test_one_thing_under_two_names_is_refused():
    with pytest.raises(TypeError, match="enable_expert_parallel .*expert_parallel"):
        EngineArgs(model="m", expert_parallel=True, enable_expert_parallel=False)


def test_no_name_is_ours_and_refused_at_once():
    """A feature that arrives takes its name out of the table, which would be asked no more."""
    for record, taker in ((EngineArgs, "LLM"), (SamplingParams, "SamplingParams")):
        assert not [field.name for field in dataclasses.fields(record)
                    if (row := vllm.ROWS.get((taker, field.name))) and row.nothing != (None,)]


# What the examples of vLLM 0.33 say to these, apart from what is the same here.
IN_EXAMPLES = {
    "LLM": "allowed_local_media_path attention_backend config_format data_parallel_address "
           "data_parallel_rpc_port data_parallel_size data_parallel_size_local "
           "disable_chunked_mm_input disable_custom_all_reduce disable_log_stats "
           "distributed_executor_backend enable_expert_parallel enable_log_requests "
           "enable_mm_embeds enable_prompt_embeds enable_return_routed_experts ignore_patterns "
           "io_processor_plugin "
           "kv_transfer_config max_cpu_loras mm_processor_cache_gb "
           "model_loader_extra_config profiler_config reasoning_parser tokenizer_mode",
    "SamplingParams": "skip_clone trace_decode_token_ids",
    "pooling": "late_chunking_params",
    "call": "data_parallel_rank mode reset_running_requests tokenization_kwargs",
    "method": "collective_rpc do_log_stats enqueue enqueue_chat get_world_size pause_generation "
              "release_kv_cache_memory resume_generation start_profile stop_profile "
              "update_weight_version wait_for_completion apply_model is_sleeping "
              "get_num_unfinished_requests get_supported_tasks"}


@pytest.mark.parametrize("taker", IN_EXAMPLES)
def test_a_name_of_vllms_examples_has_a_row(taker):
    """Some were a bare TypeError or AttributeError, which tells nobody what to do."""
    assert not [name for name in IN_EXAMPLES[taker].split() if (taker, name) not in vllm.ROWS]


def test_a_name_has_one_row_for_each_who_takes_it():
    takers = {"LLM", "serve", "SamplingParams", "call", "prompt", "pooling", "method", "body",
              "AsyncLLM", "import"}
    pairs = [(taker, name) for row in vllm.TABLE for taker in row.takers.split()
             for name in row.names.split()]
    assert len(pairs) == len(set(pairs)) and {taker for taker, _ in pairs} == takers
    for row in vllm.TABLE:
        assert not (row.remedy and row.ours) and (row.remedy or row.nothing in ((), (None,))), row


@pytest.mark.parametrize("word", ["enable_eplb", "mamba_block_size"])
def test_a_name_without_a_row_is_compared_with_none_that_is_only_similar(word):
    """By difflib's usual measure mamba_block_size would be block_size, and enable_eplb
    enable_lora."""
    with pytest.raises(TypeError, match=rf"LLM\(\) .*{word}.*help\(\)"):
        EngineArgs(model="m", **{word: True})


@pytest.mark.parametrize("name", ["seed", "thinking_token_budget"])
def test_minus_one_is_none(name):
    """vLLM's other spelling: as a number such a seed would make all samples equal, and such a
    budget would end each thought before its first token."""
    assert getattr(SamplingParams(**{name: -1}), name) is None


def test_a_clone_shares_nothing():
    params = SamplingParams(stop=["a"], logit_bias={5: 1.0}, temperature=0.5, bad_words=["b"])
    copy = params.clone()
    assert copy == params and copy is not params
    copy.stop.append("c")
    copy.logit_bias[6] = 2.0
    copy.bad_words.clear()
    assert (params.stop, params.logit_bias, params.bad_words) == (["a"], {5: 1.0}, ["b"])


def test_a_warning_points_at_the_callers_line():
    with pytest.warns(UserWarning, match=r"temperature=0.001 is raised") as caught:
        SamplingParams(temperature=0.001)
    assert caught[0].filename == __file__


def test_help_shows_the_fields_and_not_the_wrapper():
    import inspect

    for record in (EngineArgs, SamplingParams):
        names = {field.name for field in dataclasses.fields(record)}
        assert set(inspect.signature(record).parameters) == names
