"""What goes with what, from facts alone: `python -m nanoserve_extras.combinations`.

Prints the tables of docs/extras.md, section "What goes with what". A feature goes with a kind of
model, or with another feature, unless one needs a fact that the other ends (base/facts.py). No
model is read: a kind of model is given by the facts that do not hold for it.
"""

from string import ascii_lowercase

from nanoserve_extras.base.facts import Asked, Fact, Part, clash
from nanoserve_extras.block_store.block_store import BlockStore
from nanoserve_extras.drafts.speculative import Speculation
from nanoserve_extras.foreign.foreign import ENCODER, ForeignNetwork
from nanoserve_extras.forgetting.forgetting import AttentionSinks
from nanoserve_extras.layer_plan.layer_plan import LayerPlan
from nanoserve_extras.lora.lora import LoRA
from nanoserve_extras.multimodal.multimodal import Multimodal
from nanoserve_extras.new_weights import NewWeights
from nanoserve_extras.pooling.pooling import Pooling
from nanoserve_extras.quantization.quantization import Quantization
from nanoserve_extras.recurrent.recurrent import Recurrent
from nanoserve_extras.structured.structured import StructuredOutput
from nanoserve_extras.thinking import ThinkingBudget


def drafts(method: str) -> Speculation:
    return Speculation(speculative_config=dict(method=method, num_speculative_tokens=2))


FEATURES: dict[str, Part] = {
    "the prefix cache": Asked("enable_prefix_caching=True", frozenset(),
                              frozenset([Fact.PREFIX_CACHE])),
    "CUDA graphs": Asked("enforce_eager=False", frozenset(), frozenset([Fact.GRAPHS])),
    "tensor parallelism": Asked("tensor_parallel_size=2", frozenset([Fact.ONE_RANK])),
    "pipeline stages": LayerPlan(),
    "layers on disk": LayerPlan(layer_plan={"disk": 1}),
    "int8, int4": Quantization(quantization="int8"),
    "quantised checkpoints": Quantization(),
    "LoRA": LoRA(),
    "blocks in memory or a folder": BlockStore(kv_offload_bytes=1),
    "caches that forget": AttentionSinks(),
    "drafts from the text": drafts("ngram"),
    "drafts by a model": drafts("draft_model"),
    "EAGLE-3": drafts("eagle3"),
    "MTP": drafts("mtp"),
    "structured output": StructuredOutput(),
    "a budget for thinking": ThinkingBudget(),
    "images, sounds": Multimodal(limit_mm_per_prompt={"image": 1}),
    "pooling": Pooling(),
    "new weights, sleep": NewWeights(),
}


def foreign(*more: Part) -> list[Part]:
    return [Asked("transformers' network", frozenset(), ForeignNetwork.needs), *more]


KINDS: dict[str, list[Part]] = {
    "own dense": [],
    "own mixture": [],
    "transformers' dense": foreign(),
    "hybrid": foreign(Recurrent()),
    "latent": foreign(),
    "multimodal": foreign(Multimodal(limit_mm_per_prompt={"image": 1})),
    "encoder": [Asked("an encoder", ENCODER, ForeignNetwork.needs), Pooling()],
}


def missing(feature: Part, others: list[Part]) -> Fact | None:
    """The first fact that keeps the feature from working with all of these; None if it works."""
    for other in others:
        is_same = type(other) is type(feature) and not isinstance(other, Asked)
        if not is_same and clash(feature, other) is not None:
            return next(fact for fact in Fact
                        if fact in feature.needs & other.ends | other.needs & feature.ends)
    return None


LETTER = dict(zip(Fact, ascii_lowercase, strict=False))


def table(rows: dict[str, Part], columns: dict[str, list[Part]]) -> list[str]:
    """A table in Markdown. A letter in a cell names the missing fact."""
    lines = ["| | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    for name, feature in rows.items():
        cells = [missing(feature, others) for others in columns.values()]
        lines.append(f"| {name} | " + " | ".join(
            "yes" if fact is None else LETTER[fact] for fact in cells) + " |")
    return lines


def refused_pairs() -> list[str]:
    """A table in Markdown: for each feature the later ones that it can't be combined with, and the
    letters of the missing facts."""
    lines = ["| feature | does not go with |", "|---|---|"]
    names = list(FEATURES)
    for i, name in enumerate(names):
        facts = {other: missing(FEATURES[name], [FEATURES[other]]) for other in names[i + 1:]}
        refused = [f"{other} ({LETTER[fact]})" for other, fact in facts.items() if fact]
        if refused:
            lines.append(f"| {name} | {', '.join(refused)} |")
    return lines


def legend() -> str:
    used = {fact for one in FEATURES.values() for fact in one.needs | one.ends}
    return "\n".join(f"- {letter}: {fact.value}" for fact, letter in LETTER.items() if fact in used)


def main() -> None:
    seen = {name: one for name, one in FEATURES.items() if name != "images, sounds"}  # a kind
    print("\n".join([*table(seen, KINDS), "", *refused_pairs(), "", legend()]))


if __name__ == "__main__":
    main()
