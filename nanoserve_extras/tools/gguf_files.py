"""Which GGUF file a model's name means, and the folder that it is converted into, once.

    FOLDER/model.gguf            a file on this machine; without the ending it is known by its
                                 first bytes (ollama keeps files by their hashes)
    owner/repo:Q4_K_M            the repository's file of that quantisation, as llama.cpp and ollama
    hf.co/owner/repo:Q4_K_M      write it; FOLDER:Q4_K_M, where such a folder is here
    owner/repo/path/model.gguf   a file there, by its path

`find_folder` of base/checkpoint.py tries these names first, so every command and every option for a
model takes them. Downloads stay in the cache of `huggingface_hub`, which works without a network. A
hub id alone means a checkpoint in safetensors: looking for GGUF files would need a request to the
hub at each start.

The converter is imported only to convert a file, because its import takes a second.
"""

import re
from collections.abc import Callable
from importlib.metadata import version
from os import SEEK_END
from pathlib import Path
from typing import Any

import nanoserve
from nanoserve.build import cache_folder, digest
from nanoserve.progress import say
from nanoserve_extras import find

DTYPES = ("bfloat16", "float16", "float32")
BITS = ("int8", "int4")
# What decides how a file is converted.
SOURCES = [Path(__file__).with_name(name) for name in (
    "convert.py", "gguf_entries.py", "gguf_weights.py")]
SOURCES += [Path(__file__).parent.parent / "quantization" / "quantized_linear.py"]
LAST = 2 ** 20  # bytes that tell a file's numbers from those of another of its size
IN_REPOSITORY = re.compile(r"(?:(?:https://)?(?:hf\.co|huggingface\.co)/)?"
                           r"(?P<repo>\w[\w.-]*/[\w.-]+)(?::(?P<tag>[\w.-]+)|/(?P<path>.+\.gguf))")
OLLAMAS = re.compile(r"(?!.:)[\w.-]+:[\w.-]+")  # llama3.2:1b, and not a drive of Windows
PART = re.compile(r"-\d{5}-of-(?!00001)\d{5}\.gguf")
NO_MODELS = ("mmproj", "imatrix")  # towers for images, and what quantisers measure
MOST_LISTED = 12


def find_file(model: Any, option: str = "model", revision: str | None = None) -> Path | None:
    """The file, fetched if need be; None for a name that means no GGUF file. Raises `ValueError`
    that begins with the option and its value."""
    if not isinstance(model, (str, Path)):
        return None  # `find_model` says what is wrong with it
    name, file = f"{option}={str(model)!r}", Path(model).expanduser()
    folder, _, tag = str(model).rpartition(":")
    if file.exists():
        if file.is_dir() or not is_gguf(file):
            return None
    elif folder and (place := Path(folder).expanduser()).is_dir():
        names = [path.relative_to(place).as_posix() for path in place.rglob("*.gguf")]
        file = place / pick(names, tag, name)
    elif found := IN_REPOSITORY.fullmatch(str(model)):
        return fetch(found, name, revision)
    elif file.suffix == ".gguf":
        raise ValueError(f"{name}: there is no such file")
    elif OLLAMAS.fullmatch(str(model)):
        raise ValueError(f"{name} is a name of ollama's, whose registry is not read: name a hub "
                         "id, or a GGUF file in one as OWNER/REPOSITORY:Q4_K_M")
    else:
        return None
    if revision is not None:
        raise ValueError(f"revision={revision!r} is about hub ids, and {name} is a file: leave it "
                         "out")
    check_begin(file)
    return file


def check_begin(file: Path) -> None:
    """Check a file's first bytes, before its conversion is announced. Raises `ValueError`."""
    with file.open("rb") as opened:
        begin = opened.read(32)
    if begin.startswith(b"version https://git-lfs"):
        raise ValueError(f"{file} is a pointer to a file that is not here: run git lfs pull")
    if not begin.startswith(b"GGUF"):
        raise ValueError(f"{file} is no GGUF file: it does not begin with these letters")


def is_gguf(file: Path) -> bool:
    """Whether a file is a GGUF file, by its ending or its first bytes."""
    if file.suffix == ".gguf" or not file.is_file():
        return file.suffix == ".gguf"
    with file.open("rb") as opened:
        return opened.read(4) == b"GGUF"


def fetch(found: re.Match, name: str, revision: str | None) -> Path:
    """A repository's file, or its copy in the cache."""
    # Imported here because only a hub id needs it: a local file works without the package.
    from huggingface_hub import hf_hub_download
    repo, tag = found["repo"], found["tag"]
    path = found["path"] or pick(asked(name, list_files, repo, revision), tag, name)
    return Path(asked(name, hf_hub_download, repo, path, revision=revision))


def list_files(repo: str, revision: str | None) -> list[str]:
    """The repository's files by the hub; without a network those in the cache."""
    from huggingface_hub import list_repo_files, snapshot_download
    try:
        return list_repo_files(repo, revision=revision)
    except Exception as error:
        try:
            cached = Path(snapshot_download(repo, revision=revision, local_files_only=True))
        except Exception:  # nothing is there: the hub's answer is what tells why
            raise error from None
        return [path.relative_to(cached).as_posix() for path in cached.rglob("*.gguf")]


def asked(name: str, call: Callable, *args, **options) -> Any:
    """A call of the hub. A network can fail in a dozen ways; the remedy is the same."""
    try:
        return call(*args, **options)
    except Exception as error:
        reason = (str(error).strip() or "no reason given").splitlines()[0]
        raise ValueError(f"{name} is no file here, and could not be fetched from the hub: "
                         f"{type(error).__name__}: {reason} (without a network: fetch the file "
                         "elsewhere, and name its path)") from error


def pick(names: list[str], tag: str, name: str) -> str:
    """The file of a quantisation among those of a repository: "Q4_K_M" is model-Q4_K_M.gguf,
    model.q4_k_m.gguf and Q4_K_M/model.gguf. Raises `ValueError` that lists what there is."""
    models = [one for one in names if one.endswith(".gguf") and not any(
        word in one.lower() for word in NO_MODELS)]
    of_it = re.compile(rf"(?:^|[-._/]){re.escape(tag)}(?:[-./]|$)", re.I)
    found = [one for one in models if one == tag or of_it.search(one.removesuffix(".gguf"))]
    if found and all(PART.search(one) for one in found):
        raise ValueError(f"{name} is split into {len(found)} files: fetch them, join them with "
                         "llama-gguf-split --merge, and name the file")
    if len(found) == 1:
        return found[0]
    listed = ", ".join(sorted(found or models)[:MOST_LISTED]) or "none at all"
    raise ValueError(f"{name}: {len(found) or 'no'} GGUF files are of this quantisation: name one "
                     f"by its path, as OWNER/REPOSITORY/FILE; there are {listed}")


def kept(file: Path, quantization: str | None = None, option: str = "model",
         dtype: str = "auto") -> Path:
    """The folder with the converted file; converts it if needed. There is another folder for other
    contents, told by size, time and last bytes, and after an upgrade or a change of SOURCES, which
    may fix a conversion. quantization, dtype: the engine's, used for the folder, too; float32 keeps
    the file's own numbers. option: the option that named the file. Raises `ValueError` if the file
    can't be converted."""
    name, cache = f"{option}={str(file)!r}", cache_folder()
    remedy = f"nanoserve convert {file.name} FOLDER, and name the folder"
    bits = quantization if quantization in BITS else None
    dtype = dtype if dtype in DTYPES else DTYPES[0]
    kind = "".join(f"-{one}" for one in (bits, dtype) if one not in (None, DTYPES[0]))
    if cache is None:
        raise ValueError(f"{name}: there is no cache folder of this user's own to "
                         f"convert it into: {remedy}")
    folder = cache / "gguf" / f"{file.stem}{kind}-{digest_of(file)}"
    if not folder.exists():
        say(f"{file.name} is converted into {folder}, once. For another place: {remedy}")
        try:
            find("tools.convert.convert_for_engine")(file, folder, dtype, bits)
        except OSError as error:
            if not folder.exists():  # else another process was faster
                raise ValueError(f"{name} can't be converted into {folder}: {error}: "
                                 f"{remedy}") from error
    return folder


def digest_of(file: Path) -> str:
    """A digest of the file's contents and of the converter."""
    status = file.stat()
    with file.open("rb") as opened:  # archives give all of their files one time
        opened.seek(-min(status.st_size, LAST), SEEK_END)
        last = opened.read()
    converter = b"".join(source.read_bytes() for source in SOURCES)
    versions = version("transformers"), nanoserve.__version__
    return digest(converter + last + repr((status.st_size, status.st_mtime_ns, *versions)).encode())
