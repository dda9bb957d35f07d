"""Three ordinary vLLM scripts, as their authors would write them, run with one changed import.

Each is a text whose `from vllm import` becomes `from nanoserve import`; nothing else is touched.
MODEL is the bundled story model, so that what is printed can be read. What a script prints is held
against transformers: its greedy text and its hidden states.
"""

import contextlib
import io

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nanoserve.checkpoint.hub import find_model

PARAMETER_LIST = """
from transformers import AutoTokenizer
from vllm import LLM, SamplingParams, TextPrompt, TokensPrompt

tokenizer = AutoTokenizer.from_pretrained(MODEL_FOLDER)
llm = LLM(MODEL, dtype="float32", tensor_parallel_size=1, pipeline_parallel_size=1,
          enforce_eager=True, max_model_len=256)

base = SamplingParams(temperature=0.0, max_tokens=4)
short, long = base.clone(), base.clone()
long.max_tokens = 10
early = SamplingParams(temperature=0.0, max_tokens=10,
                       stop_token_ids=[tokenizer.convert_tokens_to_ids(",")])

outputs = llm.generate(
    [TextPrompt(prompt="Once upon a time"),
     TokensPrompt(prompt_token_ids=tokenizer.encode("Once upon a time")),
     tokenizer("The old house")],
    [short, long, early],
    use_tqdm=False,
    lora_request=None,
)
for output in outputs:
    completion = output.outputs[0]
    print(len(completion.token_ids), completion.finish_reason, completion.stop_reason,
          repr(completion.text))
"""

STREAMING_CHAT = """
from vllm import EngineArgs, LLMEngine, SamplingParams

engine = LLMEngine.from_engine_args(EngineArgs(model=MODEL, dtype="float32", max_model_len=256))
tokenizer = engine.get_tokenizer()

conversation = [
    {"role": "system", "content": "You tell stories."},
    {"role": "user", "content": "Tell me about a king."},
]
prompt = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
engine.add_request("chat-0", prompt, SamplingParams(temperature=0, max_tokens=12))

shown = ""
while engine.has_unfinished_requests():
    for request_output in engine.step():
        text = request_output.outputs[0].text
        print(text[len(shown):], end="|", flush=True)
        shown = text
print()
"""

EMBED_AND_RERANK = """
from vllm import LLM, PoolingParams

documents = ["The king had three daughters.", "A fox ran over the hill.", "It rained all day."]

llm = LLM(model=MODEL, runner="pooling", dtype="float32", max_model_len=256)
for output in llm.embed(documents, pooling_params=PoolingParams(use_activation=True)):
    embedding = output.outputs.embedding
    print("embedding", len(embedding), *embedding)
for output in llm.score("Who is the king?", documents):
    print("cosine", output.outputs.score)

reranker = LLM(model=MODEL, runner="pooling", dtype="float32", max_model_len=256,
               hf_overrides={"architectures": ["Qwen3ForSequenceClassification"],
                             "classifier_from_token": ["No", "Yes"],
                             "is_original_qwen3_reranker": True})
queries = ["Who is the king?"] * len(documents)
for output in reranker.score(queries, documents, use_tqdm=False):
    print("score", output.outputs.score)
"""


def run(script: str) -> tuple[list[str], dict]:
    """The lines that a script prints, after the one change, and its variables."""
    assert script.count("from vllm import") == 1
    names = {"MODEL": "storyteller", "MODEL_FOLDER": str(find_model("storyteller"))}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(script.replace("from vllm import", "from nanoserve import"), names)
    return printed.getvalue().splitlines(), names


class Reference:
    """transformers and its tokenizer, in float32."""

    def __init__(self):
        folder = find_model("storyteller")
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def hidden(self, text: str) -> torch.Tensor:
        """(hidden_size,), of the last token."""
        ids = torch.tensor([self.tokenizer.encode(text)])
        return self.model.model(ids).last_hidden_state[0, -1]

    def greedy(self, text: str, count: int) -> list[int]:
        """The next tokens; the story model ends none of these texts so early."""
        ids = torch.tensor([self.tokenizer.encode(text)])
        found = self.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False,
                                    max_new_tokens=count)
        return found[0, ids.shape[1]:].tolist()

    def greedy_text(self, text: str, count: int) -> str:
        return self.tokenizer.decode(self.greedy(text, count))


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


def test_a_list_of_parameters_and_three_kinds_of_prompt(reference):
    comma = reference.tokenizer.convert_tokens_to_ids(",")
    ids = reference.greedy("The old house", 10)
    before = ids[:ids.index(comma)]
    expected = [f"{count} length None {reference.greedy_text('Once upon a time', count)!r}"
                for count in (4, 10)]
    expected.append(f"{len(before) + 1} stop {comma} {reference.tokenizer.decode(before)!r}")
    assert run(PARAMETER_LIST)[0] == expected


def test_a_chat_that_streams(reference):
    prompt = ("<|im_start|>system\nYou tell stories.<|im_end|>\n"
              "<|im_start|>user\nTell me about a king.<|im_end|>\n<|im_start|>assistant\n")
    pieces = "\n".join(run(STREAMING_CHAT)[0]).split("|")
    assert len(pieces) > 8  # it came in pieces
    assert "".join(pieces).rstrip("\n") == reference.greedy_text(prompt, 12).rstrip("\n")


def test_embeddings_and_reranking(reference):
    texts = ["The king had three daughters.", "A fox ran over the hill.", "It rained all day."]
    query = "Who is the king?"
    found = [line.split() for line in run(EMBED_AND_RERANK)[0]]
    assert [line[0] for line in found] == ["embedding"] * 3 + ["cosine"] * 3 + ["score"] * 3
    vectors = [torch.nn.functional.normalize(reference.hidden(text), dim=0)
               for text in (query, *texts)]
    for line, vector in zip(found[:3], vectors[1:], strict=True):
        assert int(line[1]) == 256
        assert [float(x) for x in line[2:]] == pytest.approx(vector.tolist(), abs=1e-4)
    assert [float(line[1]) for line in found[3:6]] == pytest.approx(
        [(vectors[0] @ vector).item() for vector in vectors[1:]], abs=1e-4)
    no_and_yes = reference.model.lm_head.weight[
        reference.tokenizer.convert_tokens_to_ids(["No", "Yes"])]
    assert [float(line[1]) for line in found[6:]] == pytest.approx(
        [(no_and_yes @ reference.hidden(query + text)).softmax(-1)[1].item() for text in texts],
        abs=1e-4)
