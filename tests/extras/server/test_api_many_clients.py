"""Other people's clients against a real server on the loopback; docs/server.md has their table.

They are heavy to install: `pip install -e ".[test-full]"`, and for JavaScript `npm install openai`
in a folder that NODE_PATH names. What is missing is skipped. Oracle: offline `generate`, `chat`,
`embed` and `score` of the same engine; for lm-eval its own `hf` model, which runs transformers.
"""

import json
import os
import shutil
import subprocess
import sys

import pytest
from serving import CHAT, PROMPT, Serving

from nanoserve import LLM, SamplingParams
from nanoserve.loader import find_model

ASKED = dict(temperature=0, max_tokens=10)
DOCUMENTS = ["It rained all day.", "The king had three daughters.", "A fox ran over the hill."]
QUERY = "Who is the king?"
TOO_LONG = "word " * 4000
JAVASCRIPT = """
const OpenAI = require('openai');
const client = new OpenAI({baseURL: process.argv[2], apiKey: 'none', maxRetries: 0});
const asked = {model: 'tested', temperature: 0, max_tokens: 10};
const messages = [{role: 'user', content: 'Tell me a story.'}];
async function main() {
  const whole = await client.completions.create({prompt: 'Once upon a time', ...asked});
  const chat = await client.chat.completions.create({messages, ...asked});
  const streamed = ['', ''];
  for await (const piece of await client.completions.create(
      {prompt: 'Once upon a time', stream: true, ...asked}))
    streamed[0] += piece.choices[0].text;
  for await (const piece of await client.chat.completions.create(
      {messages, stream: true, stream_options: {include_usage: true}, ...asked}))
    streamed[1] += piece.choices[0]?.delta?.content ?? '';
  const error = await client.completions.create(
      {prompt: 'word '.repeat(4000), ...asked}).catch((one) => one);
  console.log(JSON.stringify({whole: whole.choices[0].text, usage: whole.usage.total_tokens,
      chat: chat.choices[0].message.content, streamed, code: error.code, status: error.status,
      id: error.requestID.length, models: (await client.models.list()).data.map((one) => one.id)}));
}
main();
"""


@pytest.fixture(scope="module")
def pooling():
    with Serving(LLM(dtype="float32", num_gpu_blocks_override=160, runner="pooling")) as server:
        yield server


@pytest.fixture
def told(server) -> str:
    return server.offline(**ASKED).outputs[0].text


@pytest.fixture
def answered(server) -> str:
    [output] = server.llm.chat(CHAT, SamplingParams(**ASKED), use_tqdm=False)
    return output.outputs[0].text


def scores(pooling) -> list[float]:
    return [output.outputs.score for output in pooling.llm.score(QUERY, DOCUMENTS, use_tqdm=False)]


def vectors(pooling) -> list:
    return [pytest.approx(output.outputs.embedding, abs=1e-5)
            for output in pooling.llm.embed(DOCUMENTS, use_tqdm=False)]


def test_openai_in_javascript(server, told, answered, tmp_path):
    node = shutil.which("node")
    if node is None or subprocess.run([node, "-e", "require.resolve('openai')"],
                                      capture_output=True).returncode:
        pytest.skip("npm install openai, and name its node_modules with NODE_PATH")
    script = tmp_path / "client.js"
    script.write_text(JAVASCRIPT)
    done = subprocess.run([node, str(script), f"{server.url}/v1"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == dict(
        whole=told, chat=answered, streamed=[told, answered], usage=14, status=400, id=32,
        code="context_length_exceeded", models=["tested", "other-name"])


def test_litellm(server, pooling, told, answered, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # no look-up of prices
    litellm = pytest.importorskip("litellm")
    reached = dict(api_base=f"{server.url}/v1", api_key="none")
    for provider in ("openai", "hosted_vllm"):
        answer = litellm.completion(f"{provider}/tested", CHAT, **reached, **ASKED)
        assert answer.choices[0].message.content == answered
        pieces = litellm.completion(f"{provider}/tested", CHAT, stream=True, **reached, **ASKED)
        assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == answered
        with pytest.raises(litellm.ContextWindowExceededError):
            litellm.completion(f"{provider}/tested", [CHAT[0] | dict(content=TOO_LONG)], **reached)
    answer = litellm.text_completion(model="text-completion-openai/tested", prompt=PROMPT,
                                     **reached, **ASKED)
    assert answer.choices[0].text == told
    reached = dict(api_base=f"{pooling.url}/v1", api_key="none")
    answer = litellm.embedding("openai/tested", DOCUMENTS, **reached)
    assert [one["embedding"] for one in answer.data] == vectors(pooling)
    answer = litellm.rerank("hosted_vllm/tested", QUERY, DOCUMENTS, api_base=pooling.url,
                            api_key="none", top_n=2)
    found = {one["index"]: one["relevance_score"] for one in answer.results}
    assert len(found) == 2 and found == {i: pytest.approx(scores(pooling)[i]) for i in found}


def test_langchain(server, pooling, told, answered):
    langchain = pytest.importorskip("langchain_openai")
    reached = dict(model="tested", base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    model = langchain.ChatOpenAI(**reached, **ASKED)
    assert model.invoke("Tell me a story.").content == answered
    assert "".join(piece.content for piece in model.stream("Tell me a story.")) == answered
    assert [one.content for one in model.batch(["Tell me a story."] * 2)] == [answered] * 2
    with pytest.raises(Exception, match="context_length_exceeded") as caught:
        model.invoke(TOO_LONG)
    assert "Overflow" in type(caught.value).__name__  # by which it shortens a history
    assert langchain.OpenAI(**reached, **ASKED).invoke(PROMPT) == told
    reached = dict(reached, base_url=f"{pooling.url}/v1")
    embeddings = langchain.OpenAIEmbeddings(check_embedding_ctx_length=False, **reached)
    assert embeddings.embed_documents(DOCUMENTS) == vectors(pooling)


def test_llama_index(server, told, answered):
    llama_index = pytest.importorskip("llama_index.llms.openai_like")
    from llama_index.core.llms import ChatMessage

    reached = dict(model="tested", api_base=f"{server.url}/v1", api_key="none", **ASKED)
    model = llama_index.OpenAILike(is_chat_model=True, **reached)
    assert model.chat([ChatMessage(**CHAT[0])]).message.content == answered
    assert [*model.stream_chat([ChatMessage(**CHAT[0])])][-1].message.content == answered
    assert llama_index.OpenAILike(**reached).complete(PROMPT).text == told


def test_cohere(pooling):
    cohere = pytest.importorskip("cohere")
    expected = scores(pooling)
    for client in (cohere.Client, cohere.ClientV2):
        answer = client("none", base_url=pooling.url).rerank(
            model="tested", query=QUERY, documents=DOCUMENTS, top_n=2)
        best = [one.index for one in answer.results]
        assert best == sorted(range(3), key=lambda i: -expected[i])[:2]
        assert [one.relevance_score for one in answer.results] == pytest.approx(
            [expected[i] for i in best], abs=1e-5)
    answer = cohere.ClientV2("none", base_url=pooling.url).embed(
        model="tested", texts=DOCUMENTS, input_type="search_document", embedding_types=["float"])
    assert answer.embeddings.float_ == vectors(pooling)


def test_guidellm(server, tmp_path):
    """A load of its own making: all requests must come back, with the tokens they asked for."""
    pytest.importorskip("guidellm")
    for path in ("/v1/completions", "/v1/chat/completions"):
        report = tmp_path / "report.json"
        done = subprocess.run(
            [sys.executable, "-m", "guidellm", "run", "--disable-progress", "--backend",
             f"kind=openai_http,target={server.url},model=tested,request_format={path}",
             "--profile", "kind=concurrent,streams=3", "--constraint", "kind=max_requests,count=6",
             "--tokenizer", f"kind=hf_auto,model={find_model('storyteller')}",
             "--data", "kind=synthetic_text,prompt_tokens=20,output_tokens=8",
             "--output", f"kind=json,path={report}"],
            capture_output=True, text=True, env=os.environ | dict(HF_HUB_OFFLINE="1"))
        assert done.returncode == 0, done.stdout + done.stderr
        [benchmark] = json.loads(report.read_text())["benchmarks"]
        requests = benchmark["requests"]
        assert (len(requests["successful"]), requests["errored"]) == (6, [])
        assert {one["output_tokens"] for one in requests["successful"]} == {8}


def test_lm_eval_has_the_perplexity_and_the_choices_of_transformers(server, tmp_path):
    """Its whole path of log-likelihoods: prompts as ids, `echo`, `logprobs`, batches."""
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.tasks import TaskManager

    texts = [f"{PROMPT} there was a king who had {i} daughters, and the Queen was dead. " * 3
             for i in range(4)]
    rows = [dict(text=text, choices=[" the King.", " a table with nine legs."], answer=0)
            for text in texts]
    data = tmp_path / "data.json"
    data.write_text("\n".join(map(json.dumps, rows)))
    source = ("test_split: test\ndataset_path: json\n"
              f"dataset_kwargs: {{data_files: {{test: {data}}}}}")
    (tmp_path / "perplexity.yaml").write_text(
        f"task: perplexity\n{source}\noutput_type: loglikelihood_rolling\ndoc_to_text: ''\n"
        "doc_to_target: text\nmetric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]\n")
    (tmp_path / "choices.yaml").write_text(
        f"task: choices\n{source}\noutput_type: multiple_choice\ndoc_to_text: text\n"
        "doc_to_choice: choices\ndoc_to_target: answer\nmetric_list: [{metric: acc}]\n")
    folder = find_model("storyteller")
    results = [lm_eval.simple_evaluate(
        model=model, model_args=options, tasks=["perplexity", "choices"], bootstrap_iters=0,
        log_samples=True, task_manager=TaskManager(include_path=str(tmp_path)))
        for model, options in (
            ("hf", dict(pretrained=str(folder), dtype="float32", device="cpu", max_length=512)),
            ("local-completions", dict(model="tested", base_url=f"{server.url}/v1/completions",
                                       tokenizer=str(folder), tokenizer_backend="huggingface",
                                       max_length=512, num_concurrent=2)))]
    theirs, ours = (result["results"] for result in results)
    for name, value in theirs["perplexity"].items():
        if isinstance(value, float):
            assert ours["perplexity"][name] == pytest.approx(value, rel=1e-5), name
    assert ours["choices"]["acc,none"] == theirs["choices"]["acc,none"]
    for one, other in zip(*(result["samples"]["choices"] for result in results), strict=True):
        assert [value for value, _ in other["filtered_resps"]] == pytest.approx(
            [value for value, _ in one["filtered_resps"]], abs=1e-3)
