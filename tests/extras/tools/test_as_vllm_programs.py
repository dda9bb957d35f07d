"""Further programs written for vLLM, offline and as clients, run as they are.

Each does what one of vLLM's own examples does, in words of ours, on local folders. What they print
is held against the engine's own calls, which other tests hold to transformers.
"""

import pytest
from adapters import ALL, Adapters
from test_as_vllm import PROMPT, SMALL, run, told  # noqa: F401

from nanoserve import LLM, SamplingParams

PREFIXES = """
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

prompts = ["Once upon a time" + end for end in ("", " there", " in the forest")]
sampling_params = SamplingParams(temperature=0.0, max_tokens=8)

def main():
    regular = LLM(model="storyteller", gpu_memory_utilization=0.4, dtype="float32",
                  max_model_len=256, num_gpu_blocks_override=64)
    texts = [output.outputs[0].text for output in regular.generate(prompts, sampling_params)]
    del regular
    cleanup_dist_env_and_memory()
    cached = LLM(model="storyteller", enable_prefix_caching=True, gpu_memory_utilization=0.4,
                 dtype="float32", max_model_len=256, num_gpu_blocks_override=64)
    cached.generate(prompts[0], sampling_params)
    outputs = cached.generate(prompts, sampling_params)
    print(texts[0])
    print("the same:", texts == [output.outputs[0].text for output in outputs])

if __name__ == "__main__":
    main()
"""
CHATS = """
from argparse import Namespace
from vllm import LLM, EngineArgs
from vllm.utils import FlexibleArgumentParser

def main(args: Namespace):
    path = args.chat_template_path
    del args.chat_template_path
    llm = LLM(**vars(args))
    params = llm.get_default_sampling_params()
    params.temperature, params.max_tokens = 0, 8
    conversation = [{"role": "system", "content": "You tell stories."},
                    {"role": "user", "content": "Hello"},
                    {"role": "assistant", "content": "Hello! What about?"},
                    {"role": "user", "content": "A king."}]
    with open(path) as file:
        template = file.read()
    for one, more in ((conversation, {}), ([conversation] * 3, {}),
                      ([conversation] * 3, dict(chat_template=template))):
        for output in llm.chat(one, params, use_tqdm=False, **more):
            print(output.prompt.count("king"), repr(output.outputs[0].text))

if __name__ == "__main__":
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.set_defaults(model="storyteller", dtype="float32")
    parser.add_argument("--chat-template-path", type=str, default=None)
    main(parser.parse_args())
"""
ADAPTERS = """
from vllm import EngineArgs, LLMEngine, RequestOutput, SamplingParams
from vllm.lora.request import LoRARequest

def initialize_engine() -> LLMEngine:
    return LLMEngine.from_engine_args(EngineArgs(
        model=BASE, enable_lora=True, max_loras=2, max_lora_rank=8, max_cpu_loras=2,
        max_num_seqs=256, dtype="float32", max_model_len=64, num_gpu_blocks_override=64))

def process_requests(engine: LLMEngine, waiting: list) -> None:
    request_id = 0
    while waiting or engine.has_unfinished_requests():
        if waiting:
            prompt, params, lora_request = waiting.pop(0)
            engine.add_request(str(request_id), prompt, params, lora_request=lora_request)
            request_id += 1
        request_outputs: list[RequestOutput] = engine.step()
        for output in request_outputs:
            if output.finished:
                print(output.request_id, output.outputs[0].token_ids)

greedy = dict(temperature=0.0, logprobs=1, prompt_logprobs=1, max_tokens=8)
process_requests(initialize_engine(), [
    ("hello", SamplingParams(**greedy), None),
    ("hello", SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2, max_tokens=3), None),
    ("hello", SamplingParams(**greedy), LoRARequest("one", 1, FIRST)),
    ("hello", SamplingParams(**greedy), LoRARequest("two", 2, SECOND))])
"""
DRAFTS = """
from transformers import AutoTokenizer
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.v1.metrics.reader import Counter, Histogram, Vector

tokenizer = AutoTokenizer.from_pretrained(FOLDER)
llm = LLM(model=FOLDER, trust_remote_code=True, tensor_parallel_size=1, enforce_eager=False,
          gpu_memory_utilization=0.8, disable_log_stats=False, dtype="float32", max_model_len=256,
          num_gpu_blocks_override=64, limit_mm_per_prompt={}, speculative_config={
              "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4,
              "prompt_lookup_min": 2})
outputs = llm.generate([TokensPrompt(prompt_token_ids=tokenizer.encode("Once upon a time"))],
                       sampling_params=SamplingParams(temperature=0, max_tokens=8))
num_drafts = num_accepted = seconds = 0
by_position = [0] * 3
for metric in llm.get_metrics():
    if metric.name == "vllm:spec_decode_num_drafts":
        assert isinstance(metric, Counter)
        num_drafts += metric.value
    elif metric.name == "vllm:spec_decode_num_accepted_tokens":
        assert isinstance(metric, Counter)
        num_accepted += metric.value
    elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
        assert isinstance(metric, Vector)
        for i, value in enumerate(metric.values):
            by_position[i] += value
    elif metric.name in ("vllm:request_prefill_time_seconds", "vllm:request_decode_time_seconds"):
        assert isinstance(metric, Histogram) and metric.count == 1
        seconds += metric.sum
print(outputs[0].outputs[0].text)
assert sum(by_position) == num_accepted <= 3 * num_drafts and seconds > 0
"""
SCORES = """
from argparse import Namespace
from vllm import LLM, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

def parse_args():
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.set_defaults(model="storyteller", runner="pooling", enforce_eager=True)
    return parser.parse_args()

def main(args: Namespace):
    llm = LLM(**vars(args))
    outputs = llm.score("Who is the king?", ["The king slept.", "It rained all day."])
    for output in outputs:
        print(f"{output.outputs.score:.4f}")

if __name__ == "__main__":
    main(parse_args())
"""
COMPLETION_CLIENT = """
import argparse
from openai import OpenAI

parser = argparse.ArgumentParser(description="a client of a server")
parser.add_argument("--stream", action="store_true")
parser.add_argument("--base-url", default="http://localhost:8000/v1")
args = parser.parse_args()
client = OpenAI(api_key="EMPTY", base_url=args.base_url)
model = client.models.list().data[0].id
completion = client.completions.create(model=model, prompt="Once upon a time", echo=False, n=2,
                                       stream=args.stream, logprobs=3, max_tokens=8, seed=5,
                                       temperature=0.5, top_p=1.0)
texts = ["", ""]
for piece in completion if args.stream else [completion]:
    for choice in piece.choices:
        texts[choice.index] += choice.text
print(texts)
client.close()
"""
SCORE_CLIENT = """
import argparse
import json
from urllib.request import Request, urlopen

parser = argparse.ArgumentParser()
parser.add_argument("--host", type=str, default="localhost")
parser.add_argument("--port", type=int, default=8000)
parser.add_argument("--model", type=str, default="tested")
args = parser.parse_args()
documents = ["The king slept.", "It rained all day."]
for path, body in (("score", {"text_1": "Who is the king?", "text_2": documents}),
                   ("v1/rerank", {"query": "Who is the king?", "documents": documents})):
    request = Request(f"http://{args.host}:{args.port}/{path}",
                      json.dumps({"model": args.model, **body}).encode(),
                      {"Content-Type": "application/json"})
    with urlopen(request) as response:
        answer = json.load(response)
    for one in answer.get("data") or sorted(answer["results"], key=lambda one: one["index"]):
        print(f"{one.get('score', one.get('relevance_score')):.4f}")
"""


@pytest.mark.parametrize("script, more", [(PREFIXES, "the same: True\n"), (DRAFTS, "")])
def test_a_program_prints_what_generate_gives(tmp_path, capsys, told, script, more):  # noqa: F811
    from nanoserve.checkpoint.hub import find_model

    run(tmp_path, f"FOLDER = {str(find_model('storyteller'))!r}\n{script}")
    assert capsys.readouterr().out == f"{told}\n{more}"


def test_conversations_go_through_either_template(tmp_path, capsys):
    pytest.importorskip("uvicorn")
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.content }} king {% endfor %}")
    run(tmp_path, CHATS, "--chat-template-path", str(template), "--max-model-len", "256")
    lines = capsys.readouterr().out.splitlines()
    assert [line[0] for line in lines] == list("1111555")
    assert len(set(lines[:4])) == len(set(lines[4:])) == 1


def test_adapters_answer_side_by_side(tmp_path, capsys, checkpoints):
    voices = Adapters(checkpoints["qwen3"], tmp_path)
    folders = [voices.write(seed, ALL) for seed in (1, 2)]
    run(tmp_path, f"BASE, FIRST, SECOND = {str(voices.base)!r}, {str(folders[0])!r}, "
        f"{str(folders[1])!r}\n{ADAPTERS}")
    said = dict(line.split(" ", 1) for line in capsys.readouterr().out.splitlines())
    with LLM(voices.base, dtype="float32", enable_lora=True, max_loras=2, max_lora_rank=8,
             max_model_len=64, num_gpu_blocks_override=64) as llm:
        for name, seed in (("0", None), ("2", 1), ("3", 2)):
            [output] = llm.generate("hello", SamplingParams(temperature=0, max_tokens=8),
                                    use_tqdm=False, lora_request=voices.request(seed))
            assert said[name] == str(output.outputs[0].token_ids)
    assert len(said) == 4


@pytest.fixture(scope="module")
def scores() -> str:
    outputs = LLM(**SMALL, runner="pooling").score(  # nobody else holds this engine
        "Who is the king?", ["The king slept.", "It rained all day."], use_tqdm=False)
    return "".join(f"{output.outputs.score:.4f}\n" for output in outputs)


def test_texts_are_compared(tmp_path, capsys, scores):
    pytest.importorskip("uvicorn")
    run(tmp_path, SCORES, "--max_model_len", "256", "--dtype", "float32")
    assert capsys.readouterr().out == scores


def test_clients_of_a_server_print_what_the_engine_gives(tmp_path, capsys, scores):
    pytest.importorskip("openai")
    from serving import Serving

    with Serving(LLM(**SMALL)) as server:
        [output] = server.llm.generate(PROMPT, SamplingParams(
            n=2, seed=5, temperature=0.5, max_tokens=8), use_tqdm=False)
        for words in ((), ("--stream",)):
            run(tmp_path, COMPLETION_CLIENT, "--base-url", f"{server.url}/v1", *words)
            assert capsys.readouterr().out == f"{[one.text for one in output.outputs]}\n"
    with Serving(LLM(**SMALL, runner="pooling")) as server:
        run(tmp_path, SCORE_CLIENT, "--host", "127.0.0.1", "--port", str(server.port))
        assert capsys.readouterr().out == scores * 2
