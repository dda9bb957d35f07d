"""Generate text offline: `python example.py`, or with your own model and prompts:

    python example.py --model Qwen/Qwen3-0.6B "The capital of France is"
    python example.py --trace run.html     and see in a browser what each step did

Without a model it uses the small story model that comes with nanoserve, which has read 27
children's books and knows nothing else. With `--trace` and no prompts it writes other stories, in
an engine with little memory: most of them begin with the same words, which are computed once, and
they outgrow the memory, so that the last ones have to give theirs back for a while.
"""

import argparse

from nanoserve.frontend.command import command

PROMPTS = [
    "Once upon a time",
    "There was once a king who had three daughters, and",
    "\"What shall we do now?\" said Alice.",
    "The old house at the edge of the wood",
]
BEGINNING = ("Once upon a time there was an old king who lived with his three daughters in a "
             "castle by the sea, and he was very sad. ")
STORIES = {  # prompt: tokens to generate at most
    BEGINNING + "The eldest daughter said": 70,
    BEGINNING + "One day a poor fisherman came": 40,
    "\"What shall we do now?\" said Alice to the Rabbit, who was looking at a watch.": 90,
    BEGINNING + "Now the cook had a black cat, and the cat": 55,
    "A frog sat by the well": 80,
    BEGINNING + "At night a wolf came to the gate, and it said": 60,
    BEGINNING + "Far out at sea there was a ship,": 30,
    "There was a tailor who had one needle,": 45,
}
# Too little, to see what happens then: the stories want about 40 blocks of 16 tokens.
LITTLE = dict(num_gpu_blocks_override=22, max_num_batched_tokens=48, max_num_seqs=6,
              max_model_len=256)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("prompts", nargs="*")
    parser.add_argument("--model", help="folder or hub id; the bundled model without it")
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("--temperature", type=float, default=0.7, help="0 is greedy")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--trace", metavar="FILE", help="record every step: .html to look at, or "
                        ".json for Perfetto; without prompts of a run made to be looked at")
    args = parser.parse_args()
    from nanoserve import LLM, SamplingParams  # here: it loads torch, which takes seconds

    to_look_at = bool(args.trace) and not args.prompts and not args.model
    prompts = args.prompts or (list(STORIES) if to_look_at else PROMPTS)
    try:
        params = [SamplingParams(
            temperature=args.temperature, top_p=0.95, seed=args.seed, ignore_eos=to_look_at,
            max_tokens=min(args.max_tokens, STORIES[prompt]) if to_look_at else args.max_tokens)
            for prompt in prompts]
        llm = LLM(*([args.model] if args.model else []), trace=args.trace,
                  **(LITTLE if to_look_at else {}))
        outputs = llm.generate(prompts, params)
    except ValueError as error:
        parser.error(str(error))
    for output in outputs:
        print(f"\n{output.prompt} =>{output.outputs[0].text}")


if __name__ == "__main__":
    with command():
        main()
