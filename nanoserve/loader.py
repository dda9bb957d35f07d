"""From a model's name to its folder, and from weight files to parameters.

A model is named by a folder, a hub id such as "Qwen/Qwen3-0.6B", or a bundled one ("storyteller",
wherever the package is installed). For a hub id, `huggingface_hub` fetches the files that an engine
reads, and keeps them, so that later starts work offline.

A checkpoint is one `model.safetensors`, or several shards. A file is mapped, so loading needs the
model's size and one tensor, never two models; with tensor parallelism each rank copies from each
tensor the share that is its own.

A layer says itself which tensors fill it: `tensors(path)` yields their names, each with a function
that copies what belongs there (layers.py). Names are those that most checkpoints use; the dialects
of the others are translated here:

    model.layers.0.self_attn.k_proj.weight         layers.0.self_attn.k_proj.weight
    model.language_model.layers.0...               layers.0...         (the text part)
    ...block_sparse_moe.experts.3.w1.weight        ...mlp.experts.3.gate_proj.weight     (Mixtral)

Invariant: **every part of every parameter is written exactly once.** A tensor that has no place, a
place that gets no tensor, and a tensor that comes twice are errors that name the tensor. Engines
that skip this check answer with random text when a glob finds nothing (nano-vllm #97).
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

BUNDLED = Path(__file__).parent / "assets"
TEXTS, WEIGHTS = ["*.json", "*.model", "*.txt", "*.jinja"], ["*.safetensors"]
CODE = ["*.py", "*.tiktoken"]  # for `trust_remote_code`: code, and its vocabularies
SECOND_COPIES = ["consolidated*", "original/*"]  # Mistral's and Meta's own files, the same weights
# How other files spell the names that layers know: applied in this order.
DIALECTS = [(r"^(model\.)?((language_model|text_model)\.)?(model\.)?", ""),
            (r"\.block_sparse_moe\.", ".mlp."),
            (r"(\.experts\.\d+)\.w1\.", r"\1.gate_proj."),
            (r"(\.experts\.\d+)\.w2\.", r"\1.down_proj."),
            (r"(\.experts\.\d+)\.w3\.", r"\1.up_proj.")]
ROPE_TABLE = "rotary_emb.inv_freq"  # a buffer in older files, which follows from config.json
TIED = ("embed_tokens.weight", "lm_head.weight")  # two names of one matrix if weights are tied
DUMMY_NUMBERS = 2 ** 20 + 7  # drawn, then repeated; odd, so that a matrix's rows differ
Tensors = Iterator[tuple[Path, str, torch.Tensor]]  # each with its file and name

# ---------------------------------------------------------------- which folder


def find_model(model: str | Path, option: str = "model", weights: bool = True,
               code: bool = False, revision: str | None = None) -> Path:
    """The folder of a model: a local or bundled one, or a hub id's (fetched, or from its cache).

    weights, code: whether to fetch these from the hub, too. revision: a branch, a tag or a commit
    there. Raises `ValueError` if there is no such model, naming the option that it was given with,
    and for a revision of a folder, which has none.
    """
    folder = Path(model).expanduser()
    if not folder.exists() and len(folder.parts) == 1 and (BUNDLED / folder).is_dir():
        folder = BUNDLED / folder
    if not folder.is_dir():
        return fetch(str(model), option, TEXTS + WEIGHTS * weights + CODE * code, revision)
    if revision is not None:
        raise ValueError(f"revision={revision!r} is about hub ids, and {option}={str(model)!r} "
                         "is a folder: leave it out")
    return folder


def fetch(name: str, option: str, patterns: list[str], revision: str | None = None) -> Path:
    """The folder of a hub id, with the files that these patterns match."""
    # Imported here because only a hub id needs it: a local folder works without the package.
    from huggingface_hub import snapshot_download
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns,
                                      ignore_patterns=SECOND_COPIES))
    except Exception as error:  # a network can fail in a dozen ways; the remedy is the same
        reason = (str(error).strip() or "no reason given").splitlines()[0]
        raise ValueError(f"{option}={name!r} is not a local folder, and as a hub id it could "
                         f"not be fetched: {type(error).__name__}: {reason} (without a network: "
                         "fetch it elsewhere, and name its folder)") from error


# ------------------------------------------------------------ files to tensors


def stored_tensors(folder: Path, load_format: str = "auto") -> Tensors:
    """All tensors of a checkpoint with their files, one in memory at a time.

    The file is mapped, not read: a tensor's pages come from the disk when it is copied into its
    place, and the system may drop them again at once. Raises `ValueError` naming the file.
    """
    if load_format == "pt":
        raise ValueError("load_format='pt': nanoserve_extras, which reads pickled weights, is not "
                         "there")
    files = weight_files(folder)
    if not files:
        raise ValueError(f"{folder} holds no *.safetensors file: check the path, or convert the "
                         "checkpoint (load_format='dummy' runs on random weights)")
    return read_safetensors(files)


def weight_files(folder: Path) -> list[Path]:
    """One file, or its shards. In this order, because a folder may hold the same weights twice: in
    a second file (Mistral's "consolidated"), or in another format's shards."""
    for pattern in ("model.safetensors", "model-*.safetensors", "*.safetensors"):
        if files := sorted(folder.glob(pattern)):
            return files
    return []


def read_safetensors(files: Iterable[Path]) -> Tensors:
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():
                    yield file, name, opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} can't be read, truncated or damaged: {error}") from error


# ------------------------------------------------------- tensors to parameters


def load(model: nn.Module, folder: Path, load_format: str, seed: int) -> None:
    """Fill a network from the files in its folder, or with random numbers ("dummy")."""
    if load_format == "dummy":
        load_dummy_weights(model, seed)
    else:
        load_weights(model, stored_tensors(folder, load_format), folder)


def load_weights(model: nn.Module, tensors: Tensors, source: Path) -> None:
    """Fill a `Decoder`, or a network with its `config` and `unused`. source: for messages.

    `missing` begins with every tensor that the model needs, and each tensor that is read is removed
    from it. A tensor that is not in it is left over, or comes twice; what remains in it at the end
    is missing from the files. A decoder layer is packed when its last tensor has come.

    Raises `ValueError` naming the file or the tensor that is missing, left over or of wrong shape.
    """
    missing = expected_tensors(model)
    num_left = Counter(map(layer_of, missing))
    for file, name, known, tensor in needed(model, tensors):
        if known not in missing:
            raise ValueError(f"{file}: the tensor {name} has no place in "
                             f"{model.config.architecture} with this config.json, or comes twice")
        try:
            missing.pop(known)(tensor)
        except ValueError as error:
            raise ValueError(f"{file}: the tensor {name} can't fill its place in the network of "
                             f"config.json: {error}") from None
        layer = layer_of(known)
        num_left[layer] -= 1
        if layer and not num_left[layer]:
            finish(model.get_submodule(layer).modules())
    check_all_filled(missing, source)
    finish(module for path, module in model.named_modules() if not layer_of(path))


def needed(model: nn.Module,
           tensors: Tensors) -> Iterator[tuple[Path, str, str, torch.Tensor]]:
    """The tensors that belong in a layer, each with its name in the file and the layer's."""
    tied = None  # the matrix that is embedding and head
    for file, name, tensor in tensors:
        known = translated(name)
        is_rope_table = known.endswith(ROPE_TABLE) and tensor.dim() == 1
        if is_rope_table or known.startswith(model.unused):
            continue
        if known in TIED and model.config.tie_word_embeddings:
            if tied is not None:
                check_tied(file, tied, tensor)
                continue
            known, tied = TIED[0], tensor
        yield file, name, known, tensor


def check_tied(file: Path, one: torch.Tensor, other: torch.Tensor) -> None:
    """A head that is stored beside the embedding must equal it. One that differs was trained on its
    own, although config.json says that it's tied: without it the text is fluent but wrong."""
    if one.shape != other.shape or not torch.equal(one.to(other), other):
        raise ValueError(f"{file}: lm_head.weight is not the embedding, although config.json says "
                         "tie_word_embeddings: set that to false, hf_overrides will do")


def check_all_filled(missing: Iterable[str], source: Path) -> None:
    names = sorted(name if name.startswith(("lm_head.", "score.")) else f"model.{name}"
                   for name in missing)
    if names:
        raise ValueError(f"{source}: {len(names)} tensors are missing from the checkpoint: "
                         f"{', '.join(names[:5])}{' ...' if len(names) > 5 else ''}")


def expected_tensors(model: nn.Module) -> dict[str, Callable[[torch.Tensor], None]]:
    """Every checkpoint tensor that the model needs, with the function that takes it."""
    found: dict[str, Callable[[torch.Tensor], None]] = {}
    for path, module in model.named_modules():
        if next(module.parameters(recurse=False), None) is not None:
            found.update(module.tensors(path))
    return found


def layer_of(name: str) -> str:
    """The decoder layer of a name: layers.3 for layers.3.mlp.up_proj.weight, "" outside of all."""
    found = re.match(r"layers\.\d+", name)
    return found[0] if found else ""


def finish(modules: Iterable[nn.Module]) -> None:
    """Let modules pack their weights, one module at a time. All of their tensors have come."""
    for module in modules:
        if hasattr(module, "process_weights_after_loading"):
            module.process_weights_after_loading()


def translated(name: str) -> str:
    """A checkpoint's name for a tensor, in the layers' words."""
    for pattern, replacement in DIALECTS:
        name = re.sub(pattern, replacement, name)
    return name


# ---------------------------------------------------------- random weights


@torch.no_grad()
def load_dummy_weights(model: nn.Module, seed: int) -> None:
    """Random weights that keep activations at a sensible size; for benchmarks and tests.

    Each parameter has its own seed, so a parameter that all ranks keep whole (a router) is equal on
    all ranks. But their shares of a matrix are equal, too, so two ranks run another model than one
    does. A large parameter repeats its first million numbers, because drawing all of them is slow.
    """
    for module in model.modules():
        if hasattr(module, "make_room"):  # a layer with a weight only while it is loaded
            module.make_room()
        for parameter in module.parameters(recurse=False):
            seed += 1
            if hasattr(module, "neutral"):  # a norm
                parameter.fill_(module.neutral)
            else:
                fill_at_random(parameter, seed)
        finish([module])


def fill_at_random(parameter: torch.Tensor, seed: int) -> None:
    generator = torch.Generator(parameter.device).manual_seed(seed)
    deviation = max(parameter.shape[-1], 1) ** -0.5  # a share may be empty
    numbers = parameter.new_empty(min(parameter.numel(), DUMMY_NUMBERS)).normal_(
        0, deviation, generator=generator)
    for part in parameter.view(-1).split(DUMMY_NUMBERS):
        part.copy_(numbers[:len(part)])
