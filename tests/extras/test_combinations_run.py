"""The cells that say yes, run: each feature with each kind of model, text against transformers'.

Takes a minute, so it runs with the extra `test-full` alone (docs/extras.md has the last run).
Weights that are rounded or quantised are held against transformers with those numbers in
tests/extras/quantization, heads that draft in tests/extras/drafts.
"""

import pytest
import torch
import transformers
from architectures import ARCHITECTURES, Made, make, texts_by
from checkpoints import Reference, assert_same_text
from encoders import hidden_of
from encoders import make as make_encoder
from hybrids import HYBRIDS
from seeing import make_seeing
from wrappings import reference

from nanoserve import LLM, SamplingParams
from nanoserve_extras.combinations import FEATURES, KINDS, missing

pytestmark = pytest.mark.full

GREEDY = SamplingParams(temperature=0, max_tokens=8)
SHARED = list(range(60, 84))
PROMPTS = [SHARED + [7, 9], [5, 6, 7], SHARED + [200, 3, 11, 90]]
SMALL = dict(dtype="float32", block_size=16, num_gpu_blocks_override=14, max_num_batched_tokens=19)
# What each feature asks for; None: another file holds it, or it takes a GPU.
OPTIONS = {
    "the prefix cache": {}, "CUDA graphs": None,
    "tensor parallelism": dict(tensor_parallel_size=2),
    "pipeline stages": dict(pipeline_parallel_size=2),
    "layers on disk": dict(layer_plan={"disk": 1}),
    "int8, int4": None, "quantised checkpoints": None, "LoRA": dict(enable_lora=True),
    "blocks in memory or a folder": dict(kv_offload_bytes=2 ** 22),
    "caches that forget": None,
    "drafts from the text": dict(speculative_config=dict(
        method="ngram", num_speculative_tokens=3)),
    "drafts by a model": dict(speculative_config=dict(
        method="draft_model", num_speculative_tokens=3)),
    "EAGLE-3": None, "MTP": None, "structured output": {}, "a budget for thinking": None,
    "images, sounds": None, "pooling": dict(runner="pooling"), "new weights, sleep": {}}
SOURCES = {
    "own dense": lambda folder, ours: ours["qwen3"],
    "own mixture": lambda folder, ours: ours["qwen3-moe"],
    "transformers' dense": lambda folder, ours: make(ARCHITECTURES["olmo2"](), folder),
    "hybrid": lambda folder, ours: make(HYBRIDS["qwen3.5"](), folder),
    "latent": lambda folder, ours: make(ARCHITECTURES["deepseek3"](), folder),
    "multimodal": lambda folder, ours: make_seeing("llava", folder),
    "encoder": lambda folder, ours: make_encoder("bert", folder)}
YES = [(feature, kind) for feature, options in OPTIONS.items() for kind in KINDS
       if options is not None and missing(FEATURES[feature], KINDS[kind]) is None]


@pytest.fixture(scope="module")
def folders(checkpoints, tmp_path_factory) -> Made:
    return Made(tmp_path_factory.mktemp("kinds"),
                lambda kind, folder: SOURCES[kind](folder, checkpoints))


@pytest.fixture(scope="module")
def texts(folders):
    return texts_by(folders, PROMPTS, lambda folder: (
        reference if folder.name == "multimodal" else Reference)(folder), GREEDY.max_tokens)


def hidden(folder, kind: str) -> list[torch.Tensor]:
    """What is pooled: of an encoder the first token's state, of a decoder the last one's."""
    if kind == "encoder":
        return [states[0] for states in hidden_of(folder, PROMPTS)]
    network = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return [network(input_ids=torch.tensor([prompt])).last_hidden_state[0, -1]
                for prompt in PROMPTS]


@pytest.mark.parametrize(("feature", "kind"), YES)
def test_a_cell_that_says_yes(feature, kind, folders, checkpoints, texts):
    options = SMALL | OPTIONS[feature]
    if kind == "multimodal":
        options |= dict(limit_mm_per_prompt={"image": 1})
    if feature == "drafts by a model":
        options["speculative_config"] = options["speculative_config"] | dict(
            model=str(checkpoints["qwen3-tied"]))
    if kind == "encoder" or feature == "pooling":
        del options["max_num_batched_tokens"]
        check_vectors(folders[kind], kind, options | dict(runner="pooling"))
        return
    with LLM(folders[kind], **options) as llm:
        for attempt in range(2):  # the second time the prompts are in the cache
            params = [GREEDY] * len(PROMPTS)
            if feature == "structured output":
                params[1] = SamplingParams(temperature=0, max_tokens=8,
                                           structured_outputs=dict(regex="(yes|no)+"))
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            for i, (output, (expected, gaps)) in enumerate(zip(outputs, texts(kind), strict=True)):
                if params[i] is GREEDY:
                    assert_same_text(output.outputs[0].token_ids, expected, gaps, feature)
                else:
                    assert set(output.outputs[0].text) <= set("yesno")
            if feature == "new weights, sleep" and not attempt:
                llm.sleep()
                llm.wake_up()
                llm.update_weights(folders[kind])


def check_vectors(folder, kind: str, options: dict) -> None:
    with LLM(folder, **options) as llm:
        outputs = llm.embed(PROMPTS, use_tqdm=False)
    for output, state in zip(outputs, hidden(folder, kind), strict=True):
        expected = torch.nn.functional.normalize(state, dim=0)
        torch.testing.assert_close(torch.tensor(output.outputs.embedding), expected,
                                   rtol=1e-4, atol=1e-4)
