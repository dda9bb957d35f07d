"""Prefill and decode apart: one engine computes prompts, another one goes on from their KV.

    python -m nanoserve.extras.disaggregated --prompt "Once upon a time" --max-tokens 40

A long prompt makes steps long, and decoding slows down. So large services compute prompts on
machines of their own (Zhong et al. 2024, "DistServe"; Patel et al. 2024, "Splitwise").
What travels between the two is the prompt's KV. Here it travels through a folder that both engines
have as `kv_store`, best one in memory:

    prompt ──► prefill engine ──blocks──► /dev/shm/... ──blocks──► decode engine ──► text
                another process            block_store.py           this process

**Invariant: the first engine can only save time.** The second one gets the same request when the
first has computed it, or has died. It looks for the prompt's blocks as for any prefix, computes
what it does not find (always the last tokens: fewer than a block), and goes on. There are no
leases, because the folder owns its copy, and no time-outs: a first engine that hangs is waited for.

Not known here: blocks, keys, devices. Known limits: two copies through host memory take the place
of one from GPU to GPU; two engines on one CPU share its cores, and only show the idea. Road not
taken: NIXL and similar libraries, which move blocks between GPUs, and then must agree on who may
free which block, and when.
"""

import argparse
import json
import queue
import subprocess
import sys
import threading
from pathlib import Path
from tempfile import TemporaryDirectory

from nanoserve import LLM, SamplingParams
from nanoserve.config import RequestOutputKind
from nanoserve.extras.block_store import BlockStore
from nanoserve.frontend.command import command
from nanoserve.frontend.metrics import say
from nanoserve.frontend.outputs import RequestOutput

PROMPT = ("Once upon a time, in a village by the sea, there was an old fisherman who told "
          "stories to the children every evening, when the boats had come home. One evening ")
MODULE = "nanoserve.extras.disaggregated"
SHARED_MEMORY = Path("/dev/shm")  # where there is one, the folder needs no disk


class Prefiller:
    """The other process. `done` gets the number of each prompt whose blocks are in the folder, and
    None when the process has ended. Ctrl-C is not for it: a group of its own doesn't get it."""

    def __init__(self, options: dict):
        self.messages: queue.Queue[str | None] = queue.Queue()
        self.done: queue.Queue[int | None] = queue.Queue()
        self.send(options)
        self.process = subprocess.Popen([sys.executable, "-m", MODULE, "--prefill"], text=True,
                                        errors="replace", process_group=0,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for work in (self._write, self._listen):
            threading.Thread(target=work, daemon=True).start()

    def send(self, message: object) -> None:
        self.messages.put(json.dumps(message, default=str))

    def _write(self) -> None:
        """A pipe has room for a few prompts: who writes more waits until they are computed."""
        try:
            while (message := self.messages.get()) is not None:
                print(message, file=self.process.stdin, flush=True)
        except OSError:
            pass  # it has died: `done` says so

    def _listen(self) -> None:
        for line in self.process.stdout:
            if line.strip().isdecimal():  # others may print there, too
                self.done.put(int(line))
        self.done.put(None)

    def close(self) -> None:
        """Kill it: nobody waits for what it computes now, and no file is left half-written."""
        self.process.kill()
        self.messages.put(None)
        self.process.wait()


class Disaggregated:
    """Two engines of one model. options: of both; prefill_options: those that differ for the first,
    for example `max_num_batched_tokens`. What KV depends on must be equal (dtype, operators, block
    size, number of ranks), or the second engine finds nothing. When they are closed the folder is
    deleted, unless `kv_store` names it.

    Raises `ValueError` for what the second engine refuses. If the first one can't be made, it says
    why on standard error, and the second computes all prompts.
    """

    def __init__(self, model: str = "storyteller", prefill_options: dict | None = None, **options):
        self.folder = None
        if options.get("kv_store") is None:
            place = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
            self.folder = TemporaryDirectory(prefix="nanoserve-", dir=place)
            options["kv_store"] = self.folder.name
        self.decoder = LLM(model, **options)  # first: it refuses what both would
        self.prefiller: Prefiller | None = Prefiller(
            dict(options, model=model, **(prefill_options or {})))
        self.num_sent = 0

    def generate(self, prompts: str | list, sampling_params: SamplingParams | list | None = None,
                 ) -> list[RequestOutput]:
        """`LLM.generate`: each prompt is decoded here as soon as it was computed there."""
        llm = self.decoder
        requests = llm.make_requests(prompts, sampling_params)
        waiting, inbox, results = dict(enumerate(requests, self.num_sent)), [], {}
        self.num_sent += len(requests)
        for i, request in waiting.items():
            request.params.output_kind = RequestOutputKind.FINAL_ONLY
            if self.prefiller is not None:
                self.prefiller.send([i, request.prompt_token_ids])
        try:
            while waiting or llm.has_unfinished_requests():
                for i in self._computed(waiting, wait=not llm.has_unfinished_requests()):
                    llm.submit(waiting.pop(i), inbox)
                llm.step()
            results = {output.request_id: output for output in inbox}
        finally:
            llm.abort_request([request.request_id for request in requests])
        return [results[request.request_id] for request in requests]

    def _computed(self, waiting: dict, wait: bool) -> list[int]:
        """Which of those waiting may go on; all of them, if nobody computes them any more."""
        found: list[int] = []
        while self.prefiller is not None and waiting:
            try:
                number = self.prefiller.done.get(block=wait and not found)
            except queue.Empty:
                return found
            if number is None:
                say("the prefill engine has ended: prompts are computed by the one that decodes")
                self.prefiller.close()
                self.prefiller = None
            elif number in waiting and number not in found:  # others print numbers, too
                found.append(number)
        return list(waiting)

    def close(self) -> None:
        """End both. Calling it twice is fine."""
        if self.prefiller is not None:
            self.prefiller.close()
            self.prefiller = None
        self.decoder.shutdown()
        if self.folder is not None:
            self.folder.cleanup()

    def __enter__(self) -> "Disaggregated":
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()


def prefill() -> None:
    """The other process: a line of options, then a line for each prompt. One token is asked for,
    and thrown away: it comes when all of the prompt was computed."""
    one_token = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    with LLM(**json.loads(sys.stdin.readline())) as llm:
        for line in sys.stdin:
            number, token_ids = json.loads(line)
            llm.generate([token_ids], one_token, use_tqdm=False)
            llm.extra(BlockStore).flush()
            print(number, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="storyteller")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--max-tokens", type=int, default=40)
    parser.add_argument("--prefill", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.prefill:
        prefill()
        return
    try:
        params = SamplingParams(temperature=0, max_tokens=args.max_tokens)
        with Disaggregated(args.model) as engines:
            output, = engines.generate(args.prompt, params)
            block_size = engines.decoder.config.block_size
    except ValueError as error:
        parser.error(str(error))
    num_found, num_tokens = output.num_cached_tokens, len(output.prompt_token_ids)
    print(args.prompt + output.outputs[0].text)
    print(f"{num_found} of {num_tokens} prompt tokens came from the prefill engine")
    if num_tokens <= block_size:
        print(f"(blocks of {block_size} tokens are handed over: try a longer prompt)")


if __name__ == "__main__":
    with command():
        main()
