"""What a request may ask for: every default, every refusal, and the arithmetic of a sequence.

The oracle is the documented API (vLLM's names and defaults), copied here as plain tables: a default
that drifts, a bound that moves or a field that is accepted and ignored fails a row. Needs no torch.
"""

import dataclasses
import math
import re

import numpy as np
import pytest
from helpers import sequence

from nanoserve.config import RequestOutputKind, SamplingParams
from nanoserve.sequence import Step

pytestmark = pytest.mark.floor
DEFAULTS = dict(
    n=1, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0, temperature=1.0,
    top_p=1.0, top_k=0, min_p=0.0, seed=None, stop=[], stop_token_ids=[], ignore_eos=False,
    max_tokens=16, min_tokens=0, logprobs=None, prompt_logprobs=None, detokenize=True,
    skip_special_tokens=True, include_stop_str_in_output=False,
    output_kind=RequestOutputKind.CUMULATIVE, logit_bias=None, allowed_token_ids=None,
    bad_words=None, logits_processors=None, extra_args=None, thinking_token_budget=None,
    structured_outputs=None)


def test_the_defaults_are_the_documented_ones():
    assert dataclasses.asdict(SamplingParams()) == DEFAULTS


# (arguments, the field whose name and value the message must contain)
OUT_OF_RANGE = [
    (dict(temperature=-0.1), "temperature"), (dict(temperature=math.nan), "temperature"),
    (dict(temperature=math.inf), "temperature"), (dict(temperature="0.7"), "temperature"),
    (dict(temperature=None), "temperature"), (dict(temperature=True), "temperature"),
    (dict(presence_penalty=-2.1), "presence_penalty"),
    (dict(presence_penalty=2.1), "presence_penalty"),
    (dict(presence_penalty=math.nan), "presence_penalty"),
    (dict(frequency_penalty=-2.1), "frequency_penalty"),
    (dict(frequency_penalty=2.1), "frequency_penalty"),
    (dict(repetition_penalty=0.0), "repetition_penalty"),
    (dict(repetition_penalty=math.nan), "repetition_penalty"),
    (dict(repetition_penalty=math.inf), "repetition_penalty"),
    (dict(repetition_penalty=1e-40), "repetition_penalty"),  # 0 in float32: 1 / 0 is no number
    (dict(top_p=0.0), "top_p"), (dict(top_p=1.01), "top_p"), (dict(top_p=math.nan), "top_p"),
    (dict(top_k=-2), "top_k"), (dict(top_k=1.5), "top_k"), (dict(top_k=True), "top_k"),
    (dict(min_p=-0.01), "min_p"), (dict(min_p=1.01), "min_p"), (dict(min_p=math.nan), "min_p"),
    (dict(ignore_eos="false"), "ignore_eos"), (dict(detokenize="no"), "detokenize"),
    (dict(skip_special_tokens=None), "skip_special_tokens"),
    (dict(include_stop_str_in_output="x"), "include_stop_str_in_output"),
    (dict(logit_bias={5: 1, "5": 2}), "logit_bias"), (dict(n=10 ** 9), "n"), (dict(n=0), "n"),
    (dict(n=1.0), "n"), (dict(n=2, temperature=0), "n"),
    (dict(max_tokens=0), "max_tokens"), (dict(max_tokens=-5), "max_tokens"),
    (dict(max_tokens=2.5), "max_tokens"),
    (dict(min_tokens=-1), "min_tokens"), (dict(min_tokens=9, max_tokens=8), "min_tokens"),
    (dict(logprobs=-2), "logprobs"), (dict(logprobs=1.5), "logprobs"),
    (dict(prompt_logprobs=-2), "prompt_logprobs"),
    (dict(seed=1.5), "seed"), (dict(seed="7"), "seed"),
    (dict(stop=5), "stop"), (dict(stop=""), "stop"), (dict(stop=["fine", ""]), "stop"),
    (dict(stop=["fine", 3]), "stop"), (dict(stop="###", detokenize=False), "stop"),
    (dict(stop_token_ids=5), "stop_token_ids"),
    (dict(stop_token_ids=np.array(5)), "stop_token_ids"),  # has `__iter__`, and no members
    (dict(stop_token_ids=[-1]), "stop_token_ids"),
    (dict(stop_token_ids=["</s>"]), "stop_token_ids"),
    (dict(bad_words=[""]), "bad_words"), (dict(bad_words=["fine", " "]), "bad_words"),
    (dict(bad_words="word"), "bad_words"), (dict(bad_words=[7]), "bad_words"),
    (dict(bad_words=7), "bad_words"), (dict(allowed_token_ids=[]), "allowed_token_ids"),
    (dict(allowed_token_ids=7), "allowed_token_ids"),
    (dict(allowed_token_ids=[1, -1]), "allowed_token_ids"),
    (dict(allowed_token_ids=["1"]), "allowed_token_ids"),
    (dict(allowed_token_ids=[True]), "allowed_token_ids"),
    (dict(logits_processors=["f"]), "logits_processors"),
    (dict(logits_processors=[dict]), "logits_processors"),  # its objects can't be called
    (dict(logits_processors=max), "logits_processors"), (dict(output_kind="DELTA"), "output_kind"),
]


@pytest.mark.parametrize(("arguments", "field"), OUT_OF_RANGE, ids=lambda value: str(value))
def test_bad_values_are_refused_by_name_and_value(arguments, field):
    with pytest.raises(ValueError) as error:
        SamplingParams(**arguments)
    message = str(error.value)
    assert re.search(rf"\b{field}\b", message), message
    # The value itself, or, for a single string, the list it has become.
    value = arguments[field]
    assert repr(value) in message or repr([value]) in message, message


@pytest.mark.parametrize("arguments", [
    dict(temperature=0, max_tokens=1), dict(temperature=2.1), dict(temperature=1e300),
    dict(top_p=1), dict(top_p=1e-9), dict(top_k=-1), dict(top_k=0), dict(top_k=10 ** 6),
    dict(min_p=0), dict(min_p=1.0), dict(n=1, temperature=0), dict(n=64), dict(max_tokens=None),
    dict(seed=-1), dict(seed=2 ** 70), dict(stop_token_ids=[0]), dict(stop=[]), dict(stop=()),
    dict(bad_words=[]), dict(logit_bias={}), dict(stop_token_ids=(3, 4)),
], ids=str)
def test_values_on_the_edge_of_what_is_allowed_are_accepted(arguments):
    SamplingParams(**arguments)


@pytest.mark.parametrize(("params", "index", "bad_words", "waits", "controls", "num_scored"), [
    (dict(), 0, [], False, False, 0),
    (dict(repetition_penalty=1.5), 0, [], True, True, 0),
    (dict(presence_penalty=-1), 0, [], True, True, 0),
    (dict(frequency_penalty=1), 0, [], True, True, 0),
    (dict(min_tokens=3), 0, [], False, True, 0),  # it is a count, which is known in advance
    (dict(logprobs=0), 0, [], False, True, 0),
    (dict(logit_bias={3: 1}), 0, [], False, True, 0),
    (dict(allowed_token_ids=[3]), 0, [], False, True, 0),
    (dict(logits_processors=[max]), 0, [], True, True, 0),
    (dict(thinking_token_budget=0), 0, [], True, True, 0),
    (dict(bad_words=["a"]), 0, [[3], [4]], False, True, 0),
    (dict(bad_words=["a"]), 0, [[3], [4, 5]], True, True, 0),
    (dict(prompt_logprobs=0), 0, [], False, False, 3),  # what follows token 3 is not the prompt's
    (dict(prompt_logprobs=2, n=2), 1, [], False, False, 0),
], ids=str)
def test_what_a_sequence_needs(params, index, bad_words, waits, controls, num_scored):
    """Whether its next token depends on the value of the last one decides if it may be ahead of the
    host; and a sample without controls must not cost the sampler a look."""
    seq = sequence("7", [1, 2, 3, 4], SamplingParams(**params), index=index, bad_word_ids=bad_words)
    assert (seq.request.needs_output_tokens, seq.request.has_controls, seq.num_prompt_logprobs) == (
        waits, controls, num_scored)
    assert seq.needs_all_positions == (num_scored > 0)
    seq.token_ids.append(5)  # its prompt has been scored by now
    assert not seq.needs_all_positions


@pytest.mark.parametrize(("bias", "named"), [
    ([5], "[5]"), ({-1: 1}, "-1"), ({1.5: 1}, "1.5"), ({"x": 1}, "'x'"), ({" 5": 1}, "' 5'"),
    ({True: 1}, "True"),
    ({5: math.nan}, "nan"), ({5: math.inf}, "inf"), ({5: -math.inf}, "-inf"), ({5: 100.1}, "100.1"),
    ({5: -101}, "-101"), ({5: "1"}, "'1'"), ({5: True}, "True"), ({5: None}, "None"),
], ids=str)
def test_a_bad_logit_bias_is_refused_by_key_or_value(bias, named):
    with pytest.raises(ValueError, match=rf"logit_bias.*{re.escape(named)}"):
        SamplingParams(logit_bias=bias)


def test_unknown_fields_raise():
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=0.5)


@pytest.mark.parametrize(("given", "kept"), [
    ("###", ["###"]), (["a", "b"], ["a", "b"]), (("a",), ["a"]), ([], []), (None, [])], ids=str)
def test_stop_becomes_a_list_of_its_own(given, kept):
    params = SamplingParams(stop=given)
    assert params.stop == kept
    assert params.stop is not given  # the caller's list may change later


@pytest.mark.parametrize("temperature", [0.001, 0.0099, 1e-30])
def test_a_tiny_temperature_is_raised_with_a_warning(temperature):
    with pytest.warns(UserWarning, match=rf"temperature={temperature}.*0\.01") as caught:
        params = SamplingParams(temperature=temperature)
    assert params.temperature == 0.01
    assert caught[0].filename == __file__  # it points at the caller's line, not into the engine


@pytest.mark.parametrize("temperature", [0, 0.0, 0.01, 0.5])
def test_other_temperatures_are_kept_without_a_word(temperature, recwarn):
    assert SamplingParams(temperature=temperature).temperature == temperature
    assert not recwarn.list


def test_a_changed_field_is_checked_again_by_replace():
    """The engine copies parameters with `replace`: a field set to nonsense afterwards is found."""
    params = SamplingParams()
    params.top_p = 7.0
    with pytest.raises(ValueError, match="top_p.*7.0"):
        dataclasses.replace(params)


# ---------------------------------------------------------------- a sequence


@pytest.mark.parametrize("drafts, sampled, stops, expected", [
    ([5, 6, 7], [5, 6, 9, 4], (), [5, 6, 9]), ([5, 6, 7], [5, 6, 7, 4], (), [5, 6, 7, 4]),
    ([5, 6, 7], [1, 6, 7, 4], (), [1]), ([5], [5, 5], (), [5, 5]),
    ([5, 6, 7], [5, 6, 7, 4], (6,), [5, 6]), ([5, 6, 7], [5, 6, 7, 4], (4,), [5, 6, 7, 4]),
    ([5, 6, 7], [8, 6, 7, 4], (8,), [8])])
def test_what_a_row_with_drafts_comes_to(drafts, sampled, stops, expected):
    """The drafts that came out, and one token more. The other row has no drafts."""
    seq, other = (sequence("0", [1], SamplingParams(), stop_ids=frozenset(stops)) for _ in "ab")
    step = Step(0, {other: 1, seq: 1 + len(drafts)}, [0, 0], [other, seq], {seq: drafts})
    assert step.outcome([3, *sampled]) == {other: [3], seq: expected}
    assert step.samples() == [other] + [seq] * (1 + len(drafts))


def test_numbers_of_numpy_are_numbers():
    params = SamplingParams(temperature=np.float32(0.5), max_tokens=np.int64(5), seed=np.int64(3),
                            top_p=np.float64(0.5), stop_token_ids=np.array([3, 4]))
    assert (params.temperature, params.max_tokens, params.seed) == (0.5, 5, 3)
    assert params.stop_token_ids == [3, 4]
    assert [type(x) for x in (params.temperature, params.max_tokens, params.seed)] == [
        float, int, int]
