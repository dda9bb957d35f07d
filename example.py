"""Generate text offline: `python example.py`; with `--trace run.html` a page shows every step."""

import argparse
import re
import time

PROMPTS = {  # each with the seed of a story that is pleasant to read
    "Once upon a time": 9,
    "\"What shall we do now?\" said Alice.": 4,
    "A fox and a crow met by the river, and": 5,
    "There was once a king who had three daughters, and": 2,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="storyteller", help="a folder, a hub id or a GGUF file")
    parser.add_argument("--trace", metavar="FILE", help=".html, or .json for Perfetto")
    args = parser.parse_args()
    from nanoserve import LLM, SamplingParams  # here: it loads torch, which takes seconds

    params = [SamplingParams(temperature=0.7, top_p=0.9, max_tokens=110, seed=seed)
              for seed in PROMPTS.values()]
    traced = {"trace": args.trace} if args.trace else {}  # an option of an extra
    try:
        llm = LLM(args.model, **traced)
    except ValueError as error:  # it says what to do
        parser.error(str(error))
    with llm:
        start = time.perf_counter()
        outputs = llm.generate(list(PROMPTS), params)
        seconds = time.perf_counter() - start
    for output in outputs:
        print(f"\n{until_a_sentence_ends(output.prompt + output.outputs[0].text)}")
    count = sum(len(output.outputs[0].token_ids) for output in outputs)
    print(f"\n{count} tokens of {len(outputs)} stories at once in {seconds:.1f} s, "
          f"{count / seconds:.0f} a second.\nNext: python bench.py measures the speed of many "
          "prompts; nanoserve chat talks to a model.")


def until_a_sentence_ends(text: str) -> str:
    """A story has so many tokens and no more: leave out the sentence in which they end."""
    ends = [match.end() for match in re.finditer(r"[.!?]['\"]*(?=\s|$)", text)]
    return text[:ends[-1]] if ends else text


if __name__ == "__main__":
    try:
        from nanoserve_extras.base.command import command  # Ctrl-C ends it without a traceback
    except ImportError:  # the extras were deleted
        from contextlib import nullcontext as command
    with command():
        main()
