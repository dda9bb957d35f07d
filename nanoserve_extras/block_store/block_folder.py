"""KV blocks on disk: a folder with a file for each block, which several engines can share.

    kv_store/   1f3a...9c.kv   checksum  of name and bytes, xxh3
                               bytes     the block's KV, layer by layer
                b07e...41.kv   ...       the name is the block's digest: see block_store.py

A file is written under a temporary name and renamed, so it is complete or missing. One with wrong
contents (damaged, cut off by a full disk, another block's) is a miss, not an error.

Invariant: a problem with files costs time, never an answer. If the folder can't be written, this is
reported once, and it is not written to again; requests go on. Users who can write to the folder are
trusted: the checksum detects damage, not malice. Hence its mode, 0700.

The road not taken: one large mapped file with an index. A step would wait for the file system's
pages, a truncated file would kill the process, and engines that reuse slots would need locks
(docs/log, 2026-11-27).
"""

import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash

from nanoserve.config import EngineConfig
from nanoserve_extras.base.files import private
from nanoserve_extras.base.words import in_words

VERSION = 2  # the files' format
CHECKSUM = 16  # bytes that it takes
OLD_SECONDS = 3600  # a temporary file this old was left by a process that died
NAME = re.compile(r"[0-9a-f]{64}\.(kv|.+\.tmp)")  # a file of ours: others are left alone
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")


def fingerprint(config: EngineConfig, about: list[str], folders: list[Path],
                shapes: list) -> bytes:
    """A hash of all that KV depends on besides tokens and adapter: the weights' content, and
    options.

    Reads all weights once more, because two fine-tuned models may differ only in their bytes.
    """
    options = {name: getattr(config, name) for name in (
        "dtype", "kernels", "block_size", "hf_overrides", "tensor_parallel_size", "load_format",
        "seed")}
    if config.load_format != "dummy":
        del options["seed"]  # it only makes random weights
    text = json.dumps([VERSION, sys.byteorder, options, about, shapes], sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode())
    for folder in folders:
        for path in sorted(folder.iterdir()):
            if path.suffix in WEIGHTS or path.name == "config.json":
                with open(path, "rb") as file:
                    content = hashlib.file_digest(file, xxhash.xxh3_128).digest()
                digest.update(path.name.encode() + content)
    return digest.digest()


def make_folder(name: str | Path) -> Path:
    """With mode 0700 if it isn't there. Returns its absolute path, since the program may change its
    directory. Raises `ValueError` if it can't be made or read."""
    with in_words(f"kv_store={str(name)!r} must be a folder that can be read, or one that can be "
                  "made"):  # a null byte; ~ of a user without a home
        path = Path(name).expanduser().absolute()
        if path.exists() and not path.is_dir():
            raise ValueError("it is a file")
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.listdir(path)
    return path


def checksum(digest: bytes, data: Any) -> bytes:
    """The checksum of a block's bytes and its name."""
    return xxhash.xxh3_128(data, seed=int.from_bytes(digest[:8])).digest()


class Folder:
    """A file for each block: a checksum of the bytes, and the bytes.

    path: see `make_folder`, which makes it. limit: of all files together, in bytes; the least
    recently used ones are deleted. say: is called with a message when something fails. Raises
    `ValueError` if there is no such folder and none can be made.
    """

    def __init__(self, path: Path, limit: int, say: Callable[[str], None]):
        self.path = path = make_folder(path)
        self.limit, self.say = limit, say
        if path.stat().st_mode & 0o077:
            say(f"kv_store={str(path)!r} is open to other users, who can read prompts there, or "
                "change answers: chmod 700")
        for left in self._files(".tmp"):
            if time.time() - _stat(left)[0] > OLD_SECONDS:
                _delete(left)
        sizes = [size for _, size in map(_stat, self._files(".kv"))]
        self.num_bytes = sum(sizes)  # when they were last counted
        self.num_new = 0  # bytes that were written here since then
        self.reads = self.writes = True
        self.is_damaged = False  # one file was: any other may be, and is written anew
        self.has_failed = False  # for another reason than its files

    def _path_of(self, digest: bytes) -> Path:
        return self.path / f"{digest.hex()}.kv"

    def _files(self, suffix: str) -> list[Path]:
        """Raises `OSError`, where `Path.glob` finds nothing and says nothing."""
        return [self.path / name for name in os.listdir(self.path)
                if NAME.fullmatch(name) and name.endswith(suffix)]

    def has(self, digest: bytes) -> bool:
        return self.reads and os.path.exists(self._path_of(digest))  # False for any OSError

    def read(self, digest: bytes, into: Any) -> bool:
        """Read a block's bytes into memory of their size. False if the file is missing or invalid.
        An invalid file stays until a valid one replaces it: a deletion here might hit that one."""
        try:
            with open(self._path_of(digest), "rb") as file:
                expected, num_bytes = file.read(CHECKSUM), file.readinto(into)
                is_whole = num_bytes == len(into) and not file.read(1)
            if is_whole and checksum(digest, into) == expected:
                return True
            self.is_damaged = True
        except OSError:
            pass
        except Exception as error:
            self._report(error)
        return False

    def write(self, digest: bytes, data: Any) -> None:
        """Written under a temporary name and then renamed, so a file is there as a whole or not at
        all. If two processes write the same block, the second replaces it, or changes nothing."""
        path = self._path_of(digest)
        if not self.writes or (os.path.exists(path) and not self.is_damaged):
            return
        own = path.with_suffix(f".{os.getpid()}-{id(self)}.tmp")
        try:
            _delete(own)  # a dead process's, or a link that lies in wait
            with open(own, "xb", opener=private) as file:
                file.write(checksum(digest, data))
                file.write(data)
            os.replace(own, path)
            self.num_new += _stat(path)[1]
            if self.num_new > min(self.limit / 16, self.limit - self.num_bytes):
                self._trim()
        except OSError as error:
            _delete(own)
            self.writes = False
            self.say(f"kv_store={str(self.path)!r} can't be written, and saves no more: {error}; "
                     "make room there, or name another folder")
        except Exception as error:
            self._report(error)

    def _report(self, error: Exception) -> None:
        """Report an unexpected error, once; it counts as a miss, because no request may fail
        through the store."""
        if not self.has_failed:
            self.has_failed = True
            self.say(f"kv_store={str(self.path)!r}: a block is computed anew, or is not written, "
                     f"because of {error!r}")

    def touch(self, digests: list[bytes]) -> None:
        """Mark a chain of blocks as used now. Its tail gets an older time, by microseconds, so that
        it is deleted before its head, without which no look-up would reach it."""
        now = time.time_ns()
        for i, digest in enumerate(digests):
            with suppress(OSError):  # some are not there
                os.utime(self._path_of(digest), ns=(now - 1000 * i, now - 1000 * i))

    def _trim(self) -> None:
        """Count all files, of other engines, too. Above the limit, delete the oldest until a tenth
        of it is free."""
        files = sorted((*_stat(path), path) for path in self._files(".kv"))
        self.num_bytes, self.num_new = sum(size for _, size, _ in files), 0
        if self.num_bytes <= self.limit:
            return
        for _, size, path in files:
            if self.num_bytes <= 0.9 * self.limit:
                break
            path.unlink(missing_ok=True)
            self.num_bytes -= size

    def clear(self) -> None:
        """Delete all blocks. If that fails, the folder is not read again."""
        if not self.reads:
            return
        try:
            for path in self._files(".kv"):
                path.unlink(missing_ok=True)
        except OSError as error:
            self.reads = self.writes = False
            self.say(f"kv_store={str(self.path)!r} can't be emptied, and is not used any more: "
                     f"{error}")
        self.num_bytes = self.num_new = 0


def _delete(path: Path) -> None:
    """A file that can't be deleted takes room, and does no other harm."""
    with suppress(OSError):
        path.unlink()


def _stat(path: Path) -> tuple[float, int]:
    """When it was last used, and its size; zeros if another process has deleted it."""
    try:
        stat = path.stat()
        return stat.st_mtime, stat.st_size
    except OSError:
        return 0.0, 0
