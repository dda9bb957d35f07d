"""What tests of checkpoints share."""

import shutil
from pathlib import Path

import pytest


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
