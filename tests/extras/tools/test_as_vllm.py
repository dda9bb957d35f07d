"""Programs written for vLLM, run as they are.

Each does what one of vLLM's own examples does, in words of ours, on the bundled model. What they
print is held against the engine's own calls, which other tests hold to transformers.
"""

import runpy
import sys

import pytest

from nanoserve import LLM, SamplingParams
from nanoserve.llm import BUNDLED_MODEL
from nanoserve_extras.tools import as_vllm

SMALL = dict(dtype="float32", max_model_len=256, num_gpu_blocks_override=64)
PROMPT = "Once upon a time"

BASIC = """
from vllm import LLM, SamplingParams

def main():
    llm = LLM(model="storyteller", dtype="float32", max_model_len=256, num_gpu_blocks_override=64)
    params = SamplingParams(temperature=0, max_tokens=8)
    for output in llm.generate(["Once upon a time"], params, priority=[2]):
        print(output.outputs[0].text)

if __name__ == "__main__":
    main()
"""
COMMAND_LINE = """
from vllm import LLM, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
EngineArgs.add_cli_args(parser)
parser.set_defaults(model="storyteller")
group = parser.add_argument_group("Sampling parameters")
group.add_argument("--max-tokens", type=int)
group.add_argument("--temperature", type=float)
args = vars(parser.parse_args())
max_tokens, temperature = args.pop("max_tokens"), args.pop("temperature")
llm = LLM(**args)
params = llm.get_default_sampling_params()
params.max_tokens, params.temperature = max_tokens, temperature
print(llm.generate(["Once upon a time"], params)[0].outputs[0].text)
"""
BY_HAND = """
import argparse
from vllm import EngineArgs, LLMEngine, RequestOutput, SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser(description="the engine's steps by hand")
parser = EngineArgs.add_cli_args(parser)
args: argparse.Namespace = parser.parse_args()
engine = LLMEngine.from_engine_args(EngineArgs.from_cli_args(args))
engine.add_request("0", "Once upon a time", SamplingParams(temperature=0, max_tokens=8))
while engine.has_unfinished_requests():
    outputs: list[RequestOutput] = engine.step()
    for output in outputs:
        if output.finished:
            print(output.outputs[0].text)
"""
ASYNCHRONOUS = """
import asyncio
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

async def main():
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(
        model="storyteller", dtype="float32", max_model_len=256, num_gpu_blocks_override=64,
        enforce_eager=True))
    params = SamplingParams(temperature=0, max_tokens=8, output_kind=RequestOutputKind.DELTA)
    async for output in engine.generate(request_id="0", prompt="Once upon a time",
                                        sampling_params=params):
        print(output.outputs[0].text, end="")
    print()
    engine.shutdown()

asyncio.run(main())
"""
METRICS = """
import vllm
from vllm.distributed.parallel_state import destroy_model_parallel
from vllm.v1.metrics.reader import Counter, Gauge, Histogram, Vector

llm = vllm.LLM("storyteller", dtype="float32", max_model_len=256, num_gpu_blocks_override=64,
               disable_log_stats=False)
llm.generate(["Once upon a time"], vllm.SamplingParams(temperature=0, max_tokens=8))
for metric in llm.get_metrics():
    if isinstance(metric, (Counter, Gauge)) and metric.name == "vllm:generation_tokens":
        print(metric.value)
    elif isinstance(metric, (Histogram, Vector)):
        assert metric.name
assert vllm.__version__.split(".")[0] == "0"
assert vllm.lora.request.LoRARequest and vllm.outputs.RequestOutput
destroy_model_parallel()
"""
STRUCTURED = """
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

llm = LLM("storyteller", dtype="float32", max_model_len=256, num_gpu_blocks_override=64)
params = SamplingParams(temperature=0, max_tokens=8,
                        structured_outputs=StructuredOutputsParams(choice=["Positive", "Negative"]))
print(llm.generate("The end was", params)[0].outputs[0].text)
"""
PROCESSED = """
import torch
from vllm import LLM, SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import (
    AdapterLogitsProcessor, BatchUpdate, LogitsProcessor, RequestLogitsProcessor)
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

class Only(LogitsProcessor):
    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool):
        self.tokens: dict[int, int] = {}
    def is_argmax_invariant(self) -> bool:
        return False
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self.tokens, batch_update, lambda params, prompt, output: (
            params.extra_args and params.extra_args.get("only")))
    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, token in self.tokens.items():
            logits[row, torch.arange(logits.shape[1]) != token] = float("-inf")
        return logits

class Not(AdapterLogitsProcessor):
    def is_argmax_invariant(self) -> bool:
        return False
    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        banned = params.extra_args and params.extra_args.get("not")
        def ban(output_ids, logits):
            logits[banned] = float("-inf")
            return logits
        return None if banned is None else ban

llm = LLM("storyteller", dtype="float32", max_model_len=256, num_gpu_blocks_override=64,
          logits_processors=[Only, Not])
def first(**asked):
    params = SamplingParams(temperature=0, max_tokens=2, extra_args=asked or None)
    return llm.generate("Once upon a time", params)[0].outputs[0].token_ids
usual = first()
assert first(only=300) == [300, 300] and first(**{"not": usual[0]})[0] != usual[0]
print(first() == usual)
"""
POOLING = """
from vllm import LLM, PoolingParams, PoolingRequestOutput
from vllm.config import PoolerConfig
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.outputs import EmbeddingRequestOutput
from vllm.utils.print_utils import print_embeddings

llm = LLM("storyteller", runner="pooling", dtype="float32", max_model_len=256,
          num_gpu_blocks_override=64, pooler_config=PoolerConfig(task="embed"))
[output] = llm.embed("Once upon a time")
assert isinstance(output, EmbeddingRequestOutput) and isinstance(output, PoolingRequestOutput)
print_embeddings(output.outputs.embedding, prefix=len(output.outputs.embedding))
del llm
cleanup_dist_env_and_memory()
"""
EVALUATED = """
# What lm-eval's `--model vllm` does (0.4.13), and older scripts' words.
from importlib.metadata import version
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.lora.request import LoRARequest
from vllm.renderers.hf import resolve_chat_template
from vllm.tokenizers import get_tokenizer
from vllm.utils import random_uuid

assert version("vllm").split(".")[0] == "0" and len(random_uuid()) == 32
llm = LLM(model="storyteller", revision=None, dtype="float32", tokenizer=None,
          tokenizer_mode="auto", tokenizer_revision=None, trust_remote_code=False,
          max_model_len=256, max_num_seqs=None, quantization=None, seed=1234, swap_space=4,
          task="generate", limit_mm_per_prompt={"image": 0, "video": 0}, num_gpu_blocks_override=64)
config = llm.llm_engine.model_config
assert config.max_model_len == 256
tokenizer = get_tokenizer("storyteller", tokenizer_mode="auto", trust_remote_code=False,
                          revision=None)
assert tokenizer.chat_template == resolve_chat_template(
    tokenizer=tokenizer, chat_template=None, tools=None, model_config=config)
ids = tokenizer("Once upon a time").input_ids
params = SamplingParams(temperature=0, prompt_logprobs=True, max_tokens=8, logprobs=False,
                        skip_special_tokens=False, spaces_between_special_tokens=False)
[output] = llm.generate([TokensPrompt(prompt_token_ids=ids)], sampling_params=params,
                        use_tqdm=True, lora_request=None)
assert len(output.prompt_logprobs) == len(ids) and output.outputs[0].logprobs is None
try:
    llm.generate(prompt_token_ids=[ids], sampling_params=params)
except ValueError as error:
    assert "pass them as the prompts" in str(error)
    print(output.outputs[0].text)
"""
ENGINE = """
from vllm import LLMEngine
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM
args = AsyncEngineArgs(model="storyteller", max_model_len=64, num_gpu_blocks_override=16)
"""
SERVED = ["--max_model_len", "256", "--dtype", "float32", "--num-gpu-blocks-override", "64"]


@pytest.fixture(scope="module")
def told() -> str:
    [output] = LLM(**SMALL).generate([PROMPT], SamplingParams(temperature=0, max_tokens=8),
                                     use_tqdm=False)
    return output.outputs[0].text


def run(tmp_path, script: str, *words: str) -> None:
    file = tmp_path / "script.py"
    file.write_text(script)
    assert as_vllm.main([str(file), *words]) == 0
    assert "vllm" not in sys.modules  # afterwards everything is as it was


@pytest.mark.parametrize("script, words", [
    (BASIC, ()), (COMMAND_LINE, (*SERVED, "--max-tokens", "8", "--temperature", "0")),
    (BY_HAND, ("--model", "storyteller", *SERVED)), (ASYNCHRONOUS, ()), (EVALUATED, ())])
def test_a_program_prints_what_generate_gives(tmp_path, capsys, told, script, words):
    pytest.importorskip("uvicorn")
    run(tmp_path, script, *words)
    assert capsys.readouterr().out == f"{told}\n"


@pytest.mark.parametrize("script, said", [
    (METRICS, ["8"]), (STRUCTURED, ["Positive", "Negative"]), (POOLING, ["256: ["]),
    (PROCESSED, ["True"])])
def test_a_program_prints_one_of_these(tmp_path, capsys, script, said):
    run(tmp_path, script)
    assert capsys.readouterr().out.strip().startswith(tuple(said))


@pytest.mark.parametrize("line, said", [
    ("from vllm.sampling_params import BeamSearchParams", "ask for n samples"),
    ("from vllm import SamplingParam", "SamplingParams"),
    ("from vllm.logprobs import Logprob; from vllm import ModelRegistry", "row of FAMILIES"),
    ("import vllm.envs as envs; envs.VLLM_USE_V1", "options of LLM"),
    ("from vllm.config import WeightTransferConfig", "LLM.update_weights takes"),
    ("from vllm.engine.arg_utils import AsyncEngineArgs\n"
     "AsyncEngineArgs(model='m').create_engine_config()", "AsyncLLM.from_engine_args take"),
    (ENGINE + "LLMEngine.from_engine_args(args).reset_prefix_cache(reset_running_requests=True)",
     "abort the requests"),
    (ENGINE + "AsyncLLM.from_engine_args(args).pause_generation(mode='keep')", "between_steps"),
    ("from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole", "kv_store="),
    ("from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo", "update_weig"),
    ("from vllm.model_executor.model_loader import ShardedStateLoader", "safetensors"),
    ("from vllm.multimodal.utils import encode_image_url", "docs/extras.md"),
    ("from vllm.worker.worker import Worker", "vllm.worker.worker.Worker: it is not here")])
def test_a_name_that_is_missing_says_what_to_use(tmp_path, line, said):
    with pytest.raises((ImportError, AttributeError, ValueError), match=said):
        run(tmp_path, line)


def test_every_name_is_there():
    for name in as_vllm.HERE:
        assert getattr(as_vllm.StandIn("vllm"), name) is not None, name


def test_words_of_older_vllms_are_translated_and_others_refused():
    options = as_vllm.CliEngineArgs(model="m", task="embed", swap_space=4, max_model_len=9,
                                    block_size=None, otlp_traces_endpoint=None, model_impl="vllm")
    assert (options.runner, options.convert, options.max_model_len) == ("pooling", "embed", 9)
    for wrong, said in ((dict(task="draw"), "task='draw' is not supported: use runner"),
                        (dict(tokenizer_mode="mistral"), "leave it out")):
        with pytest.raises(ValueError, match=said):
            as_vllm.import_module("nanoserve_extras.tools.as_vllm_trl").TrainersLLM(
                str(BUNDLED_MODEL), **wrong)


def test_without_a_script_the_usage_is_said(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["as_vllm", "no.py"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(as_vllm.__file__, run_name="__main__")
    assert end.value.code == 2 and capsys.readouterr().err.startswith("usage: python -m")
