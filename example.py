"""Generate text offline: `python example.py`; with `--trace run.html` a page shows every step."""

import argparse

from nanoserve.command import command

PROMPTS = [
    "Once upon a time",
    "There was once a king who had three daughters, and",
    "\"What shall we do now?\" said Alice.",
    "The old house at the edge of the wood",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="storyteller", help="a folder, a hub id or a GGUF file")
    parser.add_argument("--trace", metavar="FILE", help=".html, or .json for Perfetto")
    args = parser.parse_args()
    from nanoserve import LLM, SamplingParams  # here: it loads torch, which takes seconds

    params = SamplingParams(temperature=0.7, top_p=0.95, max_tokens=100, seed=1)
    traced = {"trace": args.trace} if args.trace else {}  # an option of an extra
    try:
        llm = LLM(args.model, **traced)
    except ValueError as error:  # it says what to do
        parser.error(str(error))
    with llm:
        for output in llm.generate(PROMPTS, params):
            print(f"\n{output.prompt} =>{output.outputs[0].text}")


if __name__ == "__main__":
    with command():
        main()
