"""The forms that prompts may have, before anything is known about a vocabulary."""

from collections import UserDict

import numpy as np
import pytest

from nanoserve import TextPrompt, TokensPrompt
from nanoserve.inputs import as_list, encoded_prompts, one_encoded_prompt

pytestmark = pytest.mark.floor


@pytest.mark.parametrize(("prompts", "expected"), [
    ("Hello", ["Hello"]), ([5, 9], [[5, 9]]), ([[5, 9], [7]], [[5, 9], [7]]),
    (TextPrompt(prompt="Hello"), [{"prompt": "Hello"}]),
    ([TokensPrompt(prompt_token_ids=[5]), "Hello"], [{"prompt_token_ids": [5]}, "Hello"]),
    (UserDict(input_ids=[5, 9]), [[5, 9]]),
    (UserDict(input_ids=[[5, 9], [7]]), [[5, 9], [7]]),
], ids=str)
def test_one_prompt_is_a_list_of_one(prompts, expected):
    assert as_list(prompts) == expected


@pytest.mark.parametrize("kind", [list, np.array], ids=["lists", "arrays"])
def test_padding_is_taken_away_on_either_side(kind):
    encoding = UserDict(input_ids=kind([[0, 0, 5], [7, 8, 0], [1, 2, 3]]),
                        attention_mask=kind([[0, 0, 1], [1, 1, 0], [1, 1, 1]]))
    assert encoded_prompts(encoding) == [[5], [7, 8], [1, 2, 3]]


def test_a_zero_that_is_no_padding_stays():
    assert encoded_prompts(UserDict(input_ids=[0, 5, 0])) == [[0, 5, 0]]
    assert encoded_prompts(UserDict(input_ids=[0, 5], attention_mask=[1, 1])) == [[0, 5]]


def test_several_prompts_in_the_place_of_one_are_refused():
    assert one_encoded_prompt(UserDict(input_ids=[[5, 9]])) == [5, 9]
    with pytest.raises(ValueError, match="2 prompts"):
        one_encoded_prompt(UserDict(input_ids=[[5], [9]]))


def test_another_mapping_names_what_it_lacks():
    with pytest.raises(ValueError, match=r"needs 'input_ids', got \['pixels'\]"):
        as_list(UserDict(pixels=[1]))
