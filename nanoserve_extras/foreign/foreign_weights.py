"""The weights of transformers' networks: from a checkpoint's files, or made up; towers left out.

    files ─ towers left out ─► names, tensors of mapped files, quantised matrices to be assembled
      └─► transformers' `from_pretrained`, which knows each class's names, old ones included
            └─ a block of layers has come ─► `done`, which packs it: nothing waits for the others

transformers makes up what is missing, with a warning, and passes over what it doesn't know: fluent
text from random weights. So what it says of the names is read here, and is an error.

A *wrapping* (`...ForConditionalGeneration`) holds a text network and towers for images or sound.
The class that config.json names runs, since only its own `forward` says what it does behind its LM
head; but its towers are taken out: all that is neither the text network that `get_decoder` finds,
nor above it, nor the head.

    network ─┬─ model ─┬─ language_model, and lm_head     filled from the files
             │         └─ vision_tower, projector         one number in place of each tensor while
             └─ lm_head                                   weights are filled in, then nothing

Invariant: every parameter comes from the files exactly once; a parameter of two names has two equal
tensors; towers' tensors are neither read nor missed. To fill the network tensor by tensor would
repeat each class's renamed weights.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import torch
import transformers
from torch import nn
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
)
from transformers.pytorch_utils import Conv1D
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from nanoserve.config import EngineConfig
from nanoserve.loader import Tensors, translated
from nanoserve.parallel import CHECKPOINT_DTYPES
from nanoserve_extras.base.weight_files import adds_nothing, follows, stored_tensors, text_alone
from nanoserve_extras.base.words import in_words
from nanoserve_extras.base.wrappings import check_names
from nanoserve_extras.quantization.quantized_linear import Quantised


def fill(asked: EngineConfig, model_class: type, hf_config: transformers.PreTrainedConfig,
         folder: Path, dtype: torch.dtype, tensors: Tensors | None = None, passed_over: str = "$^",
         left_out: list[int] | None = None, assemble: Callable[[Tensors], Tensors] | None = None,
         kept: dict[str, Quantised] | None = None, has_towers: bool = False,
         done: Callable[[nn.Module, str], None] | None = None, stage: object = None) -> nn.Module:
    """The network with its weights; made up with load_format="dummy", if no `tensors` are given.

    transformers makes up what is missing, with a warning. Here that is an error, and so are
    tensors that are left over or come twice. tensors: in the place of those in the files.
    passed_over: a pattern of unneeded names, there or not. left_out: of a wrapping, takes
    the sizes of its towers' tensors; None to fill towers, if it has_towers. assemble: makes weights
    of a quantised checkpoint's tensors, or functions that do; those that stay in 4 bits are also
    put into `kept`. done: called with the network and the path of each block whose tensors are in
    their places. stage: a `ForeignStage`, which takes out of a network what is on other ranks.
    """
    stored: dict[str, torch.Tensor | Later] = {}
    with in_words("config.json: transformers can't make this network"):
        absent = stand_ins(model_class, hf_config, dtype, left_out is not None, stage)
    if tensors is None and asked.load_format == "dummy":
        return made_up(asked.seed, model_class, hf_config, dtype, absent, left_out is not None)
    if tensors is None:
        check_names(folder, model_class.__name__, has_towers or left_out is not None)
        tensors = stored_tensors(folder, asked.load_format, show_progress=True)
    tensors = tensors if left_out is None else text_alone(tensors, left_out)
    tensors = tensors if stage is None else stage.pass_over(tensors)
    for file, name, tensor in assemble(tensors) if assemble else tensors:
        if name in stored:
            raise ValueError(f"{file}: the tensor {name} comes twice")
        stored[name] = tensor if isinstance(tensor, torch.Tensor) else Later(
            tensor, translated(name), kept)
    with in_words(f"{folder}: the weights do not match config.json"):  # in their number, say
        network, found = make_network(model_class, hf_config, stored | absent, dtype,
                                      left_out is not None, done)
    found["mismatched_keys"] = [f"{name} {[*has]}, not {[*wanted]}"
                                for name, has, wanted in found["mismatched_keys"]]
    found["unexpected_keys"] = [
        name for name in found["unexpected_keys"]
        if not (name in stored and (follows(name, stored[name]) or
                                    assemble and adds_nothing(name, stored[name])))]
    for what, names in found.items():
        if names := [name for name in map(str, names) if not re.search(passed_over, name)]:
            words = what.replace("_keys", " tensors").replace("_", " ")
            raise ValueError(f"{folder}: {words} for {model_class.__name__}: "
                             f"{', '.join(sorted(names)[:5])}")
    check_weights(network, stored, folder)
    if assemble and any(type(module) is Conv1D or getattr(module, "was_transposed", False)
                        for module in network.modules()):
        raise ValueError(f"{folder}: quantised weights of {model_class.__name__}, whose matrices "
                         "are stored transposed, are not supported: use the unquantised checkpoint")
    return network


class Later:
    """A quantised matrix in the place of a tensor: it is made when transformers wants its numbers.
    One that stays in 4 bits is put into `kept` then."""

    dtype = torch.float32

    def __init__(self, make: Callable[[], torch.Tensor | Quantised], name: str,
                 kept: dict[str, Quantised]):
        self.make, self.name, self.kept = make, name, kept

    def __getitem__(self, everything: object) -> torch.Tensor:
        whole = self.make()
        if isinstance(whole, Quantised):
            self.kept[self.name], whole = whole, whole[:]
        return whole


# How quantised checkpoints call what is joined to an expert's rows of a layer's one parameter.
EXPERTS = {"gate_up_proj": ["gate_proj.weight", "up_proj.weight"],
           "down_proj": ["down_proj.weight"]}
BLOCK = re.compile(r".+?\.\d+(?=\.)")  # model.layers.3 in model.layers.3.mlp.experts.0.up_proj


@register_quantizer("nanoserve")
class Pieces(HfQuantizer, ConversionOps):
    """transformers' page of hooks for those who round weights while they are read. Here it tells
    when a block is complete: when a matrix of the next one has come. It asks for one matrix after
    the other then; without such a hook it reads and converts all of them ahead."""

    is_trainable = False

    def __init__(self, config: QuantizationConfigMixin, **options):
        super().__init__(config, **options)
        self.come: set[str] = set()
        self.block: str | None = None

    def is_serializable(self) -> bool:
        return False

    def param_needs_quantization(self, model: nn.Module, name: str, **others) -> bool:
        """Until it has come: then its shape is checked as that of any other. Vectors are left out,
        and what a class keeps in a dtype of its own: transformers would convert it."""
        one = model.get_parameter_or_buffer(name)
        return name not in self.come and one.dim() > 1 and one.dtype == model.dtype

    def update_weight_conversions(self, weight_conversions: list, model: nn.Module) -> list:
        """They hold each expert by itself, also of classes that know a layer's experts in one
        tensor alone (Gemma 4, where Model Optimizer says moe.experts)."""
        if any("experts.*." in str(one.source_patterns) for one in weight_conversions):
            return weight_conversions
        return [*weight_conversions, WeightRenaming(r"\.moe\.experts\.(?=\d)", ".experts."), *(
            WeightConverter([f"experts.*.{part}" for part in parts], f"experts.{name}",
                            [MergeModulelist(dim=0), Concatenate(dim=1)][:len(parts)])
            for name, parts in EXPERTS.items())]

    def get_quantize_ops(self) -> ConversionOps:
        return self

    def convert(self, tensors: dict, *, model: nn.Module, full_layer_name: str, **others) -> dict:
        self.come.update(tensors)
        found = BLOCK.match(full_layer_name)
        if found is not None and found[0] != self.block:
            before, self.block = self.block, found[0]
            if before and not any(one.is_meta for one in model.get_submodule(
                    before).state_dict().values()):
                with suppress(Exception):  # transformers hides it: `take_over` meets it again
                    self.quantization_config.done(model, before)
        return tensors


def check_weights(network: nn.Module, stored: dict[str, torch.Tensor], folder: Path) -> None:
    """Weights must be plain floats, and tied ones be stored once or twice alike: transformers takes
    two that differ, and config.json says that they don't."""
    # Names are in any dialect. Some buffers are integers, and have at most two dimensions; a tensor
    # with more holds the matrices of all experts.
    for name, tensor in stored.items():
        if tensor.dtype not in CHECKPOINT_DTYPES and (
                name.endswith(("weight", "bias")) or tensor.dim() > 2):
            raise ValueError(f"{folder}: {name} is {tensor.dtype}: quantised weights are not "
                             "supported")
    for name, other in network.get_expanded_tied_weights_keys(all_submodels=True).items():
        if network.get_parameter_or_buffer(name) is not network.get_parameter_or_buffer(other):
            raise ValueError(f"{folder}: {name} is not {other}, although config.json says "
                             "tie_word_embeddings: set that to false, hf_overrides will do")


def made_up(seed: int, model_class: type, hf_config: transformers.PreTrainedConfig,
            dtype: torch.dtype, absent: dict[str, torch.Tensor], has_towers: bool) -> nn.Module:
    """transformers' own random weights. Raises `ValueError` with what its class says of a config, a
    padding id beyond the vocabulary for one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        said = transformers.logging.get_verbosity()
        transformers.logging.set_verbosity_error()  # it lists each tensor that is made up
        try:
            with in_words("config.json: transformers can't make this network"):
                return make_network(model_class, hf_config, absent, dtype, has_towers)[0]
        finally:
            transformers.logging.set_verbosity(said)


# -------------------------------------------------------------------- towers


def text_config_of(hf_config: transformers.PreTrainedConfig) -> transformers.PreTrainedConfig:
    """The sizes of the text network; `hf_config` itself where that is all there is."""
    return hf_config.get_text_config(decoder=True)


def text_class(model_class: type, hf_config: transformers.PreTrainedConfig,
               ) -> tuple[type, transformers.PreTrainedConfig]:
    """The class to run, and its config. Gemma 3n's wrapping embeds the tokens of images in each
    step, and its tower needs another package (timm): its class for text alone takes its place.
    Gemma 4 Unified makes masks in which tokens of an image see each other, and a text has none."""
    text = text_config_of(hf_config)
    if hf_config.model_type == "gemma4_unified":
        text.use_bidirectional_attention = None
    if hf_config.model_type != "gemma3n":
        return model_class, hf_config
    text.dtype = text.dtype or hf_config.dtype
    return transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(text)], text


def outside_of_text(network: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Each tower as (the module above it, its name there); towers may be single parameters."""
    text, head = network.get_decoder(), network.get_output_embeddings()
    [path] = [path for path, module in network.named_modules() if module is text]
    above = network
    for step in path.split("."):
        for name, child in above.named_children():
            if name != step and child is not head:
                yield above, name
        for name, _ in above.named_parameters(recurse=False):
            yield above, name
        above = getattr(above, step)


def towers_of(network: nn.Module) -> set[nn.Module]:
    """All modules within towers."""
    return {part for above, name in outside_of_text(network) if name in above._modules
            for part in getattr(above, name).modules()}


def make_network(model_class: type, hf_config: transformers.PreTrainedConfig,
                 stored: dict[str, torch.Tensor], dtype: torch.dtype,
                 has_towers: bool, done: Callable | None = None) -> tuple[nn.Module, dict]:
    """transformers' network with the stored weights, and what it says was missing or left over,
    without towers if it has some. done: see `fill`."""
    options = {}
    if done is not None:
        options["quantization_config"] = QuantizationConfigMixin("nanoserve")
        options["quantization_config"].done = done
    network, found = model_class.from_pretrained(
        None, config=hf_config, state_dict=stored, dtype=dtype, output_loading_info=True,
        ignore_mismatched_sizes=True, **options)
    if done is not None:
        network.hf_quantizer.remove_quantization_config(network)
    if has_towers:
        drop_towers(network)
    return network, found


def stand_ins(model_class: type, hf_config: transformers.PreTrainedConfig, dtype: torch.dtype,
              has_towers: bool, stage: object) -> dict[str, torch.Tensor]:
    """All that lies in towers, or on other ranks, by transformers' names: each tensor is one
    number, seen often. Without them transformers would draw random weights."""
    if not has_towers and stage is None:
        return {}
    with torch.device("meta"):
        network = model_class(hf_config)
    shapes = {name: tensor.shape for name, tensor in network.state_dict().items()}
    if has_towers:
        drop_towers(network)
    if stage is not None:
        stage.take(network)
    return {name: torch.zeros((), dtype=dtype).expand(shapes[name])
            for name in shapes.keys() - network.state_dict().keys()}


def drop_towers(network: nn.Module) -> None:
    for above, name in [*outside_of_text(network)]:
        setattr(above, name, None)
