"""Where a checkpoint's folder is: on this machine, or fetched from the Hugging Face hub.

A model is named by a folder, by a hub id such as "Qwen/Qwen3-0.6B", or by the name of a bundled one
("storyteller", wherever the package is installed). A folder is taken as it is. A hub id is fetched
by `huggingface_hub`, which keeps a cache and works offline from it; only the files that an engine
reads are fetched. Pickled weights are fetched only where there are no others.

Invariant: the caller gets a folder, or a `ValueError` that names the option, the value and the
reason. An engine that went on with an empty folder would answer with random text (nano-vllm #97).
"""

from pathlib import Path

SECOND_COPIES = ["consolidated*", "original/*"]  # Mistral's and Meta's own files, the same weights
HUB_FILES = ["*.json", "*.model", "*.txt", "*.jinja"]  # always fetched
READ = (".json", ".model", ".txt", ".jinja", ".safetensors", ".bin")
BUNDLED = Path(__file__).parent / "assets"
HUB_CODE = ["*.py", "*.tiktoken"]  # for `trust_remote_code`: code, and its vocabularies


def find_model(model: str | Path, option: str = "model", weights: bool = True,
               code: bool = False, revision: str | None = None) -> Path:
    """The folder of a model: a local or bundled one, or a hub id's (fetched, or from its cache).

    weights, code: whether these are wanted from the hub, too. revision: a branch, a tag or a commit
    there. Raises `ValueError` when there is no such model, naming the option that it was given
    with, and for a revision of a folder, which has none.
    """
    if not isinstance(model, (str, Path)) or not str(model).strip():
        raise ValueError(f"{option}={model!r}: name a folder or a hub id")
    folder = Path(model).expanduser()
    if not folder.exists() and len(folder.parts) == 1 and (BUNDLED / folder).is_dir():
        folder = BUNDLED / folder
    if folder.is_dir():
        if revision is not None:
            raise ValueError(f"revision={revision!r} is about hub ids, and {option}={str(model)!r} "
                             "is a folder: leave it out")
        check_fetched(folder, weights)
        return folder
    if folder.suffix == ".gguf":
        raise ValueError(f"{option}={str(model)!r} is a GGUF file, and nanoserve_extras, which "
                         "reads these, is not there")
    if folder.exists():
        raise ValueError(f"{option}={str(model)!r} is a file: name the folder it lies in")
    if len(folder.parts) > 2 or str(model)[0] in "./~":  # no hub id begins or looks so
        raise ValueError(f"{option}={str(model)!r} is not a local folder, and no hub id looks so")
    # Imported here because only a hub id needs it: a local folder works without the package.
    from huggingface_hub import snapshot_download
    try:
        folder = Path(snapshot_download(str(model), revision=revision, allow_patterns=[
            *HUB_FILES, *["*.safetensors"] * weights, *HUB_CODE * code],
            ignore_patterns=SECOND_COPIES))
        if weights and not any(folder.glob("*.safetensors")):
            snapshot_download(str(model), revision=revision,
                              allow_patterns=["pytorch_model*.bin"])
        return folder
    except Exception as error:  # a network can fail in a dozen ways; the remedy is the same
        reason = (str(error).strip() or "no reason given").splitlines()[0]
        raise ValueError(f"{option}={str(model)!r} is not a local folder, and as a hub id it could "
                         f"not be fetched: {type(error).__name__}: {reason} (without a network: "
                         "fetch it elsewhere, and name its folder)") from error


def check_fetched(folder: Path, weights: bool) -> None:
    """Raises `ValueError` for what `git clone` leaves in the place of large files without LFS, and
    for a pipe or a device, which whoever reads it would wait for."""
    for file in sorted([*folder.glob("*"), *folder.glob("*/*")]):
        if file.suffix not in READ or not file.exists() or file.is_dir():
            continue
        if not file.is_file():
            raise ValueError(f"{file} is no regular file: remove it, or put the real one there")
        read = file.suffix == ".json" or weights and file.suffix in (".safetensors", ".bin")
        if read and file.stat().st_size < 1024 and file.read_bytes().startswith(
                b"version https://git-lfs"):
            raise ValueError(f"{file} is a pointer to a file that is not here: run git lfs pull")
