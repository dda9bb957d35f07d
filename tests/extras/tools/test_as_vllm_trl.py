"""TRL's `vllm_mode="colocate"` on this engine: its calls one by one, and the trainer itself."""

import re
import subprocess
import sys

import pytest
import torch
from pages import ROOT, block_after, read
from safetensors.torch import load_file

from nanoserve import SamplingParams
from nanoserve.llm import BUNDLED_MODEL
from nanoserve_extras.tools.as_vllm_trl import TrainersLLM

# As trl/generation/vllm_generation.py (1.16) makes it.
ASKED = dict(tensor_parallel_size=1, gpu_memory_utilization=0.3, max_model_len=None, max_num_seqs=4,
             enable_sleep_mode=True, model_impl="vllm", seed=0, max_num_batched_tokens=4096,
             distributed_executor_backend="external_launcher", quantization=None,
             logprobs_mode="processed_logprobs", trust_remote_code=False)
PROMPTS = [{"prompt_token_ids": [5, 6, 7, 8]}, {"prompt_token_ids": [9, 10]}]


def sampled(llm: TrainersLLM) -> list[list[int]]:
    params = SamplingParams(n=1, repetition_penalty=1.0, temperature=1.0, top_p=1.0, top_k=0,
                            min_p=0.0, max_tokens=8, logprobs=0, seed=5)
    outs = llm.generate(PROMPTS, sampling_params=params, use_tqdm=False)
    return [out.outputs[0].token_ids for out in outs]


def test_the_calls_of_a_trainer_in_their_order():
    """Weights come a tensor a call, and count when all of them are there."""
    tensors = load_file(BUNDLED_MODEL / "model.safetensors")
    other = {name: tensor * 1.5 if "o_proj" in name else tensor for name, tensor in tensors.items()}
    with TrainersLLM(str(BUNDLED_MODEL), **ASKED) as llm:
        texts = [sampled(llm)]
        for weights in (other, tensors):
            llm.sleep(level=2)
            llm.wake_up(tags=["weights"])
            model = llm.llm_engine.model_executor.driver_worker.model_runner.model
            for name, tensor in weights.items():
                model.load_weights([(name, torch.nn.Parameter(tensor).data)])
            llm.reset_prefix_cache()
            llm.wake_up(tags=["kv_cache"])
            texts.append(sampled(llm))
        assert texts[0] == texts[2] != texts[1]
        for wrong in (dict(temperature=0.9), dict(top_p=0.5), dict(presence_penalty=1.0)):
            with pytest.raises(ValueError, match=f"processed_logprobs'.*{[*wrong][0]}"):
                llm.generate(PROMPTS, SamplingParams(logprobs=0, **wrong), use_tqdm=False)


def test_grpo_trains_with_the_log_probabilities_of_the_network_that_it_trains(tmp_path):
    """The page's program. Rewards are printed, and not required."""
    pytest.importorskip("trl", reason="it is one of the extra 'test-full'")
    script = tmp_path / "grpo.py"
    script.write_text(block_after(read("docs/training.md"), "<!-- grpo.py -->"))
    printed = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "nanoserve_extras.tools.as_vllm", str(script),
         "0", "1", "2"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    print(printed)
    apart = re.findall(r"^seed \d: .* differ by at most (.*)$", printed, re.M)
    assert len(apart) == 3 and max(map(float, apart)) < 1e-4
