"""A GGUF file becomes a folder that this engine serves: config, tokenizer, and weights.

    nanoserve convert Qwen3-0.6B-Q8_0.gguf Qwen3-0.6B      then: nanoserve serve Qwen3-0.6B
    LLM("Qwen3-0.6B-Q8_0.gguf")                            the same, once, in the cache folder
    ... --quantization int4, LLM(..., quantization="int4") the matrices of layers in 4 bits

GGUF (llama.cpp's format) is one file with metadata, a tokenizer, and weights in small blocks, each
with a scale. gguf_entries.py reads the metadata, gguf_weights.py the weights, and transformers the
tokenizer. In int4 the file's own numbers are kept; else they are rounded a second time, to bfloat16
or to few bits. The last lines of output report the rounding.

Invariants: the folder is complete or missing. Every weight of the file is in the network, and every
entry of its metadata is known. A network that the engine would refuse is refused before weights are
read. Before the folder gets its name, the engine's text is compared with that of transformers, if
both networks fit into half of the free memory in float32. At most one shard is in memory.

llama.cpp computes with the blocks themselves: some thirty kinds, each with its own product.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from shutil import disk_usage
from tempfile import TemporaryDirectory

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from tqdm import tqdm

from nanoserve.device import free_cpu_memory
from nanoserve_extras import choose
from nanoserve_extras.base.device import return_freed_memory
from nanoserve_extras.engine_args import EngineArgs
from nanoserve_extras.tools.gguf_entries import (
    check_names,
    read_file,
    read_generation,
    read_network,
    read_tokenizer,
)
from nanoserve_extras.tools.gguf_files import BITS, DTYPES, check_begin, find_file
from nanoserve_extras.tools.gguf_weights import (
    FAMILIES,
    Change,
    Source,
    keeps_8_bits,
    rounded,
    sources,
)
from nanoserve_extras.tools.verify import BATCHED, NEAR_TIE, run_mode, write_reference

PACKAGES = ("gguf",)
SHARD = 2 ** 28  # bytes of weights that wait to be written


def convert(file: Path, folder: Path, dtype: str, quantization: str | None = None) -> None:
    """Write the folder, and print what came out. Raises `ValueError` for what can't be converted,
    naming the remedy."""
    check(file, folder)
    with refusing(str(file), "it may be cut off, or newer than the package gguf: download it "
                  "again, or pip install -U gguf"):
        entries, tensors = read_file(file)
    with refusing(str(file)):
        others = check_names(entries)
        factors = {one.name: one.data.view(np.float32) for one in tensors
                   if one.name.startswith("rope_")}
        tensors = [one for one in tensors if one.name not in factors]
        network = read_network_of(entries, tensors, factors, dtype)
        arch = entries["general.architecture"]
        found = sources(tensors, arch, network, entries.get(f"{arch}.nextn_predict_layers", 0))
        tokenizer = read_tokenizer(entries)
    with TemporaryDirectory() as work:
        network.config.save_pretrained(work)
        choose(EngineArgs(model=work), Path(work))  # the engine must be able to serve it
    network.generation_config.update(**read_generation(entries))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}.") as work:
        made, free = Path(work, folder.name), disk_usage(work).free
        made.mkdir()
        try:
            changes = write_weights(
                made, found, getattr(torch, dtype), quantization, network.config)
            network.config.save_pretrained(made)
            network.generation_config.save_pretrained(made)
            tokenizer.save_pretrained(made)
        except Exception as error:  # a full disk: each library raises another
            raise ValueError(f"{folder} can't be written: {error}; {free:,} bytes were free: make "
                             "room, or name another folder") from error
        size = sum(p.numel() for p in network.parameters())
        if quantization is None and 16 * size < free_cpu_memory():
            probe(made)
        made.replace(folder)
    if others:
        print(f"Passed over: {', '.join(others)}")
    size = sum(one.stat().st_size for one in folder.iterdir())
    print(f"{folder}: {type(network).__name__}, {size / 1e6:,.1f} MB in {quantization or dtype}, "
          f"of {file.stat().st_size / 1e6:,.1f} MB in {file.name}")
    print(*report(changes), sep="\n")


def convert_for_engine(file: Path, folder: Path, dtype: str, quantization: str | None) -> None:
    """`convert` at an engine's start: its report goes to stderr."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # reports name flags that the user has not set
    try:
        with redirect_stdout(sys.stderr):
            convert(file, folder, dtype, quantization)
    finally:
        transformers.logging.set_verbosity(verbosity)


def check(file: Path, folder: Path) -> None:
    """Check the arguments, before anything that takes long."""
    if not file.is_file():
        raise ValueError(f"{file}: there is no such file")
    check_begin(file)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there and not an empty folder: name another")
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        raise ValueError(f"converting needs {missing[0]}: pip install "
                         "'nanoserve[gguf]', or in a clone pip install -e '.[gguf]'")
    if find_spec("transformers.integrations.gguf") is None:
        raise ValueError(f"converting needs transformers 5.23, here is {transformers.__version__}")


def read_network_of(entries: dict, tensors: list, factors: dict, dtype: str) -> torch.nn.Module:
    """transformers' network, on "meta", as the metadata says."""
    arch = entries.get("general.architecture")
    if arch not in FAMILIES:
        raise ValueError(f"architecture {arch} is not supported, but {', '.join(FAMILIES)}")
    family = FAMILIES[arch]
    if arch == "mistral3" and f"{arch}.attention.temperature_scale" not in entries:
        family = FAMILIES["llama"]  # Mistral Small 3
    kind = transformers.CONFIG_MAPPING[family.model_type]
    config = kind(**family.said | read_network(
        entries, {one.name for one in tensors}, kind(), factors), dtype=dtype)
    with torch.device("meta"):
        network = transformers.AutoModelForCausalLM.from_config(config)
    config.architectures = [type(network).__name__]
    turned = entries.get(f"{arch}.rope.dimension_count")
    for name, waves in network.named_buffers():
        if turned and name.endswith("inv_freq") and 2 * len(waves) != turned:
            raise ValueError(f"{arch}.rope.dimension_count={turned}, but the class turns "
                             f"{2 * len(waves)}")
    return network


@contextmanager
def refusing(words: str, remedy: str = "use the checkpoint in safetensors") -> Iterator[None]:
    """Any error within becomes a `ValueError` with these words and the remedy."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{words}: {error}; {remedy}") from error


def write_weights(folder: Path, found: list[Source], dtype: torch.dtype, quantization: str | None,
                  config: transformers.PreTrainedConfig) -> list[Change]:
    """All tensors, in shards, with an index. The config is told of few bits."""
    changes, files = [], {}
    for number, shard in enumerate(shards(found, dtype, quantization, changes)):
        name = f"model-{number:05}.safetensors"
        (file := folder / name).touch()
        mode = file.stat().st_mode
        save_file(shard, file, {"format": "pt"})
        file.chmod(mode)  # the usual mode: safetensors lets only the owner read
        files |= dict.fromkeys(shard, name)
        shard.clear()  # before the next one is made
        return_freed_memory()
    if len({*files.values()}) == 1:
        Path(folder, *{*files.values()}).replace(folder / "model.safetensors")
    else:
        Path(folder, "model.safetensors.index.json").write_text(json.dumps(
            {"metadata": {}, "weight_map": files}))
    if quantization is not None:
        config.quantization_config = dict(quant_method="nanoserve", bits=int(quantization[-1]))
    return changes


def shards(found: list[Source], dtype: torch.dtype, quantization: str | None,
           changes: list[Change]) -> Iterator[dict[str, torch.Tensor]]:
    """Tensors by their names, some hundred MB at a time. changes: one for each is appended."""
    waiting: dict[str, torch.Tensor] = {}
    keep_8 = keeps_8_bits(found)
    for one in tqdm(found, desc="Converting", unit="tensor", disable=None, leave=False):
        for name, stored in one.matrices():
            made, change = rounded(one, name, stored, dtype, quantization, keep_8)
            waiting |= made
            changes.append(change)
            if sum(tensor.nbytes for tensor in waiting.values()) >= SHARD:
                yield waiting
                waiting = {}
    if waiting:
        yield waiting


def report(changes: list[Change]) -> Iterator[str]:
    """A line for each number format: how many numbers, and their error against the file's."""
    for how in dict.fromkeys(one.how for one in changes):
        some = [one for one in changes if one.how == how]
        moved = sum(one.moved for one in some)
        apart = "as the file has them" if not moved else (
            f"rounded: {(moved / sum(one.squares for one in some)) ** 0.5:.2%} from the file's")
        yield (f"  {how}: {sum(one.numbers for one in some) / 1e6:,.1f} million numbers in "
               f"{len(some)} tensors, {apart}")


def probe(folder: Path) -> None:
    """Raises `ValueError` unless the engine writes the same text from the folder as transformers,
    both in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    length = min(40, model.config.max_position_embeddings - 4)
    prompt = [i * 7919 % model.config.vocab_size for i in range(length)]
    ends = model.generation_config.eos_token_id or ()
    text = write_reference(model, prompt, ends, 4, NEAR_TIE, dense=True)
    del model
    with redirect_stderr(StringIO()) as said:  # its line at the start is not the reader's engine
        row = run_mode(folder, BATCHED, [text], 4, device="cpu", tensor_parallel_size=1)
    if row.differ:
        print(said.getvalue(), file=sys.stderr)
        raise ValueError(f"the engine writes another text than transformers: {row.differ[0]}")


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="nanoserve convert",
                                     description=__doc__.split("\n")[0])
    parser.add_argument("file", metavar="FILE.gguf", help="or OWNER/REPOSITORY:Q4_K_M, on the hub")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a new one, or an empty one")
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="of the weights in the "
                        "folder; default: bfloat16")
    parser.add_argument("--quantization", choices=BITS, help="round the matrices of layers")
    args = parser.parse_args(argv)
    transformers.logging.set_verbosity_error()  # reports name flags that the user has not set
    try:
        file = find_file(args.file, "FILE") or Path(args.file)  # which `check` refuses
        convert(file, args.folder, args.dtype, args.quantization)
    except (ValueError, OSError) as error:
        print(f"convert: error: {error}", file=sys.stderr)
        return 2
    return 0
