"""A GGUF file becomes a folder that this engine serves: config, tokenizer, and plain weights.

    nanoserve convert Qwen3-0.6B-Q8_0.gguf Qwen3-0.6B      then: nanoserve serve Qwen3-0.6B

GGUF (llama.cpp's format) is one file with metadata, a tokenizer, and weights in small blocks, each
with a scale. transformers rebuilds a config from the metadata, and multiplies the blocks out. What
comes out is rounded a second time, to bfloat16; the last line says how much that changes.

Invariants: the folder is there whole, or not at all. What transformers passes over in silence is
an error: it leaves out how RoPE was scaled (by a tensor in Llama 3.1, by metadata with YaRN), and
makes up what one part of a split file lacks. So every number of the file must be in the network. A
network that the engine would refuse is refused before weights are read.

Not known here: how blocks are stored. Confessed: all weights are in memory in float32. Road not
taken: blocks that stay as they are, as in llama.cpp: some thirty kinds, each with products of its
own.
"""

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import transformers

from nanoserve.config import EngineConfig
from nanoserve.llm import read_model

PACKAGES = ("gguf", "accelerate")  # transformers asks for both
DTYPES = ("bfloat16", "float16", "float32")


def convert(file: Path, folder: Path, dtype: str) -> None:
    """Write the folder, and print what came out. Raises `ValueError` for what can't be converted,
    naming the remedy."""
    check(file, folder)
    config = read_config(file)
    model, tokenizer = read_weights(file)
    check_whole(file, config, model)
    loss = rounding_loss(model, getattr(torch, dtype))
    with torch.device("meta"):  # the same without what transformers keeps of a GGUF file
        plain = type(model)(config)
    plain.load_state_dict(model.to(getattr(torch, dtype)).state_dict(), assign=True)
    plain.tie_weights()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}.") as work:
        made = Path(work, "made")
        plain.save_pretrained(made)
        tokenizer.save_pretrained(made)
        made.replace(folder)
    size = sum(one.stat().st_size for one in folder.iterdir())
    print(f"{folder}: {type(model).__name__}, {size / 1e6:,.1f} MB in {dtype}, of "
          f"{file.stat().st_size / 1e6:,.1f} MB in {file.name}")
    print(f"What rounding the file's numbers once more changes, relative to them: {loss:.2%}")


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


def read_config(file: Path) -> transformers.PreTrainedConfig:
    """What transformers makes of the metadata. The engine must be able to serve it."""
    try:
        config = transformers.AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    except Exception as error:  # whatever its parsers raise
        raise ValueError(f"{file}: transformers {transformers.__version__} can't read it: {error}; "
                         "use the checkpoint in safetensors") from error
    if config.architectures is None:
        known = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
        config.architectures = [getattr(known, "__name__", "a model that does not generate")]
    with TemporaryDirectory() as work:
        config.save_pretrained(work)
        read_model(EngineConfig(model=work), Path(work))
    return config


def read_weights(file: Path) -> tuple[torch.nn.Module, transformers.PreTrainedTokenizerBase]:
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            file.parent, gguf_file=file.name, trust_remote_code=False)
        new = hasattr(transformers, "GgufConfig")  # from 5.23 on, it may leave blocks as they are
        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32, output_loading_info=True,
            **dict(quantization_config=transformers.GgufConfig(dequantize=True)) if new else {})
    except Exception as error:
        raise ValueError(f"{file}: transformers {transformers.__version__} can't load it: {error}; "
                         "use the checkpoint in safetensors") from error
    for what, names in found.items():
        if names:
            raise ValueError(f"{file}: {what.replace('_', ' ')} {', '.join(sorted(names)[:5])}. If "
                             "it is one part of several, join them: llama-gguf-split --merge")
    return model, tokenizer


def check_whole(file: Path, config: transformers.PreTrainedConfig,
                model: torch.nn.Module) -> None:
    """Raises `ValueError` if the file has numbers that nobody asked for."""
    from gguf import GGUFReader  # here, where it is known to be there
    reader = GGUFReader(file)
    scaled = [name for name, field in reader.fields.items()
              if name.endswith(".rope.scaling.type") and field.contents() != "none"]
    rope = getattr(config, "rope_parameters", None) or {}
    strange = [one.name for one in reader.tensors if one.name.startswith("rope_")] + [
        name for name in scaled if rope.get("rope_type", "default") == "default"]
    stored = sum(int(one.n_elements) for one in reader.tensors)
    read = sum(p.numel() for p in model.parameters())
    if strange or stored != read:
        raise ValueError(f"{file}: transformers {transformers.__version__} reads {read:,} numbers "
                         f"of {stored:,}, and leaves out {', '.join(strange[:5]) or 'the rest'}: "
                         "texts would differ, so use the checkpoint in safetensors")


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
    try:
        convert(args.file, args.folder, args.dtype)
    except (ValueError, OSError) as error:
        print(f"convert: error: {error}", file=sys.stderr)
        return 2
    return 0
