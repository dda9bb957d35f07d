"""What tests of the extras share."""

import os
import shutil
from functools import cache

import pytest
from quick_interpreter import quick_interpreter  # noqa: F401


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """Chromium without a window. Where it can't be had a test is skipped, in CI it fails."""
    import browser as chromium

    program = chromium.install()
    if program is None:
        message = "no Chromium: install it (Debian: apt-get install chromium) to test the pages"
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)
    browser = chromium.Browser(program, tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def noisy(checkpoints, tmp_path_factory):
    """A checkpoint like the one named, with noise in its weights: a guesser that is often right."""
    import torch
    from safetensors.torch import load_file, save_file

    def make(name: str, noise: float = 0.15):
        folder = tmp_path_factory.mktemp("noisy") / name
        shutil.copytree(checkpoints[name], folder)
        weights = load_file(folder / "model.safetensors")
        generator = torch.Generator().manual_seed(2)
        for key, weight in weights.items():
            if weight.dim() > 1:
                weights[key] = weight + noise * weight.std() * torch.randn(
                    weight.shape, generator=generator)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        return folder

    return make


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkpoint after some training: the same names and shapes, other numbers."""
    import torch
    from loading import stored_tensors
    from safetensors.torch import save_file

    def train(folder):
        there = tmp_path_factory.mktemp("trained") / "model"
        shutil.copytree(folder, there)
        for file in there.glob("*.safetensors"):
            tensors, generator = stored_tensors(there), torch.Generator().manual_seed(7)
            save_file({name: (tensor + 0.5 * tensor.std() * torch.randn(
                tensor.shape, generator=generator)).to(tensor.dtype)
                for name, tensor in tensors.items()}, file, {"format": "pt"})
        return there

    return train


@pytest.fixture
def expect(references):
    """Compares texts of 12 tokens with transformers'."""
    from checkpoints import assert_same_text

    def compare(prompts, texts, name="qwen3"):
        for prompt, text in zip(prompts, texts, strict=True):
            assert_same_text(text, *references(name, prompt, 12, text), name)

    return compare


@pytest.fixture(scope="session")
def hidden_states(checkpoints):
    """Hidden states by checkpoint and prompt; each is computed once."""
    import torch
    from transformers import AutoModel

    @cache
    def model(name: str):
        return AutoModel.from_pretrained(checkpoints[name], dtype=torch.float32).eval()

    @cache
    @torch.no_grad()
    def of(name: str, prompt: tuple[int, ...]) -> torch.Tensor:
        return model(name)(torch.tensor([prompt])).last_hidden_state[0]

    return lambda name, prompt: of(name, tuple(prompt))


@pytest.fixture(scope="session")
def classifiers(tmp_path_factory):
    """Classifiers by family and number of classes."""
    from checkpoints import CHECKPOINTS, save
    from transformers import AutoModelForSequenceClassification

    @cache
    def folder_of(name: str, num_labels: int, **entries):
        config = CHECKPOINTS[name]()
        config.num_labels = num_labels
        for entry, value in entries.items():
            setattr(config, entry, value)
        model = AutoModelForSequenceClassification.from_config(config)
        return save(model, tmp_path_factory.mktemp(f"{name}-{num_labels}"))

    return folder_of
