"""The forms that prompts may have, before anything is known about a vocabulary."""

import pytest

from nanoserve.inputs import as_list

pytestmark = pytest.mark.floor


@pytest.mark.parametrize(("prompts", "expected"), [
    ("Hello", ["Hello"]), ([5, 9], [[5, 9]]), ([[5, 9], [7]], [[5, 9], [7]]),
    ({"prompt": "Hello"}, [{"prompt": "Hello"}]),
    ([{"prompt_token_ids": [5]}, "Hello"], [{"prompt_token_ids": [5]}, "Hello"]),
], ids=str)
def test_one_prompt_is_a_list_of_one(prompts, expected):
    assert as_list(prompts) == expected
