"""Where a checkpoint's folder is: on this machine, or fetched from the Hugging Face hub.

A model is named by a folder or by a hub id such as "Qwen/Qwen3-0.6B". A folder is taken as it is. A
hub id is fetched by `huggingface_hub`, which keeps a cache and works offline from it; only the
files that an engine reads are asked for.

Invariant: whoever asks gets a folder, or a `ValueError` that names the option, the value and the
reason. An engine that went on with an empty folder would answer with random text (nano-vllm #97).

Not known here: what the files say.
"""

from pathlib import Path

HUB_FILES = ["*.json", "*.model", "*.txt", "*.jinja"]  # what is always fetched
HUB_CODE = ["*.py", "*.tiktoken"]  # what `trust_remote_code` allows to run, and its vocabularies


def find_model(model: str | Path, option: str = "model", weights: bool = True,
               code: bool = False) -> Path:
    """The folder of a model: a local one, or a hub id's (fetched, or from the offline cache).

    weights, code: whether these are wanted from the hub, too. Raises `ValueError` when it is
    neither, naming the option that it was given with.
    """
    if not isinstance(model, (str, Path)) or not str(model).strip():
        raise ValueError(f"{option}={model!r}: name a folder or a hub id")
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ValueError(f"{option}={str(model)!r} is a file: name the folder it lies in")
    # Imported here because only a hub id needs it: a local folder works without the package.
    from huggingface_hub import snapshot_download
    try:
        return Path(snapshot_download(str(model), allow_patterns=[
            *HUB_FILES, *["*.safetensors"] * weights, *HUB_CODE * code]))
    except Exception as error:  # a network can fail in a dozen ways; the remedy is the same
        reason = (str(error).strip() or "no reason given").splitlines()[0]
        raise ValueError(f"{option}={str(model)!r} is not a local folder, and as a hub id it could "
                         f"not be fetched: {type(error).__name__}: {reason}") from error
