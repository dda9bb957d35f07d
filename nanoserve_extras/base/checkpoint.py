"""Which folder a model's name means, GGUF files and pickled weights among them.

The engine takes a folder, a hub id or a bundled model's name (nanoserve/loader.py). With the extras
a GGUF file is a model, too: it is converted once, in the number format that the engine wants, to a
folder that is kept. Pickled weights are fetched only if there are no others.

Invariant: the caller gets a folder whose files can be read, or a `ValueError` that names the
option, the value and the reason. An engine that went on with an empty folder would answer with
random text (nano-vllm #97).
"""

from pathlib import Path

from nanoserve.config import EngineConfig
from nanoserve.loader import fetch, find_model
from nanoserve_extras import find

PICKLES = ["pytorch_model*.bin"]
READ = (".json", ".model", ".txt", ".jinja", ".safetensors", ".bin")


def find_folder(model: str | Path, option: str = "model", *, quantization: str | None = None,
                dtype: str = "auto", revision: str | None = None, weights: bool = True,
                code: bool = False) -> Path:
    """The folder of a model, by any kind of name. The arguments are those of `find_model`;
    quantization and dtype are the engine's, for a GGUF file's weights. Raises a `ValueError` that
    names the option."""
    if not isinstance(model, (str, Path)) or not str(model).strip():
        raise ValueError(f"{option}={model!r}: name a folder or a hub id")
    file = find("tools.gguf_files.find_file")(model, option, revision)
    if file is not None:
        return find("tools.gguf_files.kept")(file, quantization, option, dtype)
    place = Path(model).expanduser()
    if place.exists() and not place.is_dir():
        raise ValueError(f"{option}={str(model)!r} is a file: name the folder it lies in")
    if not place.exists() and (len(place.parts) > 2 or str(model)[0] in "./~"):
        raise ValueError(f"{option}={str(model)!r} is not a local folder, and no hub id looks so")
    folder = find_model(model, option, weights, code, revision)
    if weights and not place.exists() and not any(folder.glob("*.safetensors")):
        fetch(str(model), option, PICKLES, revision)
    check_fetched(folder, weights)
    return folder


def check_fetched(folder: Path, weights: bool) -> None:
    """Raises `ValueError` for the pointers that `git clone` without LFS leaves in the place of
    large files, and for a pipe or a device, on which a read would block."""
    for file in sorted([*folder.glob("*"), *folder.glob("*/*")]):
        if file.suffix not in READ or not file.exists() or file.is_dir():
            continue
        if not file.is_file():
            raise ValueError(f"{file} is no regular file: remove it, or put the real one there")
        read = file.suffix == ".json" or weights and file.suffix in (".safetensors", ".bin")
        if read and file.stat().st_size < 1024 and file.read_bytes().startswith(
                b"version https://git-lfs"):
            raise ValueError(f"{file} is a pointer to a file that is not here: run git lfs pull")


def tokenizer_folder(asked: EngineConfig, folder: Path) -> Path:
    """The tokenizer's folder: that of `tokenizer=`, or the model's own."""
    return folder if asked.tokenizer is None else find_folder(
        asked.tokenizer, "tokenizer", weights=False, code=asked.trust_remote_code)
