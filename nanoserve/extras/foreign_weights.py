"""The weights of transformers' networks: from a checkpoint's files, or made up.

    files ─ towers left out ─ a quantised matrix assembled ─► names and tensors
      └─► transformers' `from_pretrained`: it knows each class's names, old ones included

transformers makes up what is missing, with a warning, and passes over what it doesn't know: fluent
text from random weights. So what it says of the names is read here, and is an error.

Invariant: every parameter comes from the files exactly once; a parameter of two names has two equal
tensors. Not known here: attention, layers, steps. Road not taken: to fill the network tensor by
tensor, which would repeat each class's table of renamed weights.
"""

import re
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from torch import nn
from transformers.pytorch_utils import Conv1D

from nanoserve.checkpoint.loader import (
    Tensors,
    adds_nothing,
    stored_tensors,
    text_alone,
    translated,
)
from nanoserve.checkpoint.wrappings import check_names
from nanoserve.config import EngineConfig
from nanoserve.extras.int4_linear import Grouped
from nanoserve.extras.towers import make_network
from nanoserve.parallel.ranks import CHECKPOINT_DTYPES


def made_up(make: Callable[[], nn.Module], asked: EngineConfig) -> nn.Module:
    """A network with transformers' own random weights. Raises `ValueError` with what its class says
    of a config, a padding id beyond the vocabulary for one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(asked.seed)
        said = transformers.logging.get_verbosity()
        transformers.logging.set_verbosity_error()  # it lists each tensor that is made up
        try:
            return make()
        except Exception as error:
            raise ValueError(f"config.json: transformers can't make this network: {error!s:.500}"
                             ) from error
        finally:
            transformers.logging.set_verbosity(said)


def fill(model_class: type, hf_config: transformers.PreTrainedConfig, folder: Path,
         load_format: str, dtype: torch.dtype, passed_over: str = "$^",
         left_out: list[int] | None = None, assemble: Callable[[Tensors], Tensors] | None = None,
         kept: dict[str, Grouped] | None = None, tensors: Tensors | None = None,
         has_towers: bool = False) -> nn.Module:
    """transformers makes up what is missing, with a warning. Here that is an error, and so are
    tensors that are left over or come twice. passed_over: a pattern of names that nobody needs,
    there or not. left_out: of a wrapping, takes the sizes of its towers' tensors; None to fill
    towers, if it has_towers. assemble: makes weights of a quantised checkpoint's tensors; those
    that stay in 4 bits are also put into `kept`. tensors: in the place of those in the files.
    """
    stored: dict[str, torch.Tensor] = {}
    if tensors is None:
        check_names(folder, model_class.__name__, has_towers or left_out is not None)
        tensors = stored_tensors(folder, load_format, show_progress=True)
    tensors = tensors if left_out is None else text_alone(tensors, left_out)
    for file, name, tensor in assemble(tensors) if assemble else tensors:
        if name in stored:
            raise ValueError(f"{file}: the tensor {name} comes twice")
        if isinstance(tensor, Grouped):
            kept[translated(name)], tensor = tensor, tensor[:]
        stored[name] = tensor.to(dtype) if assemble else tensor
    try:
        network, found = make_network(model_class, hf_config, stored, dtype, left_out is not None)
    except Exception as error:  # shapes that don't match, for one
        raise ValueError(f"{folder}: the weights do not match config.json: {error}") from error
    for what, names in found.items():
        if names := [name for name in map(str, names) if not re.search(passed_over, name)
                     and not (assemble and name in stored and adds_nothing(name, stored[name]))]:
            words = what.replace("_keys", " tensors").replace("_", " ")
            raise ValueError(f"{folder}: {words} for {model_class.__name__}: "
                             f"{', '.join(sorted(names)[:5])}")
    check_weights(network, stored, folder)
    if assemble and any(type(module) is Conv1D for module in network.modules()):
        raise ValueError(f"{folder}: quantised weights of {model_class.__name__}, whose matrices "
                         "are stored transposed, are not supported: use the unquantised checkpoint")
    return network


def check_weights(network: nn.Module, stored: dict[str, torch.Tensor], folder: Path) -> None:
    """Weights must be plain floats. One parameter may be stored under several names, as embedding
    and head are; these tensors must be equal, or one of them was trained and is lost."""
    for name, tensor in stored.items():  # in any dialect of names; some buffers are integers
        if name.endswith(("weight", "bias")) and tensor.dtype not in CHECKPOINT_DTYPES:
            raise ValueError(f"{folder}: {name} is {tensor.dtype}: quantised weights are not "
                             "supported")
    copies: dict[int, str] = {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        if name not in stored:
            continue
        other = copies.setdefault(id(parameter), name)
        if not torch.equal(stored[name], stored[other]):
            raise ValueError(f"{folder}: {name} is not {other}, although config.json says "
                             "tie_word_embeddings: set that to false, hf_overrides will do")
