"""Weight files in the forms in which checkpoints are published: pickles, towers beside the text,
quantised matrices, buffers of older code.

The engine fills a network from safetensors in which each tensor has a place (nanoserve/loader.py).
The generators here turn other files into such tensors, as triples (file, name, tensor):

    stored_tensors     the files that an index names; also `pytorch_model.bin`, a pickle: torch runs
                       the part of that language that makes tensors and refuses everything else, so
                       no file can execute anything
    apart              splits fused experts (two tensors a layer, as transformers 5 and trainers
                       have them in memory) into each expert's matrices
    text_alone         leaves out the towers of a wrapping (wrappings.py)
    assemble           makes weights of quantised matrices (quantization/formats.py)
    without_buffers    leaves out buffers that follow from config.json

Invariant: only tensors that follow from other entries, or that don't belong to the text network,
are left out. The others must fill every parameter once, as the loader demands.
"""

import pickle
import re
import zipfile
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from nanoserve.engine import LLMEngine
from nanoserve.hooks import Extra
from nanoserve.loader import Tensors, expected_tensors, read_safetensors, translated
from nanoserve.progress import say
from nanoserve_extras.base.config_files import read_json
from nanoserve_extras.base.plan import Plan
from nanoserve_extras.base.wrappings import check_names, is_text

# By load_format: the name of a single file and the pattern for shards, the preferred format first.
FORMATS = {"safetensors": [("model.safetensors", "*.safetensors")],
           "pt": [("pytorch_model.bin", "pytorch_model*.bin")]}
FORMATS["auto"] = FORMATS["safetensors"] + FORMATS["pt"]
# All experts of a layer in one tensor.
JOINED = re.compile(r"(.*\.experts)\.(gate_up|down)_proj")
# Buffers that older files carry, see `follows`.
ROPE_TABLES = re.compile(r"(rotary\w*|rope)\.(\w*inv_freq|freqs|(cos|sin)\w*)$|\bfreqs_cis$")
MASKS = re.compile(r"(attn|attention)\.(bias|mask|causal_mask)$")


class WeightFiles(Extra):
    """Makes every rank read its weights by `find_weights`."""

    def prepare(self, plan: Plan) -> Plan:
        self.left_out: list[int] = []
        note = ("text only",) if plan.model_config.has_towers else ()
        return replace(plan, notes=plan.notes + note, parts=replace(
            plan.parts, weights=partial(find_weights, left_out=self.left_out)))

    def attach(self, engine: LLMEngine) -> None:
        """Report how much of a wrapping was left out; transformers' network reports it itself."""
        left_out = sum(self.left_out) or getattr(engine.runner.model, "left_out", 0)
        if left_out:
            say(f"text only, {left_out / 1e9:.2g} GB of towers left out")


def find_weights(model: nn.Module, folder: Path, load_format: str = "auto",
                 given: Tensors | None = None, left_out: list[int] | None = None) -> Tensors:
    """The tensors that fill the engine's own decoder: `given`, or those in its folder. left_out: a
    list to which the sizes of towers' tensors are appended."""
    config = model.config
    if given is None:
        check_names(folder, config.architecture, config.has_towers)
        given = stored_tensors(folder, load_format, model.on.ranks.rank == 0)
    if config.has_towers:
        given = text_alone(given, [] if left_out is None else left_out)
    if config.quantization is not None:
        if model.on.assemble is None:
            raise ValueError(f"{folder}: the checkpoint is quantised: set quantization="
                             "'dequantize', or use the unquantised one")
        given = without_zeros(model.on.assemble(given, config.quantization), model)
    return without_buffers(apart(given))


# ---------------------------------------------------------------------- files


def stored_tensors(folder: Path, load_format: str = "auto",
                   show_progress: bool = False) -> Tensors:
    """All tensors of a checkpoint with their files, one in memory at a time: see the engine's
    function of that name. load_format: see FORMATS. Raises a `ValueError` that names the file."""
    for single, pattern in FORMATS[load_format]:
        if files := weight_files(folder, single, pattern):
            # disable=None: tqdm shows the bar on a terminal only.
            hide = True if len(files) == 1 or not show_progress else None
            bar = tqdm(files, desc="Loading weights", unit="file", disable=hide, leave=False)
            return read_pickles(bar) if single.endswith(".bin") else read_safetensors(bar)
    patterns = " or ".join(pattern for _, pattern in FORMATS[load_format])
    raise ValueError(f"{folder} holds no {patterns} file: check the path, or convert the "
                     "checkpoint (a GGUF file is named itself; load_format='dummy' runs on "
                     "random weights)")


def weight_files(folder: Path, single: str, pattern: str) -> list[Path]:
    """The files named by an index, or else the one file, or else every file of the pattern.

    In this order, because some folders hold the same weights twice, in another format's shards.
    """
    if (index := folder / f"{single}.index.json").exists():
        return files_of(index)
    if (folder / single).exists():
        return [folder / single]
    return sorted(folder.glob(pattern))


def files_of(index: Path) -> list[Path]:
    """The files that an index names. They must exist, in its folder."""
    weight_map = read_json(index).get("weight_map")
    if not weight_map or not isinstance(weight_map, dict):
        raise ValueError(f"{index} has no readable weight_map, got {weight_map!r:.80}")
    files = [inside(index.parent, str(name)) for name in sorted({*map(str, weight_map.values())})]
    for file in files:
        if not file.is_file():
            raise ValueError(f"{index} names a file that does not exist: {file.name}")
    return files


def inside(folder: Path, name: str) -> Path:
    """The path of a file that another file of the folder names. Raises `ValueError` unless it is in
    the folder. A link there may lead out: the hub's cache is made of links."""
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(f"{folder}: {str(name)!r} is named by one of its files and lies outside "
                         "of it: only files in the folder are read")
    return folder / name


def read_pickles(files: Iterable[Path]) -> Tensors:
    for file in files:
        try:
            for name, tensor in read_pickle(file).items():
                yield file, name, tensor
        except OSError as error:
            raise ValueError(f"{file} can't be read, truncated or damaged: {error}") from error


def read_pickle(file: Path) -> dict[str, torch.Tensor]:
    """Since 2020 torch writes a zip archive, which is mapped. An older file is read as a whole.

    Two names may share memory (a tied head and its embedding); both are returned.
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
    except Exception as error:  # half a file raises a dozen kinds of errors
        raise OSError((str(error) or "it ends too early").partition("\n")[0]) from error
    wrong = tensors if not isinstance(tensors, dict) else next(
        ((name, value) for name, value in tensors.items()
         if not isinstance(name, str) or not isinstance(value, torch.Tensor)), None)
    if wrong is not None:
        raise ValueError(f"{file} must hold a dict of tensors, got {wrong!r:.80}: this is another "
                         "program's format")
    return tensors


# --------------------------------------------------------------- what is needed


def text_alone(tensors: Tensors, left_out: list[int]) -> Tensors:
    """Leave out the tensors of a wrapping's towers, and note their sizes. Their data is not read,
    because files are mapped."""
    for file, name, tensor in tensors:
        if is_text(name):
            yield file, name, tensor
        else:
            left_out.append(tensor.nbytes)


def apart(tensors: Tensors) -> Tensors:
    """Split a tensor of all experts of a layer into each expert's matrices, (outputs, inputs).
    Other tensors are unchanged."""
    for file, name, tensor in tensors:
        if (joined := JOINED.fullmatch(name)) is None or tensor.dim() != 3:
            yield file, name, tensor
            continue
        names = joined[2].split("_")  # "gate_up": the rows of gate, then those of up
        for i, expert in enumerate(tensor):
            for matrix, rows in zip(names, expert.chunk(len(names)), strict=True):
                yield file, f"{joined[1]}.{i}.{matrix}_proj.weight", rows


def without_zeros(tensors: Tensors, model: nn.Module) -> Tensors:
    """Leave out biases that the network doesn't have and that are all zeros."""
    expected = expected_tensors(model)
    return (one for one in tensors
            if translated(one[1]) in expected or not adds_nothing(one[1], one[2]))


def without_buffers(tensors: Tensors) -> Tensors:
    return (one for one in tensors if not follows(one[1], one[2]))


def follows(name: str, tensor: torch.Tensor) -> bool:
    """Whether a tensor follows from config.json: a table of RoPE, a causal mask or positions, which
    older code saved as buffers. Name and shape are compared: a weight of the same name
    (`attn.bias`) has another shape."""
    if ROPE_TABLES.search(name):
        return sum(size > 1 for size in tensor.shape) <= 2
    if name.endswith("position_ids"):
        return not tensor.is_floating_point()
    if name.endswith(".masked_bias"):
        return tensor.shape[:2] in ((), (1,), (1, 1))
    return bool(MASKS.search(name)) and tensor.dim() == 4 and tensor.shape[:2] == (1, 1)


def adds_nothing(name: str, tensor: torch.Tensor) -> bool:
    """Whether a bias is all zeros: AutoGPTQ wrote one beside each matrix, even if the model has
    none."""
    return name.endswith(".bias") and tensor.is_floating_point() and not tensor.float().any()
