"""Tokenizers and chat templates of the kinds that real checkpoints have.

Six tokenizers, built here in the way of the families they are named after: byte-level BPE (Qwen,
Llama 3), BPE with "▁" for a space and bytes for rare characters (Llama 2, Gemma), the same as a
Unigram model, and WordPiece. They are trained on a little text, so that they have what makes real
ones hard: tokens that end in the middle of a character, and tokens that read differently after
others.
"""

import json
import re

import pytest
from helpers import assert_grows
from hypothesis import HealthCheck, settings
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from nanoserve import SamplingParams
from nanoserve.detokenizer import Detokenizer

UNFINISHED = "\ufffd"
no_clock = settings(deadline=None, derandomize=True, max_examples=40,
                    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])

ENGLISH = """The harbour of the old town lay still. Nobody had told the ferryman that the last
passengers would be late, so he waited, and while he waited he told the gulls about the winter when
the whole harbour had frozen and people had walked to the island. "You don't believe me," he said,
"but it's true; they've forgotten." The gulls didn't answer. At ten o'clock, or a little later, the
passengers came: a girl with a suitcase, her grandfather, and a café owner from São Paulo.
""".replace("\n", " ")
OTHERS = """日本語の文章です。東京は日本の首都です。日本語の勉強をしています。\
我们今天去北京,明天回上海。\
你好,世界!你好吗?
Привет, мир! Как дела? مرحبا بالعالم، كيف حالك؟ नमस्ते दुनिया, आप कैसे हैं? สวัสดีชาวโลก 안녕하세요 세계
😀😃😄😁😆 👨‍👩‍👧 👩🏽‍🚀 🇩🇪🇯🇵🇧🇷 🏳️‍🌈 ❤️ e\u0301 a\u0308 Grüße, ça va? naïve"""
# As GPT-4, Llama 3 and Qwen cut a text before merging (shortened).
WORDS = Regex(r"'(?:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
              r"|\s*[\r\n]|\s+(?!\S)|\s+")

# Qwen: a default system prompt, and a switch that writes the empty thoughts of a model that is not
# to think.
CHATML = """\
{%- if messages[0].role != 'system' %}<|im_start|>system
You are a helpful assistant.<|im_end|>
{% endif -%}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif -%}"""
LLAMA_3 = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
    {{- message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""
LLAMA_2 = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate user/assistant') }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' + message.content + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message.content + eos_token }}
    {%- endif %}
{%- endfor %}"""


def byte_level(size: int, *special: str, **kinds) -> PreTrainedTokenizerFast:
    """BPE over bytes. Every text has tokens, and many a token is no text by itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(WORDS, "isolated"), ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator([ENGLISH * 2, OTHERS * 3], trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=ByteLevel.alphabet(), show_progress=False))
    tokenizer.add_special_tokens(list(special))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **kinds)


def like_qwen() -> PreTrainedTokenizerFast:
    """No BOS. Two tokens end a text. "<think>" is one token, but not a special one: it is shown."""
    tokenizer = byte_level(
        700, "<|endoftext|>", "<|im_start|>", "<|im_end|>", eos_token="<|im_end|>",
        pad_token="<|endoftext|>", chat_template=CHATML)
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_tokens(["<think>", "</think>"])
    return tokenizer


def like_llama_3() -> PreTrainedTokenizerFast:
    """BOS comes from the post-processor for a plain text, and from the template for a chat."""
    tokenizer = byte_level(
        500, "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
        "<|eot_id|>", bos_token="<|begin_of_text|>", eos_token="<|eot_id|>", chat_template=LLAMA_3)
    bos = ("<|begin_of_text|>", tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos[0]} $A", special_tokens=[bos])
    return tokenizer


def byte_fallback(model, *special: str, **kinds) -> PreTrainedTokenizerFast:
    """A SentencePiece vocabulary: <unk>, <s>, </s>, 256 bytes, and then the pieces of `model`."""
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>", *special])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>",
                                   eos_token="</s>", **kinds)


BYTE_PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]


def sentencepiece_bpe() -> models.BPE:
    """Trained on English and a little Japanese; every other character is left to the bytes."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trained.train_from_iterator([ENGLISH, OTHERS[:22]], trainers.BpeTrainer(
        vocab_size=300, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].get)
    return models.BPE({piece: i for i, piece in enumerate(BYTE_PIECES + pieces)},
                      [tuple(merge) for merge in model["merges"]],
                      unk_token="<unk>", fuse_unk=True, byte_fallback=True)


def like_llama_2() -> PreTrainedTokenizerFast:
    """A space is put in front of every text and taken away again, whatever is decoded."""
    tokenizer = byte_fallback(sentencepiece_bpe(), chat_template=LLAMA_2)
    backend = tokenizer.backend_tokenizer
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)])
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def like_gemma() -> PreTrainedTokenizerFast:
    """Llama 2's without the space in front."""
    tokenizer = byte_fallback(sentencepiece_bpe(), "<start_of_turn>", "<end_of_turn>")
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def like_mistral() -> PreTrainedTokenizerFast:
    """A Unigram model, its "▁" by a pre-tokenizer; "[INST]" and "[/INST]" are special tokens."""
    words = sorted({f"▁{word}" for word in re.findall(r"\w+", ENGLISH)})
    letters = sorted(set(ENGLISH.replace(" ", "") + "日本語の"))
    pieces = [*((piece, 0.0) for piece in BYTE_PIECES), ("▁", -3.0),
              *((word, -6.0) for word in words), *((letter, -5.0) for letter in letters)]
    tokenizer = byte_fallback(models.Unigram(pieces, unk_id=0, byte_fallback=True),
                              "[INST]", "[/INST]")
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace("▁", prepend_scheme="first", split=False)])
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def like_bert() -> PreTrainedTokenizerFast:
    """Spaces come between words unless a piece begins with "##", and go in front of punctuation;
    what is not in the vocabulary is lost. transformers would clean up some more spaces."""
    words = set(re.findall(r"\w+|[^\w\s]", ENGLISH.lower()))
    letters = set("".join(words) + "日本語ß😀")
    pieces = ["[UNK]", "[CLS]", "[SEP]", *sorted(words | letters),
              *sorted(f"##{letter}" for letter in letters)]
    tokenizer = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)},
                                           unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece("##", cleanup=True)
    tokenizer.add_special_tokens(["[CLS]", "[SEP]"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", bos_token="[CLS]",
                                   eos_token="[SEP]", clean_up_tokenization_spaces=True)


class Made(dict):
    """By name, each made when it is first asked for."""

    def __missing__(self, name: str) -> PreTrainedTokenizerFast:
        self[name] = globals()[f"like_{name}"]()
        return self[name]


TOKENIZERS = Made()
BYTE_LEVEL = ["qwen", "llama_3"]
BYTE_FALLBACK = ["llama_2", "gemma", "mistral"]
NAMES = [*BYTE_LEVEL, *BYTE_FALLBACK, "bert"]
every_tokenizer = pytest.mark.parametrize("name", NAMES)
every_lossless = pytest.mark.parametrize("name", BYTE_LEVEL + BYTE_FALLBACK)


def decode(name: str, ids: list[int], skip: bool = True) -> str:
    return TOKENIZERS[name].decode(ids, skip_special_tokens=skip,
                                   clean_up_tokenization_spaces=False)


def encode(name: str, text: str) -> list[int]:
    return TOKENIZERS[name].encode(text, add_special_tokens=False)


def truth(name: str, prompt: list[int], output: list[int], skip: bool = True) -> str:
    """The text of the output: what decoding adds to the prompt's text."""
    return decode(name, prompt + output, skip)[len(decode(name, prompt, skip)):]


def start_of(name: str) -> int:
    """A special token that a prompt may begin with."""
    tokenizer = TOKENIZERS[name]
    return tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id


def stream(name: str, prompt: list[int], output: list[int], **params):
    """What a caller sees after each token; then the final text and the stop string."""
    detokenizer = Detokenizer(TOKENIZERS[name], SamplingParams(**params), prompt)
    seen = []
    for token_id in output:
        detokenizer.add(token_id)
        if detokenizer.is_over:
            break
        seen.append(detokenizer.visible_text)
    detokenizer.flush()
    assert_grows([*seen, detokenizer.text])
    return seen, detokenizer.text, detokenizer.stop_string


FAMILY = "👨\u200d👩\u200d👧"  # three people and two joiners: 18 bytes, one picture
FRAGMENTS = [
    "the harbour", " the", "don't", " ", "  ", "\n", "\n\n", ".", ", ", "'s", "0", "123", "x",
    FAMILY, "😀", "👩🏽\u200d🚀", "🏳️\u200d🌈", "🇩🇪🇯🇵", "❤️", "🧑🏿",  # joined, coloured, flags
    "日本", "語", "你好,世界!", "ひらがな", "안녕", "\U00020000",  # a rare character of four bytes
    "مرحبا", "كَيْفَ", "שָׁלוֹם", "नमस्ते", "क्षत्रिय", "สวัสดี", "Привет",
    "é", "e\u0301", "Z͑ͫ̓", "ﬁ", "\u200b", "\xa0", "\u2028", "▁", "Ġ", UNFINISHED]

SAID = f"the harbour 😀日本語, {FAMILY} नमस्ते"
