"""Random models that sentence-transformers itself writes have its own numbers.

Modules and fields are drawn at random, the library saves the model, reads it again, and is asked
for vectors and scores of texts that are empty, long, and begin with prompts. A text that is too
long may be refused instead, but nothing else. `pip install -e ".[test-full]"`
"""

import json
import random

import pytest
import torch
from checkpoints import CHECKPOINTS, byte_tokenizer
from encoders import ENCODERS
from pooled import start
from tokenizers.processors import TemplateProcessing
from torch import nn

from nanoserve import PoolingParams

library = pytest.importorskip("sentence_transformers")
pytestmark = pytest.mark.full

import transformers  # noqa: E402
from sentence_transformers.base import modules as base  # noqa: E402
from sentence_transformers.cross_encoder.modules import LogitScore  # noqa: E402
from sentence_transformers.sentence_transformer import modules as more  # noqa: E402

NETWORKS = {name: ENCODERS[name] for name in ("bert", "xlm-roberta", "distilbert", "modernbert")}
NETWORKS |= {name: CHECKPOINTS[name] for name in ("qwen3", "llama3.1")}
DECODERS = ("qwen3", "llama3.1")
FUNCTIONS = (nn.Tanh, nn.Identity, nn.ReLU, nn.GELU, nn.Sigmoid, nn.SiLU, nn.LeakyReLU, nn.Softplus)
MODES = list(more.Pooling.POOLING_MODES)
ROLES = ("{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
         "{% if add_generation_prompt %}A:{% endif %}")
TEXTS = ["a fox", "", "The OLD king sat.", "in the forest there was " * 9, "x", "Ünïcode É"]


def fill(module: nn.Module, generator: torch.Generator) -> nn.Module:
    with torch.no_grad():
        for name, one in module.named_parameters():
            centre = 1 if one.dim() == 1 and "norm" in name.lower() and "weight" in name else 0
            one.copy_(torch.randn(one.shape, generator=generator) * 0.3 + centre)
    return module


class Drawn:
    """A random model; seed: of all that is drawn."""

    def __init__(self, seed: int, folder):
        self.draw, self.folder = random.Random(seed), folder
        self.generator = torch.Generator().manual_seed(seed)
        self.name = self.draw.choice(list(NETWORKS))
        self.decodes = self.name in DECODERS
        self.prompts = self.draw.choice([None, dict(query="find: ", document="")])
        self.default = self.prompts and self.draw.choice([None, "query"])
        self.texts = [text for text in TEXTS if text or not self.decodes]

    def network(self, kind: str, **options) -> str:
        config = NETWORKS[self.name]()
        for key, value in options.items():
            setattr(config, key, value)
        torch.manual_seed(0)
        fill(getattr(transformers, kind).from_config(config).float(),
             self.generator).save_pretrained(self.folder)
        tokenizer = byte_tokenizer()
        tokenizer.chat_template = self.draw.choice([None, ROLES]) if self.decodes else None
        if not self.decodes:
            tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
                single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1",
                special_tokens=[("<s>", 256), ("</s>", 257)])
            types = ["token_type_ids"] * (self.name == "bert")
            tokenizer.model_input_names = ["input_ids", "attention_mask", *types]
            tokenizer.init_kwargs["model_input_names"] = tokenizer.model_input_names
            tokenizer.model_max_length = 120  # RoBERTa has fewer positions than its config says
        tokenizer.save_pretrained(self.folder)
        return str(self.folder)

    def steps(self, width: int, most: int, tensor: str) -> tuple[list[nn.Module], int]:
        found = []
        for _ in range(self.draw.randrange(most)):
            kind = self.draw.choice(["Dense", "Dense", "Normalize", "LayerNorm", "Dropout"])
            if kind == "Normalize":
                found.append(base.Normalize(module_input_name=tensor))
            elif kind == "Dense" or tensor == "token_embeddings":
                size = self.draw.choice([width, 24])
                found.append(base.Dense(width, size, self.draw.random() < 0.5, self.draw.choice(
                    FUNCTIONS)(), module_input_name=tensor, use_residual=self.draw.random() < 0.5))
                width = size
            else:
                found.append(more.LayerNorm(width) if kind == "LayerNorm" else more.Dropout())
        return [fill(one, self.generator) for one in found], width

    def parts(self) -> tuple[list[nn.Module], int]:
        first = base.Transformer(self.network("AutoModel"), do_lower_case=self.draw.random() < 0.3,
                                 max_seq_length=self.draw.choice([None, 60]))
        before, width = self.steps(first.get_embedding_dimension(), 2, "token_embeddings")
        modes = self.draw.sample(MODES, self.draw.choice([1, 1, 2, 3]))
        pooling = more.Pooling(width, modes, include_prompt=self.draw.random() < 0.7)
        behind, width = self.steps(pooling.get_embedding_dimension(), 4, "sentence_embedding")
        return [first, *before, pooling, *behind], width

    def embedder(self):
        return library.SentenceTransformer(
            modules=self.parts()[0], prompts=self.prompts, default_prompt_name=self.default,
            truncate_dim=self.draw.choice([None, 5]), device="cpu",
            similarity_fn_name=self.draw.choice([None, "dot", "euclidean", "manhattan"]))

    def reranker(self):
        form = self.draw.choice(["class", "dense", "logits"][:2 + self.decodes])
        if form == "class":
            modules = [base.Transformer(self.network(
                "AutoModelForSequenceClassification", num_labels=self.draw.choice([1, 1, 3])),
                transformer_task="sequence-classification")]
        elif form == "logits":
            first = base.Transformer(
                self.network("AutoModelForCausalLM"), transformer_task="text-generation",
                processing_kwargs={"chat_template": {"add_generation_prompt": True}})
            modules = [first, LogitScore(70, self.draw.choice([80, None]))]
        else:
            modules, width = self.parts()
            modules.append(fill(base.Dense(width, 1, activation_function=nn.Identity(),
                                           module_output_name="scores"), self.generator))
        return library.CrossEncoder(
            modules=modules, prompts=self.prompts, default_prompt_name=self.default, device="cpu",
            activation_fn=self.draw.choice([None, nn.Identity(), nn.Sigmoid(), nn.Tanh()]))


def assert_near(got, expected) -> None:
    assert got.shape == expected.shape
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("seed", range(24))
def test_vectors_and_scores_are_the_librarys(tmp_path, seed):
    drawn = Drawn(seed, tmp_path / "network")
    reranks = seed % 2
    oracle = drawn.reranker() if reranks else drawn.embedder()
    pairs = list(zip(drawn.texts, reversed(drawn.texts), strict=True))
    if was_used := drawn.draw.random() < 0.6:  # then tokenizer.json says that texts are cut
        oracle.predict(pairs[:1]) if reranks else oracle.encode(["a"])
    saved = tmp_path / "saved"
    oracle.save(str(saved))
    oracle = type(oracle)(str(saved), device="cpu")
    options = dict(max_num_batched_tokens=16) if drawn.decodes and drawn.draw.random() < 0.5 else {}
    with start(saved, runner="auto", **options) as llm:
        longest = llm.config.max_model_len
        if json.loads((saved / "tokenizer.json").read_text())["truncation"] is None:
            assert not was_used
            with pytest.raises(ValueError, match=f"{longest} tokens.*truncate_prompt_tokens"):
                llm.encode("y" * 999, pooling_task=llm.runner.pooler.tasks[0])
            drawn.texts = [text for text in drawn.texts if len(text) < 20]
            pairs = [pair for pair in pairs if len("".join(pair)) < 20]
        if reranks:
            expected = oracle.predict(pairs, convert_to_tensor=True).float()
            prompts = [llm.inputs.pair(*pair, None, PoolingParams()) for pair in pairs]
            outputs = llm.classify(prompts, use_tqdm=False)
            got = torch.tensor([one.outputs.probs for one in outputs])
            return assert_near(got if expected.dim() > 1 else got[:, 0], expected)
        for name in (None, *(drawn.prompts or ())):
            expected = oracle.encode(drawn.texts, prompt_name=name, convert_to_tensor=True)
            outputs = llm.embed(drawn.texts, prompt_name=name, use_tqdm=False)
            assert_near(torch.tensor([one.outputs.embedding for one in outputs]), expected)
        expected = oracle.encode(drawn.texts, convert_to_tensor=True)
        outputs = llm.score(drawn.texts[0], drawn.texts, use_tqdm=False)
        assert_near(torch.tensor([one.outputs.score for one in outputs]),
                    oracle.similarity(expected[:1], expected)[0])


@pytest.mark.parametrize("restores, template", [
    (True, ROLES), (False, ROLES), (True, ROLES.replace("m['content']", "(m.content[0].type + "
     "m.content[0].text if m.content[0].type else m.content)"))])
def test_a_text_in_a_template_is_cut_as_the_library_cuts_it(tmp_path, restores, template):
    drawn = Drawn(0, tmp_path / "network")
    drawn.name = "qwen3"
    drawn.network("AutoModel")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(drawn.folder)
    first = base.Transformer(str(drawn.folder), max_seq_length=40, processing_kwargs={
        "chat_template": {"add_generation_prompt": True, "restore_suffix": restores}})
    oracle = library.SentenceTransformer(device="cpu", modules=[
        first, more.Pooling(first.get_embedding_dimension(), "lasttoken")])
    oracle.save(str(tmp_path / "saved"))
    expected = oracle.encode(TEXTS[2:4], convert_to_tensor=True)
    with start(tmp_path / "saved", runner="auto") as llm:
        outputs = llm.embed(TEXTS[2:4], use_tqdm=False, pooling_params=PoolingParams(
            truncate_prompt_tokens=-1, truncation_side="right"))
        assert [len(one.prompt_token_ids) for one in outputs] == [25 + 4 * (template != ROLES), 40]
        assert_near(torch.tensor([one.outputs.embedding for one in outputs]), expected)
