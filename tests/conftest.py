"""What holds for every test, and the fixtures that are made once a session.

Nothing here imports torch before it is needed. A test file that says

    pytestmark = pytest.mark.floor

is part of the floor: it imports no torch, and neither does `pytest -m floor`, which takes seconds.
pytest imports every file that it collects, so that run does not collect the other files at all.
"""

import gc
import json
import os
import random
import re
import shutil
import signal
import sys
from functools import wraps
from importlib.util import find_spec
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
# For bench.py and benchmarks/, and for the helpers that stand beside the tests that share them.
sys.path[:0] = map(str, [TESTS.parent, TESTS, *(
    path for path in TESTS.rglob("*") if path.is_dir() and path.name != "__pycache__")])
# Assertions of helpers are to explain themselves as those of test files do.
pytest.register_assert_rewrite(*(
    path.stem for path in TESTS.rglob("*.py") if not path.stem.startswith(("test_", "conftest"))))

# What a shell starts in its background ignores Ctrl-C, and so would the scripts of the tests.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Processes that tests start have one thread each, as tests have: several processes run at a time,
# and threads of OpenMP that wait for a core take it from the others.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def is_floor(path: Path) -> bool:
    return bool(re.search(r"^pytestmark = pytest\.mark\.floor$", path.read_text("utf-8"), re.M))


def pytest_ignore_collect(collection_path, config):
    if config.option.markexpr == "floor" and collection_path.suffix == ".py":
        return not is_floor(collection_path) or None


def pytest_pycollect_makemodule(module_path):
    """Before a file is imported that may import torch."""
    if not is_floor(module_path):
        prepare_torch()


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """The 700,000 objects that imports leave stay to the end. Python's garbage collector would look
    at them many times, a fourth of the time that it takes to collect the tests, and once more in
    each test that calls it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def prepare_torch() -> None:
    import torch

    torch.set_num_threads(1)  # the models are tiny: more threads only wait for each other
    if not torch.cuda.is_available():  # before anything imports triton, which decides then
        os.environ.setdefault("TRITON_INTERPRET", "1")
    remember_trials()


def remember_trials() -> None:
    """As on a machine on which each model of the tests has been started before, and was right."""
    from nanoserve import self_test as trial

    trial.wrong_functions = wraps(trial.wrong_functions)(lambda backend, shapes: {})


def pytest_runtest_setup(item):
    if item.get_closest_marker("full") and not find_spec("peft"):
        pytest.skip("heavy, and another test holds most of it: it runs with the extra 'test-full'")


@pytest.fixture(autouse=True)
def audit_every_step(monkeypatch):
    """Every engine of every test audits its books after every step."""
    monkeypatch.setenv("NANOSERVE_CHECK", "1")


@pytest.fixture(autouse=True)
def same_random_numbers():
    """In every run, whatever other tests ran before in this process."""
    if torch := sys.modules.get("torch"):
        # Not `torch.manual_seed`: without a GPU it keeps a traceback for each kind of device.
        torch.default_generator.manual_seed(0)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(0)


@pytest.fixture(autouse=True)
def no_torch_on_the_floor(request):
    yield
    if request.config.option.markexpr == "floor":
        assert "torch" not in sys.modules, "imported by this test"


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    from checkpoints import Checkpoints

    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def qwen3(checkpoints) -> Path:
    return checkpoints["qwen3"]


@pytest.fixture
def dummy(tmp_path) -> Path:
    """A folder with nothing but a config.json: enough for random weights."""
    from config_files import LLAMA

    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


@pytest.fixture(scope="session")
def toy(tmp_path_factory) -> Path:
    """Shapes without weights, as a user's own config.json would be."""
    from benchmarks.roofline import MODELS

    folder = tmp_path_factory.mktemp("toy")
    config = MODELS["Qwen3-0.6B"] | dict(
        num_hidden_layers=2, hidden_size=32, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, intermediate_size=48, vocab_size=300, torch_dtype="float32")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def known_machine(monkeypatch):
    """What the machine can do is measured in one test only; elsewhere it takes time for nothing."""
    from benchmarks import roofline

    monkeypatch.setattr(roofline, "measure",
                        lambda device, dtype: roofline.Machine(3e10, 4e11))


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Token prompts of mixed lengths around the block size, some with a common beginning."""
    rng = random.Random(0)
    shared = [rng.randrange(256) for _ in range(40)]
    own = [[rng.randrange(256) for _ in range(n)] for n in (1, 2, 15, 16, 17, 31, 32, 33, 70)]
    return own + [shared + [rng.randrange(256) for _ in range(n)] for n in (1, 8, 8, 24)] + [shared]


@pytest.fixture(scope="session")
def references(checkpoints):
    """Reference texts by checkpoint, prompt and length; each is computed once, and a shorter one is
    the beginning of a longer one. guess: what the text may be (see `Reference.generate`)."""
    from checkpoints import Reference

    models, texts = {}, {}

    def reference(name: str, prompt: list[int], max_tokens: int,
                  guess: list[int] = ()) -> tuple[list[int], list[float]]:
        key = (name, tuple(prompt))
        longest, tokens, gaps = texts.get(key, (0, (), ()))
        if longest < max_tokens:
            if name not in models:
                models[name] = Reference(checkpoints[name])
            guess = guess if len(guess) > len(tokens) else tokens
            tokens, gaps = models[name].generate(prompt, max_tokens, guess)
            texts[key] = max_tokens, tokens, gaps
        return tokens[:max_tokens], gaps[:max_tokens]

    return reference


@pytest.fixture
def ranks_in_threads(monkeypatch):
    """Engines that are made from now on have their other ranks in threads of this process."""
    from rank_threads import start_in_threads

    from nanoserve import parallel

    monkeypatch.setattr(parallel, "start_ranks", start_in_threads)


@pytest.fixture
def recorded(monkeypatch):
    """Engines on kernels record their steps with a stand-in for CUDA graphs (recorded_graphs.py).
    The sizes that were replayed."""
    from recorded_graphs import record_steps

    return record_steps(monkeypatch)


# ---- the engine that the tests of a file share; behind each test it must be idle and in order


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "overlap"])
def engine(request, qwen3):
    from small_engine import make

    llm = make(qwen3, async_scheduling=request.param)
    llm.check_every_step = True  # the variable is set for single tests, this engine is older
    return llm


@pytest.fixture
def llm(engine, monkeypatch):
    from small_engine import assert_idle, drain

    yield engine
    monkeypatch.undo()  # whatever a test put into the engine's way
    try:
        assert_idle(engine)
    finally:  # one failure is enough: the next test finds the engine tidy
        for request_id in list(engine.requests):
            engine.abort_request(request_id)
        drain(engine)


@pytest.fixture
def expected(references):
    """transformers' greedy text: token ids by prompt (text or ids) and length."""
    from small_engine import ids_of

    def tokens(prompt, max_tokens: int = 8) -> list[int]:
        ids = ids_of(prompt) if isinstance(prompt, str) else prompt
        return references("qwen3", ids, max_tokens)[0]
    return tokens


@pytest.fixture
def say(llm, monkeypatch):
    """Put words into the model's mouth: every request's output is this text, then EOS for ever."""
    import torch
    from checkpoints import EOS
    from small_engine import ids_of

    from nanoserve.sampler import SamplerOutput

    def script(text: str | list[int]) -> None:
        words = ids_of(text) if isinstance(text, str) else text
        launch = llm.runner.launch

        def spoken(step):
            launch(step)
            at = [seq.num_tokens - 1 - seq.num_prompt_tokens for seq in step.sampling]
            tokens = torch.tensor([words[i] if i < len(words) else EOS for i in at])
            llm.runner.last_tokens[[seq.row for seq in step.sampling]] = tokens
            return SamplerOutput(tokens)
        monkeypatch.setattr(llm.runner, "launch", spoken)
    return script


@pytest.fixture
def hub(monkeypatch):
    """hub(folder) puts this folder on the hub, under any name. Returns what will be asked for:
    names, revisions and patterns of files."""
    import huggingface_hub

    def fill(folder: Path) -> list[tuple[str, str | None, list[str]]]:
        asked = []
        monkeypatch.setattr(
            huggingface_hub, "snapshot_download", lambda repo_id, revision, allow_patterns, **_: (
                asked.append((repo_id, revision, allow_patterns)) or str(folder)))
        return asked
    return fill


@pytest.fixture
def copy_of(checkpoints, tmp_path):
    """A copy of a checkpoint to break; `change` maps its tensors to what is stored instead."""
    from loading import stored_tensors
    from safetensors.torch import save_file

    def copy(name: str, change=None) -> Path:
        folder = tmp_path / name
        shutil.copytree(checkpoints[name], folder)
        if change is not None:
            tensors = change(stored_tensors(folder))
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return copy
