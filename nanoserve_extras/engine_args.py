"""`EngineArgs`: all options of `LLM(...)` in one record, the engine's own and those of the extras.

    LLM(model, max_num_seqs=8, enable_lora=True) ──► EngineArgs ──part(EngineConfig)──► the engine
                                                        └──────part(LoRAOptions)─────► the extra

Each record is the only place of its options: their names, defaults and rules. This class inherits
from all of them, so the command line, a dict of options and vLLM's `EngineArgs` know the same names
without a second list. Imports no torch.
"""

from dataclasses import dataclass

from nanoserve.config import EngineConfig
from nanoserve.frontend.vllm import takes_vllms_words
from nanoserve_extras.block_store.options import BlockStoreOptions
from nanoserve_extras.drafts.options import DraftOptions
from nanoserve_extras.foreign.options import ForeignOptions
from nanoserve_extras.layer_plan.options import LayerPlanOptions
from nanoserve_extras.lora.options import LoRAOptions
from nanoserve_extras.multimodal.options import MultimodalOptions
from nanoserve_extras.pooling.options import PoolingOptions
from nanoserve_extras.quantization.options import QuantizationOptions
from nanoserve_extras.recurrent.options import RecurrentOptions
from nanoserve_extras.trace.options import TraceOptions


# A record's fields come behind those of the records on its right: the engine's own are the first.
@takes_vllms_words("LLM()", "LLM")
@dataclass(frozen=True, kw_only=True)
class EngineArgs(TraceOptions, BlockStoreOptions, DraftOptions, MultimodalOptions, LayerPlanOptions,
                 PoolingOptions, LoRAOptions, RecurrentOptions, QuantizationOptions, ForeignOptions,
                 EngineConfig):
    """Checked as its parts are: raises `ValueError`, naming the field and the remedy."""
