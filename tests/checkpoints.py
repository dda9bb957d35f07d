"""Checkpoints written by transformers itself, and the reference: its own greedy text.

The weights are random but large, so that outputs vary and near-ties are rare. Each is made once a
session, when it is first asked for, in a temporary folder; nothing is downloaded. Test files that
run without torch can't import this module; the fixtures of conftest import it when they are used.
"""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from nanoserve.batch import Batch, BatchBuilder
from nanoserve.controls import Constraints
from nanoserve.sampler import SamplerOutput, SamplingInputs, sample
from nanoserve.sequence import Sequence, Step

VOCAB_SIZE = 260  # 256 bytes, then these:
BOS, EOS, END_OF_TURN, PAD = 256, 257, 258, 259
SIZES = dict(vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
             max_position_embeddings=256, bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte: every character beyond ASCII needs several tokens."""
    alphabet = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<|end|>", "<pad>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>",
        chat_template="{% for m in messages %}<s>{{ m.role }}:{{ m.content }}<|end|>{% endfor %}"
                      "{% if add_generation_prompt %}<s>assistant:{% endif %}")


def save(model, folder: Path, **options) -> Path:
    """Randomise a transformers model so that its greedy text is lively, and write it out.

    Gemma multiplies its embedding by sqrt(hidden_size) and has it as LM head as well: were it not
    small beside what the layers add, every text would be the prompt's last token, for ever. A large
    last norm makes up for it in the logits.
    """
    generator = torch.Generator().manual_seed(1)
    embedding, last_norm = (0.02, 9.0) if "gemma" in model.config.model_type else (1.0, 1.0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                scale = embedding if "embed" in name else 2.5 * parameter.shape[-1] ** -0.5
                parameter.normal_(0, scale, generator=generator)
            else:  # norms around 1, biases around 0
                center = last_norm if name == "model.norm.weight" else 1.0 if "norm" in name else 0
                parameter.normal_(center, 0.3, generator=generator)
    model.save_pretrained(folder, **options)
    byte_tokenizer().save_pretrained(folder)
    return folder


GQA = dict(num_attention_heads=4, num_key_value_heads=2)
LLAMA3_ROPE = dict(rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0,
                   high_freq_factor=4.0, original_max_position_embeddings=64)
YARN_ROPE = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0,
                 original_max_position_embeddings=32)
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=40)
GEMMA = dict(SIZES, **GQA, head_dim=16, sliding_window=13, query_pre_attn_scalar=24)

# One small checkpoint for each thing that differs between real ones. Windows are shorter than most
# prompts; in "mistral" and "mixtral" every layer has one, so that blocks are given back.
CHECKPOINTS: dict[str, Callable] = {
    "llama2": lambda: LlamaConfig(**SIZES, num_attention_heads=4),
    "llama3.1": lambda: LlamaConfig(**SIZES, **GQA, rope_parameters=LLAMA3_ROPE),
    "llama3.2": lambda: LlamaConfig(**SIZES, **GQA, head_dim=24, tie_word_embeddings=True,
                                    rope_parameters=LLAMA3_ROPE),
    "llama-bias": lambda: LlamaConfig(**SIZES, **GQA, attention_bias=True, mlp_bias=True),
    "llama-linear": lambda: LlamaConfig(**SIZES, **GQA, rope_parameters=dict(
        rope_type="linear", rope_theta=10000.0, factor=4.0)),
    "llama-yarn": lambda: LlamaConfig(**SIZES, **GQA, rope_parameters=YARN_ROPE),
    "mistral": lambda: MistralConfig(**SIZES, **GQA, sliding_window=13),
    "mistral-full": lambda: MistralConfig(**SIZES, **GQA, head_dim=24, sliding_window=None),
    "qwen2": lambda: Qwen2Config(**SIZES, **GQA, tie_word_embeddings=True),
    "qwen2-window": lambda: Qwen2Config(**SIZES, **GQA, use_sliding_window=True, sliding_window=13,
                                        max_window_layers=1),
    "qwen3": lambda: Qwen3Config(**SIZES, **GQA, head_dim=32),
    "qwen3-tied": lambda: Qwen3Config(**SIZES, num_attention_heads=4, num_key_value_heads=1,
                                      head_dim=16, tie_word_embeddings=True),
    "qwen3-sharded": lambda: Qwen3Config(**SIZES, **GQA, head_dim=32),
    "mixtral": lambda: MixtralConfig(**SIZES, **GQA, num_local_experts=4, num_experts_per_tok=2,
                                     sliding_window=20),
    "qwen3-moe": lambda: Qwen3MoeConfig(**SIZES, **GQA, **EXPERTS, head_dim=16, num_experts=4,
                                        norm_topk_prob=True, mlp_only_layers=[1]),
    "qwen3-moe-odd": lambda: Qwen3MoeConfig(**SIZES, **GQA, **EXPERTS, head_dim=16, num_experts=5,
                                            norm_topk_prob=False, decoder_sparse_step=2),
    "gemma2": lambda: Gemma2Config(**GEMMA, attn_logit_softcapping=5.0,
                                   final_logit_softcapping=3.0),
    "gemma3": lambda: Gemma3TextConfig(
        **GEMMA, layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters=dict(
            full_attention=dict(rope_type="linear", rope_theta=1e6, factor=2.0),
            sliding_attention=dict(rope_type="default", rope_theta=1e4))),
}


# For kernels in Triton's interpreter, where a launch takes milliseconds a program: a layer or two,
# one KV head. Together they have every feature that a kernel has an argument for.
TINY = SIZES | dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=16,
                    num_attention_heads=2, num_key_value_heads=1)
TINY_CHECKPOINTS: dict[str, Callable] = {
    "tiny": lambda: Qwen3Config(**TINY | dict(num_hidden_layers=1, intermediate_size=64)),
    "tiny-moe": lambda: MixtralConfig(**TINY | dict(head_dim=24), num_local_experts=3,
                                      num_experts_per_tok=2, sliding_window=20),
    "tiny-gemma": lambda: Gemma2Config(**TINY | dict(num_attention_heads=4), sliding_window=13,
                                       query_pre_attn_scalar=24, attn_logit_softcapping=5.0,
                                       final_logit_softcapping=3.0),
}


class Checkpoints(dict):
    """Folders by name, each made when it is first asked for."""

    def __init__(self, root: Path):
        super().__init__()
        self.root = root

    def __missing__(self, name: str) -> Path:
        with torch.random.fork_rng(devices=[]):  # whoever asks first draws what others draw
            model = AutoModelForCausalLM.from_config((CHECKPOINTS | TINY_CHECKPOINTS)[name]())
        options = dict(max_shard_size="100KB") if name.endswith("-sharded") else {}
        folder = self[name] = save(model, self.root / name, **options)
        assert (folder / "model.safetensors.index.json").exists() == bool(options)
        return folder


class Reference:
    """transformers, one prompt at a time, greedy, fp32: token ids and the gap of each choice."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32,
                 auto: type = AutoModelForCausalLM):
        # "eager": transformers 5.17 takes scaled_dot_product_attention for Gemma 2: no softcap.
        self.model = auto.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()

    @torch.no_grad()
    def generate(self, prompt: list[int], max_tokens: int,
                 guess: list[int] = ()) -> tuple[list[int], list[float]]:
        """Returns the output tokens, EOS included, and top-1 minus top-2 logit at each.

        guess: what the text may be. One pass over all of it tells how far it is the likeliest token
        at each place; transformers' `generate` writes the rest. So a right guess saves twenty times
        the work, and a wrong one changes nothing.
        """
        ends, found = self.model.generation_config.eos_token_id, []
        ends = ends if isinstance(ends, list) else [ends]
        if guess := list(guess)[:max_tokens]:
            ids = torch.tensor([prompt + guess[:-1]])
            for logits, token in zip(self.model(input_ids=ids).logits[0, len(prompt) - 1:], guess,
                                     strict=True):
                found.append(logits)
                if (likeliest := int(logits.argmax())) != token or token in ends:
                    break
            guess[len(found) - 1:] = [likeliest]
        if not guess or len(guess) < max_tokens and guess[-1] not in ends:
            out = self.model.generate(
                torch.tensor([prompt + guess]), max_new_tokens=max_tokens - len(guess),
                do_sample=False, return_dict_in_generate=True, output_logits=True)
            found += [logits[0] for logits in out.logits]
            guess = out.sequences[0, len(prompt):].tolist()
        best = [logits.float().topk(2).values for logits in found]
        return guess, [float(one - two) for one, two in best]


@torch.no_grad()
def logprobs_beside(model, output) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a request with logprobs=-1: the engine's and transformers', each (num_output_tokens,
    vocab_size). Those of transformers come of one forward pass over prompt and output."""
    sample, prompt = output.outputs[0], output.prompt_token_ids
    ours = [[entry[token].logprob for token in range(len(entry))] for entry in sample.logprobs]
    theirs = model(torch.tensor([prompt + sample.token_ids])).logits[0, len(prompt) - 1:-1]
    return torch.tensor(ours), theirs.float().log_softmax(-1)


NEAR_TIE = 1e-4


def assert_same_text(got: list[int], expected: list[int], gaps: list[float], where: str) -> None:
    """Token for token equal; past a near-tie of the reference's top two logits all bets are off."""
    for i, (ours, theirs) in enumerate(zip(got, expected, strict=False)):
        if ours != theirs:
            if gaps[i] < NEAR_TIE:
                print(f"{where}: near-tie at token {i} (gap {gaps[i]:.1e}), {ours} for {theirs}")
                return
            raise AssertionError(f"{where}: token {i} is {ours}, transformers says {theirs} "
                                 f"(gap {gaps[i]:.4f})")
    assert len(got) == len(expected), f"{where}: {len(got)} tokens for {len(expected)}"


def sampling_step(seqs: list[Sequence]) -> tuple[Step, Batch]:
    """A step in which each of these sequences, its newest token still unknown, computes the token
    before that one and samples it."""
    for row, seq in enumerate(seqs):
        seq.row, seq.block_table = row, [0]
    step = Step(0, dict.fromkeys(seqs, 1), [seq.num_tokens - 2 for seq in seqs], list(seqs))
    builder = BatchBuilder(len(seqs), len(seqs), 2 ** 20, 2 ** 20, torch.device("cpu"))
    return step, builder.build(step)


def sampling_inputs(seqs: list[Sequence]) -> SamplingInputs:
    """What such a step's rows ask of the sampler."""
    return SamplingInputs.of(*sampling_step(seqs), {})


def sample_logits(logits: torch.Tensor, seqs: list[Sequence], ops: ModuleType,
                  constraints: Constraints | None = None) -> SamplerOutput:
    """What the sampler makes of such a step, whose logits are given."""
    step, batch = sampling_step(seqs)
    inputs = SamplingInputs.of(step, batch, constraints or {})
    return sample(logits, inputs, batch, lambda hidden: hidden, ops)
