"""Where a checkpoint is, and its weight files to parameters: each tensor is copied to its layer.

A model is named by a folder, a hub id such as "Qwen/Qwen3-0.6B", or a bundled one ("storyteller",
wherever the package is installed). `huggingface_hub` fetches a hub id's files that an engine reads,
keeps them and works offline.

A checkpoint is one `model.safetensors`, or several shards with an index that says which tensor lies
in which file. A file is mapped, so loading needs the model's size and one tensor, never two models;
with tensor parallelism each rank copies from each tensor the share that is its own. Older
checkpoints have `pytorch_model.bin`, a pickle: torch runs the part of that language that makes
tensors and refuses everything else, so that no file can execute anything here.

A layer says itself which tensors fill it: `tensors(path)` yields their names, each with a function
that copies what belongs there (layers.py). Names are those that most checkpoints use; the dialects
of the others are translated here:

    model.layers.0.self_attn.k_proj.weight         layers.0.self_attn.k_proj.weight
    language_model.model.layers.0...               layers.0...       (wrappings, see wrappings.py)
    ...block_sparse_moe.experts.3.w1.weight        ...mlp.experts.3.gate_proj.weight     (Mixtral)
    ...mlp.experts.down_proj                       ...mlp.experts.3.down_proj.weight     (in memory)

Invariant: **every part of every parameter is written exactly once.** A tensor that has no place, a
place that gets no tensor, and a tensor that comes twice are errors with names. Engines that skip
this check answer with random text when a glob finds nothing (nano-vllm #97).
"""

import pickle
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from tqdm import tqdm

from nanoserve.model_config import ModelConfig, inside, read_json
from nanoserve.wrappings import check_names, is_text

# How other files spell the names that layers know: applied in this order.
DIALECTS = [(r"^(model\.)?((language_model|text_model)\.)?(model\.)?", ""),
            (r"\.block_sparse_moe\.", ".mlp."),
            (r"(\.experts\.\d+)\.w1\.", r"\1.gate_proj."),
            (r"(\.experts\.\d+)\.w2\.", r"\1.down_proj."),
            (r"(\.experts\.\d+)\.w3\.", r"\1.up_proj.")]
# A layer's experts as transformers 5 has them in memory, and a trainer sends them: two tensors.
JOINED = re.compile(r"(.*\.experts)\.(gate_up|down)_proj")
# By load_format: the names without and with an ending for shards, the preferred format first.
FORMATS = {"safetensors": [("model.safetensors", "*.safetensors")],
           "pt": [("pytorch_model.bin", "pytorch_model*.bin")]}
FORMATS["auto"] = FORMATS["safetensors"] + FORMATS["pt"]
# Buffers that older files carry, see `follows`.
ROPE_TABLES = re.compile(r"(rotary\w*|rope)\.(\w*inv_freq|freqs|(cos|sin)\w*)$|\bfreqs_cis$")
MASKS = re.compile(r"(attn|attention)\.(bias|mask|causal_mask)$")
DRAFT_LAYERS = "mtp_layers."  # MiMo's layers for drafts, which no token needs
DUMMY_NUMBERS = 2 ** 20 + 7  # odd, so that the rows of a matrix differ
SECOND_COPIES = ["consolidated*", "original/*"]  # Mistral's and Meta's own files, the same weights
HUB_FILES = ["*.json", "*.model", "*.txt", "*.jinja"]  # always fetched
READ = (".json", ".model", ".txt", ".jinja", ".safetensors", ".bin")
BUNDLED = Path(__file__).parent / "assets"
HUB_CODE = ["*.py", "*.tiktoken"]  # for `trust_remote_code`: code, and its vocabularies
Tensors = Iterator[tuple[Path, str, torch.Tensor]]  # a checkpoint's, each with its file and name


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


def load_weights(model: nn.Module, config: ModelConfig, folder: Path,
                 show_progress: bool = True, unused: tuple[str, ...] = (),
                 load_format: str = "auto",
                 assemble: Callable[[Tensors, dict], Tensors] | None = None,
                 tensors: Tensors | None = None) -> int:
    """Fill `model` from the files in `folder`. unused: beginnings of the names of tensors that are
    skipped. load_format: see FORMATS. assemble: makes weights of a quantised checkpoint's tensors.
    tensors: in the place of those in the files. Returns the bytes of a wrapping's towers, which are
    passed over.

    Raises `ValueError` naming the file or the tensor that is missing, left over or of wrong shape.
    """
    if tensors is None:
        check_names(folder, config.architecture, config.has_towers)
        tensors = stored_tensors(folder, load_format, show_progress)
    left_out = [0]
    if config.has_towers:
        tensors = text_alone(tensors, left_out)
    if config.quantization is not None:
        if assemble is None:
            raise ValueError(f"{folder}: the checkpoint is quantised: set quantization="
                             "'dequantize', or use the unquantised one")
        tensors = assemble(tensors, config.quantization)
    places, tied_head = Places(model), None
    for file, name, tensor in apart(tensors):
        known = translated(name)
        if known.startswith((*unused, DRAFT_LAYERS)):
            continue
        if known == "lm_head.weight" and config.tie_word_embeddings:
            tied_head = file, tensor  # compared last: by then the embedding has come
        elif known in places.missing:
            try:
                places.fill(known, tensor)
            except ValueError as error:
                raise ValueError(f"{file}: the tensor {name} can't fill its place in the network "
                                 f"of config.json: {error}") from None
            places.finish_block_of(known)
        elif known in places.expected or not needs_no_place(name, tensor, config):
            raise ValueError(f"{file}: the tensor {name} has no place in {config.architecture} "
                             "with this config.json, or comes twice")
    if tied_head is not None and "embed_tokens.weight" in places.missing:
        places.fill("embed_tokens.weight", tied_head[1])  # safetensors' `save_model` kept this one
    places.check_all_filled(folder)
    if tied_head is not None:
        _check_tied(model, *tied_head)
    finish(module for path, module in model.named_modules() if not block_of(path))
    return sum(left_out)


class Places:
    """The places of a model's tensors.

    `missing` begins with every tensor that the model needs, and each tensor that is read is removed
    from it. A tensor that is not in it is left over, or comes twice; what remains in it at the end
    is missing from the files.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.missing = expected_tensors(model)
        self.expected = frozenset(self.missing)
        self.num_left = Counter(map(block_of, self.missing))  # of each block

    def fill(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a tensor to its place."""
        self.missing.pop(name)(tensor)

    def finish_block_of(self, name: str) -> None:
        """A block whose last tensor this was packs its weights."""
        block = block_of(name)
        self.num_left[block] -= 1
        if block and not self.num_left[block]:
            finish(self.model.get_submodule(block).modules())

    def check_all_filled(self, folder: Path) -> None:
        if not self.missing:
            return
        names = sorted(name if name.startswith(("lm_head.", "score.")) else f"model.{name}"
                       for name in self.missing)
        raise ValueError(f"{folder}: {len(names)} tensors are missing from the checkpoint: "
                         f"{', '.join(names[:5])}{' ...' if len(names) > 5 else ''}")


def block_of(name: str) -> str:
    """layers.3 of layers.3.mlp.up_proj.weight, and nothing of other names."""
    found = re.match(r"layers\.\d+", name)
    return found[0] if found else ""


def finish(modules: Iterable[nn.Module]) -> None:
    """All of their weights are in place: they may pack them, one by one."""
    for module in modules:
        if hasattr(module, "process_weights_after_loading"):
            module.process_weights_after_loading()


def text_alone(tensors: Tensors, left_out: list[int]) -> Tensors:
    """Without the tensors of a wrapping's towers, whose sizes are noted. Nothing of them is read:
    a file is mapped."""
    for file, name, tensor in tensors:
        if is_text(name):
            yield file, name, tensor
        else:
            left_out.append(tensor.nbytes)


def apart(tensors: Tensors) -> Tensors:
    """Each expert's own matrices, (outputs, inputs), where all of a layer come in one tensor."""
    for file, name, tensor in tensors:
        if (joined := JOINED.fullmatch(name)) is None or tensor.dim() != 3:
            yield file, name, tensor
            continue
        names = joined[2].split("_")  # "gate_up": the rows of the one, then those of the other
        for i, expert in enumerate(tensor):
            for matrix, rows in zip(names, expert.chunk(len(names)), strict=True):
                yield file, f"{joined[1]}.{i}.{matrix}_proj.weight", rows


def expected_tensors(model: nn.Module) -> dict[str, Callable[[torch.Tensor], None]]:
    """Every checkpoint tensor that the model needs, with the function that takes it."""
    found: dict[str, Callable[[torch.Tensor], None]] = {}
    for path, module in model.named_modules():
        weights = [name for name, _ in module.named_parameters(recurse=False)]
        assert not weights or hasattr(module, "tensors"), f"nobody would fill {path}.{weights[0]}"
        for name, fill in module.tensors(path) if weights else ():
            assert name not in found, f"two layers want {name}"
            found[name] = fill
    return found


def translated(name: str) -> str:
    """A checkpoint's name for a tensor, in the layers' words."""
    for pattern, replacement in DIALECTS:
        name = re.sub(pattern, replacement, name)
    return name


def needs_no_place(name: str, tensor: torch.Tensor, config: ModelConfig) -> bool:
    """Whether a tensor that no layer takes may be passed over."""
    return follows(name, tensor) or bool(config.quantization) and adds_nothing(name, tensor)


def follows(name: str, tensor: torch.Tensor) -> bool:
    """Whether a tensor that no layer takes follows from config.json: a table of RoPE, a causal mask
    or positions, which older code kept as buffers. Known by its name and its shape: a weight of
    the same name (`attn.bias`) has another."""
    if ROPE_TABLES.search(name):
        return sum(size > 1 for size in tensor.shape) <= 2
    if name.endswith("position_ids"):
        return not tensor.is_floating_point()
    if name.endswith(".masked_bias"):
        return tensor.shape[:2] in ((), (1,), (1, 1))
    return bool(MASKS.search(name)) and tensor.dim() == 4 and tensor.shape[:2] == (1, 1)


def adds_nothing(name: str, tensor: torch.Tensor) -> bool:
    """AutoGPTQ wrote a bias of zeros beside each matrix, also where the model has none."""
    return name.endswith(".bias") and tensor.is_floating_point() and not tensor.float().any()


def _check_tied(model: nn.Module, file: Path, head: torch.Tensor) -> None:
    """A stored head that equals the embedding is ignored. One that differs was trained on its own,
    although config.json says that it's tied: without it the text is fluent but wrong."""
    embedding = model.get_submodule("embed_tokens")
    share = head[embedding.tokens.start:embedding.tokens.stop].to(embedding.weight)
    if share.shape != embedding.weight.shape or (
            not share.is_meta and not torch.equal(share, embedding.weight)):
        raise ValueError(f"{file}: lm_head.weight is not the embedding, although config.json says "
                         "tie_word_embeddings: set that to false, hf_overrides will do")


@torch.no_grad()
def load_dummy_weights(model: nn.Module, seed: int) -> None:
    """Random weights that keep activations at a sensible size; for benchmarks and tests.

    Each parameter has its own seed, so a parameter that all ranks keep whole (a router) is equal on
    all of them. But so are their shares of a matrix: it is another model than on one rank. A large
    parameter repeats its first million numbers, because drawing all of them is slow.
    """
    for module in model.modules():
        if hasattr(module, "make_room"):  # a layer with a weight only while it is loaded
            module.make_room()
        for parameter in module.parameters(recurse=False):
            seed += 1
            if hasattr(module, "neutral"):  # a norm
                parameter.fill_(module.neutral)
            else:
                generator = torch.Generator(parameter.device).manual_seed(seed)
                deviation = max(parameter.shape[-1], 1) ** -0.5  # a share may be empty
                numbers = parameter.new_empty(min(parameter.numel(), DUMMY_NUMBERS)).normal_(
                    0, deviation, generator=generator)
                for part in parameter.view(-1).split(DUMMY_NUMBERS):
                    part.copy_(numbers[:len(part)])
        if hasattr(module, "process_weights_after_loading"):
            module.process_weights_after_loading()


def stored_tensors(folder: Path, load_format: str = "auto",
                   show_progress: bool = False) -> Tensors:
    """All tensors of a checkpoint with their files, one in memory at a time.

    The file is mapped, not read: a tensor's pages come from the disk when it is copied into its
    place, and the system may drop them again at once. Raises `ValueError` naming the file.
    """
    files = _weight_files(folder, load_format)
    # disable=None: tqdm shows the bar on a terminal only.
    hide = True if len(files) == 1 or not show_progress else None
    for file in tqdm(files, desc="Loading weights", unit="file", disable=hide, leave=False):
        read = _read_pickle if file.suffix == ".bin" else _read_safetensors
        try:
            for name, tensor in read(file):
                yield file, name, tensor
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} can't be read, truncated or damaged: {error}") from error


def _read_safetensors(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(file, framework="pt") as opened:
        for name in opened.keys():
            yield name, opened.get_tensor(name)


def _read_pickle(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """torch writes a zip archive since 2020, which can be mapped. An older file is read as a whole.

    Two names may stand for the same memory (a head that is the embedding); each is yielded.
    """
    try:
        tensors = torch.load(file, "cpu", mmap=zipfile.is_zipfile(file), weights_only=True)
    except pickle.UnpicklingError as error:
        wanted = re.search(r"GLOBAL (\S+)", str(error))
        if wanted is None:
            raise OSError("it is no pickle of torch's") from error
        raise ValueError(f"{file} asks for {wanted[1]}, which is no tensor and could execute "
                         "anything: get the checkpoint as safetensors, or convert the file where "
                         "you trust it") from error
    except Exception as error:  # torch's and Python's words for half a file, a dozen of them
        raise OSError((str(error) or "it ends too early").partition("\n")[0]) from error
    wrong = tensors if not isinstance(tensors, dict) else next(
        ((name, value) for name, value in tensors.items()
         if not isinstance(name, str) or not isinstance(value, torch.Tensor)), None)
    if wrong is not None:
        raise ValueError(f"{file} must hold a dict of tensors, got {wrong!r:.80}: this is another "
                         "program's format")
    yield from tensors.items()


def _weight_files(folder: Path, load_format: str) -> list[Path]:
    """The files named by an index, or else the one file, or else every file of the format.

    In this order, because some folders hold the same weights twice, in another format's shards.
    """
    for single, pattern in FORMATS[load_format]:
        if (index := folder / f"{single}.index.json").exists():
            return _files_of(index)
        if (folder / single).exists():
            return [folder / single]
        if files := sorted(folder.glob(pattern)):
            return files
    patterns = " or ".join(pattern for _, pattern in FORMATS[load_format])
    raise ValueError(f"{folder} holds no {patterns} file: check the path, or convert the "
                     "checkpoint (a GGUF file is named itself; load_format='dummy' runs on "
                     "random weights)")


def _files_of(index: Path) -> list[Path]:
    """The files that an index names; they must be there, in its folder."""
    try:
        names = sorted({Path(name) for name in read_json(index)["weight_map"].values()})
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{index} has no readable weight_map: {error!r}") from None
    files = [inside(index.parent, name) for name in names]
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise ValueError(f"{index.parent}: {index.name} names files that do not exist: "
                         f"{', '.join(absent)}")
    return files
