"""`LLM` with everything: extras that come and go while the engine runs."""

import pytest
from small_engine import drain, greedy, make

from nanoserve.hooks import Extra


@pytest.fixture(scope="module")
def engine(qwen3):
    with make(qwen3) as llm:
        yield llm


class Prepares(Extra):
    def prepare(self, plan):
        return plan


class CannotAttach(Extra):
    def attach(self, engine):
        raise RuntimeError("no room")


class Drafts(Extra):
    most_drafts = 3


@pytest.mark.parametrize(("extra", "words"), [
    (Drafts(), "Drafts drafts: .* no overlap, .* extras="),
    (Prepares(), "Prepares can't be added to an engine that runs, .* extras="),
    (Extra, "objects that inherit from Extra, got <class"),
    (None, "objects that inherit from Extra, got None"),
    (CannotAttach(), "no room")], ids=["drafts", "late", "a class", "nothing", "no room"])
def test_an_engine_that_runs_stays_as_it_was_where_an_extra_is_refused(llm, extra, words):
    before = [*llm.extras]
    with pytest.raises((ValueError, RuntimeError), match=words):
        llm.add(extra)
    assert llm.extras == before


def test_a_hook_set_on_an_object_is_called_until_it_is_removed_once(llm):
    extra, steps = Extra(), []
    extra.scheduled = steps.append
    llm.add(extra)
    llm.add_request("one", [5], greedy(2))
    drain(llm)
    assert steps
    llm.remove(extra)
    with pytest.raises(ValueError, match="can't be removed: it is not among llm.extras"):
        llm.remove(extra)


def test_what_only_an_extra_can_do_is_refused_again_without_it(llm):
    class Taking(Extra):
        takes = ("lora_request",)

    llm.add(taking := Taking())
    assert llm.make_request("", [1, 2], lora_request="one").lora_request == "one"
    llm.remove(taking)
    with pytest.raises(ValueError, match="lora_request='one': .*enable_lora=True"):
        llm.make_request("", [1, 2], lora_request="one")
