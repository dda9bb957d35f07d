"""A GGUF file becomes a folder that this engine serves: config, tokenizer, and plain weights.

    nanoserve convert Qwen3-0.6B-Q8_0.gguf Qwen3-0.6B      then: nanoserve serve Qwen3-0.6B
    LLM("Qwen3-0.6B-Q8_0.gguf")                            the same, once, in the cache folder

GGUF (llama.cpp's format) is one file with metadata, a tokenizer, and weights in small blocks, each
with a scale. transformers names the network's class, and multiplies the blocks out; what the
metadata says is read in gguf_entries.py. What comes out is rounded a second time, to bfloat16; the
last line says how much that changes.

Invariants: the folder is there whole, or not at all. Every number of the file is in the network,
and every entry of its metadata is known. A network that the engine would refuse is refused before
weights are read, and before the folder has its name the engine has written a text from it, which is
that of transformers.

Confessed: all weights are in memory in float32. llama.cpp computes with blocks as they are: some
thirty kinds, each with products of its own.
"""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from importlib.util import find_spec
from os import SEEK_END
from pathlib import Path
from shutil import disk_usage
from tempfile import TemporaryDirectory

import torch
import transformers

import nanoserve
from nanoserve.device.build import cache_folder, digest
from nanoserve.frontend.progress import say
from nanoserve.llm import read_model
from nanoserve_extras.engine_args import EngineArgs
from nanoserve_extras.tools.gguf_entries import (
    check_names,
    mend_tokenizer,
    read_generation,
    read_network,
)
from nanoserve_extras.tools.verify import BATCHED, NEAR_TIE, run_mode, write_reference

THEIRS = f"transformers {transformers.__version__}"
PACKAGES = ("gguf", "accelerate")  # transformers asks for both
DTYPES = ("bfloat16", "float16", "float32")
LAST = 2 ** 20  # bytes that tell a file's numbers from those of another of its size


def convert(file: Path, folder: Path, dtype: str) -> None:
    """Write the folder, and print what came out. Raises `ValueError` for what can't be converted,
    naming the remedy."""
    check(file, folder)
    from gguf import GGUFReader  # here, where it is known to be there
    with refusing(str(file)):
        reader = GGUFReader(file)
        entries = {name: field.contents() for name, field in reader.fields.items()}
        others = check_names(entries)
    factors = {one.name: one.data for one in reader.tensors if one.name.startswith("rope_")}
    config = read_config(file, entries, factors)
    model, tokenizer = read_weights(file, config)
    with refusing(str(file)):
        mend_tokenizer(tokenizer, entries)
        check_whole([one for one in reader.tensors if one.name not in factors], entries, model)
    loss = rounding_loss(model, getattr(torch, dtype))
    with torch.device("meta"):  # the same without what transformers keeps of a GGUF file
        plain = type(model)(config)
    plain.load_state_dict(model.to(getattr(torch, dtype)).state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config.update(**read_generation(entries))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}.") as work:
        made, needed = Path(work, folder.name), sum(p.nbytes for p in plain.parameters())
        free = disk_usage(work).free
        try:
            plain.save_pretrained(made)
            tokenizer.save_pretrained(made)
        except Exception as error:  # a full disk: each library raises another
            raise ValueError(f"{folder} can't be written: {error}; {needed:,} bytes are needed, "
                             f"{free:,} are free: make room, or name another folder") from error
        name = type(plain).__name__
        del model, plain
        probe(made)
        made.replace(folder)
    if others:
        print(f"Passed over: {', '.join(others)}")
    size = sum(one.stat().st_size for one in folder.iterdir())
    print(f"{folder}: {name}, {size / 1e6:,.1f} MB in {dtype}, of "
          f"{file.stat().st_size / 1e6:,.1f} MB in {file.name}")
    print(f"What rounding the file's numbers once more changes, relative to them: {loss:.2%}")


def kept(model: str | Path) -> Path:
    """The folder that a file was converted into, or is now. A file of another content, by its size,
    time and last numbers, is another one; so is it after an upgrade, which may have mended a
    conversion. Raises `ValueError` for what can't be converted."""
    file, cache = Path(model).expanduser(), cache_folder()
    if not file.is_file():
        raise ValueError(f"model={str(model)!r}: there is no such file")
    remedy = f"nanoserve convert {file.name} FOLDER, and name the folder"
    if cache is None:
        raise ValueError(f"model={str(model)!r}: there is no cache folder of this user's own to "
                         f"convert it into: {remedy}")
    status = file.stat()
    with file.open("rb") as opened:  # archives give all of their files one time
        opened.seek(-min(status.st_size, LAST), SEEK_END)
        last = opened.read()
    about = digest(last + repr((status.st_size, status.st_mtime_ns, transformers.__version__,
                                nanoserve.__version__)).encode())
    folder = cache / "gguf" / f"{file.stem}-{about}"
    if not folder.exists():
        say(f"{file.name} is converted into {folder}, once. For another dtype or place: {remedy}")
        verbosity = transformers.logging.get_verbosity()
        transformers.logging.set_verbosity_error()  # reports name flags that nobody has set
        try:
            with redirect_stdout(sys.stderr):
                convert(file, folder, DTYPES[0])
        except OSError as error:
            if not folder.exists():  # else another process was faster
                raise ValueError(f"model={str(model)!r} can't be converted into {folder}: {error}: "
                                 f"{remedy}") from error
        finally:
            transformers.logging.set_verbosity(verbosity)
    return folder


def check(file: Path, folder: Path) -> None:
    """Before anything that takes long."""
    if not file.is_file():
        raise ValueError(f"{file}: there is no such file")
    with file.open("rb") as opened:
        if opened.read(4) != b"GGUF":
            raise ValueError(f"{file} is no GGUF file: it does not begin with these letters")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there and not an empty folder: name another")
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        raise ValueError(f"converting needs {' and '.join(missing)}: pip install "
                         "'nanoserve[gguf]', or in a clone pip install -e '.[gguf]'")
    if not hasattr(transformers, "GgufConfig"):
        raise ValueError(f"converting needs transformers 5.23, here is {transformers.__version__}")


def read_config(file: Path, entries: dict, factors: dict) -> transformers.PreTrainedConfig:
    """What the metadata says, for the class that transformers has. The engine must be able to serve
    it."""
    with refusing(f"{file}: {THEIRS} can't read it"):
        base, _ = transformers.PreTrainedConfig.get_config_dict(file.parent, gguf_file=file.name)
        kind = transformers.CONFIG_MAPPING[base["model_type"]]
    with refusing(str(file)):
        config = kind(**read_network(entries, base, kind(), factors))
    if config.architectures is None:
        known = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
        config.architectures = [getattr(known, "__name__", "a model that does not generate")]
    with TemporaryDirectory() as work:
        config.save_pretrained(work)
        read_model(EngineArgs(model=work), Path(work))
    return config


def read_weights(file: Path, config: transformers.PreTrainedConfig,
                 ) -> tuple[torch.nn.Module, transformers.PreTrainedTokenizerBase]:
    with refusing(f"{file}: {THEIRS} can't load it"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            file.parent, gguf_file=file.name, trust_remote_code=False)
        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, config=config, dtype=torch.float32,
            quantization_config=transformers.GgufConfig(dequantize=True),
            output_loading_info=True, ignore_mismatched_sizes=True)  # they are named below
    for name, stored, meant in found.pop("mismatched_keys"):
        raise ValueError(f"{file}: {name} has {list(stored)} numbers, and {list(meant)} by the "
                         "metadata: take another file")
    for what, names in found.items():
        if names:
            named = ", ".join(sorted(names)[:5])
            raise ValueError(f"{file}: {what.replace('_', ' ')} {named}. If it is one part of "
                             "several, join them: llama-gguf-split --merge")
    return model, tokenizer


@contextmanager
def refusing(words: str) -> Iterator[None]:
    """Any error within becomes a `ValueError` with these words and the remedy."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{words}: {error}; use the checkpoint in safetensors") from error


def check_whole(tensors: list, entries: dict, model: torch.nn.Module) -> None:
    """Raises `ValueError` if the file has numbers that nobody asked for, or if RoPE turns another
    part of each head than it says. Layers that only draft (nextn) are left out."""
    arch, layers = entries["general.architecture"], model.config.num_hidden_layers
    drafts = {f"blk.{i}" for i in range(layers, entries[f"{arch}.block_count"])}
    stored = sum(int(one.n_elements) for one in tensors
                 if ".".join(one.name.split(".")[:2]) not in drafts)
    read = sum(p.numel() for p in model.parameters())
    if stored != read:
        raise ValueError(f"{THEIRS} reads {read:,} numbers of {stored:,}")
    turned = entries.get(f"{arch}.rope.dimension_count")
    for name, waves in model.named_buffers():
        if turned and name.endswith("inv_freq") and 2 * len(waves) != turned:
            raise ValueError(f"{arch}.rope.dimension_count={turned}, but the class turns "
                             f"{2 * len(waves)}")


def probe(folder: Path) -> None:
    """Raises `ValueError` unless the engine writes from the folder what transformers' network does,
    both in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    length = min(40, model.config.max_position_embeddings - 4)
    prompt = [i * 7919 % model.config.vocab_size for i in range(length)]
    ends = model.generation_config.eos_token_id or ()
    text = write_reference(model, prompt, ends, 4, NEAR_TIE, dense=True)
    del model
    row = run_mode(folder, BATCHED, [text], 4, device="cpu", tensor_parallel_size=1)
    if row.differ:
        raise ValueError(f"the engine writes another text than transformers: {row.differ[0]}")


def rounding_loss(model: torch.nn.Module, dtype: torch.dtype) -> float:
    """The root of the mean squared change of all matrices, relative to them."""
    changed = total = 0.0
    for weight in (p.data for p in model.parameters() if p.dim() > 1):
        changed += float((weight.to(dtype).float() - weight).square().sum())
        total += float(weight.square().sum())
    return (changed / total) ** 0.5


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="nanoserve convert",
                                     description=__doc__.split("\n")[0])
    parser.add_argument("file", type=Path, metavar="FILE.gguf")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a new one, or an empty one")
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="of the weights in the "
                        "folder; default: bfloat16")
    args = parser.parse_args(argv)
    transformers.logging.set_verbosity_error()  # reports name flags that nobody has set
    try:
        convert(args.file, args.folder, args.dtype)
    except (ValueError, OSError) as error:
        print(f"convert: error: {error}", file=sys.stderr)
        return 2
    return 0
