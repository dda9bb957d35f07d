"""The weights of transformers' networks: from a checkpoint's files, or made up; towers left out.

    files ─ towers left out ─► names, tensors of mapped files, quantised matrices to be assembled
      └─► transformers' `from_pretrained`, which knows each class's names, old ones included
            └─ a block of layers has come ─► `done`, which packs it: nothing waits for the others

transformers fills missing tensors with random numbers, with a warning, and ignores unknown ones:
the result is fluent text from random weights. So its report about names is read here, and is an
error.

A *wrapping* (`...ForConditionalGeneration`) holds a text network and towers for images or sound.
The class in config.json is run, because only its own `forward` knows the operations after its LM
head. Its towers are removed: all modules except the text network that `get_decoder` finds, the
modules above it, and the head.

    network ─┬─ model ─┬─ language_model, and lm_head     filled from the files
             │         └─ vision_tower, projector         one number in place of each tensor while
             └─ lm_head                                   weights are filled in, then nothing

Invariant: every parameter comes from the files exactly once; a parameter of two names has two equal
tensors; towers' tensors are neither read nor missed. The road not taken: filling the network tensor
by tensor would need each class's renaming rules.
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

    Missing tensors, which transformers would make up, are an error, and so are tensors that are
    left over or come twice. tensors: replace those in the files. passed_over: a pattern of names
    that are not needed. left_out: for a wrapping, a list to which the sizes of its towers' tensors
    are appended; None to fill towers, if it has_towers. assemble: makes weights of a quantised
    checkpoint's tensors, or functions that do; those that stay in 4 bits are also put into `kept`.
    done: called with the network and the path of each block whose tensors are complete. stage: a
    `ForeignStage`, which removes the parts of a network that are on other ranks.
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
    """Stands for a tensor: a quantised matrix that is made when transformers reads its numbers. If
    it stays in 4 bits, it is also put into `kept` then."""

    dtype = torch.float32

    def __init__(self, make: Callable[[], torch.Tensor | Quantised], name: str,
                 kept: dict[str, Quantised]):
        self.make, self.name, self.kept = make, name, kept

    def __getitem__(self, everything: object) -> torch.Tensor:
        whole = self.make()
        if isinstance(whole, Quantised):
            self.kept[self.name], whole = whole, whole[:]
        return whole


# Quantised checkpoints' names of the matrices that form an expert's rows of a layer's parameter.
EXPERTS = {"gate_up_proj": ["gate_proj.weight", "up_proj.weight"],
           "down_proj": ["down_proj.weight"]}
BLOCK = re.compile(r".+?\.\d+(?=\.)")  # model.layers.3 in model.layers.3.mlp.experts.0.up_proj


@register_quantizer("nanoserve")
class Pieces(HfQuantizer, ConversionOps):
    """Uses transformers' hooks for rounding weights while they are read, to learn when a block is
    complete: when a matrix of the next one comes. With these hooks transformers reads one matrix
    after the other; without them it reads and converts all of them ahead."""

    is_trainable = False

    def __init__(self, config: QuantizationConfigMixin, **options):
        super().__init__(config, **options)
        self.come: set[str] = set()
        self.block: str | None = None

    def is_serializable(self) -> bool:
        return False

    def param_needs_quantization(self, model: nn.Module, name: str, **others) -> bool:
        """True for a matrix until it has come; later its shape is checked as any other's. False for
        vectors, and for parameters that a class keeps in its own dtype: they would be converted."""
        one = model.get_parameter_or_buffer(name)
        return name not in self.come and one.dim() > 1 and one.dtype == model.dtype

    def update_weight_conversions(self, weight_conversions: list, model: nn.Module) -> list:
        """Add conversions for files with one tensor per expert, also for classes that only know a
        layer's experts in one tensor (Gemma 4; Model Optimizer writes moe.experts)."""
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
    """Raises `ValueError` unless weights are plain floats, and tied ones are stored once, or twice
    alike: transformers would accept two that differ, against config.json."""
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
    """A network with transformers' own random weights. Raises `ValueError` for configs that its
    class refuses, for example a padding id beyond the vocabulary."""
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
    """The text network's config; `hf_config` itself if it is no wrapping."""
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
    """A network with the stored weights, and transformers' report on missing and unknown names;
    towers, if it has some, are not reported. done: see `fill`."""
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
    """The tensors of towers and of other ranks, by transformers' names: each is one number,
    expanded. Without them transformers would draw random weights."""
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
