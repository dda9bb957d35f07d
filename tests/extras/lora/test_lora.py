"""LoRA: one batch, many adapters, and nobody is told another one's text.

The oracle is transformers on a checkpoint into which the adapter was merged here, by the formula of
the paper: W + scaling * B A.
"""

import gc
import re
import shutil
import weakref
from pathlib import Path

import pytest
import torch
from adapters import ALL, ATTENTION, GREEDY, PROMPTS, SMALL, Adapters, logprobs
from checkpoints import Reference, assert_same_text
from loading import stored_tensors
from safetensors.torch import save_file
from small_engine import drain
from weight_kinds import needs_interpreter

from nanoserve import LLM, LoRARequest
from nanoserve.layers import Linear
from nanoserve_extras.forgetting.snapkv import SnapKV
from nanoserve_extras.lora import lora


@pytest.fixture(scope="module")
def voices(checkpoints, tmp_path_factory):
    voices = Adapters(checkpoints["qwen3"], tmp_path_factory.mktemp("voices"))
    voices.write(1, ["q_proj", "v_proj"])
    voices.write(2, ALL, rank=8, scaling=1.0)
    voices.write(3, ["up_proj", "down_proj", "k_proj"], rank=2, scaling=8 / 2 ** 0.5,
                 use_rslora=True)
    return voices


@pytest.mark.parametrize("options", [
    {}, dict(max_num_batched_tokens=7, max_num_seqs=3), dict(num_gpu_blocks_override=18),
    dict(enable_prefix_caching=False), dict(kernels="torch"), dict(async_scheduling=True),
    dict(speculative_config=dict(method="ngram", num_speculative_tokens=3))], ids=str)
def test_each_adapter_and_the_bare_model_in_one_batch(voices, options):
    with LLM(voices.base, **SMALL | options) as llm:
        for seeds in ([1, 2, None, 1, 2], [2, None, 1, 2, 1], [1] * 5, [None] * 5, [2] * 5):
            texts = voices.check(llm, seeds, str(options))
        assert texts[0] != voices.check(llm, [1])[0]


@pytest.mark.parametrize("plan", [[1, 2], {"disk": 2}], ids=str)
def test_adapters_of_layers_elsewhere(voices, plan, ranks_in_threads):
    """Rank 0 reads all of an adapter, also what is for layers that another rank has."""
    with LLM(voices.base, **SMALL, layer_plan=plan) as llm:
        for seeds in ([1, 2, None, 1, 2], [3] * 5, [2, None, 1, 2, 1]):
            voices.check(llm, seeds, str(plan))


def test_the_same_prompt_under_two_adapters_and_none_shares_no_block(voices):
    prompt = {"prompt_token_ids": PROMPTS[0]}
    asked = [voices.request(seed) for seed in (1, 2, None)]
    with LLM(voices.base, **SMALL) as llm:
        first = llm.generate([prompt] * 3, GREEDY, use_tqdm=False, lora_request=asked)
        assert [output.num_cached_tokens for output in first] == [0, 0, 0]
        again = llm.generate([prompt] * 3, GREEDY, use_tqdm=False, lora_request=asked)
        assert [output.num_cached_tokens for output in again] == [16, 16, 16]
        assert [o.outputs[0].token_ids for o in again] == [o.outputs[0].token_ids for o in first]


def test_a_cache_that_forgets_counts_votes_with_each_adapter(voices):
    """The oracle has the adapter merged into its weights, and one text at a time."""
    options = dict(kernels="torch", block_size=4, num_gpu_blocks_override=64, max_model_len=64)
    prompts = [{"prompt_token_ids": (prompt * 3)[:33]} for prompt in PROMPTS[:3]]
    texts = []
    for seed, prompt in zip((1, 2, None), prompts, strict=True):
        folder = voices.base if seed is None else voices.root / f"merged-{seed}"
        with LLM(folder, **options, extras=[SnapKV(keep=8, observed=6)]) as llm:
            texts += [llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids]
    asked = [voices.request(1), voices.request(2), None]
    with LLM(voices.base, **options, enable_lora=True, max_loras=2, max_num_batched_tokens=20,
             extras=[SnapKV(keep=8, observed=6)]) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=asked)
    assert [output.outputs[0].token_ids for output in outputs] == texts


def test_an_adapter_that_was_written_anew_finds_no_old_block(voices, tmp_path):
    """Its name, number and path are the same, its weights are not."""
    fresh = Adapters(voices.base, tmp_path)
    fresh.write(1), fresh.write(2)
    with LLM(voices.base, **SMALL) as llm:
        fresh.check(llm, [1])
        shutil.copytree(tmp_path / "adapter-2", tmp_path / "adapter-1", dirs_exist_ok=True)
        request = fresh.request(1)
        [output] = llm.generate({"prompt_token_ids": PROMPTS[0]}, GREEDY, use_tqdm=False,
                                lora_request=request)
        expected, gaps = Reference(tmp_path / "merged-2").generate(PROMPTS[0], GREEDY.max_tokens)
        assert_same_text(output.outputs[0].token_ids, expected, gaps, "written anew")
        assert output.num_cached_tokens == 0


def test_two_roots_that_hash_alike_share_no_block(voices):
    """The identity of the root is compared, not its key alone."""
    with LLM(voices.base, **SMALL) as llm:
        for seed in (1, 2):
            adapter = voices.check(llm, [seed]) and llm.runner.adapters.loaded
            for loaded in adapter.values():
                loaded.root.key = b"the same"
        voices.check(llm, [1], "collided")
        voices.check(llm, [2], "collided")


def test_the_least_recently_used_adapter_makes_room(voices):
    with LLM(voices.base, **SMALL) as llm:
        for seed in (1, 2, 1, 3):
            voices.check(llm, [seed])
        names = [adapter.name for adapter in llm.runner.adapters.loaded.values()]
        assert names == ["voice 1", "voice 3"]
        voices.check(llm, [2, 3, None], "loaded again, into another's place")


def test_what_no_step_needed_is_not_kept(voices):
    """Adapters that are named one after the other, as a server does at its start, wait for the
    next step in their columns: two of them, though four were read."""
    with LLM(voices.base, **SMALL) as llm:
        for seed in (1, 2, 3, 1):
            llm.make_request("", [0], lora_request=voices.request(seed))
        assert len(llm.runner.adapters.unsent) == 2
        voices.check(llm, [3, 1, None, 1, 3])
        assert not llm.runner.adapters.unsent


def test_an_adapter_that_a_request_needs_stays(voices):
    prompt = {"prompt_token_ids": PROMPTS[0]}
    with LLM(voices.base, **SMALL | dict(max_loras=1)) as llm:
        llm.add_request("one", prompt, GREEDY, lora_request=voices.request(1))
        llm.step()
        with pytest.raises(ValueError, match="'voice 2'.*'voice 1'.*max_loras=1"):
            llm.add_request("two", prompt, GREEDY, lora_request=voices.request(2))
        assert drain(llm)["one"][-1].outputs[0].token_ids == voices.check(llm, [1])[0]
        voices.check(llm, [2])  # and now there is room


def test_a_refused_call_leaves_its_adapters_free(voices):
    """Also while its error is kept, as the interactive prompt keeps the last one, and with it the
    requests that had been made before."""
    with LLM(voices.base, **SMALL | dict(max_loras=1)) as llm:
        with pytest.raises(ValueError, match="prompt 1: .*max_loras=1") as kept:
            llm.generate(["x", "y"], GREEDY, use_tqdm=False,
                         lora_request=[voices.request(1), voices.request(2)])
        voices.check(llm, [2])
        assert kept.value.__traceback__ is not None


@pytest.mark.parametrize("end", ["shut down", "forgotten"])
def test_an_engine_that_ended_keeps_no_weights(voices, end):
    """Its check of requests and the layers' products held the layers, in a circle. So a model that
    was shut down stayed in memory beside the next one."""
    llm = LLM(voices.base, **SMALL)
    voices.check(llm, [1])
    layers = [layer for layer in llm.runner.model.layers.modules() if isinstance(layer, Linear)]
    held = [weakref.ref(part) for layer in layers for part in (layer, layer.adapted.a)]
    assert len(held) == 3 * 4 * 2  # three layers, four products in each
    del layers
    gc.collect()
    gc.disable()
    try:
        if end == "shut down":
            llm.shutdown()
        else:
            del llm
        assert not [ref for ref in held if ref() is not None]
    finally:
        gc.enable()


def test_streams_and_chats_take_an_adapter(voices):
    with LLM(voices.base, **SMALL) as llm:
        *_, last = llm.stream({"prompt_token_ids": PROMPTS[1]}, GREEDY,
                              lora_request=voices.request(2))
        assert last.outputs[0].token_ids == voices.check(llm, [None, 2])[1]
        talk = [{"role": "user", "content": "hello"}]
        texts = {seed: llm.chat(talk, GREEDY, use_tqdm=False, chat_template="{{ messages }}",
                                lora_request=voices.request(seed))[0].outputs[0].token_ids
                 for seed in (1, 2)}
        assert texts[1] != texts[2]


@pytest.mark.parametrize("name", ["llama-bias", "mistral", "gemma2", "qwen2-window"])
def test_other_families(checkpoints, tmp_path, name):
    voices = Adapters(checkpoints[name], tmp_path)
    voices.write(1), voices.write(2, ATTENTION, rank=8, scaling=1.0)
    with LLM(voices.base, **SMALL) as llm:
        voices.check(llm, [1, 2, None, 2, 1], name)


def test_patterns_give_modules_ranks_and_scalings_of_their_own(voices, tmp_path):
    """A key of a pattern is the end of a module's path, whole names only."""
    other = Adapters(voices.base, tmp_path)
    other.write(1, ["q_proj"], scaling=4.0, lora_alpha=8, alpha_pattern={"q_proj": 16})
    other.write(2, ["q_proj"], scaling=2.0, lora_alpha=8, alpha_pattern={"proj": 16})
    with LLM(voices.base, **SMALL) as llm:
        other.check(llm, [1, 2])


FULL = "model.language_model.layers.11.self_attn.q_proj"
KEYS = ["q_proj", "proj", "self_attn.q_proj", r"layers\.11\.self_attn\.q_proj", ".*q_proj", "roj",
        "layers.1.*q_proj", "layers.12.*", "^model.*layers.11.*", "^layers.11.*", "q_proj$", FULL,
        "layers.11", "1.self_attn.q_proj", ".*.*.*", "model.*k_proj", "language_model.*",
        "^" + FULL, "q_proj|v_proj", "layers.1[01].self_attn.(q|k)_proj",
        "base_model.model." + FULL]


def test_a_pattern_matches_what_it_matches_in_peft():
    """PEFT's own rule is a regular expression around the key, on the name in the model that was
    trained: what sees has language_model in it, which our own names have not."""
    for key in KEYS:
        matches = re.match(rf"(.*\.)?({key})$", FULL)
        found = lora.of_module(Path(), {"alpha_pattern": {key: 3}}, "alpha_pattern", FULL, 8)
        assert found == (3 if matches else 8), key
    both = {"alpha_pattern": {"k_proj": 1, "self_attn.q_proj": 2, "q_proj": 3}}
    assert lora.of_module(Path(), both, "alpha_pattern", FULL, 8) == 2  # the first that matches


RULES = [(dict(), True), (dict(target_modules=["v_proj", "q_proj"]), True),
         (dict(target_modules=["_proj"]), False), (dict(target_modules=[FULL]), True),
         (dict(target_modules=r".*\.layers\..*_proj"), True),
         (dict(target_modules="q_proj"), False),
         (dict(target_modules="ALL-linear"), True),
         (dict(target_modules="all-linear", exclude_modules=["self_attn.q_proj"]), False),
         (dict(target_modules=["q_proj"], exclude_modules=r".*k_proj|.*\.1\..*"), True),
         (dict(target_modules=["q_proj"], layers_to_transform=[1, 11]), True),
         (dict(target_modules=["q_proj"], layers_to_transform=1), False),
         (dict(target_modules=["q_proj"], layers_to_transform=11, layers_pattern="layers"), True),
         (dict(target_modules=["q_proj"], layers_to_transform=11, layers_pattern=["h"]), False),
         (dict(target_modules=[FULL], layers_to_transform=[0]), True)]


@pytest.mark.parametrize("settings, targeted", RULES, ids=str)
def test_what_a_file_may_change_is_what_peft_would_change(settings, targeted):
    assert lora.is_targeted(settings, FULL) == targeted


@pytest.mark.full
def test_peft_compares_names_in_the_same_way():
    peft = pytest.importorskip("peft")
    from peft.tuners.tuners_utils import check_target_module_exists
    from peft.utils.other import get_pattern_key
    for key in KEYS:
        found = lora.of_module(Path(), {"a": {key: 3}}, "a", FULL, 8)
        assert found == {key: 3}.get(get_pattern_key([key], FULL), 8), key
    for settings, _ in RULES[1:]:
        if str(settings["target_modules"]).lower() != "all-linear":
            config = peft.LoraConfig(**settings)
            found = bool(check_target_module_exists(config, FULL))
            assert lora.is_targeted(settings, FULL) == found, settings


@pytest.mark.parametrize("entries, words", [
    (dict(use_dora=True), "use_dora=True is not supported"),
    (dict(modules_to_save=["lm_head"]), "modules_to_save=.* is not supported"),
    (dict(bias="all"), "bias='all' is not supported"),
    (dict(init_lora_weights="pissa_niter_16"), "init_lora_weights='pissa_niter_16' is not supp"),
    (dict(kasa_config={"a": 1}), "kasa_config=.* is not supported"),
    (dict(use_rslora="no"), "use_rslora='no' must be true or false"),
    (dict(r=8), "q_proj has rank 4, and adapter_config.json says 8"),
    (dict(rank_pattern={"q_proj": 2}), "q_proj has rank 4, and adapter_config.json says 2"),
    (dict(lora_alpha="16"), "alpha '16', which is no number"),
    (dict(lora_alpha=1e300), "numbers that are not finite"),
    (dict(alpha_pattern={"(": 3}), r"alpha_pattern=.* must name modules"),
    (dict(rank_pattern={"(.+)" * 9 + r"\3\4\5\6\7\8\9": 4}), "rank_pattern=.* regex timed out"),
    (dict(alpha_pattern=[1]), r"alpha_pattern=\[1\] must name modules"),
    (dict(target_modules=["v_proj"]), "q_proj has an adapter, and by .*target_modules.* none"),
    (dict(target_modules="("), "target_modules, .* can't be compared with model.layers"),
    (dict(peft_type="IA3"), "peft_type must be LORA")])
def test_settings_that_are_refused(voices, tmp_path, entries, words):
    """PiSSA and OLoRA take what they begin with off the model's weights, and PEFT does so whenever
    it loads such an adapter: the text was another one here."""
    other = Adapters(voices.base, tmp_path)
    other.write(1, ["q_proj"], **entries)
    refused(voices, other.request(1), words)


Q_PROJ = "model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize("name, shape, words", [
    ("model.embed_tokens.lora_embedding_A", (4, 8), "embed_tokens.* no adapter can change"),
    ("lm_head.lora_A.weight", (4, 64), "lm_head.* no adapter can change"),
    ("model.layers.0.mlp.experts.0.up_proj.lora_A.weight", (4, 64), "experts.* can change"),
    ("model.layers.9.self_attn.q_proj.lora_A.weight", (4, 64), "layers.9.* can change"),
    ("model.layers.0.self_attn.k_proj.lora_A.weight", (4, 64), "has only lora_A"),
    (Q_PROJ, (9, 64), "rank 9, max_lora_rank=8"),
    (Q_PROJ, (4, 7), r"shapes \(4, 7\)"),
    (Q_PROJ, torch.ones(4, 64, dtype=torch.int8), "layers.0.self_attn.q_proj has (numbers|shapes)"),
    (Q_PROJ, torch.tensor(1.0), "layers.0.self_attn.q_proj has (numbers|shapes)"),
    (Q_PROJ, torch.full((4, 64), torch.nan), "layers.0.self_attn.q_proj has (numbers|shapes)")],
    ids=lambda value: str(value)[:40])
def test_tensors_that_are_refused(voices, tmp_path, name, shape, words):
    other = Adapters(voices.base, tmp_path)
    folder = other.write(1, ["q_proj"])
    tensors = stored_tensors(folder)
    tensors[f"base_model.model.{name}"] = (
        shape if isinstance(shape, torch.Tensor) else torch.ones(shape))
    save_file(tensors, folder / "adapter_model.safetensors")
    refused(voices, other.request(1), words)


def refused(voices: Adapters, asked: object, words: str) -> None:
    """Before anything starts, the good request beside it included; and the engine goes on."""
    with LLM(voices.base, **SMALL) as llm:
        with pytest.raises(ValueError, match=words):
            llm.generate([{"prompt_token_ids": PROMPTS[0]}] * 2, GREEDY, use_tqdm=False,
                         lora_request=[None, asked])
        assert not llm.has_unfinished_requests()
        voices.check(llm, [1, None])


def test_requests_that_are_refused(voices, tmp_path):
    refused(voices, LoRARequest("no", 1, str(tmp_path)), "adapter_config.json")
    refused(voices, "voice", "must be a LoRARequest")
    (tmp_path / "adapter_config.json").write_text("{")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"no tensors")
    refused(voices, LoRARequest("no", 1, str(tmp_path)), "adapter_config.json is not valid JSON")
    for fields in (("", 1, "x"), ("x", 0, "x"), ("x", True, "x"), ("x", 1, "")):
        with pytest.raises(ValueError, match="lora_"):
            LoRARequest(*fields)
    with LLM(voices.base, dtype="float32", device="cpu", num_gpu_blocks_override=8) as llm:
        with pytest.raises(ValueError, match="enable_lora=True"):
            llm.generate("a", lora_request=voices.request(1))


@pytest.fixture
def two_ranks(voices, ranks_in_threads):
    return lambda **options: LLM(voices.base, **SMALL | dict(tensor_parallel_size=2) | options)


@pytest.mark.parametrize("options", [
    dict(max_num_batched_tokens=7, max_num_seqs=3),
    dict(num_gpu_blocks_override=18, async_scheduling=True)], ids=str)
def test_two_ranks_mix_adapters(voices, two_ranks, options):
    """Each has its share of A where it has a share of the inputs, and of B where of the outputs.
    The third adapter takes the columns of the first while the engine serves."""
    with two_ranks(**options) as llm:
        for seeds in ([1, 2, None, 1, 2], [3] * 5, [None, 3, 2, 3, None], [1, 2, 2, None, 1]):
            voices.check(llm, seeds, str(options))


def test_two_ranks_after_an_adapter_that_is_refused(voices, two_ranks, tmp_path):
    """Rank 0 reads and checks it, so the others never hear of it."""
    broken = shutil.copytree(voices.root / "adapter-1", tmp_path / "broken")
    (broken / "adapter_model.safetensors").write_bytes(b"no tensors")
    with two_ranks() as llm:
        voices.check(llm, [1, 2])
        with pytest.raises(ValueError, match="can't be read"):
            llm.generate("a", lora_request=LoRARequest("broken", 9, str(broken)))
        voices.check(llm, [2, None, 1])


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_adapters_over_small_weights(voices, quantization):
    """The weight is rounded, the adapter is not: so says a dense engine with the rounded weights
    and the same adapters, whose hidden states differ by the rounding of activations alone."""
    exact = logprobs(voices, PROMPTS[0])
    small = logprobs(voices, PROMPTS[0], quantization=quantization)
    bare = (exact[2] - small[2]).abs().mean()  # what rounding alone costs
    for i in range(2):
        effect = (exact[i] - exact[2]).abs().mean()
        assert (exact[i] - small[i]).abs().mean() < 3 * bare < effect


@needs_interpreter
def test_adapters_in_recorded_steps(checkpoints, tmp_path, recorded):
    """One row's adapter beside none, in other places of the batch, with drafts of a row, and a
    second adapter that is loaded when all is recorded. Steps without one are replays of their own.
    """
    voices = Adapters(checkpoints["tiny"], tmp_path)
    voices.write(1), voices.write(2, ALL, rank=8, scaling=1.0)
    options = SMALL | dict(kernels="triton", max_num_seqs=2, block_size=16)
    with LLM(voices.base, **options, speculative_config=dict(
            method="ngram", num_speculative_tokens=2, prompt_lookup_max=1)) as llm:
        for seeds in ([1, None], [None], [None, 2]):
            voices.check(llm, seeds)
    assert {(size.extra, size.drafts) for size in recorded} == {
        (extra, drafts) for extra in (False, True) for drafts in (False, True)}


@needs_interpreter
def test_adapters_over_small_weights_in_a_kernel(voices):
    """Of Triton; the interpreter is given a short prompt."""
    plain, kernel = (logprobs(voices, PROMPTS[1], quantization="int4", kernels=kernels)
                     for kernels in ("torch", "triton"))
    torch.testing.assert_close(kernel, plain, rtol=1e-4, atol=1e-4)
    assert (kernel[:2] - kernel[2]).abs().amax(1).min() > 0.1

@pytest.mark.parametrize("options", [{}, dict(max_num_batched_tokens=7, max_num_seqs=3),
                                     dict(quantization="int8")], ids=str)
def test_adapters_embed(voices, options):
    """Vectors of one call, each under its own adapter, are those of merged checkpoints; asked
    again they come out of the prefix cache, where each adapter finds its own blocks."""
    prompts, seeds = [{"prompt_token_ids": ids} for ids in PROMPTS], [1, 2, None, 3, 1]
    pooling = SMALL | dict(runner="pooling", max_loras=3) | options
    with LLM(voices.base, **pooling) as llm:
        asked = [voices.request(seed) for seed in seeds]
        first, again = (llm.embed(prompts, use_tqdm=False, lora_request=asked) for _ in range(2))
        score = llm.score("a", "a", lora_request=asked[0], use_tqdm=False)
        with pytest.raises(ValueError, match="lora_request is a list"):
            llm.score(["a"], ["a"], lora_request=asked[:1])
    assert score[0].outputs.score == pytest.approx(1)
    assert again[0].num_cached_tokens == 16
    for ids, seed, output, second in zip(PROMPTS, seeds, first, again, strict=True):
        folder = voices.base if seed is None else voices.root / f"merged-{seed}"
        with torch.inference_mode():
            hidden = Reference(folder).model.model(torch.tensor([ids])).last_hidden_state[0, -1]
        vector = torch.nn.functional.normalize(hidden, dim=0)
        tolerance = 1e-5 if not options.get("quantization") else 0.1
        for found in (output, second):
            torch.testing.assert_close(torch.tensor(found.outputs.embedding), vector,
                                       atol=tolerance, rtol=0)


def test_peft_says_the_same(voices):
    """The library that writes these folders, on transformers: each adapter as it reads it."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    with LLM(voices.base, **SMALL | dict(max_loras=3)) as llm:
        texts = {seed: [voices.check(llm, [seed] * 5), voices.check(llm, [seed] * 5)]
                 for seed in (1, 2, 3)}
    for seed, (fresh, cached) in texts.items():
        assert fresh == cached
        reference = Reference(voices.base)
        reference.model = peft.PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(voices.base, dtype=torch.float32),
            str(voices.root / f"adapter-{seed}")).eval()
        for ids, text in zip(PROMPTS, fresh, strict=True):
            assert_same_text(text, *reference.generate(ids, GREEDY.max_tokens), f"peft, {seed}")
