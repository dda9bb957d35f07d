"""Generate text offline: `python example.py`, or with your own model and prompts:

    python example.py --model Qwen/Qwen3-0.6B "The capital of France is"
    python example.py --trace run.html     and see in a browser what each step did

Without a model it uses the small story model that comes with nanoserve, which has read 27
children's books and knows nothing else.
"""

import argparse

from nanoserve import LLM, SamplingParams

PROMPTS = [
    "Once upon a time",
    "There was once a king who had three daughters, and",
    "\"What shall we do now?\" said Alice.",
    "The old house at the edge of the wood",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("prompts", nargs="*", default=PROMPTS)
    parser.add_argument("--model", help="folder or hub id; the bundled model without it")
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("--temperature", type=float, default=0.7, help="0 is greedy")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--trace", metavar="FILE", help="record every step: .html to look at, or "
                                                        ".json for Perfetto")
    args = parser.parse_args()

    try:
        llm = LLM(*([args.model] if args.model else []), trace=args.trace)
        params = SamplingParams(temperature=args.temperature, top_p=0.95, seed=args.seed,
                                max_tokens=args.max_tokens)
        outputs = llm.generate(args.prompts, params)
    except ValueError as error:
        parser.error(str(error))
    for output in outputs:
        print(f"\n{output.prompt} =>{output.outputs[0].text}")


if __name__ == "__main__":
    main()
