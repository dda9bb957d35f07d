"""vLLM users' habits: names, prompts, keywords, methods.

The oracles are transformers' greedy text and its logits.
"""

import dataclasses

import numpy as np
import pytest
import torch
from checkpoints import VOCAB_SIZE
from small_engine import HELLO, MESSAGES, TOKENIZER, copy_of, drain, greedy, ids_of, run, tokens
from transformers import AutoModelForCausalLM

from nanoserve import LLM, EngineArgs, SamplingParams

SMALL = dict(max_num_seqs=4, max_num_batched_tokens=24, max_model_len=64,
             num_gpu_blocks_override=24)


# --------------------------------------------------------------------- prompts


@pytest.mark.parametrize("options", [{}, dict(return_tensors="pt"), dict(return_tensors="np")],
                         ids=str)
def test_what_a_tokenizer_returns_is_a_prompt(llm, expected, options):
    outs = run(llm, TOKENIZER("Hello", **options), greedy())
    assert tokens(outs) == [expected("Hello")] and outs[0].prompt_token_ids == HELLO
    assert tokens(run(llm, [TOKENIZER("Hello", **options), "world"], greedy())) == [
        expected("Hello"), expected("world")]
    padded = TOKENIZER(["Hello", "Hi"], padding=True, **options)
    assert len(padded["input_ids"][1]) == len(HELLO)  # or nothing is shown
    assert tokens(run(llm, padded, greedy())) == [expected("Hello"), expected("Hi")]


def test_a_chat_that_was_tokenized_outside_is_a_prompt(llm):
    encoding = TOKENIZER.apply_chat_template(MESSAGES, add_generation_prompt=True)
    assert not isinstance(encoding, (list, dict))  # transformers 5: a BatchEncoding
    [ours], [theirs] = llm.chat(MESSAGES, greedy(), use_tqdm=False), run(llm, encoding, greedy())
    assert theirs.outputs[0].token_ids == ours.outputs[0].token_ids
    llm.add_request("one", encoding, greedy())
    assert drain(llm)["one"][-1].outputs[0].token_ids == ours.outputs[0].token_ids


# --------------------------------------------------------------------- logprobs


@torch.no_grad()
def test_logprobs_of_all_tokens(llm, qwen3, expected):
    """-1 stands for the whole vocabulary, of the output and of the prompt."""
    params = greedy(2, logprobs=-1, prompt_logprobs=-1)
    [out], [beside] = run(llm, "Hello", params), run(llm, "Hello", greedy(2, logprobs=1))
    assert params.logprobs == -1  # the caller's own stay as they are
    logits = AutoModelForCausalLM.from_pretrained(qwen3, dtype=torch.float32)(
        torch.tensor([HELLO + expected("Hello", 2)])).logits[0].log_softmax(-1)
    entries = out.prompt_logprobs[1:] + out.outputs[0].logprobs
    assert out.prompt_logprobs[0] is None and len(entries) == len(HELLO) - 1 + 2
    for found, theirs in zip(entries, logits, strict=False):
        assert sorted(found) == list(range(VOCAB_SIZE))
        assert [found[i].logprob for i in range(VOCAB_SIZE)] == pytest.approx(
            theirs.tolist(), abs=1e-3)
    assert [len(one) for one in beside.outputs[0].logprobs] == [1, 1]  # greedy: it is the likeliest


# ------------------------------------------------------------- engines by name


def test_engine_args_may_be_spread_over_llm(qwen3):
    args = EngineArgs(model=str(qwen3), **SMALL)
    with LLM(**dataclasses.asdict(args)) as llm:
        assert llm.config.max_num_seqs == 4 and llm.llm_engine is llm


# ------------------------------------------------------------------- revisions


def test_a_revision_goes_to_the_hub(qwen3, hub):
    asked = hub(qwen3)
    LLM("somebody/a-model", revision="v1.2", **SMALL).shutdown()
    assert [one[:2] for one in asked] == [("somebody/a-model", "v1.2")]


def test_a_folder_has_no_revision(qwen3):
    with pytest.raises(ValueError, match="revision='v1.2'.*model="):
        LLM(qwen3, revision="v1.2")
    with pytest.raises(ValueError, match="revision.*got 7"):
        LLM(qwen3, revision=7)


def test_a_bundled_model_has_a_name(qwen3, tmp_path, monkeypatch):
    """Wherever the package is installed; a folder of that name goes first."""
    from nanoserve.loader import find_model

    monkeypatch.chdir(tmp_path)
    folder = find_model("storyteller")
    assert (folder / "config.json").exists() and folder.parent.name == "assets"
    copy_of(qwen3, tmp_path).rename(tmp_path / "storyteller")
    assert find_model("storyteller").resolve() == (tmp_path / "storyteller").resolve()


# -------------------------------------------------------------- chat, and calls


def test_a_chat_streams(llm):
    [whole] = llm.chat(MESSAGES, greedy(), use_tqdm=False)
    shown = [out.outputs[0].text for out in llm.chat(MESSAGES, greedy(), stream=True)]
    assert len(shown) > 2 and shown[-1] == whole.outputs[0].text
    assert all(whole.outputs[0].text.startswith(text) for text in shown)


def test_chat_takes_use_tqdm_by_position(llm, capsys):
    llm.chat(MESSAGES, greedy(2), False)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("call", "given"), [
    ("generate", dict(prompt_token_ids=[[1, 2]])),
    ("generate", dict(mm_processor_kwargs={"x": 1})),
    ("stream", dict(truncate_prompt_tokens=3)),
    ("chat", dict(chat_template_content_format="openai")),
    ("generate", dict(tokenization_kwargs={"truncation": True})),
    ("add_request", dict(arrival_time=5.0)), ("sleep", dict(mode="keep")),
    ("reset_prefix_cache", dict(reset_running_requests=True)),
    ("reset_prefix_cache", dict(reset_connector=True)), ("sleep", dict(offload_tags=["weights"])),
], ids=str)
def test_keywords_that_are_missing_here(llm, call, given):
    [word] = given
    what = dict(chat=[MESSAGES, greedy(2)], sleep=[], reset_prefix_cache=[]).get(
        call, ["Hello", greedy(2)])
    with pytest.raises(ValueError, match=rf"{call}\(\): {word}=.*: \w+"):
        getattr(llm, call)(*what, **given)


def test_keywords_that_ask_for_nothing(llm):
    [out] = llm.generate({"prompt": "Hello", "cache_salt": None}, greedy(2), use_tqdm=False,
                         lora_request=None, priority=None)
    [chat] = llm.chat(MESSAGES, greedy(2), use_tqdm=False, tools=None, lora_request=None,
                      chat_template_content_format="auto", mm_processor_kwargs=None)
    assert out.finished and chat.finished
    llm.add_request("mine", "Hello", params=greedy(1), tokenization_kwargs=None, trace_headers=None)
    while llm.has_unfinished_requests():
        outputs = llm.step()
    assert [one.request_id for one in outputs] == ["mine"]
    assert llm.reset_prefix_cache(reset_running_requests=False, reset_connector=False)


def test_tools_go_the_way_that_the_refusal_names(llm):
    """The remedy has to work."""
    [out] = llm.chat(MESSAGES[:1], greedy(2), use_tqdm=False,
                     chat_template="{{ tools[0].name }}{{ messages[0].content }}",
                     chat_template_kwargs={"tools": [{"name": "clock"}]})
    assert out.prompt_token_ids == ids_of("clockHi")


@pytest.mark.parametrize("name", [
    "beam_search", "collective_rpc", "apply_model", "start_profile",
    "stop_profile", "reward", "set_tokenizer", "pause_generation", "resume_generation", "renderer",
    "init_weight_transfer_engine", "get_world_size", "reset_mm_cache", "engine_core", "enqueue"])
def test_methods_that_are_missing_here(llm, name):
    with pytest.raises(AttributeError, match=rf"LLM\.{name} .*: \w+"):
        getattr(llm, name)("x")
    assert not hasattr(llm, name)


def test_a_mistyped_method_names_the_nearest(llm):
    with pytest.raises(AttributeError, match="genrate.*generate"):
        llm.genrate("Hello")


def test_keys_of_json_are_token_ids():
    """A JSON object has no other keys than strings; vLLM's server takes them for numbers, too."""
    params = SamplingParams(logit_bias={"5": 1, np.int64(7): np.float32(-2.5)})
    assert params.logit_bias == {5: 1.0, 7: -2.5}
    assert all(type(key) is int and type(bias) is float for key, bias in params.logit_bias.items())
