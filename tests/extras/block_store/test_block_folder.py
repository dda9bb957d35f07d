"""A folder of blocks: whatever happens to its files, a reader gets the right bytes or none."""

import errno
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from nanoserve_extras.block_store.block_folder import Folder, make_folder

SIZE = 1000  # bytes of a block
NAMES = [bytes([i]) * 32 for i in range(40)]


def content(name: bytes) -> bytes:
    return random.Random(name).randbytes(SIZE)


def open_folder(path: Path, limit: int = 2 ** 20, said: list | None = None):
    return Folder(path, limit, (said if said is not None else []).append)


def fill(folder: Folder, names=NAMES) -> None:
    for name in names:
        folder.write(name, content(name))


def found(folder: Folder, name: bytes) -> bool:
    """Whether it is there, and then it is right."""
    data = bytearray(SIZE)
    is_there = folder.read(name, data)
    assert not is_there or data == content(name)
    return is_there


def test_what_was_written_is_read_again_by_another_folder_object(tmp_path):
    path = tmp_path / "a" / "b"
    fill(open_folder(path))
    assert path.stat().st_mode & 0o777 == 0o700
    assert {one.stat().st_mode & 0o777 for one in path.iterdir()} == {0o600}
    again = open_folder(path)
    assert all(found(again, name) for name in NAMES)
    assert again.num_bytes == sum(one.stat().st_size for one in path.iterdir())
    assert not found(again, b"x" * 32)


@pytest.mark.parametrize("damage", [
    lambda data: data[:len(data) // 2], lambda data: b"", lambda data: data + b"x",
    lambda data: data[:-5] + b"?" + data[-4:], lambda data: b"?" + data[1:],
    lambda data: os.urandom(len(data))],
    ids=["half", "empty", "longer", "one byte", "checksum", "noise"])
def test_a_damaged_file_is_a_miss_and_makes_room_for_a_right_one(tmp_path, damage):
    folder, name = open_folder(tmp_path), NAMES[0]
    fill(folder, [name])
    path, = tmp_path.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    assert not found(folder, name)
    fill(folder, [name])
    assert found(folder, name)


def test_another_blocks_file_under_this_name_is_a_miss(tmp_path):
    fill(folder := open_folder(tmp_path), NAMES[:1])
    (tmp_path / f"{NAMES[0].hex()}.kv").rename(tmp_path / f"{NAMES[1].hex()}.kv")
    assert not folder.read(NAMES[1], bytearray(SIZE))
    assert not folder.read(NAMES[1], bytearray(SIZE - 1))


def test_a_link_that_lies_in_wait_is_not_followed(tmp_path):
    """Under the temporary name: the block was written over whatever it led to."""
    folder, name = open_folder(tmp_path / "store"), NAMES[0]
    (tmp_path / "others").write_text("theirs")
    own = folder.path / f"{name.hex()}.{os.getpid()}-{id(folder)}.tmp"
    own.symlink_to(tmp_path / "others")
    fill(folder, [name])
    assert (tmp_path / "others").read_text() == "theirs"
    file, = folder.path.iterdir()
    assert found(folder, name) and not file.is_symlink() and file.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS])
def test_a_full_or_read_only_disk_switches_writing_off_and_says_so_once(tmp_path, monkeypatch,
                                                                        error):
    said: list[str] = []
    folder = open_folder(tmp_path, said=said)
    fill(folder, NAMES[:3])

    def fail(*args):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "replace", fail)
    fill(folder, NAMES[3:])
    monkeypatch.undo()
    fill(folder, NAMES[3:])
    assert len(said) == 1 and os.strerror(error) in said[0] and str(tmp_path) in said[0]
    assert [found(folder, name) for name in NAMES] == [True] * 3 + [False] * 37
    assert len(list(tmp_path.iterdir())) == 3, "nothing half-written is left"


def test_the_least_recently_used_files_go_when_the_limit_is_reached(tmp_path):
    folder = open_folder(tmp_path, limit=20 * 1050)
    for i, name in enumerate(NAMES):
        fill(folder, [name])
        os.utime(tmp_path / f"{name.hex()}.kv", (i, i))
        assert found(folder, NAMES[0])
        folder.touch(NAMES[:1])  # it is used all the time
        assert sum(one.stat().st_size for one in tmp_path.iterdir()) <= 20 * 1050
        assert i >= 20 or len(list(tmp_path.iterdir())) == i + 1, "none goes before"
    kept = [i for i, name in enumerate(NAMES) if found(folder, name)]
    assert kept == [0, *range(40 - len(kept) + 1, 40)] and 15 <= len(kept) <= 20


def test_engines_that_share_a_folder_share_its_limit(tmp_path):
    """Each counted its own files: four engines kept four times what the folder may hold."""
    limit = 64 * 1050
    folders = [open_folder(tmp_path, limit) for _ in range(4)]
    for i in range(400):
        fill(folders[i % 4], [i.to_bytes(32, "big")])
        assert sum(one.stat().st_size for one in tmp_path.iterdir()) < 1.3 * limit


@pytest.mark.parametrize("in_time", [True, False], ids=["touched", "a missing one first"])
def test_a_chain_loses_its_tail_before_its_head(tmp_path, in_time):
    """Files were touched as they were read, head first: so a prompt that had just been found lost
    its head, and nobody asked for the rest. All of this happens within one tick of a disk's clock.
    """
    folder = open_folder(tmp_path, limit=20 * 1050)
    chain = NAMES[:15]
    fill(folder, chain)
    folder.touch(chain if in_time else [b"x" * 32, *chain])
    fill(folder, NAMES[15:25])
    kept = [found(folder, name) for name in chain]
    assert 5 <= sum(kept) < 15 and kept == sorted(kept, reverse=True)


def test_what_is_not_ours_is_left_alone(tmp_path):
    """A user's `notes.kv` was deleted with the blocks, and an old `draft.tmp` at the start; a
    folder of such a name made the engine fail."""
    others = [tmp_path / name for name in ("notes.txt", "notes.kv", "draft.tmp", "a.kv", "b.tmp")]
    for other in others[:3]:
        other.write_text("mine")
    for other in others[3:]:
        other.mkdir()
    for other in others:
        os.utime(other, (1, 1))
    said: list[str] = []
    folder = open_folder(tmp_path, limit=20 * 1050, said=said)
    fill(folder)
    folder.clear()
    assert sorted(tmp_path.iterdir()) == sorted(others) and folder.num_bytes == 0
    assert folder.writes and not said


def refuse(monkeypatch, *names: str) -> None:
    """Have the system refuse these calls, as for a folder of another user. (Tests may run as root,
    to whom no mode is an obstacle.)"""
    def fail(*args, **kwargs):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    for name in names:
        monkeypatch.setattr(os, name, fail)


def test_a_folder_that_can_not_be_reached_any_more_is_a_miss_and_said_once(tmp_path, monkeypatch):
    """`Path.exists` raises for a folder without permission, in the middle of a request's start."""
    said: list[str] = []
    folder = open_folder(tmp_path, said=said)
    fill(folder, NAMES[:3])
    refuse(monkeypatch, "stat", "open", "unlink", "listdir")
    assert not folder.has(NAMES[0])
    fill(folder, NAMES[3:])
    assert len(said) == 1 and "saves no more" in said[0]
    monkeypatch.undo()
    assert found(folder, NAMES[0])


def test_a_folder_that_can_not_be_emptied_is_not_read_any_more(tmp_path, monkeypatch):
    said: list[str] = []
    folder = open_folder(tmp_path, said=said)
    fill(folder, NAMES[:3])
    refuse(monkeypatch, "unlink")
    folder.clear()
    folder.clear()
    assert len(said) == 1 and "can't be emptied" in said[0]
    assert not folder.has(NAMES[0]) and open_folder(tmp_path).has(NAMES[0])


def test_a_folder_that_can_not_be_listed_is_refused(tmp_path, monkeypatch):
    refuse(monkeypatch, "listdir")
    with pytest.raises(ValueError, match="must be a folder that can be read"):
        open_folder(tmp_path)


@pytest.mark.parametrize("mode, is_said", [(0o700, False), (0o755, True), (0o720, True)])
def test_a_folder_that_is_open_to_others_is_said(tmp_path, mode, is_said):
    said: list[str] = []
    tmp_path.chmod(mode)
    open_folder(tmp_path, said=said)
    assert bool(said) == is_said and all("open to other users" in line for line in said)


# ------------------------------------------------------------------ other processes

WRITE = """
import sys; from pathlib import Path
sys.path.insert(0, {here!r})
from test_block_folder import NAMES, fill, found, open_folder
folder = open_folder(Path({path!r}))
print("ready", flush=True)
{then}
"""
KILLED = """
import os, random, signal, time
rng, num_found = random.Random(0), 0
for _ in range(50):
    child = os.fork()
    while not child:
        fill(folder)
        folder.clear()
    time.sleep(0.02 * rng.random())
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    whole = sorted(path.name for path in folder.path.glob("*.kv"))
    assert whole == sorted(f"{name.hex()}.kv" for name in NAMES if found(folder, name))
    num_found += len(whole)
assert not folder.is_damaged
print(num_found)
"""
ALL_ANEW = """
sys.stdin.readline()
folder.is_damaged = True
for _ in range(20):
    fill(folder)
"""


def writer(path: Path, then: str) -> subprocess.Popen:
    code = WRITE.format(here=str(Path(__file__).parent), path=str(path), then=then)
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE)


def test_a_process_killed_while_it_writes_leaves_whole_files_and_nothing_else_that_is_read(
        tmp_path):
    """50 of them, each in the middle of something else."""
    process = writer(tmp_path, KILLED)
    out, _ = process.communicate()
    assert process.returncode == 0 and int(out.split()[1]) > 50
    left = tmp_path / f"{NAMES[0].hex()}.1-2.tmp"  # an old one goes when the folder is opened again
    left.write_bytes(b"half")
    os.utime(left, (1, 1))
    open_folder(tmp_path)
    assert not left.exists()


def test_two_processes_write_the_same_blocks(tmp_path):
    """At the same time, again and again; whoever reads meanwhile finds whole files."""
    processes = [writer(tmp_path, ALL_ANEW) for _ in range(2)]
    assert [process.stdout.readline() for process in processes] == [b"ready\n"] * 2
    for process in processes:
        process.stdin.write(b"go\n")
        process.stdin.flush()
    reader, num_found = open_folder(tmp_path), 0
    while any(process.poll() is None for process in processes):
        num_found += sum(found(reader, name) for name in NAMES)
    assert [process.returncode for process in processes] == [0, 0]
    assert num_found > len(NAMES) and not reader.is_damaged
    assert all(found(open_folder(tmp_path), name) for name in NAMES)
    assert len(list(tmp_path.iterdir())) == len(NAMES), "no temporary file is left"


def test_a_home_is_found_and_a_program_may_change_its_directory(tmp_path, monkeypatch):
    """A folder named ~ was made."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert make_folder("~/blocks") == tmp_path / "blocks" and (tmp_path / "blocks").is_dir()
    monkeypatch.chdir(tmp_path)
    assert make_folder("others") == tmp_path / "others"
