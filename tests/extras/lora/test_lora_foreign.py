"""LoRA in networks of transformers', those with recurrent states among them.

The oracle is transformers on a checkpoint into which the adapter was merged, as in test_lora.py;
`pytest -m full` asks peft, too.
"""

import shutil

import pytest
import torch
from adapters import GREEDY, PROMPTS, SMALL, Adapters, logprobs
from architectures import ARCHITECTURES, make
from checkpoints import Reference, assert_same_text
from hybrids import HYBRIDS, WRAPPED, make_wrapped
from safetensors.torch import save_file
from seeing import Seer, make_seeing
from small_engine import drain_through, lose_steps
from weight_kinds import needs_interpreter
from wrappings import reference

from nanoserve import LLM, LoRARequest

ATTENTION = ["q_proj", "v_proj", "o_proj"]
# Two sets of matrices, each of an adapter's: fused ones, low ranks of the model's own, in_proj and
# out_proj of mixers, of which some see a part of the step's rows at a time.
TARGETS = {
    "gpt2": (["c_attn"], ["c_attn", "attn.c_proj", "c_fc", "mlp.c_proj"]),
    "phi3": (["qkv_proj", "o_proj"], ["gate_up_proj", "down_proj"]),
    "gemma4": (ATTENTION, ["gate_proj", "down_proj", "per_layer_input_gate"]),
    "deepseek3": (["q_a_proj", "kv_a_proj_with_mqa", "o_proj"],
                  ["q_b_proj", "o_proj"]),
    "qwen3.5": (["q_proj", "in_proj_qkv", "out_proj"], ["in_proj_z", "in_proj_b", "down_proj"]),
    "qwen3.5-vl": (["q_proj", "in_proj_qkv", "out_proj"], ["in_proj_a", "up_proj"]),
    "lfm2": (["conv.in_proj", "q_proj"], ["conv.out_proj", "out_proj", "w1"]),
    "granite4-h": (["in_proj", "shared_mlp.input_linear"],
                   ["out_proj", "o_proj", "shared_mlp.output_linear"]),
    "falcon-h1": (["in_proj", "v_proj"], ["o_proj", "gate_proj", "down_proj"]),
    "olmo-hybrid": (ATTENTION, ["up_proj", "out_proj"]),
}
OFTEN = ("gemma4", "qwen3.5", "granite4-h")
CROWD = dict(max_num_batched_tokens=7, max_num_seqs=3, num_gpu_blocks_override=18)
LAST = {"phi3": "qkv_proj", "deepseek3": "q_b_proj", "qwen3.5": "v_proj", "qwen3.5-vl": "v_proj",
        "gpt2": "c_proj"}
TURNS = ([1, 2, None, 1, 2], [2, None, 1, 2, 1])


@pytest.fixture(scope="module")
def voices(tmp_path_factory):
    made = {}

    def of(name: str) -> Adapters:
        if name not in made:
            root = tmp_path_factory.mktemp(name)
            base = make_wrapped(name, root / "base") if name in WRAPPED else make(
                (ARCHITECTURES | HYBRIDS)[name](), root / "base")
            made[name] = Adapters(base, root, reference if name in WRAPPED else Reference)
            extra = dict(fan_in_fan_out=True) if name == "gpt2" else {}
            scaled = dict(lora_alpha=1, alpha_pattern={  # as PEFT has it: by the file's names
                r"language_model\.layers\.\d+\..*": 8}) if name in WRAPPED else {}
            made[name].write(1, TARGETS[name][0], **extra, **scaled)
            made[name].write(2, TARGETS[name][1], rank=8, scaling=1.0, **extra)
        return made[name]

    return of


@pytest.mark.parametrize("name", [
    name if name in OFTEN else pytest.param(name, marks=pytest.mark.full) for name in TARGETS])
def test_adapters_and_none_in_one_batch_that_is_cut_and_preempted(voices, name):
    with LLM(voices(name).base, **SMALL | CROWD) as llm:
        for seeds in TURNS:
            texts = voices(name).check(llm, seeds, name)
        assert texts[0] != voices(name).check(llm, [None])[0] != voices(name).check(llm, [1])[0]


@pytest.mark.parametrize("options", [
    {}, dict(kernels="torch"), dict(async_scheduling=True), dict(enable_prefix_caching=False),
    dict(speculative_config=dict(method="ngram", num_speculative_tokens=3))], ids=str)
@pytest.mark.parametrize("name", OFTEN)
@pytest.mark.full
def test_adapters_in_other_modes(voices, name, options):
    with LLM(voices(name).base, **SMALL | options) as llm:
        for seeds in TURNS:
            voices(name).check(llm, seeds, f"{name}, {options}")


@pytest.mark.full
@needs_interpreter
@pytest.mark.parametrize("name", ["qwen3.5", "granite4-h"])
def test_adapters_in_recorded_steps_beside_states(voices, recorded, name):
    """Each step names places of states; adapters' sections are zeros where no row has one."""
    options = SMALL | dict(kernels="triton", max_num_seqs=2, block_size=16)
    with LLM(voices(name).base, **options) as llm:
        for seeds in ([1, None], [None], [None, 2]):
            voices(name).check(llm, seeds, name)
    assert len(recorded) > 20 and all(size.extra for size in recorded)


@pytest.mark.parametrize("name", ["qwen3.5", pytest.param("lfm2", marks=pytest.mark.full)])
def test_a_step_that_is_lost_leaves_no_trace_in_a_state(voices, name):
    """A row begins anew, under its own adapter."""
    with LLM(voices(name).base, **SMALL) as llm:
        for i, seed in enumerate(TURNS[0]):
            llm.add_request(str(i), {"prompt_token_ids": PROMPTS[i]}, GREEDY,
                            lora_request=voices(name).request(seed))
        lose_steps(llm, every=3)
        outputs, num_lost = drain_through(llm, RuntimeError)
    assert num_lost > 5
    for i, seed in enumerate(TURNS[0]):
        voices(name).compare(PROMPTS[i], seed, outputs[str(i)].outputs[0].token_ids, "lost")


@pytest.mark.parametrize("name", ["qwen3.5", pytest.param("gemma4", marks=pytest.mark.full)])
def test_adapters_over_weights_in_8_bits(voices, name):
    """The weight is rounded, the adapter is not: see test_lora.py."""
    exact, small = (logprobs(voices(name), PROMPTS[0], quantization=kind) for kind in (
        None, "int8"))
    bare = (exact[2] - small[2]).abs().mean()  # what rounding alone costs
    for i in range(2):
        effect = (exact[i] - exact[2]).abs().mean()
        assert (exact[i] - small[i]).abs().mean() < 3 * bare < effect


def test_adapters_beside_images(tmp_path):
    """One picture under two adapters and none: neither adapters nor pictures share a block."""
    one = Adapters(make_seeing("llava", tmp_path / "base"), tmp_path)
    one.write(1, ["o_proj", "gate_proj"]), one.write(2, ["down_proj"])
    seer = Seer("llava", one.base)
    prompts = [seer.prompt(seer.picture(2, 2, seed), before=12, behind=4) for seed in (1, 2)]
    asked = [(prompt, seed) for seed in (1, None, 2) for prompt in prompts]
    with LLM(one.base, **SMALL | CROWD, limit_mm_per_prompt={"image": 1},
             skip_tokenizer_init=True) as llm:
        for attempt in ("first", "cached"):
            outputs = llm.generate([prompt for prompt, _ in asked], GREEDY, use_tqdm=False,
                                   lora_request=[one.request(seed) for _, seed in asked])
            for (prompt, seed), output in zip(asked, outputs, strict=True):
                merged = Seer("llava", one.root / f"merged-{seed}") if seed else seer
                assert_same_text(output.outputs[0].token_ids,
                                 *merged.generate(prompt, GREEDY.max_tokens), attempt)


@pytest.mark.parametrize("name, tensor, shape", [
    ("phi3", "model.layers.0.self_attn.q_proj", (4, 32)),  # it lies in qkv_proj
    ("deepseek3", "model.layers.0.self_attn.kv_b_proj", (4, 16)),  # it is absorbed
    ("deepseek3", "model.layers.1.mlp.experts", (4, 32)),  # one parameter of three dimensions
    ("qwen3.5", "model.layers.0.linear_attn.conv1d", (4, 32)),
    ("qwen3.5-vl", "model.visual.blocks.0.attn.proj", (4, 16)),  # a tower, which is left out
    ("gpt2", "lm_head", (4, 32))])
def test_what_no_product_of_ours_reads_is_refused(voices, tmp_path, name, tensor, shape):
    shutil.copytree(voices(name).root / "adapter-1", tmp_path, dirs_exist_ok=True)
    save_file({f"base_model.model.{tensor}.lora_A.weight": torch.zeros(shape)},
              tmp_path / "adapter_model.safetensors")
    with LLM(voices(name).base, **SMALL) as llm:
        with pytest.raises(ValueError, match=f"{tensor}.* no adapter can change.*{LAST[name]}"):
            llm.generate("a", lora_request=LoRARequest("other", 9, str(tmp_path)))


@pytest.mark.full
@pytest.mark.parametrize("name", TARGETS)
def test_peft_says_the_same(voices, name):
    """Logits of a prompt and greedy texts, by the library that writes these folders."""
    peft, one = pytest.importorskip("peft"), voices(name)
    with LLM(one.base, **SMALL | CROWD) as llm:
        texts = {seed: one.check(llm, [seed] * 5) for seed in (1, 2)}
    ours = logprobs(one, PROMPTS[0])
    for seed in (1, 2):
        oracle = one.reference(one.base)
        oracle.model = peft.PeftModel.from_pretrained(
            oracle.model, str(one.root / f"adapter-{seed}")).eval()
        for ids, text in zip(PROMPTS, texts[seed], strict=True):
            assert_same_text(text, *oracle.generate(ids, GREEDY.max_tokens), f"peft, {seed}")
        with torch.inference_mode():
            logits = oracle.model(input_ids=torch.tensor([PROMPTS[0]])).logits[0, -1]
        torch.testing.assert_close(ours[seed - 1], logits.log_softmax(-1), atol=2e-4, rtol=0)
