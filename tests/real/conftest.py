"""Each published file in turn, converted once."""

import shutil
from pathlib import Path

import pytest
from real_models import GEMMA, MORE, SMOLLM2, Real, find_gguf


@pytest.fixture(scope="session", params=[SMOLLM2, GEMMA, *MORE], ids=lambda name: Path(name).stem)
def real(request, tmp_path_factory):
    """Each file in turn. What `LLM(file)` keeps goes into a folder of this run."""
    pytest.importorskip("gguf", reason="gguf is not installed: it is one of the extra 'gguf'")
    find_gguf(request.param, place := tmp_path_factory.mktemp("real"))
    from nanoserve_extras.tools import gguf_files

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_files, "cache_folder", lambda: place)
        yield Real(request.param, place)
    shutil.rmtree(place)


@pytest.fixture
def chatting(real):
    """Those that were trained to chat."""
    if not real.chats:
        pytest.skip(f"{real.name} has no chat template")
    return real
