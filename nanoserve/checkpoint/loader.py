"""safetensors to parameters: find the files, rename, fuse, and prove that nothing was missed.

A checkpoint is one `model.safetensors`, or several shards with an index that says which tensor lies
in which file. Files are read one tensor at a time straight from the page cache, so that loading
needs the model's size and one tensor, never two models.

    model.layers.0.self_attn.k_proj.weight   the checkpoint's name
          layers.0.self_attn.qkv_proj  "weight"  part "k"      module, parameter, part of its rows

With tensor parallelism each rank reads the same files, and copies from each tensor the share that
is its own: a file is mapped, so that the rest is never read, and no rank ever holds all weights.

Invariant: **every part of every parameter is written exactly once.** A tensor that has no place, a
place that gets no tensor, and a tensor that comes twice are errors with names. Engines that skip
this check answer with random text when a glob finds nothing (nano-vllm #97).

Not known here: devices, what a share is, what the weights are for. Road not taken: pickled `.bin`
checkpoints, which can run code when they are loaded.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from tqdm import tqdm

from nanoserve.layers import RMSNorm
from nanoserve.checkpoint.model_config import ModelConfig

# What the engine computes in one go: the checkpoint's name -> (module, part).
FUSED = {"q_proj": ("qkv_proj", "q"), "k_proj": ("qkv_proj", "k"), "v_proj": ("qkv_proj", "v"),
         "gate_proj": ("gate_up_proj", "gate"), "up_proj": ("gate_up_proj", "up"),
         "q_norm": ("qk_norm", "q"), "k_norm": ("qk_norm", "k")}
UNFUSED = {fused: leaf for leaf, fused in FUSED.items()}
# A mixture's experts are one module here and a module each in the file, and Mixtral has its own
# names for everything about them.
EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)$")
EXPERT_PARTS = {"gate_proj": ("gate_up_proj", "gate"), "up_proj": ("gate_up_proj", "up"),
                "down_proj": ("down_proj", "down")}
EXPERT_PARTS |= {w: EXPERT_PARTS[leaf] for w, leaf in
                 (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj"))}

DUMMY_NUMBERS = 2 ** 20 + 7  # odd, so that the rows of a matrix differ


def load_weights(model: nn.Module, config: ModelConfig, folder: Path,
                 show_progress: bool = True, unused: tuple[str, ...] = ()) -> None:
    """Fill `model` from the safetensors files in `folder`. unused: the beginnings of tensors' names
    that may be there and are passed over.

    The books are kept in one set: all places there are, from which each tensor takes its own. What
    finds none, or finds it taken, is left over; what remains at the end is missing.

    Raises `ValueError` naming the file or the tensor that is missing, left over or of wrong shape.
    """
    missing, tied_head = _expected(model), None
    for file, name, tensor in _tensors(folder, show_progress):
        if name.startswith(unused):
            continue
        if _is_redundant(name, config):
            tied_head = (file, tensor) if name == "lm_head.weight" else tied_head
            continue
        piece = _piece(name)
        if piece not in missing:
            raise ValueError(f"{file}: the tensor {name} has no place in {config.architecture} "
                             "with this config.json, or comes twice")
        module_name, parameter, part = piece
        try:
            model.get_submodule(module_name).weight_loader(parameter, tensor, part)
        except ValueError as error:
            raise ValueError(f"{file}: the tensor {name} does not match config.json: {error}") \
                from None
        missing.remove(piece)
    if missing:
        names = sorted(_checkpoint_name(*piece) for piece in missing)
        raise ValueError(f"{folder}: {len(missing)} tensors are missing from the checkpoint: "
                         f"{', '.join(names[:5])}{' ...' if len(names) > 5 else ''}")
    if tied_head is not None:
        _check_tied(model, *tied_head)
    _finish(model)


def _check_tied(model: nn.Module, file: Path, head: torch.Tensor) -> None:
    """A copy of the embedding may stay where it is. A head of its own, in spite of what config.json
    says, was trained: without it the text is fluent and wrong."""
    embedding = model.get_submodule("embed_tokens")
    share = head[embedding.tokens.start:embedding.tokens.stop].to(embedding.weight)
    if not torch.equal(share, embedding.weight):
        raise ValueError(f"{file}: lm_head.weight is not the embedding, although config.json says "
                         "tie_word_embeddings: set that to false, hf_overrides will do")


@torch.no_grad()
def load_dummy_weights(model: nn.Module, seed: int) -> None:
    """Random weights that keep activations at a sensible size; for benchmarks and tests.

    Each parameter has a seed of its own, so that what all ranks must have alike (a router) is
    alike. Equal shares of a matrix are alike, too: it is not the model that one rank would have.
    A large one repeats its first million numbers: half a billion would take half a minute.
    """
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            seed += 1
            if isinstance(module, RMSNorm):
                parameter.fill_(0 if module.offset else 1)
            else:
                generator = torch.Generator(parameter.device).manual_seed(seed)
                deviation = max(parameter.shape[-1], 1) ** -0.5  # a share may be empty
                numbers = parameter.new_empty(min(parameter.numel(), DUMMY_NUMBERS)).normal_(
                    0, deviation, generator=generator)
                for part in parameter.view(-1).split(DUMMY_NUMBERS):
                    part.copy_(numbers[:len(part)])
    _finish(model)


def _parts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that own weights, by name."""
    for name, module in model.named_modules():
        if any(True for _ in module.parameters(recurse=False)):
            assert hasattr(module, "weight_loader"), f"{name} has no weight_loader"
            yield name, module


def _expected(model: nn.Module) -> set[tuple[str, str, str | None]]:
    """Everything that must be written: (module, parameter, part) triples."""
    return {(name, *piece) for name, module in _parts(model) for piece in module.pieces()}


def _piece(name: str) -> tuple[str, str, str | None]:
    """Where a checkpoint's tensor belongs, by its name."""
    name = name.removeprefix("model.").replace(".block_sparse_moe.", ".mlp.")
    path, _, parameter = name.rpartition(".")
    if (expert := EXPERT.match(path)) and expert[3] in EXPERT_PARTS and parameter == "weight":
        stacked, part = EXPERT_PARTS[expert[3]]
        return expert[1], stacked, f"{int(expert[2])}.{part}"
    parent, _, leaf = path.rpartition(".")
    module, part = FUSED.get(leaf, (leaf, None))
    return (f"{parent}.{module}" if parent else module), parameter, part


def _checkpoint_name(module: str, parameter: str, part: str | None) -> str:
    """The inverse of `_piece`, for messages: users know their checkpoint's names, not ours. (An
    expert of Mixtral's is named as the other families would.)"""
    parent, _, leaf = module.rpartition(".")
    if leaf == "experts":
        index, part = part.split(".")
        return f"model.{module}.{index}.{UNFUSED.get((parameter, part), parameter)}.weight"
    path = ".".join(filter(None, (parent, UNFUSED.get((leaf, part), leaf), parameter)))
    return path if path.startswith(("lm_head.", "score.")) else "model." + path


def _is_redundant(name: str, config: ModelConfig) -> bool:
    """Tensors some checkpoints carry although they follow from others: the angles of RoPE (Llama 2
    in its first conversion), and the LM head where it is the embedding."""
    return name.endswith("rotary_emb.inv_freq") or (
        config.tie_word_embeddings and name == "lm_head.weight")


def _tensors(folder: Path, show_progress: bool) -> Iterator[tuple[Path, str, torch.Tensor]]:
    """All tensors of a checkpoint with their files, one in memory at a time.

    The file is mapped, not read: a tensor's pages come from the disk when it is copied into its
    place, and the system may drop them again at once.
    """
    files = _weight_files(folder)
    hide = len(files) == 1 or not show_progress
    for file in tqdm(files, desc="Loading weights", unit="file", disable=hide):
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():
                    yield file, name, opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} can't be read, truncated or damaged: {error}") from error


def _weight_files(folder: Path) -> list[Path]:
    """The files named by the index, or else `model.safetensors`, or else every safetensors file.

    In this order, because some folders hold the same weights twice, in another format's shards.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = [folder / name for name in sorted(set(weight_map.values()))]
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ValueError(f"{index} has no readable weight_map: {error!r}") from None
        absent = [file.name for file in files if not file.exists()]
        if absent:
            raise ValueError(f"{folder}: {index.name} names files that do not exist: "
                             f"{', '.join(absent)}")
        return files
    single = folder / "model.safetensors"
    files = [single] if single.exists() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} holds no *.safetensors file: check the path, or convert the "
                         "checkpoint (load_format='dummy' runs on random weights)")
    return files


def _finish(model: nn.Module) -> None:
    for _, module in _parts(model):
        module.finish_loading()
