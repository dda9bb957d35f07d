"""New grammars are first compiled in a separate process, which may crash.

llguidance compiles grammars of any client. 3,000 definitions that refer each to the next overflow
its stack, which ends the process; a `multipleOf` of eight digits, or 40 patterns for one string,
take all memory and never end. So a grammar is compiled here first, within bounds of time, memory
and stack; only if that succeeds is it compiled in the engine's process.

    engine's process                        this file, run as a script
    Trial.refusal(grammar) ── a line ─────► compile it, and make two masks; it may die here
    the library's words   ◄── a line ─────  "": none

The cost: each new grammar is compiled twice, and the script copies the vocabulary (20 MB, and 150
with 150,000 tokens). The road not taken: checks of a grammar's text, each of which would
find only one way to ask for too much. The library's own limits bound the size of its results, but
not its stack, and not all of its searches.
"""

import json
import os
import sys
import time
import weakref
from contextlib import suppress
from subprocess import DEVNULL, PIPE, Popen
from threading import Lock

try:
    import resource
except ImportError:  # Windows: there the script may still die in the engine's place
    resource = None

# CPU seconds and bytes for one grammar, and the stack: half of what a thread usually has.
SECONDS, ROOM, STACK = 3, 2 ** 27, 2 ** 22
NUM_PROBED = 64  # forced tokens that are read when a grammar is compiled, to see whether it works
TOO_MUCH = (f"to compile this takes more than {SECONDS} s or {ROOM:,} bytes, or ends the library's "
            "process: make it smaller")


class Trial:
    """The script, started for the first grammar, and again behind one that ended it. tokenizer: the
    arguments of an `LLTokenizer`."""

    def __init__(self, tokenizer: dict):
        self.tokenizer = tokenizer
        self.script: Popen | None = None
        self.owner, self.lock = 0, Lock()  # a fork has a script of its own
        self.seconds = 0.0  # that all answers took, of CPU time

    def refusal(self, grammar: str) -> str:
        """Why a grammar can't be used; "" if it can."""
        with self.lock:
            if self.owner != os.getpid() or self.script.poll() is not None:
                self._start()
            answer = b""
            try:
                with suppress(BrokenPipeError):
                    self._send([grammar, SECONDS])
                    answer = self.script.stdout.readline()
            finally:
                if not answer:  # by Ctrl-C, too: its answer must not be read as the next one's
                    self.owner = 0
                    self.end()
            words, seconds = json.loads(answer) if answer else (TOO_MUCH, SECONDS)
            self.seconds += seconds
            return words

    def _start(self) -> None:
        """Ctrl-C in a terminal is not for the script. It ends with this object."""
        self.script = Popen([sys.executable, __file__], stdin=PIPE, stdout=PIPE, stderr=DEVNULL,
                            start_new_session=True)
        self.owner = os.getpid()
        self.end = weakref.finalize(self, _end, self.script, self.owner)
        self._send(self.tokenizer)

    def _send(self, value: object) -> None:
        self.script.stdin.write(json.dumps(value).encode() + b"\n")
        self.script.stdin.flush()


def byte_tokenizer() -> dict:
    """For grammars that name no tokens: how long they take hardly depends on the vocabulary."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2's letters for bytes
    letters = [*map(chr, plain), *(chr(256 + i) for i in range(256 - len(plain)))]
    return dict(eos_token=0, tokenizer=json.dumps(dict(
        version="1.0", added_tokens=[], decoder=dict(
            type="ByteLevel", add_prefix_space=True, trim_offsets=True, use_regex=True),
        model=dict(type="BPE", merges=[], vocab={one: i for i, one in enumerate(letters)}))))


def _end(script: Popen, owner: int) -> None:
    if owner == os.getpid():
        script.kill()
        script.communicate()


def probe(matcher) -> str:
    """The library notices only while it reads that no text at all is possible, or too many: as a
    rule at the beginning, or behind what every text begins with."""
    if not matcher.is_error():
        matcher.compute_bitmask()
        matcher.try_consume_tokens(matcher.compute_ff_tokens()[:NUM_PROBED])
        matcher.compute_bitmask()
    return matcher.get_error()


# ------------------------------------------------------------ run as a script


def main() -> None:
    from llguidance import LLMatcher, LLTokenizer
    if resource is not None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        most = resource.getrlimit(resource.RLIMIT_STACK)[1]
        resource.setrlimit(resource.RLIMIT_STACK, (STACK, most))
    given = json.loads(sys.stdin.buffer.readline())
    tokenizer = LLTokenizer(**given)
    for line in sys.stdin.buffer:
        grammar, seconds = json.loads(line)
        _bound(seconds)
        start = time.process_time()
        words = probe(LLMatcher(tokenizer, grammar, log_level=0))
        print(json.dumps([words, time.process_time() - start]), flush=True)


def _bound(seconds: int) -> None:
    if resource is None:
        return
    used = resource.getrusage(resource.RUSAGE_SELF)
    resource.setrlimit(resource.RLIMIT_CPU, (
        int(used.ru_utime + used.ru_stime) + seconds + 1, resource.RLIM_INFINITY))
    try:
        with open("/proc/self/statm") as file:
            most = int(file.read().split()[0]) * resource.getpagesize() + ROOM
    except OSError:  # where there is no /proc, time is the bound
        return
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))


if __name__ == "__main__":
    main()
