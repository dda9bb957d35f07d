"""Prefill and decode apart: one engine computes prompts, another one goes on from their KV.

    python -m nanoserve_extras.block_store.disaggregated --prompt "Once upon a time" --max-tokens 40

A long prompt makes steps long, and decoding slows down. So large services compute prompts on
machines of their own (Zhong et al. 2024, "DistServe"; Patel et al. 2024, "Splitwise"). What travels
is the prompt's KV, here through a folder that both engines have as `kv_store`, best in memory:

    prompt ──► prefill engine ──blocks──► /dev/shm/... ──blocks──► decode engine ──► text
                another process            block_store.py           this process

**Invariant: the first engine can only save time.** The second one gets the same request when the
first has computed it, or has died. It looks for the prompt's blocks as for any prefix, computes
what it does not find, and goes on. There are no leases, because the folder owns its copy, and no
time-outs: a first engine that hangs is waited for.

Not known here: blocks, keys, devices. Known limit: two engines on one CPU only show the idea. Road
not taken: libraries like NIXL, which move blocks between GPUs, and must agree on who frees them.
"""

import argparse
import json
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from nanoserve import LLM, SamplingParams
from nanoserve.config import RequestOutputKind
from nanoserve.frontend.command import command
from nanoserve.frontend.metrics import say
from nanoserve.frontend.outputs import RequestOutput
from nanoserve.frontend.request import Request
from nanoserve_extras.block_store.block_store import BlockStore

PROMPT = ("Once upon a time, in a village by the sea, there was an old fisherman who told "
          "stories to the children every evening, when the boats had come home. One evening ")
MODULE = "nanoserve_extras.block_store.disaggregated"
SHARED_MEMORY = Path("/dev/shm")  # where there is one, the folder needs no disk


class Prefiller:
    """The other process, and the thread that asks it for one prompt after the other. Ctrl-C is not
    for the process: a group of its own doesn't get it."""

    def __init__(self, options: dict):
        self.process = subprocess.Popen([sys.executable, "-m", MODULE, "--prefill"], text=True,
                                        errors="replace", process_group=0,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.thread, self.num_sent = ThreadPoolExecutor(1), 0
        self.thread.submit(self._write, options)

    def compute(self, prompt: dict) -> Future:
        """True when the prompt's blocks are in the folder, False if the process has ended."""
        self.num_sent += 1
        return self.thread.submit(self._compute, self.num_sent, prompt)

    def _compute(self, number: int, prompt: dict) -> bool:
        with suppress(OSError):  # it has died
            self._write([number, prompt])
            for line in self.process.stdout:  # others may print there, too
                if line.strip() == str(number):
                    return True
        return False

    def _write(self, message: object) -> None:
        print(json.dumps(message, default=str), file=self.process.stdin, flush=True)

    def close(self) -> None:
        """Kill it: nobody waits for what it computes now, and no file is left half-written."""
        self.process.kill()
        self.thread.shutdown()  # what it still is to ask for fails at once
        self.process.wait()


class Disaggregated:
    """Two engines of one model, with the same options. When they are closed the folder is deleted,
    unless `kv_store` names it.

    Raises `ValueError` for what the second engine refuses. If the first one can't be made, it says
    why on standard error, and the second computes all prompts.
    """

    def __init__(self, model: str = "storyteller", **options):
        with ExitStack() as ends:
            if options.get("kv_store") is None:
                place = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
                options["kv_store"] = ends.enter_context(
                    TemporaryDirectory(prefix="nanoserve-", dir=place))
            # First: it refuses what both would.
            self.decoder = ends.enter_context(LLM(model, **options))
            self.prefiller: Prefiller | None = Prefiller(dict(options, model=model))
            ends.callback(self.prefiller.close)
            self.ends = ends.pop_all()

    def generate(self, prompts: str | list, sampling_params: SamplingParams | list | None = None,
                 ) -> list[RequestOutput]:
        """`LLM.generate`: each prompt is decoded here as soon as it was computed there."""
        llm, inbox = self.decoder, []
        requests = llm.make_requests(prompts, sampling_params)
        waiting: dict[Future, Request] = {}
        for request in requests:
            request.params.output_kind = RequestOutputKind.FINAL_ONLY
            if self.prefiller is None:
                llm.submit(request, inbox)
            else:
                prompt = dict(prompt_token_ids=request.prompt_token_ids,
                              cache_salt=request.cache_salt)
                waiting[self.prefiller.compute(prompt)] = request
        try:
            while waiting or llm.has_unfinished_requests():
                for one in list(waiting):  # they end in this order
                    if llm.has_unfinished_requests() and not one.done():
                        break
                    if not one.result() and self.prefiller is not None:
                        say("the prefill engine has ended: prompts are computed by the one that "
                            "decodes")
                        self.prefiller.close()
                        self.prefiller = None
                    llm.submit(waiting.pop(one), inbox)
                llm.step()
            results = {output.request_id: output for output in inbox}
        finally:
            for future in waiting:
                future.cancel()
            llm.abort_request([request.request_id for request in requests])
        return [results[request.request_id] for request in requests]

    def close(self) -> None:
        """End both. Calling it twice is fine."""
        self.ends.close()

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
            number, prompt = json.loads(line)
            llm.generate(prompt, one_token, use_tqdm=False)
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
