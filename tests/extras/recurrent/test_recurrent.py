"""Networks with recurrent layers: token for token what transformers' own `generate` gives.

Each runs its prompts twice: the second time from snapshots. `verify` has more modes for those who
have the time (docs/extras.md has its table); here is one that has everything at once.
"""

import random
import weakref

import pytest
import torch
import transformers
from architectures import GQA, GREEDY, MAX_TOKENS, Made, make, texts_by
from checkpoints import Reference, assert_same_text
from helpers import watch_steps
from hybrids import HYBRIDS, WRAPPED, make_wrapped
from small_engine import drain_through, lose_steps
from stand_ins import tf32
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from weight_kinds import needs_interpreter
from wrappings import reference

from nanoserve import LLM, SamplingParams, ops
from nanoserve_extras.drafts.speculative import Speculation
from nanoserve_extras.recurrent.recurrent import Finder, Recurrent, RecurrentModel, Rows
from nanoserve_extras.recurrent.recurrent_delta import DeltaNet, delta_rule
from nanoserve_extras.recurrent.recurrent_snapshots import ZEROS

# 13 blocks of 5 hold one of the longest texts: everybody else is preempted.
BUSY = dict(num_gpu_blocks_override=13, block_size=5, max_num_batched_tokens=17,
            async_scheduling=True)
DRAFTS = dict(method="ngram", num_speculative_tokens=3)


@pytest.fixture(scope="session")
def made(tmp_path_factory) -> Made:
    return Made(tmp_path_factory.mktemp("hybrids"), lambda name, folder: (
        make_wrapped(name, folder) if name in WRAPPED else make(HYBRIDS[name](), folder)))


@pytest.fixture(scope="session")
def few_prompts() -> list[list[int]]:
    """Around blocks, two with a common beginning."""
    rng = random.Random(0)
    shared, *own = ([rng.randrange(256) for _ in range(n)] for n in (20, 1, 16, 11, 31, 9))
    return [*own[:3], shared + own[3], shared + own[4]]


@pytest.fixture(scope="session")
def texts_of(made, few_prompts):
    return texts_by(made, few_prompts, lambda folder: (
        reference if folder.name in WRAPPED else Reference)(folder))


def start(folder, **options) -> LLM:
    """An engine on a CPU whose states are NaN until they are written, but for the one of zeros."""
    llm = LLM(folder, **dict(num_gpu_blocks_override=64, dtype="float32",
                             skip_tokenizer_init=True) | options)
    model = llm.runner.model
    for states in model.states.values():
        states[0] = states[2:] = torch.nan
    return llm


def assert_texts(llm: LLM, prompts, texts, where: str) -> int:
    """Returns how many tokens came from snapshots."""
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    for output, (tokens, gaps) in zip(outputs, texts, strict=True):
        assert_same_text(output.outputs[0].token_ids, tokens, gaps, where)
    llm.extra(Recurrent).snapshots.audit()
    return sum(output.num_cached_tokens for output in outputs)


# ------------------------------------------------------------------ the same text


@pytest.mark.parametrize("name", [*HYBRIDS, *WRAPPED])
def test_greedy_text_equals_transformers(made, few_prompts, texts_of, name, capsys):
    assert len({tuple(tokens) for tokens, _ in texts_of(name)}) == len(few_prompts)  # lively
    with start(made[name], snapshot_bytes=2 ** 20) as llm:
        said = f"; {int('qwen' in name)} of {llm.runner.model.num_mixers} layers by delta_rule"
        assert said in capsys.readouterr().err
        assert assert_texts(llm, few_prompts, texts_of(name), f"{name}, batched") == 0
        assert assert_texts(llm, few_prompts, texts_of(name), f"{name}, cached") == 48 + 16
    with start(made[name], **BUSY) as llm:
        for attempt in range(2):
            assert_texts(llm, few_prompts, texts_of(name), f"{name}, busy {attempt}")
        numbers = {one.name: getattr(one, "value", None) for one in llm.get_metrics()}
    assert numbers["vllm:num_preemptions"] > 0
    assert numbers["vllm:state_snapshot_saved"] > numbers["vllm:state_snapshot_evicted"]
    assert numbers["vllm:state_snapshot_tokens"] > 0


@pytest.mark.parametrize("part, how", [
    ("in_proj_a", lambda x: x.clamp(max=16)), ("in_proj_a", lambda x: x.clamp(min=-7)),
    ("in_proj_b", lambda x: x.clamp(max=7)), ("in_proj_z", lambda x: x.clamp(-1000, 1000)),
    ("in_proj_qkv", lambda x: x.clamp(-10, 10)), ("in_proj_a", lambda x: x + 1e-3),
    ("in_proj_z", lambda x: x * 1.0001), ("out_proj", lambda x: x.clamp(max=100)),
    ("norm", lambda x: x * 1.0001)], ids=lambda one: one if isinstance(one, str) else "")
def test_a_delta_net_with_a_clamp_a_bias_or_a_scale_stays(made, monkeypatch, part, how):
    """Planted in the class's forward, and in every dtype: the trial is in float32."""
    net = transformers.models.qwen3_5.modeling_qwen3_5.Qwen3_5GatedDeltaNet
    forward = net.forward

    def planted(self, *args, **options):
        inner = getattr(self, part)
        handle = inner.register_forward_hook(lambda module, args, out: how(out))
        try:
            return forward(self, *args, **options)
        finally:
            handle.remove()

    monkeypatch.setattr(net, "forward", planted)
    with start(made["qwen3.5"], dtype="bfloat16") as llm:
        assert (llm.runner.model.num_fast, llm.runner.model.num_mixers) == (0, 1)


def guess(llm: LLM, prompts, texts) -> None:
    """From now on drafts are what transformers says, with a mistake in every fourth."""
    rng, known = random.Random(2), {tuple(prompt): tokens for prompt, (tokens, _) in zip(
        prompts, texts, strict=True)}

    def propose(seq, most):
        end = len(seq.token_ids) - seq.num_prompt_tokens
        return [token if rng.random() < 0.75 else (token + 1) % 256 for token in known[
            tuple(seq.token_ids[:seq.num_prompt_tokens])][end:end + min(most, 3)]]

    guesser = llm.extra(Speculation).guesser
    guesser.propose, guesser.checked = propose, lambda seq, num_right: None


@pytest.mark.parametrize("name", [
    name if name in ("qwen3.5", "lfm2", "granite4-h", "falcon-h1") else pytest.param(
        name, marks=pytest.mark.full) for name in (*HYBRIDS, *WRAPPED)])
def test_drafts_leave_no_trace_in_a_state(made, few_prompts, texts_of, name):
    """Right and wrong ones: among others, from snapshots, preempted, in steps of 17."""
    for options in (BUSY, dict(snapshot_bytes=2 ** 20))[:1 + (name in ("qwen3.5", "lfm2"))]:
        with start(made[name], speculative_config=DRAFTS, **options) as llm:
            guess(llm, few_prompts, texts_of(name))
            for attempt in range(2):
                cached = assert_texts(llm, few_prompts, texts_of(name), f"{name}, {attempt}")
            numbers = {one.name: getattr(one, "value", None) for one in llm.get_metrics()}
        assert cached and (numbers["vllm:num_preemptions"] or options is not BUSY)
        accepted, drafted = (numbers[f"vllm:spec_decode_num_{what}_tokens"]
                             for what in ("accepted", "draft"))
        assert 20 < accepted < drafted - 10


@pytest.mark.parametrize("method", [
    DRAFTS, dict(method="suffix", num_speculative_tokens=8),
    dict(method="draft_model", num_speculative_tokens=2)], ids=lambda asked: asked["method"])
def test_drawn_texts_are_those_without_drafts(made, checkpoints, few_prompts, method):
    """Also where a small network's layers have their KV beside, and a grammar forces tokens."""
    told, method = [], dict(method)
    if method["method"] == "draft_model":
        method["model"] = str(checkpoints["qwen3"])
    params = [SamplingParams(n=2, temperature=0.4, seed=3, max_tokens=24, logprobs=0),
              SamplingParams(max_tokens=20, seed=4, structured_outputs=dict(
                  regex="(ab ab ab ab |cd cd cd cd )[ab]{1,9}"))]
    for asked in (None, method):
        with start(made["qwen3.5"], speculative_config=asked, block_size=4,
                   skip_tokenizer_init=False) as llm:
            outputs = [one for param in params
                       for one in llm.generate(few_prompts, param, use_tqdm=False)]
            told.append([sample.token_ids for output in outputs for sample in output.outputs])
            llm.extra(Recurrent).snapshots.audit()
    assert told[0] == told[1]


@pytest.mark.parametrize("depth", [0, 1, "drafts"])
@pytest.mark.parametrize("name", ["qwen3.5", "lfm2", "falcon-h1"])
def test_a_step_that_is_lost_is_not_folded_twice(made, few_prompts, texts_of, name, depth):
    """KV is written again to the same slots. A state would hold the lost step's tokens twice."""
    drafts = DRAFTS if depth == "drafts" else None
    with start(made[name], async_scheduling=depth == 1, speculative_config=drafts) as llm:
        if drafts:
            guess(llm, few_prompts, texts_of(name))
        for i, prompt in enumerate(few_prompts):
            llm.add_request(str(i), prompt, GREEDY)
        lose_steps(llm, every=3)
        outputs, num_lost = drain_through(llm, RuntimeError, lambda: (
            llm.scheduler.check(), llm.extra(Recurrent).snapshots.audit()))
    assert num_lost > (2 if drafts else 5)
    for i, (tokens, gaps) in enumerate(texts_of(name)):
        assert_same_text(outputs[str(i)].outputs[0].token_ids, tokens, gaps, f"lost, {i}")


def test_samples_and_logprobs_are_as_everywhere(made, few_prompts, texts_of):
    with start(made["qwen3.5"]) as llm:
        params = SamplingParams(n=3, temperature=1.0, top_k=1, max_tokens=MAX_TOKENS)
        outputs = llm.generate(few_prompts, params, use_tqdm=False)
        for output, (tokens, gaps) in zip(outputs, texts_of("qwen3.5"), strict=True):
            for sample in output.outputs:
                assert_same_text(sample.token_ids, tokens, gaps, "n=3")
        scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        for attempt in range(2):  # the second one finds its prompt, and may not use it
            output, = llm.generate(few_prompts[-1], scored, use_tqdm=False)
            assert output.num_cached_tokens == 0, attempt
    ids = few_prompts[-1]
    with torch.no_grad():
        logits = Reference(made["qwen3.5"]).model(torch.tensor([ids])).logits[0].log_softmax(-1)
    got = [one[token].logprob for one, token in zip(output.prompt_logprobs[1:], ids[1:],
                                                    strict=True)]
    expected = logits[torch.arange(len(ids) - 1), ids[1:]]
    torch.testing.assert_close(torch.tensor(got), expected, rtol=1e-4, atol=1e-4)


def test_half_precision_keeps_its_recurrent_state_in_single(made, few_prompts, monkeypatch):
    """Also where a mixer hands it over in half, as kernels may: transformers' own torch doesn't."""
    update = Finder.update_recurrent_state

    def in_half(finder, new, *place, **named):
        update(finder, new.to(torch.bfloat16), *place, **named)
        return new

    monkeypatch.setattr(Finder, "update_recurrent_state", in_half)
    with start(made["granite4-h"], dtype="bfloat16") as llm:
        assert llm.generate(few_prompts, GREEDY, use_tqdm=False)[0].finished
        dtypes = {kind: states.dtype for (kind, *_), states in llm.runner.model.states.items()}
    assert dtypes == dict(conv=torch.bfloat16, recurrent=torch.float32)


# ------------------------------------------------------------------- a chat


def test_a_turn_of_a_chat_computes_only_what_is_new(made):
    """vLLM's hybrids hit near 0% (#40696, #36493): their snapshots lie where no next turn begins.
    Here each turn begins at the last block boundary of the one before, also among other users."""
    rng = random.Random(1)
    with start(made["lfm2"], snapshot_bytes=0, enable_prefix_caching=False) as llm:
        size = llm.runner.model.state_bytes
    with start(made["lfm2"], block_size=4, snapshot_bytes=6 * size) as llm:
        chats = [[rng.randrange(256) for _ in range(9)] for _ in range(2)]
        for turn in range(7):
            outputs = llm.generate(chats, SamplingParams(
                temperature=0, max_tokens=5, ignore_eos=True), use_tqdm=False)
            for chat, output in zip(chats, outputs, strict=True):
                # The last token that was written is computed by nobody before the next turn.
                known = (len(chat) - 5 - 1) // 4 * 4 if turn else 0
                assert output.num_cached_tokens == known, turn
                chat += output.outputs[0].token_ids + [rng.randrange(256) for _ in range(5)]


# ------------------------------------------------------------ memory, refusals


def test_fewer_sequences_run_where_their_states_need_the_memory(made, monkeypatch, capsys):
    from nanoserve_extras.recurrent import recurrent
    with start(made["qwen3.5"]) as llm:
        size = llm.runner.model.state_bytes
    monkeypatch.setattr(recurrent, "free_memory", lambda *_: 12 * size)
    with start(made["qwen3.5"]) as llm:  # half of 12 are 6, one of them zeros
        assert llm.config.max_num_seqs == llm.scheduler.max_num_seqs == 5
        assert "max_num_seqs is lowered from 64 to 5: " in capsys.readouterr().err
        assert llm.generate([[1, 2, 3]] * 9, GREEDY, use_tqdm=False)[8].finished
    monkeypatch.setattr(recurrent, "free_memory", lambda *_: 3 * size)
    with pytest.raises(ValueError, match="no room for one sequence's recurrent state of .* MB"):
        start(made["qwen3.5"])


def test_an_engine_that_ends_gives_back_weights_and_states(made):
    llm = start(made["lfm2"])
    llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
    model = llm.runner.model
    held = [weakref.ref(one) for one in (model, *model.states.values(), *model.parameters())]
    del model
    llm.shutdown()  # and the object stays
    assert not any(one() is not None for one in held)


@pytest.mark.parametrize("options, words", [
    (dict(kv_offload_bytes=2 ** 20), "kv_offload_bytes=1048576"),
    (dict(kv_store="{tmp}"), "kv_store="),
    (dict(tensor_parallel_size=2), "Lfm2ForCausalLM.*tensor_parallel_size=2")])
def test_what_does_not_go_together_is_refused(made, tmp_path, options, words):
    options = {key: str(tmp_path) if value == "{tmp}" else value for key, value in options.items()}
    with pytest.raises(ValueError, match=words):
        start(made["lfm2"], **options)


@pytest.mark.parametrize("forgotten", ["get_conv_state", "get_recurrent_state"])
def test_mixers_that_take_no_state_are_refused(made, monkeypatch, forgotten):
    """As Mamba 1's do, whose scan begins at nothing, whatever the cache holds."""
    get = getattr(Rows, forgotten)
    monkeypatch.setattr(Rows, forgotten, lambda *args, **options: get(*args, **options) * 0)
    with pytest.raises(ValueError, match="Hybrid.*ForCausalLM.*state"):
        start(made["granite4-h"])


def test_jamba_is_refused(tmp_path):
    folder = make(transformers.JambaConfig(
        **GQA, attn_layer_period=2, attn_layer_offset=1, num_experts=2, num_experts_per_tok=1,
        mamba_d_state=4), tmp_path)
    with pytest.raises(ValueError, match="JambaForCausalLM"):
        start(folder)


# --------------------------------------------------- in CUDA graphs, for which a recorder stands in
# States are NaN until they are written, that of padding, too: what is read from a place that a
# recording has frozen, and padding that leaks, would show.


# In 3 blocks of 16 one of them is preempted; the first one's snapshot is behind 16 tokens.
TWO_PROMPTS = [[*range(60, 78)], [*range(5, 15)]]
RECORDED = dict(kernels="triton", max_num_seqs=2, num_gpu_blocks_override=3, max_model_len=32,
            max_num_batched_tokens=20, block_size=16)


def assert_recorded_texts(llm, texts, where: str) -> None:
    """Of both prompts, and then of the first alone, from its snapshot. Some drafts are wrong; what
    a grammar would force is right, and one token where a row is free."""
    known = {tuple(prompt): tokens for prompt, (tokens, _) in zip(TWO_PROMPTS, texts, strict=True)}
    guesses = llm.runner.parts.num_drafts

    def draft(seq, most: int) -> list[int]:
        end = len(seq.output_token_ids)
        if (end + seq.row) % 3 == 0:
            return []
        tokens = known[tuple(seq.token_ids[:seq.num_prompt_tokens])][end:][:most]
        return [token + (i == end % 3) for i, token in enumerate(tokens[:2])] if guesses else (
            tokens[:2 - len(llm.scheduler.running)])

    (llm.hooks.draft if guesses else llm.hooks.force)[:] = [draft]
    for attempt in range(2):
        outputs = llm.generate(TWO_PROMPTS[:2 - attempt], GREEDY, use_tqdm=False)
        for output, (tokens, gaps) in zip(outputs, texts[:2 - attempt], strict=True):
            assert_same_text(output.outputs[0].token_ids, tokens, gaps, where)
        llm.extra(Recurrent).snapshots.audit()


@needs_interpreter
@pytest.mark.parametrize(("name", "drafter"), [("lfm2", "ngram"), *(
    pytest.param(name, drafter, marks=pytest.mark.full) for name in HYBRIDS
    for drafter in ("ngram", None) if (name, drafter) != ("lfm2", "ngram"))])
def test_replays_write_transformers_text(made, recorded, name, drafter):
    """Decodes, and rows with drafts, which have states of their own, or with what a grammar forces,
    which leave one. Mixers of transformers' take rows of one length: their drafts stay eager."""
    asked = drafter and dict(method=drafter, num_speculative_tokens=2)
    with start(made[name], **RECORDED, speculative_config=asked) as llm:
        steps = watch_steps(llm)
        assert_recorded_texts(llm, texts_by(made, TWO_PROMPTS)(name), name)
        assert llm.extra(Recurrent).snapshots.num_tokens > 0
    assert any(step.drafts for step in steps)
    assert any(step.preempted for step in steps) or name not in ("lfm2", "qwen3.5")  # they end
    assert {size.drafts for size in recorded} == {False, "qwen" in name}
    assert all(size.extra for size in recorded)


def test_ten_bits_of_a_convolution_do_not_choose_the_mixer(made):
    """A GPU's convolutions in float32 keep no more by default (TF32), and products where a script
    allows it. The trial took delta nets for something else, and transformers' slow ones ran."""
    try:
        torch.set_float32_matmul_precision("high")
        with tf32(), start(made["qwen3.5"]) as llm:
            assert llm.runner.model.num_fast == llm.runner.model.num_mixers
    finally:
        torch.set_float32_matmul_precision("highest")


@needs_interpreter
def test_a_place_that_a_recording_freezes_is_found(made, recorded, capsys, monkeypatch):
    """At the start, by the second content: the first goes on from zeros, as this recording does."""
    forward = RecurrentModel.forward

    def frozen(self, ids, positions, kv_cache, batch, wanted=None):
        if len(ids) == 1:
            batch.extra["state_sources"] = torch.full_like(
                batch.extra["state_sources"], max(ZEROS, *batch.host["state_sources"]))
        return forward(self, ids, positions, kv_cache, batch, wanted)

    monkeypatch.setattr(RecurrentModel, "forward", frozen)
    with start(made["lfm2"], **RECORDED | dict(max_num_seqs=1)) as llm:
        assert "a replay differs from the step" in capsys.readouterr().err
        assert llm.runner.graphs is None


@torch.inference_mode()
@pytest.mark.parametrize("drafts", [[0, 0, 0], [0, 7, 9]], ids=["one place", "a place each"])
def test_ragged_rows_of_a_recording_are_those_of_an_eager_step(drafts):
    """Rows of 1, 3 and 2 tokens, padded to 5 rows and 9 tokens, against each token alone."""
    net = Qwen3_5GatedDeltaNet(HYBRIDS["qwen3.5"](), 0)
    ours, places = DeltaNet(net, ops, delta_rule), [2, 4, 3]
    states = {("conv", 0, 0): torch.randn(12, 3, net.conv_dim), ("recurrent", 0, 0): torch.randn(
        12, net.num_v_heads, net.head_k_dim, net.head_v_dim)}
    x, out = torch.randn(9, net.hidden_size), []
    expected = {key: one.clone() for key, one in states.items()}
    for row, (source, tokens) in enumerate(((5, x[:1]), (4, x[1:4]), (6, x[4:6]))):
        mine = {key: one[source:source + 1].clone() for key, one in states.items()}
        for i, token in enumerate(tokens):
            out.append(ours.forward(token[None, None], Rows.at(mine, [0], [1], x.device))[0])
            slot = drafts[row] + i - 1 if i and drafts[row] else places[row]
            for key, one in mine.items():
                expected[key][slot] = one[0]
    for one in states.values():
        one[0] = torch.nan
    numbers = [torch.tensor([*given, 0, 0]) for given in ([5, 4, 6], places, drafts)]
    got = ours.forward(x[None], Rows(states, *numbers, torch.tensor([0, 1, 4, 6, 6, 6]), 9, None,
                                     []))
    torch.testing.assert_close(got[0, :6], torch.cat(out))
    for key, one in states.items():
        torch.testing.assert_close(one[1:], expected[key][1:])
