"""Adapters of a checkpoint, and what transformers says with each merged into the weights."""

import json
import shutil
from pathlib import Path

import torch
from checkpoints import Reference, assert_same_text
from loading import stored_tensors
from safetensors.torch import save_file

from nanoserve import LLM, LoRARequest, SamplingParams

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
SETTINGS = dict(peft_type="LORA", r=4, lora_alpha=8, bias="none")
PROMPTS = [list(range(5, 25)), [7, 3, 9], list(range(5, 25)), list(range(40, 45)),
           list(range(5, 40))]
GREEDY = SamplingParams(temperature=0, max_tokens=12, detokenize=False)
SMALL = dict(dtype="float32", device="cpu", enable_lora=True, max_loras=2, max_lora_rank=8,
             max_model_len=64, block_size=4, num_gpu_blocks_override=64)


class Adapters:
    """Adapters of a checkpoint, by a number, and what transformers says with each merged."""

    def __init__(self, base: Path, root: Path, reference=Reference):
        self.base, self.root, self.reference = base, root, reference
        self.texts = {}

    def write(self, seed: int, targets=ALL, rank=4, scaling=2.0, **settings) -> Path:
        """GPT-2's matrices are stored transposed; its adapters say so and are as all others."""
        folder, merged = self.root / f"adapter-{seed}", self.root / f"merged-{seed}"
        folder.mkdir()
        generator, tensors = torch.Generator().manual_seed(seed), {}
        weights = stored_tensors(self.base)
        for name, weight in weights.items():
            if any(name.endswith(f"{target}.weight") for target in targets):
                turned = weight.T if settings.get("fan_in_fan_out") else weight
                a = torch.randn(rank, turned.shape[1], generator=generator) * 0.3
                b = torch.randn(turned.shape[0], rank, generator=generator) * 0.3
                path = f"base_model.model.{name.removesuffix('.weight')}"
                tensors |= {f"{path}.lora_A.weight": a, f"{path}.lora_B.weight": b}
                turned += scaling * (b @ a)  # a view of the weight
        assert tensors
        save_file(tensors, folder / "adapter_model.safetensors")
        entries = SETTINGS | dict(r=rank, target_modules=targets) | settings
        (folder / "adapter_config.json").write_text(json.dumps(entries))
        shutil.copytree(self.base, merged)
        save_file(weights, merged / "model.safetensors", {"format": "pt"})
        return folder

    def request(self, seed: int | None) -> LoRARequest | None:
        return None if seed is None else LoRARequest(
            f"voice {seed}", seed, str(self.root / f"adapter-{seed}"))

    def check(self, llm: LLM, seeds: list[int | None], where: str = "") -> list[list[int]]:
        """A call with these adapters, one for each of the first prompts."""
        prompts = [{"prompt_token_ids": ids} for ids in PROMPTS[:len(seeds)]]
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False,
                               lora_request=[self.request(seed) for seed in seeds])
        texts = [output.outputs[0].token_ids for output in outputs]
        for ids, seed, ours in zip(PROMPTS, seeds, texts, strict=False):
            self.compare(ids, seed, ours, where)
        return texts

    def compare(self, ids: list[int], seed: int | None, ours: list[int], where: str) -> None:
        """One text with that of the merged checkpoint, which is written once."""
        key = seed, tuple(ids)
        if key not in self.texts:
            folder = self.base if seed is None else self.root / f"merged-{seed}"
            self.texts[key] = self.reference(folder).generate(ids, GREEDY.max_tokens, ours)
        assert_same_text(ours, *self.texts[key], f"{where} {seed}")


def logprobs(voices: Adapters, ids, **options) -> torch.Tensor:
    """(3, vocabulary): of the token behind a prompt, under two adapters and none."""
    with LLM(voices.base, **SMALL | options) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": ids}] * 3,
            SamplingParams(max_tokens=1, temperature=0, logprobs=-1, detokenize=False),
            use_tqdm=False, lora_request=[voices.request(seed) for seed in (1, 2, None)])
        return torch.tensor([[each.logprob for _, each in sorted(
            output.outputs[0].logprobs[0].items())] for output in outputs])
