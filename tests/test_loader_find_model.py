"""What may be named as a model: a folder, a file in it, or a hub id."""

import shutil
from pathlib import Path

import huggingface_hub
import pytest
from loading import greedy, load

from nanoserve import LLM
from nanoserve.loader import find_model, stored_tensors


def test_a_hub_id_that_can_not_be_fetched_says_so(monkeypatch):
    """Not a folder, and no network: an id was once globbed as a path, which found no weights and
    answered with random ones (nano-vllm #97)."""

    def no_network(*args, **kwargs):
        raise ConnectionError("no route to the hub\nand many more lines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", no_network)
    with pytest.raises(ValueError) as error:
        LLM("somebody/a-model")
    for words in ("'somebody/a-model'", "ConnectionError", "no route to the hub"):
        assert words in str(error.value)
    assert "many more lines" not in str(error.value)


def test_no_second_copy_of_the_weights_is_fetched(monkeypatch, tmp_path):
    """Mistral's repositories have all weights twice, Llama's once more as their maker wrote them.
    What is fetched is decided by the hub's own rule for patterns."""
    files = ["config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
             "consolidated.safetensors", "consolidated-00001-of-00002.safetensors",
             "original/params.json", "original/model.safetensors", "params.json", "README.md",
             "tekken.json", "1_Pooling/config.json"]

    def snapshot_download(name, revision, allow_patterns, ignore_patterns):
        for file in huggingface_hub.utils.filter_repo_objects(
                files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns):
            (tmp_path / file).parent.mkdir(exist_ok=True)
            (tmp_path / file).touch()
        return tmp_path

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    find_model("somebody/a-model")
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert found == {*files[:3], "params.json", "tekken.json", "1_Pooling/config.json"}


def test_a_hub_id_loads_from_where_the_hub_put_it(checkpoints, references, hub):
    asked = hub(checkpoints["qwen3-sharded"])
    llm = LLM("somebody/a-model", num_gpu_blocks_override=16)
    assert greedy(llm) == references("qwen3", list(range(20)), 8)[0]
    [(repo_id, _, patterns)] = asked
    needed = [file.name for file in checkpoints["qwen3-sharded"].iterdir()]
    assert repo_id == "somebody/a-model"
    assert all(any(Path(name).match(pattern) for pattern in patterns) for name in needed)


def test_a_folder_of_links_is_a_folder(checkpoints, tmp_path):
    """The hub's cache is made of links to `blobs`, and one that leads nowhere is no file."""
    (tmp_path / "snapshots").mkdir()
    shutil.copytree(checkpoints["qwen3-sharded"], tmp_path / "blobs")
    for file in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshots" / file.name).symlink_to(f"../blobs/{file.name}")
    (tmp_path / "snapshots" / "gone.json").symlink_to("../blobs/gone")
    assert find_model(tmp_path / "snapshots") == tmp_path / "snapshots"
    load(tmp_path / "snapshots")


def test_what_the_extras_read_is_not_passed_over_without_them(tmp_path):
    with pytest.raises(ValueError, match="load_format='pt'.*nanoserve_extras"):
        stored_tensors(tmp_path, "pt")
