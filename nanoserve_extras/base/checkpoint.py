"""Which folder a model's name means, GGUF files among them.

The engine takes a folder, a hub id or a bundled model's name (nanoserve/loader.py). With the extras
a GGUF file is a model, too: it becomes a folder once, which is kept, in the bits that the engine
wants.
"""

from pathlib import Path

from nanoserve.config import EngineConfig
from nanoserve.loader import find_model
from nanoserve_extras import find


def find_folder(model: str | Path, option: str = "model", *, quantization: str | None = None,
                revision: str | None = None, **wanted: bool) -> Path:
    """The folder of a model, whatever names it: see `find_model`, which the arguments are for.
    quantization: the bits of a GGUF file's weights. Raises `ValueError` that names the option."""
    file = find("tools.gguf_files.find_file")(model, option, revision)
    if file is not None:
        return find("tools.convert.kept")(file, quantization, option)
    return find_model(model, option, revision=revision, **wanted)


def tokenizer_folder(asked: EngineConfig, folder: Path) -> Path:
    """That of `tokenizer=`, or the model's own."""
    return folder if asked.tokenizer is None else find_folder(
        asked.tokenizer, "tokenizer", weights=False, code=asked.trust_remote_code)
