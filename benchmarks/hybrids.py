"""Layers with a state: which snapshots to keep, and how fast they are beside other engines.

    python -m benchmarks.hybrids               hit rates of chats, without a network: seconds
    python -m benchmarks.hybrids --measure     speed, in turns with transformers: 6 minutes, 8 GB

The first writes its table of docs/extras.md, the second that of docs/benchmarks.md. Speed is that
of Qwen3.5-0.8B's shapes, or of --model, with random weights; another engine takes part with
--against "vLLM's python benchmarks/engines/vllm_cpu.py". All take turns, as
benchmarks/peers.py says. Leave the machine alone meanwhile.

For the hit rates users chat with the scheduler alone. Each has ten turns: 40 new tokens, an answer
of 56, and the next turn begins with all of it. The hit rate is the share of those tokens of earlier
turns that the next one does not compute again. "every boundary" keeps a snapshot wherever one can
be taken, "prompts" at the last boundary of each prompt, and "ours" adds one that moves on with each
sequence.
"""

import argparse
import json
import random
import shlex
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import torch

from benchmarks.peers import Peer, pause
from benchmarks.tables import table, write
from benchmarks.throughput import describe_machine
from benchmarks.workloads import Request
from nanoserve.config import EngineConfig, SamplingParams
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import CoreRequest, Sequence
from nanoserve_extras.recurrent.recurrent_snapshots import Snapshot, Snapshots

DOCS = Path(__file__).parent.parent / "docs"
BEGIN = "<!-- written by benchmarks/hybrids.py -->\n"
USERS, TURNS, NEW, ANSWER, POOLS = (1, 8), 10, 40, 56, (4, 16, 64)


class EveryBoundary(Snapshots):
    """All are alike: none moves on."""

    def take(self, seq: Sequence, end: int) -> Snapshot | None:
        snapshot = super().take(seq, end)
        if snapshot is not None:
            snapshot.owner = None
        return snapshot


class Prompts(Snapshots):
    def take(self, seq: Sequence, end: int) -> Snapshot | None:
        return super().take(seq, end) if end < len(seq.token_ids) else None


RULES = {"every boundary": EveryBoundary, "prompts": Prompts, "ours": Snapshots}


def hit_rate(rule: type[Snapshots], num_snapshots: int, num_users: int) -> float:
    """Users type at their own pace: each turn comes in a random order, two at a time."""
    rng, known, cached = random.Random(0), 0, 0
    config = EngineConfig(model="none", max_num_batched_tokens=2048, max_num_seqs=8)
    scheduler = Scheduler(config, num_blocks=2000)
    snapshots = rule(scheduler, config.max_num_seqs, num_snapshots)
    chats: list[list[int]] = [[] for _ in range(num_users)]
    for turn in range(TURNS):
        order = rng.sample(range(num_users), num_users)
        for i in range(0, num_users, 2):
            seqs = []
            for user in order[i:i + 2]:
                prompt = chats[user] + [rng.randrange(1000) for _ in range(NEW)]
                seqs.append(Sequence(CoreRequest(f"{turn}.{user}", SamplingParams(), user,
                                                 max_num_tokens=len(prompt) + ANSWER), prompt))
                scheduler.add(seqs[-1])
            run(scheduler, snapshots, rng)
            for user, seq in zip(order[i:i + 2], seqs, strict=True):
                known, cached = known + len(chats[user]), cached + seq.num_cached_tokens
                chats[user] = seq.token_ids
    snapshots.check()
    return cached / known


def run(scheduler: Scheduler, snapshots: Snapshots, rng: random.Random) -> None:
    while scheduler.has_unfinished():
        step = scheduler.schedule()
        snapshots.plan(step)
        accepted = scheduler.update(step, [rng.randrange(1000) for _ in step.sampling])
        snapshots.updated(step, accepted)
        snapshots.ended([seq for seq in accepted if seq.finish_reason])


def count() -> None:
    head = ["users", "rule", *(f"{size} snapshots" for size in POOLS)]
    rows = [[str(users), name, *(f"{hit_rate(rule, size, users):.0%}" for size in POOLS)]
            for users in USERS for name, rule in RULES.items()]
    show([head, *rows], DOCS / "extras.md", BEGIN)


def show(rows: list[list[str]], page: Path, begin: str, said: str = "") -> None:
    print(said + table(rows))
    if page.exists() and begin:
        write(page, said + table([rows[0], ["---"] * len(rows[0]), *rows[1:]]), begin)


# ----------------------------------------------------------------------- speed

SPEED = "<!-- written by benchmarks/hybrids.py --measure -->\n"
SHAPES = dict(  # Qwen3.5-0.8B's
    architectures=["Qwen3_5ForCausalLM"], model_type="qwen3_5_text", dtype="bfloat16",
    vocab_size=248320, hidden_size=1024, intermediate_size=3584, num_hidden_layers=24,
    num_attention_heads=8, num_key_value_heads=2, head_dim=256, linear_num_key_heads=16,
    linear_num_value_heads=16, linear_key_head_dim=128, linear_value_head_dim=128,
    linear_conv_kernel_dim=4, max_position_embeddings=4096, tie_word_embeddings=True,
    rope_parameters=dict(rope_type="default", rope_theta=1e7, partial_rotary_factor=0.25))
ENGINES = Path(__file__).parent / "engines"
OPTIONS = dict(max_num_seqs=16, num_gpu_blocks_override=128, model_impl="transformers")
# What is asked: requests, tokens in, tokens out; and of the answer, whether more is better.
ASKED = {"one stream: decode tok/s": (1, 32, 24, lambda run: run["decode_tok_s"], True),
         "16 streams: output tok/s": (16, 32, 16, lambda run: run["output_tok_s"], True),
         "a prompt of 512: TTFT s": (1, 512, 2, lambda run: run["ttft"]["mean"], False)}


def measure(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as made, ExitStack() as stack:
        folder = args.model or Path(made)
        if args.model is None:
            (folder / "config.json").write_text(json.dumps(SHAPES))
        ours = [dict(OPTIONS, **dict(quantization=kind) if kind else {})
                for kind in (None, "int8", "int4")]
        commands = [[sys.executable, str(ENGINES / "ours.py"), "--exported", json.dumps(options)]
                    for options in ours]
        commands += [[sys.executable, str(ENGINES / "hf.py")], *map(shlex.split, args.against)]
        peers = [stack.enter_context(Peer(shlex.join(command), [
            *command, "--model", str(folder), "--max-model-len", "1024", "--threads",
            str(torch.get_num_threads())])) for command in commands]
        found = in_turns(peers, args.rounds)
    names = [*("nanoserve" + f", {kind}" * bool(kind) for kind in (None, "int8", "int4")),
             *(peer.name for peer in peers[3:])]
    rows = [["", *ASKED]]
    for i, name in enumerate(names):
        cells = []
        for title, runs in found.items():
            ratios = sorted((a / b if ASKED[title][-1] else b / a) for a, b in zip(
                runs[i], runs[3], strict=True))
            spread = f" ({statistics.median(ratios):.2f}: {ratios[0]:.2f} to {ratios[-1]:.2f})"
            cells.append(f"{statistics.median(runs[i]):.3g}" + spread * (i != 3))
        rows.append([name, *cells])
    machine = describe_machine(torch.device("cpu"))
    said = (f"{machine['date']}, {machine['cpu']}, {torch.get_num_threads()} threads, medians of "
            f"{args.rounds} rounds; in brackets how many times as good as transformers, the median "
            "and the range:\n\n")
    show(rows, DOCS / "benchmarks.md", "" if args.model else SPEED, said)


def in_turns(peers: list[Peer], rounds: int) -> dict[str, list[list[float]]]:
    """For each of `ASKED` and each peer, the figures of all rounds."""
    rng, found = random.Random(0), {}
    for title, (number, inputs, outputs, figure, _) in ASKED.items():
        requests = [Request([rng.randrange(1, 1000) for _ in range(inputs)], outputs)
                    for _ in range(number)]
        found[title] = [[] for _ in peers]
        for turn in range(rounds + 1):  # the first one is not counted
            for peer, figures in zip(peers, found[title], strict=True):
                pause(*(one.cpu_seconds for one in peers))
                run = peer.run(requests)
                if turn:
                    figures.append(figure(run))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--model", type=Path, help="a folder with config.json")
    parser.add_argument("--against", action="append", default=[], metavar="COMMAND")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    measure(args) if args.measure else count()


if __name__ == "__main__":
    main()
