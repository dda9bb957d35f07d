"""generation_config.json, in which a checkpoint recommends how to sample.

    temperature, top_k, max_new_tokens ...   a request without parameters takes them
    suppress_tokens, bad_words_ids           no request may have these tokens
    num_beams, no_repeat_ngram_size ...      not applied: a line at start-up lists them

The plain engine reads the tokens that end a text from it, and nothing else (model_config.py).
"""

import re

from nanoserve.config import SamplingParams

# Entries -> the fields of `SamplingParams` that they give values for.
RECOMMENDED = dict(temperature="temperature", top_k="top_k", top_p="top_p", min_p="min_p",
                   repetition_penalty="repetition_penalty", max_new_tokens="max_tokens",
                   min_new_tokens="min_tokens", stop_strings="stop")
# Entries that are not applied: first those that change texts unless they have this value, then
# those that never do.
NEUTRAL = dict(
    do_sample=True, max_length=20, min_length=0, no_repeat_ngram_size=0, epsilon_cutoff=0,
    encoder_no_repeat_ngram_size=0, eta_cutoff=0, diversity_penalty=0, penalty_alpha=0, num_beams=1,
    num_beam_groups=1, num_return_sequences=1, typical_p=1, encoder_repetition_penalty=1,
    length_penalty=1, guidance_scale=1, early_stopping=False, remove_invalid_values=False,
    token_healing=False)
WITHOUT_EFFECT = re.compile(
    "_.*|transformers_version|(bos|eos|pad|decoder_start)_token_id|.*cache.*|return_dict.*|output_.*|"
    "renormalize_logits|.*compile.*|is_assistant|(num_)?assistant_.*|prompt_lookup.*|use_mtp|"
    "max_matching_ngram_size|speculation_type|trust_remote_code|low_memory|prefill_chunk_size|"
    "target_lookbehind|continuous_batching_config|suppress_tokens")


def recommended(entries: dict) -> dict:
    """Fields of `SamplingParams` for which the file has a value."""
    return {ours: entries[theirs] for theirs, ours in RECOMMENDED.items()
            if entries.get(theirs) is not None}


def params_of(found: dict) -> SamplingParams:
    """The file's recommended parameters, else the defaults of `SamplingParams`. Raises
    `ValueError`."""
    try:
        params = SamplingParams(**{"max_tokens": None} | found)
    except ValueError as error:
        raise ValueError("generation_config.json recommends what can't be used "
                         f"({error}): pass sampling_params") from error
    if "max_tokens" not in found:
        params.max_tokens = max(SamplingParams.max_tokens, params.min_tokens)
    return params


def read_suppressed(entries: dict, eos_ids: tuple[int, ...], vocab_size: int) -> list[list[int]]:
    """The tokens that the file forbids for all requests, as bad words of one token:
    `suppress_tokens`, and the entries of `bad_words_ids` that are one token and no EOS. As in
    transformers, ids outside the vocabulary forbid nothing. Raises `ValueError`."""
    try:
        ids = list(entries.get("suppress_tokens") or [])
        words = [list(word) for word in entries.get("bad_words_ids") or []]
    except TypeError:
        ids, words = [None], []  # not lists: refused below
    ids += [word[0] for word in words if len(word) == 1 and word[0] not in eos_ids]
    if any(type(i) is not int for i in ids):
        raise ValueError("generation_config.json: suppress_tokens and bad_words_ids must be "
                         "lists of token ids, and of such lists: correct or remove them")
    return [[i] for i in dict.fromkeys(ids) if 0 <= i < vocab_size]


def not_applied(entries: dict, max_model_len: int) -> list[str]:
    """A line that lists the entries which would change texts and are not applied."""
    found = {name: value for name, value in entries.items()
             if name not in RECOMMENDED and not WITHOUT_EFFECT.fullmatch(name)
             and value is not None and value != [] and value != NEUTRAL.get(name, {})}
    length = found.get("max_length")
    if isinstance(length, int) and length >= max_model_len:
        del found["max_length"]
    if all(len(word) == 1 for word in found.get("bad_words_ids", [])):
        found.pop("bad_words_ids", None)
    shown = ", ".join(f"{name}={value!r:.60}" for name, value in found.items())
    return [f"generation_config.json: not applied: {shown}"] * bool(found)
