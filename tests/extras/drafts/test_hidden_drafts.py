"""Heads that read hidden states: the text is the model's, and each draft that of the definition.

The oracle is a dense EAGLE-3 in plain torch over transformers' own hidden states: no cache, no
steps, every prefix anew. A head of random weights is seldom right, and what it guesses can be
compared all the same; so can a head that is right by its construction.
"""

import json
import random
import shutil
from collections.abc import Iterable

import pytest
import torch
from architectures import ARCHITECTURES, make
from checkpoints import VOCAB_SIZE, Reference, assert_same_text
from guessing import count
from hybrids import HYBRIDS, make_wrapped
from packing import FORMATS, gptq, write
from safetensors.torch import load_file, save_file
from small_engine import drain_through, lose_steps
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from nanoserve import LLM, SamplingParams
from nanoserve_extras.drafts.speculative import Speculation

SIZES = dict(hidden_size=64, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
             head_dim=16, num_hidden_layers=1, vocab_size=VOCAB_SIZE, rms_norm_eps=1e-6,
             max_position_embeddings=256, rope_theta=10000.0, hidden_act="silu")
LAYERS = [0, 1, 2]  # of three
FEW_WORDS = range(0, VOCAB_SIZE, 3)
NUM_DRAFTS = 3
GREEDY = SamplingParams(temperature=0, max_tokens=12)
MODES = {"batched": dict(num_gpu_blocks_override=64),
         "chunks": dict(num_gpu_blocks_override=64, max_num_batched_tokens=7),
         "busy": dict(num_gpu_blocks_override=13, block_size=5, max_num_batched_tokens=33)}


def drawn(shapes: dict[str, tuple[int, ...]], norms: float = 1.0) -> dict[str, torch.Tensor]:
    """Random weights; products keep the size of what they multiply."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) * (
        norms if len(shape) == 1 else 2 * shape[-1] ** -0.5) for name, shape in shapes.items()}


def make_head(folder, words: Iterable[int] = range(VOCAB_SIZE), layers=LAYERS, **entries):
    """A head of random weights. words: it knows these alone. layers: it reads their states."""
    folder.mkdir()
    words, sizes = torch.tensor(words), SIZES | entries
    (folder / "config.json").write_text(json.dumps(SIZES | dict(
        architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=len(words),
        eagle_config=dict(eagle_aux_hidden_state_layer_ids=layers)) | entries))
    wide, inner = sizes["hidden_size"], sizes["intermediate_size"]
    shapes = {"fc": (wide, len(layers) * wide), "midlayer.self_attn.q_proj": (wide, 2 * wide),
              "midlayer.self_attn.k_proj": (wide // 2, 2 * wide),
              "midlayer.self_attn.v_proj": (wide // 2, 2 * wide),
              "midlayer.self_attn.o_proj": (wide, wide), "midlayer.mlp.gate_proj": (inner, wide),
              "midlayer.mlp.up_proj": (inner, wide), "midlayer.mlp.down_proj": (wide, inner),
              "midlayer.input_layernorm": (wide,), "midlayer.hidden_norm": (wide,),
              "midlayer.post_attention_layernorm": (wide,), "norm": (wide,),
              "lm_head": (len(words), wide)}
    tensors = {f"{name}.weight": tensor for name, tensor in drawn(shapes).items()}
    if len(words) < VOCAB_SIZE:
        tensors["d2t"] = words - torch.arange(len(words))
        tensors["t2d"] = torch.isin(torch.arange(VOCAB_SIZE), words)
    save_file(tensors, folder / "model.safetensors")
    return folder


class Dense:
    """EAGLE-3 as it is published, over a whole text at once."""

    def __init__(self, folder, reference: Reference):
        self.w = {name.removeprefix("midlayer.").removesuffix(".weight"): tensor
                  for name, tensor in load_file(folder / "model.safetensors").items()}
        self.model = reference.model

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.w[name]

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        n, half = len(x), 8
        q, k, v = ((x @ self.w[f"self_attn.{name}_proj"].T
                    + self.w.get(f"self_attn.{name}_proj.bias", 0)).view(n, -1, 16).transpose(0, 1)
                   for name in "qkv")
        angles = torch.outer(torch.arange(n), 10000.0 ** -(torch.arange(half) / half))
        cos, sin = angles.cos(), angles.sin()

        def turn(y):
            a, b = y[..., :half], y[..., half:]
            return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

        k, v = turn(k).repeat_interleave(2, 0), v.repeat_interleave(2, 0)
        scores = (turn(q) @ k.mT / 4).masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
        return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1) @ self.w["self_attn.o_proj"].T

    def layer(self, embedded: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        both = torch.cat((self.norm("input_layernorm", embedded),
                          self.norm("hidden_norm", states)), -1)
        return self.add_mlp(states + self.attend(both))

    def add_mlp(self, stream: torch.Tensor) -> torch.Tensor:
        x = self.norm("post_attention_layernorm", stream)
        gate, up = x @ self.w["mlp.gate_proj"].T, x @ self.w["mlp.up_proj"].T
        return stream + (torch.nn.functional.silu(gate) * up) @ self.w["mlp.down_proj"].T

    def states(self, token_ids: list[int]) -> torch.Tensor:
        """What the head reads of the model at each of these tokens."""
        out = self.model(torch.tensor([token_ids]), output_hidden_states=True)
        return torch.cat([out.hidden_states[i][0] for i in LAYERS], -1) @ self.w["fc"].T

    def guess(self, embedded: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The last token's own state, and the logits of the next token."""
        own = self.layer(embedded, states)[-1:]
        return own, (self.norm("norm", own) @ self.w["lm_head"].T)[0]

    @torch.no_grad()
    def drafts(self, token_ids: list[int], k: int) -> list[tuple[int, float]]:
        """What follows the text, of which the model has computed all but the last token; and how
        sure it is: the gap to the second."""
        states, ids, found = self.states(token_ids[:-1]), list(token_ids[1:]), []
        for _ in range(k):
            embedded = self.model.get_input_embeddings()(torch.tensor(ids))
            own, logits = self.guess(embedded, states)
            best = logits.topk(2)
            draft = int(best.indices[0])
            draft += int(self.w["d2t"][draft]) if "d2t" in self.w else 0
            found.append((draft, float(best.values[0] - best.values[1])))
            ids.append(draft)
            states = torch.cat((states, own))  # its own, from here on
        return found


def make_own(folder, checkpoint, **entries):
    """A checkpoint of MiMo's kind: Qwen2's layers, and a head of random weights beside them."""
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text()) | dict(
        architectures=["MiMoForCausalLM"], model_type="mimo", num_nextn_predict_layers=1) | entries
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {f"{name}_layernorm.weight": (64,) for name in (
        "token", "hidden", "final", "input", "post_attention")} | {"input_proj.weight": (64, 128)}
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in list(tensors.items()):
        if name.startswith("model.layers.0.") and "norm" not in name:
            shapes[name.removeprefix("model.layers.0.")] = tuple(tensor.shape)
    tensors |= {f"model.mtp_layers.0.{name}": one for name, one in drawn(shapes).items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


class DenseOwn(Dense):
    """MiMo's own head, over a whole text at once."""

    def __init__(self, folder, reference: Reference):
        self.w = {name.removeprefix("model.mtp_layers.0.").removesuffix(".weight"): tensor
                  for name, tensor in load_file(folder / "model.safetensors").items()}
        self.model = reference.model
        self.model.model.norm.register_forward_pre_hook(
            lambda module, args: setattr(self, "stream", args[0][0]))

    def states(self, token_ids: list[int]) -> torch.Tensor:
        self.model(torch.tensor([token_ids]))
        return self.stream

    def guess(self, embedded: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = torch.cat((self.norm("hidden_layernorm", states),
                       self.norm("token_layernorm", embedded)), -1) @ self.w["input_proj"].T
        out = self.add_mlp(x + self.attend(self.norm("input_layernorm", x)))
        own = self.norm("final_layernorm", out[-1:])
        return own, self.model.lm_head(own)[0]


# Of four experts, of which a token takes two, and one for all.
MIXTURE = {"gate": (4, 32), "experts.gate_up_proj": (4, 48, 32), "experts.down_proj": (4, 32, 24),
           "shared_expert.gate_proj": (16, 32), "shared_expert.up_proj": (16, 32),
           "shared_expert.down_proj": (32, 16), "shared_expert_gate": (1, 32)}


def make_own_foreign(folder, name: str = "qwen3.5"):
    """A checkpoint of Qwen3.5's kind, with the head that transformers passes over."""
    make(HYBRIDS[name](), folder) if name in HYBRIDS else make_wrapped(name, folder)
    config = json.loads((folder / "config.json").read_text())
    config.get("text_config", config)["mtp_num_hidden_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"fc": (32, 64), "norm": (32,), "pre_fc_norm_embedding": (32,),
              "pre_fc_norm_hidden": (32,), "layers.0.self_attn.q_proj": (64, 32),
              "layers.0.self_attn.k_proj": (16, 32), "layers.0.self_attn.v_proj": (16, 32),
              "layers.0.self_attn.o_proj": (32, 32), "layers.0.self_attn.q_norm": (8,),
              "layers.0.self_attn.k_norm": (8,), "layers.0.input_layernorm": (32,),
              "layers.0.post_attention_layernorm": (32,)}
    shapes |= {f"layers.0.mlp.{part}": shape for part, shape in (MIXTURE if "moe" in name else {
        "gate_proj": (48, 32), "up_proj": (48, 32), "down_proj": (32, 48)}).items()}
    tensors = load_file(folder / "model.safetensors")
    tensors |= {f"mtp.{part}" + ".weight" * (".experts." not in part): one
                for part, one in drawn(shapes, norms=0.3).items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


class DenseForeign(Dense):
    """Qwen3.5's head as it is published: norms whose weights are around 0, queries with gates, RoPE
    for a quarter of each head."""

    def __init__(self, folder, auto):
        self.model = Reference(folder, auto=auto).model
        self.w = {name.removeprefix("mtp.").removeprefix("layers.0.").removesuffix(".weight"): one
                  for name, one in load_file(folder / "model.safetensors").items()
                  if name.startswith("mtp.")}
        self.model.get_decoder().norm.register_forward_hook(
            lambda module, args, out: setattr(self, "normed", out[0]))

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + self.w[name])

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        n = len(x)
        q, gate = (x @ self.w["self_attn.q_proj"].T).view(n, 4, 2, 8).unbind(2)
        k, v = ((x @ self.w[f"self_attn.{name}_proj"].T).view(n, 2, 8) for name in "kv")
        angles = torch.arange(n)[:, None]  # of the only pair that is turned

        def turn(name, y):
            y = self.norm(f"self_attn.{name}_norm", y)
            a, b, rest = y[..., 0], y[..., 1], y[..., 2:]
            return torch.cat(((a * angles.cos() - b * angles.sin())[..., None],
                              (b * angles.cos() + a * angles.sin())[..., None], rest), -1)

        q, k = turn("q", q).transpose(0, 1), turn("k", k).repeat_interleave(2, 1).transpose(0, 1)
        v = v.repeat_interleave(2, 1).transpose(0, 1)
        scores = (q @ k.mT / 8 ** 0.5).masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
        out = (scores.softmax(-1) @ v).transpose(0, 1) * gate.sigmoid()
        return out.flatten(1) @ self.w["self_attn.o_proj"].T

    def add_mlp(self, stream: torch.Tensor) -> torch.Tensor:
        if "mlp.gate" not in self.w:
            return super().add_mlp(stream)
        x, w, silu = self.norm("post_attention_layernorm", stream), self.w, torch.nn.functional.silu
        chosen = (x @ w["mlp.gate"].T).softmax(-1).topk(2)
        own = silu(x @ w["mlp.shared_expert.gate_proj"].T) * (x @ w["mlp.shared_expert.up_proj"].T)
        out = (x @ w["mlp.shared_expert_gate"].T).sigmoid() * (
            own @ w["mlp.shared_expert.down_proj"].T)
        for token, (weights, experts) in enumerate(zip(*chosen, strict=True)):
            for share, i in zip(weights / weights.sum(), experts, strict=True):
                gate, up = (w["mlp.experts.gate_up_proj"][i] @ x[token]).chunk(2)
                out[token] += share * (w["mlp.experts.down_proj"][i] @ (silu(gate) * up))
        return stream + out

    def states(self, token_ids: list[int]) -> torch.Tensor:
        self.model(input_ids=torch.tensor([token_ids]))
        return self.normed

    def guess(self, embedded: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = torch.cat((self.norm("pre_fc_norm_embedding", embedded),
                       self.norm("pre_fc_norm_hidden", states)), -1) @ self.w["fc"].T
        out = self.add_mlp(x + self.attend(self.norm("input_layernorm", x)))
        own = self.norm("norm", out[-1:])
        return own, self.model.lm_head(own)[0]


@pytest.fixture(scope="module")
def few_prompts() -> list[list[int]]:
    # A block that others find was computed with the token behind it: that is shared here, too.
    rng = random.Random(1)
    shared, *own = ([rng.randrange(256) for _ in range(n)] for n in (22, 2, 16, 31, 9, 5))
    return [*own[:3], shared + own[3], shared + own[4]]


def start(folder, head, dtype="float32", **options) -> LLM:
    return LLM(folder, dtype=dtype, skip_tokenizer_init=True, speculative_config=dict(
        method="eagle3", model=str(head), num_speculative_tokens=NUM_DRAFTS), **options)


def start_own(folder, **options) -> LLM:
    return LLM(folder, dtype="float32", skip_tokenizer_init=True, speculative_config=dict(
        method="mtp", num_speculative_tokens=NUM_DRAFTS), **options)


@pytest.mark.parametrize("name, words, impl, modes", [
    ("llama2", range(VOCAB_SIZE), "nanoserve", MODES), ("qwen3", FEW_WORDS, "nanoserve", MODES),
    ("qwen3", FEW_WORDS, "transformers", ["busy"])])
def test_drafts_are_those_of_the_definition_and_the_text_is_the_models(
        checkpoints, references, tmp_path, few_prompts, name, words, impl, modes):
    head = make_head(tmp_path / "head", words)
    dense = Dense(head, Reference(checkpoints[name]))
    check_drafts(name, lambda **options: start(
        checkpoints[name], head, model_impl=impl, **options), dense, references, few_prompts, modes)


def test_a_head_in_the_format_of_speculators_is_the_same_head(checkpoints, references, tmp_path,
                                                              few_prompts):
    """Its layer's entries lie within, and the layer is called layers.0. (As Red Hat publishes them,
    from memory: no file of theirs was at hand.)"""
    own = make_head(tmp_path / "own", FEW_WORDS)
    other = shutil.copytree(own, tmp_path / "other")
    entries = json.loads((own / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(dict(
        architectures=["Eagle3DraftModel"], draft_vocab_size=entries["draft_vocab_size"],
        eagle_aux_hidden_state_layer_ids=LAYERS, embed_requires_grad=False, norm_before_fc=False,
        norm_before_residual=False, speculators_model_type="eagle3", target_hidden_size=None,
        speculators_config=dict(algorithm="eagle3", verifier=dict(name_or_path="somebody/model")),
        transformer_layer_config=SIZES | dict(model_type="llama", tie_word_embeddings=False))))
    tensors = load_file(own / "model.safetensors")
    save_file({name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()},
              other / "model.safetensors")
    check_drafts("llama2", lambda **options: start(checkpoints["llama2"], other, **options),
                 Dense(own, Reference(checkpoints["llama2"])), references, few_prompts, ["chunks"])


@pytest.mark.parametrize("name", ["qwen2", "qwen2-window"])  # a tied LM head, and one of its own
def test_a_checkpoints_own_head_guesses_as_defined_and_the_text_is_the_models(
        checkpoints, references, tmp_path, few_prompts, name):
    folder = make_own(tmp_path / "own", checkpoints[name])
    dense = DenseOwn(folder, Reference(checkpoints[name]))
    check_drafts(name, lambda **options: start_own(folder, **options), dense, references,
                 few_prompts)


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3.5-moe", "qwen3.5-vl"])
def test_the_head_of_transformers_network_guesses_as_defined(tmp_path, few_prompts, name):
    folder = make_own_foreign(tmp_path / "own", name)
    auto = AutoModelForCausalLM if name in HYBRIDS else AutoModelForImageTextToText
    reference = Reference(folder, auto=auto)
    check_drafts(name, lambda **options: start_own(folder, **options), DenseForeign(folder, auto),
                 lambda name, prompt, n: reference.generate(prompt, n), few_prompts,
                 MODES if name == "qwen3.5" else ["busy"])


@pytest.mark.parametrize("form", [pytest.param("fp8, blocks", marks=pytest.mark.full), "gptq"])
def test_a_quantised_head_of_transformers_network_is_what_its_tensors_mean(
        tmp_path, few_prompts, form):
    stored, dense = write(make_own_foreign(tmp_path / "own"), tmp_path, FORMATS[form])
    reference = Reference(dense)
    check_drafts(form, lambda **options: start_own(stored, **options), DenseForeign(
        dense, AutoModelForCausalLM), lambda name, prompt, n: reference.generate(prompt, n),
        few_prompts, ["busy"])
    if form == "gptq":  # kept in 4 bits, and with it as without
        texts = []
        for llm in (start_own(stored, quantization="int4"),
                    LLM(stored, dtype="float32", quantization="int4", skip_tokenizer_init=True)):
            with llm:
                texts.append([one.outputs[0].token_ids for one in llm.generate(
                    few_prompts, GREEDY, use_tqdm=False)])
        assert texts[0] == texts[1]


def test_a_quantised_head_of_our_own_network_is_what_its_tensors_mean(
        checkpoints, tmp_path, few_prompts):
    stored, dense = write(make_own(tmp_path / "own", checkpoints["qwen2"]), tmp_path, gptq)
    plain = json.loads((checkpoints["qwen2"] / "config.json").read_text())
    config = dense / "config.json"
    config.write_text(json.dumps(plain))  # transformers has no class for MiMo's name
    reference = Reference(dense)
    check_drafts("mimo", lambda **options: start_own(stored, **options), DenseOwn(dense, reference),
                 lambda name, prompt, n: reference.generate(prompt, n), few_prompts, ["busy"])


def check_drafts(name: str, make, dense: Dense, references, few_prompts, modes=MODES) -> None:
    for mode in modes:
        with make(**MODES[mode]) as llm:
            guesser, seen = llm.extra(Speculation).guesser, []
            fill = guesser.fill

            def note(step, fill=fill, seen=seen):
                fill(step)
                seen += [(list(seq.token_ids), list(drafts)) for seq, drafts in step.drafts.items()]

            guesser.fill = note
            outputs = llm.generate(few_prompts, GREEDY, use_tqdm=False)
            for output in outputs:
                expected, gaps = references(name, output.prompt_token_ids, GREEDY.max_tokens)
                assert_same_text(output.outputs[0].token_ids, expected, gaps, mode)
            assert len(seen) > 10 and count(llm)["num_drafts"] == len(seen)
            assert llm.metrics.num_preemptions or mode != "busy"
        for token_ids, drafts in seen:
            for draft, (expected, gap) in zip(drafts, dense.drafts(token_ids, len(drafts)),
                                              strict=True):
                if gap < 1e-3:
                    break  # a near-tie: what follows it differs
                assert draft == expected, (mode, len(token_ids))


def test_logits_of_drafts_are_not_rounded(checkpoints, tmp_path):
    """Neither those of a head that knows a few words alone."""
    head = make_head(tmp_path / "head", FEW_WORDS)
    with start(checkpoints["llama2"], head, dtype="bfloat16") as llm:
        logits = llm.runner.networks[1].compute_logits(torch.randn(3, 64).bfloat16())
        known = logits[:, FEW_WORDS]
        assert logits.dtype == torch.float32 and (known != known.bfloat16()).any()


def test_a_lost_step_costs_drafts_and_no_text(checkpoints, references, tmp_path, few_prompts):
    """The states of the step before are gone with it: the next step has no drafts."""
    with start(checkpoints["llama2"], make_head(tmp_path / "head")) as llm:
        for i, prompt in enumerate(few_prompts):
            llm.add_request(str(i), prompt, GREEDY)
        lose_steps(llm, every=4)
        outputs, num_lost = drain_through(llm, RuntimeError, llm.scheduler.check)
        assert num_lost > 2 and count(llm)["num_drafts"] > 10
    for i, prompt in enumerate(few_prompts):
        expected, gaps = references("llama2", prompt, GREEDY.max_tokens)
        assert_same_text(outputs[str(i)].outputs[0].token_ids, expected, gaps, f"lost, {i}")


def test_two_ranks_find_the_states_by_their_slots(checkpoints, references, tmp_path, few_prompts,
                                                  ranks_in_threads):
    with start(checkpoints["llama2"], make_head(tmp_path / "head"), tensor_parallel_size=2) as llm:
        for output in llm.generate(few_prompts, GREEDY, use_tqdm=False):
            expected, gaps = references("llama2", output.prompt_token_ids, GREEDY.max_tokens)
            assert_same_text(output.outputs[0].token_ids, expected, gaps, "two ranks")
        assert count(llm)["num_drafts"] > 10


@pytest.mark.parametrize("entries, words", [
    (dict(vocab_size=99), "vocab_size.*99.*260"),
    (dict(target_hidden_size=32), "target_hidden_size.*32.*64"),
    (dict(norm_before_fc=True), "norm_before_fc=True"),
    (dict(num_hidden_layers=2), "num_hidden_layers=2"),
    (dict(layers=[1, 2, 3]), "layer 3 of 3"),
    (dict(speculators_config={}, speculators_model_type="eagle"), "speculators_model_type='eagle'"),
    (dict(speculators_config={}, speculators_model_type="eagle3"), "norm_before_residual=None"),
    (dict(architectures=["LlamaForCausalLM"]), "EAGLE-3.*architectures")])
def test_a_head_that_does_not_belong_here_is_refused(checkpoints, tmp_path, entries, words):
    with pytest.raises(ValueError, match=f"speculative_config: .*{words}"):
        start(checkpoints["llama2"], make_head(tmp_path / "head", **entries))


def test_a_checkpoint_without_a_head_of_its_own_is_refused(checkpoints, tmp_path):
    with pytest.raises(ValueError, match="MiMoForCausalLM.*Llama"):
        start_own(checkpoints["llama2"])
    folder = make_own(tmp_path / "own", checkpoints["qwen2"], num_nextn_predict_layers=0)
    with pytest.raises(ValueError, match="has no head of one layer"):
        start_own(folder)


def test_two_ranks_read_a_checkpoints_own_head_and_without_the_method_it_is_passed_over(
        checkpoints, references, tmp_path, few_prompts, ranks_in_threads, monkeypatch):
    folder = make_own(tmp_path / "own", checkpoints["qwen2"])
    plain = LLM(folder, dtype="float32", skip_tokenizer_init=True)
    # The head is that of the revision which was fetched, and not looked for anew.
    monkeypatch.setattr("nanoserve_extras.base.checkpoint.find_model",
                        lambda *names, **options: folder)
    for llm in (plain, start_own("owner/model", revision="v1", tensor_parallel_size=2)):
        with llm:
            for output in llm.generate(few_prompts, GREEDY, use_tqdm=False):
                expected, gaps = references("qwen2", output.prompt_token_ids, GREEDY.max_tokens)
                assert_same_text(output.outputs[0].token_ids, expected, gaps, "own head")
            assert llm is plain or count(llm)["num_drafts"] > 10


def test_a_missing_head_and_layers_that_are_not_found_are_refused(checkpoints, tmp_path):
    with pytest.raises(ValueError, match="GPT2LMHeadModel has no list of layers"):
        start(make(ARCHITECTURES["gpt2"](), tmp_path / "gpt2"), make_head(
            tmp_path / "head", layers=[0, 1], hidden_size=32), load_format="dummy")
    with pytest.raises(ValueError, match="model is missing"):
        LLM(checkpoints["llama2"], speculative_config=dict(method="eagle3",
                                                           num_speculative_tokens=2))
