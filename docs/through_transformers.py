"""The table of `docs/models-through-transformers.md`: networks that are not ours, in every mode.

    python docs/through_transformers.py            makes tiny checkpoints, verifies, writes the page
    python docs/through_transformers.py opt gpt2   prints these rows and writes nothing

Each row is what `python -m nanoserve.tools.verify` finds for one of the checkpoints in
tests/extras/architectures.py: twelve prompts, 24 greedy tokens each, float32, in each mode of one
rank. The oracle is transformers with its own attention. On two cores it takes a few minutes.
"""

import sys
import tempfile
from argparse import Namespace
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = Path(__file__).parent / "models-through-transformers.md"
BEGIN, END = "<!-- written by docs/through_transformers.py -->\n", "<!-- end -->"
sys.path += [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "extras")]
COLUMNS = "| network | modes | texts | tokens | preempted | from the cache | near-ties | differ |"


def row(name: str, folder: Path) -> str:
    """One line of the table; raises `ValueError` where the engine refuses the model."""
    import transformers

    from nanoserve.tools import verify

    args = Namespace(model=str(folder), prompts=None, num_prompts=12, max_tokens=24,
                     dtype="float32", kernels="auto", near_tie=None, tensor_parallel_size=1,
                     model_impl="transformers")
    rows = list(verify.verify(args))
    sums = [sum(numbers) for numbers in zip(*(
        (one.num_texts, one.num_tokens, one.num_preemptions, one.num_cached_tokens,
         len(one.near_ties), len(one.differ)) for one in rows), strict=True)]
    config = transformers.AutoConfig.from_pretrained(folder)
    cells = [f"{config.architectures[0]}", len(rows), *(f"{number:,}" for number in sums)]
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    """Print the rows as they come; write the page when all are there."""
    import torch
    from architectures import ARCHITECTURES, make

    torch.set_num_threads(1)
    wanted, rows = sys.argv[1:] or list(ARCHITECTURES), []
    with tempfile.TemporaryDirectory() as folder:
        for name in wanted:
            rows.append(row(name, make(ARCHITECTURES[name](), Path(folder, name))))
            print(rows[-1], flush=True)
    if not sys.argv[1:]:
        table = "\n".join([COLUMNS, "|---" + "|---:" * 7 + "|", *rows]) + "\n"
        text = PAGE.read_text(encoding="utf-8")
        before, _, rest = text.partition(BEGIN)
        PAGE.write_text(before + BEGIN + table + END + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main()
