"""What goes with what: the page agrees with the facts, and clashes fail before work starts."""

import re

import pytest
from pages import read

from nanoserve import LLM
from nanoserve.hooks import Extra
from nanoserve_extras.base.facts import Asked, Fact, clash, facts_of
from nanoserve_extras.combinations import FEATURES, KINDS, legend, missing, refused_pairs, table
from nanoserve_extras.lora.lora import LoRA
from nanoserve_extras.trace.recorder import Recorder

PAGE = read("docs/extras.md")
PLAIN = Asked("a plain engine", frozenset())
PAIRS = [(feature, kind) for feature in FEATURES for kind in KINDS]


def test_the_page_has_both_tables_and_the_facts():
    seen = {name: one for name, one in FEATURES.items() if name != "images, sounds"}
    for part in (*table(seen, KINDS), *refused_pairs(), *legend().split("\n")):
        assert f"\n{part}\n" in PAGE, part


@pytest.mark.parametrize(("feature", "kind"), PAIRS)
def test_each_cell_is_a_sentence_or_an_engine(feature, kind):
    """The engine's own check agrees with the table, and its sentence names both parts."""
    one, others = FEATURES[feature], [part for part in KINDS[kind]
                                      if isinstance(part, Asked) or type(part) is not type(
                                          FEATURES[feature])]
    if (fact := missing(one, KINDS[kind])) is None:
        assert facts_of([one, *others]) == frozenset(Fact).difference(
            one.ends, *(part.ends for part in others))
        return
    with pytest.raises(ValueError) as error:
        facts_of([one, *others])
    said = str(error.value)
    assert fact.value in said or any(other.value in said for other in Fact)
    assert one.name in said and any(part.name in said for part in others)


def test_no_fact_is_without_somebody_who_needs_it_and_somebody_who_ends_it():
    """Otherwise it refuses nothing. `ON_CPU` is ended by an option of the engine's own."""
    parts = [*FEATURES.values(), *(part for kind in KINDS.values() for part in kind)]
    needed = {fact for part in parts for fact in part.needs}
    ended = {fact for part in parts for fact in part.ends}
    assert needed == set(Fact)
    assert ended | {Fact.ON_CPU} == set(Fact)


@pytest.mark.parametrize(("options", "names"), [
    (dict(kv_offload_bytes=2 ** 20, enable_prefix_caching=False),
     ["kv_offload_bytes=1048576", "enable_prefix_caching=False"]),
    (dict(pipeline_parallel_size=2, kv_store="folder"), ["pipeline_parallel_size", "kv_store"]),
    (dict(tensor_parallel_size=2, model_impl="transformers"), ["tensor_parallel_size=2"]),
    (dict(runner="pooling", speculative_config=dict(method="ngram", num_speculative_tokens=2)),
     ["runner='pooling'", "speculative_config"])], ids=str)
def test_an_engine_is_refused_before_its_weights_are_read(options, names, qwen3, monkeypatch):
    from nanoserve.model_runner import ModelRunner

    monkeypatch.setattr(ModelRunner, "__init__", None)
    with pytest.raises(ValueError) as error:
        LLM(qwen3, **options)
    assert all(name in str(error.value) for name in names), error.value
    assert re.search("leave .+ out", str(error.value))


def test_the_remedy_names_what_can_be_left_out():
    model = Asked("a model", frozenset([Fact.KV_ALONE]))
    store = Asked("kv_store='x'", frozenset(), frozenset([Fact.KV_ALONE]))
    said = clash(store, model)
    assert said == clash(model, store) and re.search("kv_store='x'.* a model.*kv_store out", said)
    assert clash(store, PLAIN) is None


class Mine(Extra):
    name, needs = "mine=1", frozenset([Fact.PREFIX_CACHE])


class Takes(Extra):
    name, ends = "takes=1", frozenset([Fact.KV_ALONE])


def test_an_extra_that_joins_later_is_checked_as_one_that_was_there(qwen3):
    """A refused one is not there afterwards, and the engine goes on."""
    with LLM(qwen3, enable_prefix_caching=False) as llm:
        before = [*llm.extras]
        for extra, words in ((Mine(), "mine=1 .* enable_prefix_caching=False"),
                             (Takes(), "takes=1 .* relies on .*all that a sequence keeps")):
            with pytest.raises(ValueError, match=words):
                llm.add(extra)
        assert llm.extras == before
        llm.add(watcher := Extra())
        with pytest.raises(ValueError, match="Extra .*already"):
            llm.add(watcher)
        llm.remove(watcher)
        assert llm.extras == before and llm.generate([1, 2], use_tqdm=False)


@pytest.mark.parametrize("extras", [[Mine], Mine(), 5, [None]],
                         ids=["a class", "no list", "a number", "None"])
def test_what_is_no_extra_is_refused_by_name(extras, qwen3):
    with pytest.raises(ValueError, match="extras must be .*Extra"):
        LLM(qwen3, extras=extras)


def test_an_option_that_an_extra_lacks_is_refused_with_those_that_it_has():
    with pytest.raises(TypeError, match="max_lora: .*max_loras"):
        LoRA(max_lora=2)


def test_an_option_beside_its_extra_says_the_same_or_is_refused(qwen3):
    """It would change nothing."""
    with pytest.raises(ValueError, match="max_loras=2 .*LoRA"):
        LLM(qwen3, enable_lora=True, max_loras=2, extras=[LoRA(max_loras=4)])


def test_a_recorder_without_a_file_is_refused(qwen3):
    with pytest.raises(ValueError, match="needs a file"):
        LLM(qwen3, extras=[Recorder()])


def test_an_extra_that_an_option_stands_for_is_there_once(qwen3):
    with pytest.raises(ValueError, match="enable_lora=True is there already"):
        LLM(qwen3, extras=[LoRA(max_loras=1), LoRA(max_loras=2)])
    with LLM(qwen3, enable_lora=True, max_loras=4, extras=[lora := LoRA(max_loras=4)]) as llm:
        assert llm.extra(LoRA) is lora


def test_an_extra_that_is_handed_over_stands_where_its_option_puts_it(qwen3):
    """Whoever looks at what others have prepared sees it."""
    with pytest.raises(ValueError, match="enable_lora does not go together with stages"):
        LLM(qwen3, model_impl="transformers", pipeline_parallel_size=2, extras=[LoRA()])
