"""A model that thinks, over HTTP: where stop strings hold, and how thoughts are switched off.

The model says what it is told to: its embedding is the identity, its layers add nothing, and its LM
head gives each token one successor. So the right answers are written by hand.
"""

import json

import pytest
import torch
from chat_templates import TEMPLATES
from checkpoints import EOS, byte_tokenizer
from serving import CHATS, MESSAGES, RESPONSES, Serving
from test_translate import events
from transformers import LlamaConfig, LlamaForCausalLM

from nanoserve import LLM

CHAT = [{"role": "user", "content": "hi"}]
OFF = ("{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}"
       "<think>\n\n</think>\n\n{% endif %}")


def tell(folder, text: str, template: str):
    """A model that writes `text` behind a new line, and then ends. No character may come twice."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    chain = tokenizer.encode("\n" + text) + [EOS]
    assert len(set(chain)) == len(chain)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=264, hidden_size=264, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=4, max_position_embeddings=256, eos_token_id=EOS))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0 if parameter.dim() > 1 else 1)
        model.model.embed_tokens.weight.copy_(torch.eye(264))
        for token_id, successor in zip(chain, chain[1:], strict=False):
            model.lm_head.weight[successor, token_id] = 3
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["begun by the model", "begun by the prompt"])
def running(request, tmp_path_factory):
    is_begun = request.param == "begun by the prompt"
    folder = tell(tmp_path_factory.mktemp("told"), "<think>"[7 * is_begun:] +
                  "hmQ:x</think>\tANSWrt;Z", TEMPLATES["Qwen3.5" if is_begun else "Qwen3"] + OFF)
    with Serving(LLM(folder, dtype="float32", num_gpu_blocks_override=64)) as server:
        yield server


def turn_of(server, path: str, **more) -> tuple[str, str, dict]:
    """The thought of an answer and its words, which must be the same whole and streamed; and the
    whole answer."""
    body = dict(input="hi") if path == RESPONSES else dict(messages=CHAT)
    body |= dict(temperature=0) | more
    _, whole = server.ask(path, body)
    if path == CHATS:
        keys = "reasoning_content", "content"
        found = [whole["choices"][0]["message"].get(key) or "" for key in keys]
        pieces = [one["choices"][0]["delta"] for one in server.events(path, body)]
        told = ["".join(one.get(key) or "" for one in pieces) for key in keys]
    elif path == RESPONSES:
        found = ["".join(part["content"][0]["text"] for part in whole["output"]
                         if part["type"] == kind) for kind in ("reasoning", "message")]
        pieces = events(server, path, body)
        told = ["".join(one["delta"] for one in pieces if one["type"] == f"response.{kind}.delta")
                for kind in ("reasoning_text", "output_text")]
    else:
        keys = "thinking", "text"
        found = ["".join(part.get(key, "") for part in whole["content"]) for key in keys]
        pieces = [one.get("delta", {}) for one in events(server, path, body)]
        told = ["".join(one.get(key, "") for one in pieces) for key in keys]
    assert [one.strip() for one in told] == [one.strip() for one in found]
    return found[0].strip(), found[1], whole


# A stop string that the thought holds, the white space behind it, a mark, and the answer's own.
STOPS = [(["Q:"], "ANSWrt;Z", None), (["Q:", ";"], "ANSWrt", ";"), (["\t"], "ANSWrt;Z", None),
         (["think", "hm"], "ANSWrt;Z", None), (["</think>", "Z"], "ANSWrt;", "Z"), (["A"], "", "A")]


@pytest.mark.parametrize(("stop", "said", "found"), STOPS, ids=str)
def test_a_stop_string_in_a_thought_ends_no_turn(server, stop, said, found):
    *turn, answer = turn_of(server, CHATS, stop=stop)
    [choice] = answer["choices"]
    assert turn == ["hmQ:x", said] and choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == found
    if found:
        *turn, _ = turn_of(server, CHATS, stop=stop, include_stop_str_in_output=True)
        assert turn == ["hmQ:x", said + found]
    *turn, _ = turn_of(server, RESPONSES, stop=stop)
    assert turn == ["hmQ:x", said]
    *turn, answer = turn_of(server, MESSAGES, stop_sequences=stop, max_tokens=40)
    assert turn == ["hmQ:x", said] and answer["stop_sequence"] == found


def test_a_stop_token_ends_a_turn_wherever_it_comes(server):
    """And so do stop strings in what is no chat."""
    token_id = server.llm.tokenizer.convert_tokens_to_ids("Q")
    _, answer = server.ask(CHATS, dict(messages=CHAT, temperature=0, stop_token_ids=[token_id]))
    assert answer["choices"][0]["message"]["content"] is None
    _, answer = server.ask("/v1/completions", dict(prompt="h", temperature=0, stop="Q:"))
    assert answer["choices"][0]["text"] == "m"


# OpenAI's word, a template's variables, Anthropic's and DeepSeek's, Qwen's, ollama's, OpenRouter's.
TRANSLATED = [
    dict(reasoning_effort="none"), dict(chat_template_kwargs=dict(enable_thinking=False)),
    dict(chat_template_kwargs=dict(thinking=False)), dict(thinking=dict(type="disabled")),
    dict(thinking=False), dict(thinking=dict(type="disabled"), reasoning_effort="high")]
REFUSED = [
    dict(enable_thinking=False), dict(think=False), dict(think="low"),
    dict(think=dict(type="disabled")), dict(thinking_budget=0),
    dict(reasoning=dict(enabled=False)), dict(reasoning=dict(exclude=True)),
    dict(reasoning_effort="off"), dict(thinking=dict(type="off"))]


NOTHING = [
    dict(think="", thinking={}, enable_thinking=None, reasoning={}, reasoning_effort=""),
    dict(think=True, reasoning=dict(effort=None), reasoning_effort="auto"),
    dict(reasoning_effort="Default", output_config=dict(effort="AUTO"))]


def lengths(server, switch: dict) -> list[int]:
    """Of the prompt, for each way to send a chat; or the status of a refusal, which names it."""
    found = []
    for path, body, *place in ((CHATS, dict(messages=CHAT), "usage", "prompt_tokens"),
                               ("/tokenize", dict(messages=CHAT), "count"),
                               (MESSAGES + "/count_tokens", dict(messages=CHAT), "input_tokens"),
                               (RESPONSES, dict(input="hi"), "usage", "input_tokens")):
        status, answer = server.ask(path, body | switch)
        if status == 400:
            assert answer["error"]["param"] in switch and min(switch) in answer["error"]["message"]
        for key in place if status == 200 else ():
            answer = answer[key]
        found.append(answer if status == 200 else status)
    return found


@pytest.mark.parametrize("switch", [*NOTHING, *TRANSLATED, *REFUSED], ids=str)
def test_a_switch_of_thoughts_is_translated_or_refused(server, switch):
    """Some were dropped in silence, and the model thought on. Oracle: the template itself."""
    thinks, not_thinking = (len(server.llm.tokenizer.apply_chat_template(
        CHAT, add_generation_prompt=True, return_dict=False, **more))
        for more in ({}, dict(enable_thinking=False)))
    assert not_thinking > thinks
    first, *others = lengths(server, switch)
    asked = switch not in NOTHING
    assert first == (400 if switch in REFUSED else not_thinking if asked else thinks)
    assert set(others) <= ({not_thinking, 400} if asked else {thinks})


TOOLS = [dict(type="function", function=dict(name="f", parameters=dict(
    properties=dict(x=dict(type="string")))))]


ENABLED = dict(type="enabled")


@pytest.mark.parametrize(("path", "more", "thought"), [
    (CHATS, dict(thinking_token_budget=2), "hm"),
    (CHATS, dict(thinking_token_budget=2, tools=TOOLS), "hm"),  # a tool brings a grammar
    (CHATS, dict(thinking=ENABLED | dict(budget_tokens=2)), "hm"),
    (RESPONSES, dict(reasoning=dict(max_tokens=2)), "hm"),
    (RESPONSES, dict(reasoning=dict(max_tokens=0)), ""),
    (RESPONSES, dict(reasoning=dict(effort="minimal"), max_output_tokens=20), "hm"),
    (RESPONSES, dict(reasoning=dict(effort="high"), max_output_tokens=20), "hmQ:x"),
    (MESSAGES, dict(thinking=ENABLED | dict(budget_tokens=3), max_tokens=40), "hmQ")])
def test_a_budget_ends_a_thought_in_each_language(server, path, more, thought):
    """Tokens of the thought alone are counted: "hm" is two of its five. What is said behind the
    thought is the model's own."""
    *turn, answer = turn_of(server, path, **more)
    assert turn == [thought, "ANSWrt;Z"]
    if path == CHATS:
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2


def test_a_budget_that_can_not_be_kept_is_refused(server):
    error = server.refusal(RESPONSES, dict(input="hi", reasoning=dict(max_tokens="2")))
    assert error["param"] == "reasoning"
    error = server.refusal(CHATS, dict(messages=CHAT, thinking_token_budget=2,
                                       structured_outputs=dict(regex="a")))
    assert error["param"] == "thinking_token_budget"


@pytest.mark.parametrize("name", ["Qwen3.5", "gpt-oss"])
def test_a_call_that_is_required_comes_behind_a_budgets_tokens(name):
    """A model that would never end its thought, by another template than the tokenizer's own."""
    pytest.importorskip("llguidance")
    schema = dict(type="object", required=["n"], properties=dict(n=dict(enum=[7])))
    tool = dict(type="function", function=dict(name="f", parameters=schema))
    with Serving(LLM(dtype="float32", max_model_len=1024, num_gpu_blocks_override=128),
                 chat_template=TEMPLATES[name]) as server:
        _, answer = server.ask(CHATS, dict(
            messages=CHAT, tools=[tool], tool_choice="required", parallel_tool_calls=False,
            temperature=0, max_tokens=200, thinking_token_budget=6))
    [call] = answer["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == dict(n=7)
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 6
