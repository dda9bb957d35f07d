"""Real kinds of tokenizers and chat templates: what is streamed, and where it stops.

Six tokenizers, built here in the way of the families they are named after: byte-level BPE (Qwen,
Llama 3), BPE with "▁" for a space and bytes for rare characters (Llama 2, Gemma), the same as a
Unigram model, and WordPiece. They are trained on a little text, so that they have what makes real
ones hard: tokens that end in the middle of a character, and tokens that read differently after
others.

The oracle is the tokenizer's own `decode` of everything at once, and plain search in its text.
"""

import json
import re
from pathlib import Path

import pytest
import torch
from conftest import assert_grows, cut
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from nanoserve import LLM, RequestOutputKind, SamplingParams
from nanoserve.frontend.detokenizer import Detokenizer
from nanoserve.sampler import SamplerOutput

UNFINISHED = "\ufffd"
no_clock = settings(deadline=None, derandomize=True, max_examples=60,
                    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])

# ---------------------------------------------------------------- the tokenizers

ENGLISH = """The harbour of the old town lay still. Nobody had told the ferryman that the last
passengers would be late, so he waited, and while he waited he told the gulls about the winter when
the whole harbour had frozen and people had walked to the island. "You don't believe me," he said,
"but it's true; they've forgotten." The gulls didn't answer. At ten o'clock, or a little later, the
passengers came: a girl with a suitcase, her grandfather, and a café owner from São Paulo.
""".replace("\n", " ")
OTHERS = """日本語の文章です。東京は日本の首都です。日本語の勉強をしています。我们今天去北京,明天回上海。你好,世界!你好吗?
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
GEMMA = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<start_of_turn>' + message.role | replace('assistant', 'model') + '\\n' }}
    {{- message.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""


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
    tokenizer = byte_fallback(sentencepiece_bpe(), "<start_of_turn>", "<end_of_turn>",
                              chat_template=GEMMA)
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
                              "[INST]", "[/INST]",
                              chat_template=LLAMA_2.replace(" [/INST]", "[/INST]"))
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


TOKENIZERS = {make.__name__[5:]: make() for make in (
    like_qwen, like_llama_3, like_llama_2, like_gemma, like_mistral, like_bert)}
BYTE_LEVEL = ["qwen", "llama_3"]
BYTE_FALLBACK = ["llama_2", "gemma", "mistral"]
every_tokenizer = pytest.mark.parametrize("name", TOKENIZERS)
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


def stream(name: str, prompt: list[int], chunks: list[list[int]], **params):
    """What a caller sees after each chunk of tokens; then the final text and the stop string."""
    detokenizer = Detokenizer(TOKENIZERS[name], SamplingParams(**params), prompt)
    seen = []
    for chunk in chunks:
        if detokenizer.add(chunk) is not None:
            break
        seen.append(detokenizer.visible_text)
    detokenizer.flush()
    assert_grows([*seen, detokenizer.text])
    return seen, detokenizer.text, detokenizer.stop_string


# ----------------------------------------------------------------- whole characters

FAMILY = "👨\u200d👩\u200d👧"  # three people and two joiners: 18 bytes, one picture
FRAGMENTS = [
    "the harbour", " the", "don't", " ", "  ", "\n", "\n\n", ".", ", ", "'s", "0", "123", "x",
    FAMILY, "😀", "👩🏽\u200d🚀", "🏳️\u200d🌈", "🇩🇪🇯🇵", "❤️", "🧑🏿",  # joined, coloured, flags
    "日本", "語", "你好,世界!", "ひらがな", "안녕", "\U00020000",  # a rare character of four bytes
    "مرحبا", "كَيْفَ", "שָׁלוֹם", "नमस्ते", "क्षत्रिय", "สวัสดี", "Привет",
    "é", "e\u0301", "Z͑ͫ̓", "ﬁ", "\u200b", "\xa0", "\u2028", "▁", "Ġ", UNFINISHED]
FRAGMENT = st.sampled_from(FRAGMENTS) | st.text(max_size=2)
TEXT = st.lists(FRAGMENT, min_size=1, max_size=8).map("".join)
SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=4) | st.just([1])


def cut_in_two(name: str, text: str, where: float) -> tuple[list[int], list[int]]:
    """Any text as a prompt and its continuation. The cut is made between two tokens, not within a
    character."""
    ids = encode(name, text)
    at = int(where * len(ids))
    while decode(name, ids[:at]).endswith(UNFINISHED):
        at -= 1
    return [start_of(name), *ids[:at]], ids[at:]


def test_the_vocabularies_are_hard_enough():
    """Tokens that end in half a character, some behind a whole one; characters of many tokens."""
    for name in BYTE_LEVEL:
        alone = [decode(name, [i]) for i in range(256, len(TOKENIZERS[name]))]
        assert sum(text.endswith(UNFINISHED) for text in alone) > 50
        assert any(text.endswith(UNFINISHED) and text[0] != UNFINISHED for text in alone)
    for name in BYTE_LEVEL + BYTE_FALLBACK:
        assert len(encode(name, " harbour")) < 4 < len(encode(name, "\U00020000" + FAMILY))
    assert len(encode("qwen", "日本")) == 1 == len(encode("gemma", "日本"))


@every_lossless
def test_characters_are_shown_whole_or_not_at_all(name):
    """Engines that decode each token on its own print U+FFFD, the sign for a broken character, for
    every part of one; and drop the spaces that a decoder strips from whatever it is given."""
    prompt = [start_of(name), *encode(name, "Say:")]
    for fragment in FRAGMENTS:
        text = f"a{fragment} {fragment}{fragment}.".replace("▁", " ")  # SentencePiece's own space
        if name == "qwen":
            text = TOKENIZERS[name].backend_tokenizer.normalizer.normalize_str(text)
        seen, final, _ = stream(name, prompt, [[i] for i in encode(name, text)])
        assert final == (" " if name in ("llama_2", "mistral") else "") + text
        assert all(final.startswith(visible) for visible in seen)


@every_tokenizer
@no_clock
@given(text=TEXT, where=st.floats(0, 0.9), sizes=SIZES)
def test_any_text_in_any_chunks(name, text, where, sizes):
    """Whatever the tokens and however many at once: all that is complete is shown at once, and
    nothing else. Where `decode` sees a broken character at the end, the text before it waits."""
    prompt, output = cut_in_two(name, text, where)
    chunks = cut(output, sizes)
    seen, final, _ = stream(name, prompt, chunks)
    expected, so_far = [""], []
    for chunk in chunks:
        so_far += chunk
        read = truth(name, prompt, so_far)
        expected.append(expected[-1] if read.endswith(UNFINISHED) else read)
    assert seen == expected[1:]
    assert final == truth(name, prompt, output)
    if UNFINISHED not in text:
        assert not any(UNFINISHED in visible for visible in seen)


@every_tokenizer
@no_clock
@given(text=TEXT, where=st.floats(0, 0.9))
def test_text_that_nobody_watches_is_the_same(name, text, where):
    """Without a stream and stop strings all is decoded at the end, in one piece."""
    prompt, output = cut_in_two(name, text, where)
    _, final, _ = stream(name, prompt, [[i] for i in output],
                         output_kind=RequestOutputKind.FINAL_ONLY)
    assert final == truth(name, prompt, output)


@every_tokenizer
def test_the_words_of_a_prompt_show_where_the_output_begins(name):
    """Cut between any two tokens; the first piece has its space exactly if the whole text does."""
    text = "the gulls, the ferryman and the island didn't answer a girl ."
    ids = encode(name, text)
    for at in range(1, len(ids)):
        seen, final, _ = stream(name, ids[:at], [[i] for i in ids[at:]])
        assert decode(name, ids[:at]) + final == decode(name, ids)
        assert seen == [truth(name, ids[:at], ids[at:n]) for n in range(at + 1, len(ids) + 1)]


@every_tokenizer
@pytest.mark.parametrize("end", ["b\ufffd", "日\ufffd\ufffd\ufffd", "😀", "\U00020000"], ids=ascii)
def test_the_first_space_behind_a_broken_end_of_the_prompt(name, end):
    """A prompt that quotes U+FFFD at its end, or is cut within a character, was left out of what is
    decoded altogether; so a decoder that strips the first space of a text stripped the output's,
    and "Say: b\\ufffd" went on with "the harbour" instead of " the harbour"."""
    whole, output = encode(name, "Say: " + end), encode(name, "a the harbour 😀")[1:]
    for lost in range(4):
        prompt = [start_of(name), *whole[:len(whole) - lost]]
        _, final, _ = stream(name, prompt, [[i] for i in output])
        assert final == truth(name, prompt, output)


# ---------------------------------------------------------------------- broken text


def token_lists(name: str):
    """Any tokens, special ones and half characters included. The last are ids that a padded
    embedding matrix can name, and the tokenizer can't."""
    size = len(TOKENIZERS[name])
    special = [i for i, token in TOKENIZERS[name].added_tokens_decoder.items()]
    return st.lists(st.integers(0, size - 1) | st.sampled_from([*special, size, size + 3]),
                    max_size=16)


@pytest.mark.parametrize("name", [*BYTE_LEVEL, "bert"])
@no_clock
@given(data=st.data(), sizes=SIZES, skip=st.booleans())
def test_random_tokens_read_as_the_tokenizer_does(name, data, sizes, skip):
    """A model may well write bytes that are no UTF-8: streaming does not change what they read."""
    prompt, output = data.draw(token_lists(name)), data.draw(token_lists(name))
    seen, final, _ = stream(name, prompt, cut(output, sizes), skip_special_tokens=skip)
    if decode(name, prompt, skip).endswith(UNFINISHED):  # half a character: the output stands alone
        prompt = []
    assert final == truth(name, prompt, output, skip)
    assert not any(visible.endswith(UNFINISHED) for visible in seen)


def may_read(name: str, output: list[int], skip: bool) -> str:
    """The texts that tokens with bytes among them may be shown as, as a regular expression.

    The decoder reads a run of byte tokens as characters if all of it is valid, and otherwise as one
    U+FFFD a byte. A stream can't take back what it has shown while the run was valid. So a spoilt
    run may begin with characters, and goes on with U+FFFD.
    """
    tokenizer, pattern, run = TOKENIZERS[name], "", b""
    special = [i for i, token in tokenizer.added_tokens_decoder.items() if token.special]
    pieces = [piece for i, piece in zip(output, tokenizer.convert_ids_to_tokens(output))
              if piece is not None and not (skip and i in special)]
    for piece in [*pieces, ""]:  # the last one ends a run
        if byte := re.fullmatch(r"<0x(..)>", piece):
            run += bytes.fromhex(byte[1])
            continue
        try:
            pattern += re.escape(run.decode())
        except UnicodeDecodeError as error:
            whole = run[:error.start].decode()
            begins = [re.escape(whole[:n]) for n in range(len(whole), -1, -1)]
            pattern += f"(?:{'|'.join(begins)}){UNFINISHED}+"
        run = b""
        pattern += re.escape(piece.replace("▁", " "))
    return pattern


@pytest.mark.parametrize("name", BYTE_FALLBACK)
@no_clock
@given(data=st.data(), sizes=SIZES, skip=st.booleans())
def test_random_bytes_between_words(name, data, sizes, skip):
    """Invalid bytes never swallow the words around them, nor characters already shown."""
    character = st.sampled_from(["é", "你", "😀", "a"]).map(lambda text: [
        TOKENIZERS[name].convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in text.encode()])
    byte = st.sampled_from([b"\x80", b"\xe4", b"\xf0", b"\xff"]).map(
        lambda raw: [TOKENIZERS[name].convert_tokens_to_ids(f"<0x{raw.hex().upper()}>")])
    output = sum(data.draw(st.lists(character | byte | token_lists(name), max_size=6)), [])
    prompt = [start_of(name), *encode(name, "the gulls")]
    seen, final, _ = stream(name, prompt, cut(output, sizes), skip_special_tokens=skip)
    assert re.fullmatch(may_read(name, output, skip), final, re.S)
    assert not any(visible.endswith(UNFINISHED) for visible in seen)
    _, at_once, _ = stream(name, prompt, [output], skip_special_tokens=skip)
    assert at_once == truth(name, prompt, output, skip)


@every_lossless
@pytest.mark.parametrize("lost", [1, 2, 3])
def test_a_text_that_ends_in_half_a_character(name, lost):
    """Cut by the length limit, the character is shown as broken, but only once it is over."""
    prompt = [start_of(name), *encode(name, "Say:")]
    output = encode(name, "the \U00020000")  # four bytes that are in no vocabulary together
    for token_id in output[-lost:]:
        assert UNFINISHED in decode(name, [token_id])
    seen, final, _ = stream(name, prompt, [[i] for i in output[:-lost]])
    assert not any(UNFINISHED in visible for visible in seen)
    assert final.rstrip(UNFINISHED).strip() == "the" and final.endswith(UNFINISHED)
    assert final == truth(name, prompt, output[:-lost])


# --------------------------------------------------------------------- stop strings

SAID = f"the harbour 😀日本語, {FAMILY} नमस्ते"


@every_lossless
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(("stop", "found"), [
    ("r 😀日", "r 😀日"),  # begins and ends in the middle of tokens
    ("😀", "😀"),
    ("\u200d👩", "\u200d👩"),  # the second of the family
    ("स्", "स्"),  # a conjunct: half of what is seen as one letter
    (["日本語", "日本", "日"], "日"),  # of those at the same place, the shortest
    (["नमस्तेx", "ते", "मस्ते!"], "ते"),  # others begin earlier, and come to nothing
    (["語", "harbour"], "harbour"),
    (["日本語,", "語x"], "日本語,"),  # two may have begun: the longer beginning is held back
    (["日語", "the  "], None),
], ids=ascii)
def test_stop_strings_of_many_bytes(name, stop, found, include):
    """They need not begin or end where a token or a character that is seen does."""
    prompt = [start_of(name), *encode(name, "Say:")]
    for sizes in ([1], [2], [3, 1], [1000]):
        seen, final, stop_string = stream(name, prompt, cut(encode(name, SAID), sizes), stop=stop,
                                          include_stop_str_in_output=include)
        before, stop_itself, _ = SAID.partition(found) if found else (SAID, "", "")
        assert final.lstrip(" ") == before + (stop_itself if include else "")
        assert stop_string == found
        assert all(before.startswith(visible.lstrip(" ")) for visible in seen)


def plain(name, prompt, chunks, stops, include) -> tuple[list[str], str, str | None]:
    """Decode everything anew for every chunk. Returns what may be seen, the final text, the stop.
    """
    seen, so_far, whole = [""], [], truth(name, prompt, sum(chunks, []))
    for chunk in [*chunks, None]:
        so_far += chunk or []
        read = truth(name, prompt, so_far)
        if read.endswith(UNFINISHED) and chunk:
            seen.append(seen[-1])
            continue
        if hits := [(read.find(stop), len(stop), stop) for stop in stops if stop in read]:
            at, length, stop = min(hits)
            return seen[1:], read[:at + length if include else at], stop
        held = [n for stop in stops for n in range(len(stop)) if read.endswith(stop[:n])]
        seen.append(read[:len(read) - max(held, default=0)])
    return seen[1:-1], whole, None


@every_tokenizer
@no_clock
@given(data=st.data(), where=st.floats(0, 0.9), sizes=SIZES, include=st.booleans(),
       text=TEXT.filter(lambda text: UNFINISHED not in text))
def test_stop_strings_against_plain_search(name, data, text, where, sizes, include):
    """Stop strings taken out of the text, a beginning of one, and some that do not occur."""
    prompt, output = cut_in_two(name, text, where)
    whole = truth(name, prompt, output)
    assume(whole)
    stops = []
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(whole) - 1))
        stop = whole[at:at + data.draw(st.integers(1, 5))]
        stops.append(data.draw(st.sampled_from([stop, stop, stop + "x", stop[:1], "e" + stop])))
    chunks = cut(output, sizes)
    seen, final, stop_string = stream(name, prompt, chunks, stop=stops,
                                      include_stop_str_in_output=include)
    expected_seen, expected, expected_stop = plain(name, prompt, chunks, stops, include)
    assert (seen, final, stop_string) == (expected_seen, expected, expected_stop)
    before = final[:len(final) - len(stop_string or "")] if include else final
    assert all(before.startswith(visible) for visible in seen)
    if len(stops) == 1:  # then the chunks can't matter
        assert before == whole.partition(stops[0])[0]


# ---------------------------------------------------------- in the engine, with chat templates

# What ends a text: the list of generation_config.json, of which config.json names one only.
ENDS = {"qwen": ["<|im_end|>", "<|endoftext|>"], "llama_3": ["<|end_of_text|>", "<|eot_id|>"],
        "llama_2": ["</s>"], "gemma": ["</s>", "<end_of_turn>"], "mistral": ["</s>"]}
REPLIES = ["Grüße aus 東京! 😀", f"{FAMILY} नमस्ते,\n\nthe harbour.", "مرحبا", "x", "don't \U00020000"]


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
            output = self.outputs[seq.arrival - self.first]
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
    return [{"role": role, "content": text} for role, text in zip(roles, contents)]


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
    """More conversations than there are seats: each prompt is transformers', each answer its own.
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
        assert sample.text == (" " if name in ("llama_2", "mistral") else "") + reply
        assert (sample.finish_reason, sample.stop_reason) == ("stop", None)


def test_streams_of_several_requests(speaker):
    """Cumulative outputs grow, deltas add up, and both end where `generate` does."""
    outputs = [speaker.encode(reply, *ids_of(speaker.name, ENDS[speaker.name][0]))
               for reply in REPLIES]
    prompts = [reference(speaker.name, talk(reply))[1] for reply in REPLIES]
    speaker.says(*outputs)
    outs = speaker.llm.generate(prompts, params(), use_tqdm=False)
    finals = [out.outputs[0].text for out in outs]
    assert finals == [truth(speaker.name, *both) for both in zip(prompts, outputs, strict=True)]
    for kind in (RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA):
        speaker.says(*outputs)
        pieces: dict[tuple, list[str]] = {}
        for out in speaker.llm.stream(prompts, params(output_kind=kind)):
            pieces.setdefault(tuple(out.prompt_token_ids), []).append(out.outputs[0].text)
        for prompt, output, final in zip(prompts, outputs, finals, strict=True):
            seen = pieces[tuple(prompt)]
            assert not any(UNFINISHED in text for text in seen)
            if kind is RequestOutputKind.DELTA:
                seen = ["".join(seen[:n]) for n in range(1, len(seen) + 1)]
            assert_grows(seen)
            assert len(seen) == len(output) and seen[-1] == final


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


def test_special_tokens_in_the_middle(speaker):
    """Skipped or shown; as a stop token they are told, as a stop string they are found if shown."""
    name, llm = speaker.name, speaker.llm
    end, prompt = ENDS[name][-1], reference(name, talk("Hi"))[1]
    [end_id] = ids_of(name, end)
    output = speaker.encode("日本", end_id, "é😀x")
    n = len(output)
    for kinds, text, reason in [
        (dict(), truth(name, prompt, output), ("length", None)),
        (dict(skip_special_tokens=False), truth(name, prompt, output, False), ("length", None)),
        (dict(skip_special_tokens=False, stop=end), "日本", ("stop", end)),
        (dict(skip_special_tokens=False, stop="é😀", include_stop_str_in_output=True),
         truth(name, prompt, output, False)[:-1], ("stop", "é😀")),
        (dict(stop=end, stop_token_ids=[end_id]), "日本", ("stop", end_id)),
    ]:
        speaker.says(output)
        [out] = llm.generate(prompt, params(ignore_eos=True, max_tokens=n, **kinds), use_tqdm=False)
        sample = out.outputs[0]
        assert (sample.text.lstrip(" "), (sample.finish_reason, sample.stop_reason)) == (
            text.lstrip(" "), reason)


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_while_streaming(speaker, include):
    """Nothing of a stop string is shown, and the request ends with the token that completes it."""
    name, stops = speaker.name, ["harbour 😀日本語.", "語, 👨\u200d👩", "👩\u200d"]
    prompt, output = reference(name, talk("Hi"))[1], speaker.encode(SAID)
    whole = truth(name, prompt, output)
    before, stop, _ = whole.partition(stops[1])
    for kind in (RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA):
        speaker.says(output)
        outs = [out.outputs[0] for out in speaker.llm.stream(prompt, params(
            stop=stops, include_stop_str_in_output=include, output_kind=kind))]
        seen = [out.text for out in outs]
        if kind is RequestOutputKind.DELTA:
            seen = ["".join(seen[:n]) for n in range(1, len(seen) + 1)]
        assert all(before.startswith(visible) for visible in seen[:-1])
        assert seen[-1] == before + (stop if include else "")
        assert (outs[-1].finish_reason, outs[-1].stop_reason) == ("stop", stop)
        assert stop in truth(name, prompt, output[:len(outs)])
        assert stop not in truth(name, prompt, output[:len(outs) - 1])


def test_ids_that_only_the_padding_of_the_vocabulary_has(speaker):
    """Embedding matrices are padded to round sizes, and a model may sample an id that the
    tokenizer has never heard of: a token without text."""
    beyond = [len(TOKENIZERS[speaker.name]), speaker.llm.model_config.vocab_size - 1]
    prompt, output = speaker.encode("Say:"), speaker.encode("日", *beyond, "é", beyond[0])
    speaker.says(output)
    outs = list(speaker.llm.stream(prompt, params(max_tokens=len(output))))
    assert outs[-1].outputs[0].text.replace(" ", "") == "日é"
    assert outs[-1].outputs[0].token_ids == output


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
    [out] = speaker.llm.chat(conversation, params(), continue_final_message=True, use_tqdm=False)
    assert (out.prompt, out.prompt_token_ids) == (text, ids)
    assert decode(name, ids) + out.outputs[0].text == decode(name, ids + output)


# Written by hand, because the reference above runs the same template engine.
@pytest.mark.parametrize(("name", "conversation", "text"), [
    ("qwen", talk("Hi"), "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
     "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"),
    ("qwen", [{"role": "system", "content": "Be brief."}, *talk("Hi", "Yo 😀", "東京?")],
     "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>"
     "assistant\nYo 😀<|im_end|>\n<|im_start|>user\n東京?<|im_end|>\n<|im_start|>assistant\n"),
    ("llama_3", talk("Hi ", "Yo", "é"), "<|begin_of_text|><|start_header_id|>user<|end_header_id|>"
     "\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nYo<|eot_id|>"
     "<|start_header_id|>user<|end_header_id|>\n\né<|eot_id|>"
     "<|start_header_id|>assistant<|end_header_id|>\n\n"),
    ("llama_2", talk("Hi", "Yo", "é"), "<s>[INST] Hi [/INST] Yo</s>[INST] é [/INST]"),
    ("gemma", talk("Hi", "Yo", "é"), "<s><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>"
     "model\nYo<end_of_turn>\n<start_of_turn>user\né<end_of_turn>\n<start_of_turn>model\n"),
    ("mistral", talk("Hi", "Yo", "é"), "<s>[INST] Hi[/INST] Yo</s>[INST] é[/INST]"),
], ids=lambda value: value if isinstance(value, str) and len(value) < 9 else "")
def test_templates_by_hand(name, conversation, text, tmp_path):
    speaker = Speaker(name, make_checkpoint(name, tmp_path), overlap=False)
    [out] = speaker.llm.chat(conversation, params(max_tokens=1), use_tqdm=False)
    assert out.prompt == text
    spaced = decode(name, out.prompt_token_ids, skip=False)  # "<s> [INST]" by some decoders
    assert spaced.replace(" ", "") == text.replace(" ", "")


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


def test_a_template_may_refuse_a_conversation(tmp_path):
    """Its own words are passed on, and no work has started."""
    speaker = Speaker("llama_2", make_checkpoint("llama_2", tmp_path), overlap=False)
    with pytest.raises(ValueError, match="roles must alternate"):
        speaker.llm.chat([talk("Hi"), [*talk("Hi"), *talk("Hi")]], params(), use_tqdm=False)
    assert not speaker.llm.has_unfinished_requests()
