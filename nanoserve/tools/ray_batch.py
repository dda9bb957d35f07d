"""Many machines: a file of prompts through Ray Data, with an engine in each actor.

    python -m nanoserve.tools.ray_batch prompts.txt texts.jsonl --actors 2 --max-tokens 64

    prompts.txt      one prompt a line        ─► batches ─► actor 1: LLM ─┐
    texts.jsonl      {"prompt", "text", ...}  ◄─ in order ◄ actor 2: LLM ─┘

Ray distributes: it starts an actor for each engine, on as many machines as its cluster has, hands
batches to free actors, and repeats the batches of a machine that was lost. Nothing of that is done
here; this file is what a user of Ray Data would write, its plain `map_batches` with a class.

Invariant: the results come in the order of the prompts, and a prompt's text does not depend on the
actor that generated it, because its seed is made of its line number in the file.

A batch should be several times as large as what an engine runs side by side (`max_num_seqs`), or
the engine is half empty at the end of each. Not known here: steps, blocks. Road not taken: one
engine over several machines, which a model needs that fits on none; this is for models that do.
"""

import argparse
import json
from pathlib import Path

from nanoserve.config import SamplingParams
from nanoserve.llm import BUNDLED_MODEL, LLM


class Engine:
    """What an actor holds: it is made once, and called with one batch after the other."""

    def __init__(self, model: str, options: dict, sampling: dict):
        self.llm = LLM(model, **options)
        self.sampling = sampling

    def __call__(self, batch: dict) -> dict:
        """Columns in, columns out: `index`, `prompt`; and `text`, `finish_reason`, `num_tokens`."""
        seed = self.sampling["seed"]
        params = [SamplingParams(**self.sampling | dict(seed=seed + int(index)))
                  for index in batch["index"]]
        outputs = [output.outputs[0] for output in self.llm.generate(
            list(map(str, batch["prompt"])), params, use_tqdm=False)]
        return batch | dict(text=[output.text for output in outputs],
                            finish_reason=[output.finish_reason for output in outputs],
                            num_tokens=[len(output.token_ids) for output in outputs])


def generate(prompts: list[str], model: str, options: dict, sampling: dict, num_actors: int,
             batch_size: int, cpus: float | None = None, gpus: float | None = None):
    """Yield a row for each prompt, in their order. cpus, gpus: of each actor; None: as Ray likes.
    """
    import ray  # here: an `Engine` needs none of it
    import ray.data

    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True
    rows = ray.data.from_items([dict(index=i, prompt=p) for i, p in enumerate(prompts)],
                               override_num_blocks=max(1, -(-len(prompts) // batch_size)))
    needs = {name: value for name, value in (("num_cpus", cpus), ("num_gpus", gpus))
             if value is not None}
    yield from rows.map_batches(
        Engine, fn_constructor_args=(model, options, sampling), batch_size=batch_size,
        compute=ray.data.ActorPoolStrategy(size=num_actors), **needs).iter_rows()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("prompts", type=Path, help="one prompt a line; empty lines are passed over")
    add("texts", type=Path, help="one JSON object a line, in the order of the prompts")
    add("--model", default=str(BUNDLED_MODEL))
    add("--actors", type=int, default=2, help="engines; Ray places them on its machines")
    add("--batch-size", type=int, default=256)
    add("--cpus", type=float, help="of each actor")
    add("--gpus", type=float, help="of each actor")
    add("--temperature", type=float, default=0.8)
    add("--max-tokens", type=int, default=128)
    add("--seed", type=int, default=0, help="of the first prompt; the next has one more")
    add("--engine", type=json.loads, default={}, metavar="JSON", help="options of LLM(...)")
    args = parser.parse_args()
    prompts = list(filter(str.strip, args.prompts.read_text(encoding="utf-8").splitlines()))
    sampling = dict(temperature=args.temperature, max_tokens=args.max_tokens, seed=args.seed)
    with args.texts.open("w", encoding="utf-8") as file:
        for row in generate(prompts, args.model, args.engine, sampling, args.actors,
                            args.batch_size, args.cpus, args.gpus):
            del row["index"]
            file.write(json.dumps(row) + "\n")
    print(f"{len(prompts):,} prompts -> {args.texts}")


if __name__ == "__main__":
    main()
