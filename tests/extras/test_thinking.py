"""A budget for thinking, in every mode: the thought, its closing mark, and what follows them.

Oracle: transformers. It writes the budget's tokens behind the prompt; the mark is put behind them
by hand, and it goes on.
"""

from copy import copy
from types import SimpleNamespace

import numpy as np
import pytest
from checkpoints import Reference, assert_same_text, byte_tokenizer
from grammars import padded_checkpoint
from helpers import poisoned, sequence

from nanoserve import LLM, SamplingParams
from nanoserve.sequence import Step
from nanoserve_extras.thinking import ThinkingBudget, Thought

TEMPLATE = ("{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content %}<think>"
            "{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}\n{% endfor %}"
            "{% if add_generation_prompt %}[assistant]BEGUN{% endif %}")
CHATS = [[dict(role="user", content=text)] for text in (
    "a", "So it is", "a b c d", "Of 7 and 9?", "zz", "Say it again, and again.", "Why")]
BUDGETS = [0, 1, 5, None, 9, 17, 99]
LENGTH = 26
MODES = [dict(), dict(async_scheduling=True),
         dict(speculative_config=dict(method="ngram", num_speculative_tokens=3,
                                      prompt_lookup_min=1, prompt_lookup_max=2)),
         dict(num_gpu_blocks_override=12, block_size=8, max_model_len=96,
              max_num_batched_tokens=40)]


@pytest.fixture(scope="module", params=["one token", "eight bytes"])
def thinking(request, tmp_path_factory):
    """A checkpoint whose prompts begin a thought; its tokenizer has a token for the mark or not."""
    folder = padded_checkpoint(tmp_path_factory.mktemp("thinking"))
    tokenizer = byte_tokenizer()
    if request.param == "one token":
        tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = TEMPLATE.replace("BEGUN", "<think>")
    tokenizer.save_pretrained(folder)
    return folder, tokenizer


@pytest.fixture(scope="module")
def expected(thinking):
    folder, tokenizer = thinking
    oracle, texts = Reference(folder), []
    mark = tokenizer.encode("</think>", add_special_tokens=False)
    for chat, budget in zip(CHATS, BUDGETS, strict=True):
        prompt = tokenizer.encode(tokenizer.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=True), add_special_tokens=False)
        num_thought = LENGTH if budget is None else min(budget, LENGTH)
        ids, gaps = oracle.generate(prompt, num_thought) if num_thought else ([], [])
        assert len(ids) == num_thought  # it does not end within
        if num_thought < LENGTH:
            ids, gaps = (ids + mark)[:LENGTH], (gaps + [1.0] * len(mark))[:LENGTH]
            if len(ids) < LENGTH:
                more, further = oracle.generate(prompt + ids, LENGTH - len(ids))
                ids, gaps = ids + more, gaps + further
        texts.append((ids, gaps))
    return texts


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_behind_the_budget_the_mark_is_written_and_the_text_goes_on(mode, thinking, expected):
    params = [SamplingParams(temperature=0, max_tokens=LENGTH, thinking_token_budget=budget)
              for budget in BUDGETS]
    with LLM(thinking[0], **dict(dtype="float32", device="cpu", num_gpu_blocks_override=64) | mode
             ) as llm:
        poisoned(llm, len(llm.runner.model.layers))
        outputs = llm.chat(CHATS, params, use_tqdm=False)
    for output, (ids, gaps) in zip(outputs, expected, strict=True):
        assert_same_text(output.outputs[0].token_ids, ids, gaps, str(mode))


def test_it_holds_for_each_sample_and_beside_other_controls(thinking):
    """The mark comes also where its tokens are forbidden: a thought must end."""
    folder, tokenizer = thinking
    mark = tokenizer.encode("</think>", add_special_tokens=False)
    params = SamplingParams(n=3, seed=5, max_tokens=20, thinking_token_budget=4, top_k=50,
                            allowed_token_ids=[*range(97, 123)], logit_bias={98: 3.0})
    with LLM(folder, dtype="float32", num_gpu_blocks_override=64) as llm:
        [output] = llm.chat(CHATS[0], params, use_tqdm=False)
        stream = llm.chat(CHATS[0], params, stream=True)
        *_, streamed = stream
        [by_ids] = llm.generate(output.prompt_token_ids, params, use_tqdm=False)  # without a text
        for sample, *same in zip(output.outputs, streamed.outputs, by_ids.outputs, strict=True):
            ids = sample.token_ids
            assert ids[4:4 + len(mark)] == mark and all(one.token_ids == ids for one in same)
            assert set(ids[:4] + ids[4 + len(mark):]) <= {*range(97, 123)} and len(ids) == 20
        for more, said in ((dict(structured_outputs=dict(regex="a+")), "begins without a thought"),
                           (dict(thinking_token_budget=-2), "at least -1")):
            with pytest.raises(ValueError, match=said):
                llm.chat(CHATS[0], SamplingParams(**dict(thinking_token_budget=4) | more))


def test_another_template_has_other_marks_and_one_without_is_refused(thinking):
    """The prompt's own template counts: with `chat_template=` that is not the tokenizer's, also
    where messages are kept plain."""
    folder, tokenizer = thinking
    other = TEMPLATE.replace("BEGUN", "((").replace("<think>", "((").replace("</think>", "))")
    params = SamplingParams(temperature=0, max_tokens=9, thinking_token_budget=2)
    with LLM(folder, dtype="float32", num_gpu_blocks_override=64, split_special_tokens=True) as llm:
        [output] = llm.chat(CHATS[1], params, chat_template=other, use_tqdm=False)
        assert output.outputs[0].token_ids[2:4] == tokenizer.encode("))")
        with pytest.raises(ValueError, match="no chat template says.*leave it out"):
            llm.chat(CHATS[1], params, chat_template=(
                "{% for m in messages %}{{ m.content }}{% endfor %}"))
        # The template itself has ended the thought.
        off = TEMPLATE.replace("BEGUN", "<think></think>")
        [output], [plain] = (llm.chat(CHATS[1], one, chat_template=off, use_tqdm=False)
                             for one in (params, SamplingParams(temperature=0, max_tokens=9)))
        assert output.outputs[0].token_ids == plain.outputs[0].token_ids


def text_of_letters(ids: list[int]) -> str:
    return "".join(map(chr, ids)).replace("#", "</think>")


@pytest.mark.parametrize("in_grammar", [None, False, True])
def test_a_thought_that_drafts_begin_ends_within_them(in_grammar):
    """And where a grammar has no place for the mark, its mask counts."""
    extra, seq = ThinkingBudget(), sequence("1", [*b"abc"])
    extra.tokenizer, extra.vocab_size = SimpleNamespace(decode=text_of_letters), 128
    extra.text_of = lambda id_: text_of_letters([id_])
    [place] = mark = [ord("#")]
    mask = np.full(16, 255, dtype=np.uint8)
    if not in_grammar:
        mask[place // 8] &= ~np.uint8(1 << place % 8)
    grammar = SimpleNamespace(mask=lambda *asked: mask)
    extra.others = {} if in_grammar is None else {seq: grammar}
    extra.thoughts[seq] = Thought(extra, 2, ("<", "</think>"), mark, False, num_read=3, start=3)
    drafts = [*b"<de"]
    extra.scheduled(Step(0, {seq: 4}, sampling=[seq], drafts={seq: drafts}))
    for count, forced in enumerate([False, False, False, in_grammar is not False]):
        got = extra.due[seq].mask(seq, drafts[:count], np.array([]), [])
        only = got is not None and np.unpackbits(got, bitorder="little").nonzero()[0].tolist()
        assert (only == [place]) == forced, count


def test_a_marks_last_character_may_come_in_several_tokens():
    """Kimi's is none of ASCII. Tokens are bytes here."""
    def decode(ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")

    extra = SimpleNamespace(tokenizer=SimpleNamespace(decode=decode),
                            text_of=lambda id_: decode([id_]))
    whole = [*"◁think▷ab◁/think▷".encode()]
    thought = Thought(extra, 2, ("◁think▷", "◁/think▷"), [], False)
    assert not thought.read(whole[:-1]).is_over and thought.read(whole).is_over


@pytest.mark.parametrize(("text", "where"), [
    ("<think>abcd", [9, 10, 11]), ("\n <think>\nabc", [11, 12, 13]), ("so <think>abcd", []),
    ("<think>ab</think>cdefgh", [*range(9, 17)]), ("<thunk><think>abcd", []), ("<thin", []),
    ("<think>ab</thi|nk>cdefgh", [16]), ("</think><think>|abcd", [17, 18, 19]),
    ("#|a>cd", [3, 4, 5])])
def test_where_the_budget_of_a_thought_ends(text, where):
    """Behind two tokens, which are characters here; the mark itself may be written then. A mark
    within an answer, a call's argument say, begins no thought. |: the prompt ends. #: a token that
    is the whole closing mark."""
    letters = SimpleNamespace(decode=text_of_letters)
    extra = SimpleNamespace(tokenizer=letters, text_of=lambda id_: text_of_letters([id_]))
    prompt, _, _ = text.rpartition("|")
    thought, ids = Thought(extra, 2, ("<think>", "</think>"), [], bool(prompt), False, len(prompt),
                           len(prompt)), [*map(ord, text.replace("|", ""))]
    found = [end for end in range(len(ids) + 1) if copy(thought).read(ids[:end]).num_over(end) >= 0]
    for end in range(len(ids) + 1):  # the same token by token
        assert (thought.read(ids[:end]).num_over(end) >= 0) == (end in found)
    assert found == where
