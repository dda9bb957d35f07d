"""Real kinds of tokenizers and chat templates in the engine."""

import base64
import json
from pathlib import Path

import pytest
import torch
from config_files import SIZES
from helpers import write_json
from real_tokenizers import FAMILY, FRAGMENTS, SAID, TOKENIZERS, decode, encode, truth
from transformers import LlamaConfig, LlamaForCausalLM

from nanoserve import LLM, SamplingParams
from nanoserve.sampler import SamplerOutput

# What ends a text: the list of generation_config.json, of which config.json names one only.
ENDS = {"qwen": ["<|im_end|>", "<|endoftext|>"], "llama_3": ["<|end_of_text|>", "<|eot_id|>"],
        "llama_2": ["</s>"]}
REPLIES = ["Grüße aus 東京! 😀", f"{FAMILY} नमस्ते,\n\nthe harbour.", "مرحبا", "x",
           "don't \U00020000"]


def ids_of(name: str, *tokens: str) -> list[int]:
    return [TOKENIZERS[name].convert_tokens_to_ids(token) for token in tokens]


def make_checkpoint(name: str, folder: Path) -> Path:
    """A very small model. Its vocabulary is larger than the tokenizer's, as real ones are."""
    tokenizer, ends = TOKENIZERS[name], ids_of(name, *ENDS[name])
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tokenizer) // 64 * 64 + 64, hidden_size=16, intermediate_size=16,
        num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=512,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=ends[-1]))
    model.generation_config.eos_token_id = ends
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class Speaker:
    """An engine with words put into its mouth: it computes its KV as always, but what is sampled
    is replaced."""

    def __init__(self, name: str, folder: Path, overlap: bool):
        self.name = name
        self.llm = LLM(folder, max_num_seqs=4, max_num_batched_tokens=32, max_model_len=256,
                       num_gpu_blocks_override=64, async_scheduling=overlap)
        self.launch, self.llm.runner.launch = self.llm.runner.launch, self.speak
        self.says([])

    def says(self, *outputs: list[int]) -> None:
        """The outputs of the requests to come, in their order; then one token for ever."""
        self.outputs, self.first = outputs, self.llm.num_arrived

    def speak(self, step):
        self.launch(step)
        sampled = []
        for seq in step.sampling:
            output = self.outputs[seq.request.arrival - self.first]
            at = seq.num_tokens - 1 - seq.num_prompt_tokens
            sampled.append(output[at] if at < len(output) else 7)
        return SamplerOutput(torch.tensor(sampled, dtype=torch.int64))

    def encode(self, *parts: str | int) -> list[int]:
        return sum(([part] if isinstance(part, int) else encode(self.name, part)
                    for part in parts), [])


@pytest.fixture(scope="module", params=[*((name, True) for name in ENDS), ("qwen", False)],
                ids=lambda param: param[0] + ("" if param[1] else "-sync"))
def speaker(request, tmp_path_factory):
    name, overlap = request.param
    return Speaker(name, make_checkpoint(name, tmp_path_factory.mktemp(name)), overlap)


def params(**kinds) -> SamplingParams:
    return SamplingParams(**dict(temperature=0, max_tokens=100) | kinds)


def talk(*contents: str) -> list[dict]:
    roles = ["user", "assistant"] * len(contents)
    return [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]


CONVERSATIONS = [talk("Hi"), talk("Où est 東京?", f"There 😀, {FAMILY}.", "  नमस्ते\n"),
                 talk("the  island")]


def reference(name: str, conversation: list[dict], **options) -> tuple[str, list[int]]:
    """transformers' text and token ids of a conversation."""
    options = dict(add_generation_prompt=True) | options
    template = TOKENIZERS[name].apply_chat_template
    return (template(conversation, tokenize=False, **options),
            template(conversation, tokenize=True, **options)["input_ids"])


def test_a_checkpoint_keeps_its_tokenizer(speaker):
    """What was saved is what was loaded, so that the oracles here speak for the engine."""
    ours, llm = TOKENIZERS[speaker.name], speaker.llm
    assert llm.tokenizer.get_vocab() == ours.get_vocab()
    for text in [*FRAGMENTS, SAID]:
        ids = ours.encode(text)
        assert llm.tokenizer.encode(text) == ids
        assert llm.tokenizer.decode(ids) == ours.decode(ids)
    assert set(llm.model_config.eos_token_ids) == set(ids_of(speaker.name, *ENDS[speaker.name]))


def test_conversations_and_their_answers(speaker):
    """More conversations than there are rows: each prompt is transformers', each answer its own.
    """
    name, conversations = speaker.name, CONVERSATIONS + CONVERSATIONS[:2]
    end = ids_of(name, ENDS[name][-1])
    speaker.says(*(speaker.encode(reply, *end) for reply in REPLIES))
    outs = speaker.llm.chat(conversations, params(), use_tqdm=False)
    for out, conversation, reply in zip(outs, conversations, REPLIES, strict=True):
        assert (out.prompt, out.prompt_token_ids) == reference(name, conversation)
        sample = out.outputs[0]
        assert sample.token_ids == speaker.encode(reply, *end)
        assert sample.text == truth(name, out.prompt_token_ids, sample.token_ids)
        assert sample.text == (" " if name == "llama_2" else "") + reply
        assert (sample.finish_reason, sample.stop_reason) == ("stop", None)


def test_every_end_of_the_list_ends_a_text(speaker):
    """Only the tokenizer's EOS stopped generation in several small engines: a chat model ran on
    beyond the end of its turn, or of the document. No end is shown, unless it is asked for."""
    name, llm = speaker.name, speaker.llm
    prompt = reference(name, talk("Hi"))[1]
    for end in ENDS[name]:
        for skip in (True, False):
            for include in (True, False):
                output = speaker.encode("é😀", *ids_of(name, end), "more")
                speaker.says(output)
                [out] = llm.generate(prompt, params(
                    skip_special_tokens=skip, include_stop_str_in_output=include), use_tqdm=False)
                sample = out.outputs[0]
                assert sample.text.lstrip() == "é😀" + (end if include and not skip else "")
                assert sample.token_ids == output[:-len(speaker.encode("more"))]
                assert (sample.finish_reason, sample.stop_reason) == ("stop", None)


def test_the_beginning_of_a_text_is_marked_once(speaker):
    """The post-processor puts BOS in front of a plain text, the template in front of a chat. Both
    together would be two, which is another prompt and a worse answer."""
    name, bos = speaker.name, TOKENIZERS[speaker.name].bos_token_id
    speaker.says(*[[7]] * 4)
    plain, chat = speaker.llm.generate("Hi", params(max_tokens=1), use_tqdm=False) + (
        speaker.llm.chat(talk("Hi"), params(max_tokens=1), use_tqdm=False))
    assert plain.prompt_token_ids == TOKENIZERS[name].encode("Hi")
    for out in (plain, chat):
        ids = out.prompt_token_ids
        assert ids.count(bos) == (name != "qwen") and (name == "qwen" or ids[0] == bos)


@pytest.mark.parametrize("begun", ["I think that", "Yes 😀", "नमस्", "Well, "])
def test_continuing_an_answer(speaker, begun):
    """The last message stays open, and what follows is its continuation, space by space."""
    name, conversation = speaker.name, talk("Où?", begun)
    options = dict(continue_final_message=True, add_generation_prompt=False)
    text, ids = reference(name, conversation, **options)
    assert text.rstrip().endswith(begun.rstrip())  # some templates strip it
    output = speaker.encode("ते 😀, the island", *ids_of(name, ENDS[name][0]))
    speaker.says(output)
    [out] = speaker.llm.chat(conversation, params(), use_tqdm=False, chat_template_kwargs=dict(
        continue_final_message=True, add_generation_prompt=False))
    assert (out.prompt, out.prompt_token_ids) == (text, ids)
    assert decode(name, ids) + out.outputs[0].text == decode(name, ids + output)


def test_a_template_has_switches_of_its_own(tmp_path):
    """`chat_template_kwargs` reach it: Qwen's switch for thoughts, for example. They are marked by
    tokens that are no special ones, and so they are shown."""
    speaker = Speaker("qwen", make_checkpoint("qwen", tmp_path), overlap=False)
    thoughts, end = ids_of("qwen", "<think>", "</think>"), ids_of("qwen", "<|im_end|>")
    output = speaker.encode(thoughts[0], "é?", thoughts[1], "é!", *end)
    asked = "<|im_start|>assistant\n"
    for kinds, asked_for in [(None, asked), (dict(enable_thinking=True), asked),
                             (dict(enable_thinking=False), asked + "<think>\n\n</think>\n\n")]:
        speaker.says(output)
        [out] = speaker.llm.chat(talk("Hi"), params(), use_tqdm=False, chat_template_kwargs=kinds)
        assert out.prompt.endswith("Hi<|im_end|>\n" + asked_for)
        assert (out.prompt, out.prompt_token_ids) == reference("qwen", talk("Hi"), **kinds or {})
        assert out.prompt_token_ids.count(thoughts[1]) == (asked_for != asked)
        assert out.outputs[0].text == "<think>é?</think>é!"


def test_a_chat_by_tekken_alone_is_mistrals_own(tmp_path):
    """The oracle is mistral-common's own request. In `test-full` (mistral-common 1.13.1)."""
    pytest.importorskip("mistral_common")
    from mistral_common.protocol.instruct.request import ChatCompletionRequest
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
    specials = ("<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] "
                "[/TOOL_RESULTS] [TOOL_CALLS] [IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] "
                "[SUFFIX] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT]").split()
    (tmp_path / "tekken.json").write_text(json.dumps(dict(
        config=dict(pattern=r"\w+|\W", num_vocab_tokens=256, version="v7",
                    default_vocab_size=256 + len(specials),
                    default_num_special_tokens=len(specials)),
        vocab=[dict(rank=i, token_bytes=base64.b64encode(bytes([i])).decode(), token_str=None)
               for i in range(256)],
        special_tokens=[dict(rank=i, token_str=one, is_control=True)
                        for i, one in enumerate(specials)])))
    write_json(tmp_path / "config.json", model_type="mistral", **SIZES | dict(
        architectures=["MistralForCausalLM"], vocab_size=256 + len(specials)))
    theirs = MistralTokenizer.from_file(str(tmp_path / "tekken.json"))
    with LLM(tmp_path, load_format="dummy", num_gpu_blocks_override=16, device="cpu") as llm:
        for chat in ([("user", "Hi")], [("system", "Be brief"), ("user", "a [/INST] <s>é"),
                                        ("assistant", "b"), ("user", "c")]):
            chat = [dict(role=role, content=text) for role, text in chat]
            expected = theirs.encode_chat_completion(ChatCompletionRequest(messages=chat)).tokens
            rendered = llm.inputs.render_chat(chat, add_generation_prompt=True)
            assert rendered["prompt_token_ids"] == expected
            [out] = llm.chat(chat, SamplingParams(max_tokens=3), use_tqdm=False)
            assert out.prompt_token_ids == expected
