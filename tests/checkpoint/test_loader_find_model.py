"""What may be named as a model: a folder, a file in it, or a hub id."""

import os
import shutil
from pathlib import Path

import huggingface_hub
import pytest
from loading import greedy, load

from nanoserve import LLM
from nanoserve.loader import find_model


def test_a_file_instead_of_its_folder(checkpoints):
    file = checkpoints["qwen3"] / "model.safetensors"
    with pytest.raises(ValueError, match=r"model.*/model\.safetensors'"):
        LLM(file)


def test_a_wrong_folder_is_named_by_the_option_that_named_it(checkpoints, tmp_path):
    folder, options = checkpoints["qwen3"], dict(method="draft_model", num_speculative_tokens=2)
    for option, given in (("tokenizer", dict(tokenizer=str(tmp_path / "not"))),
                          ("speculative_config: model",
                           dict(speculative_config=options | dict(model=str(tmp_path / "not"))))):
        with pytest.raises(ValueError, match=f"^{option}='.*not'"):
            LLM(folder, num_gpu_blocks_override=40, **given)


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


@pytest.mark.parametrize("name", ["./a", "/a/b", "../a", "~/a", "a/b/c"])
def test_what_no_hub_id_looks_like_is_not_asked_for(monkeypatch, name):
    """It was an HFValidationError, about the characters of a name."""
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    with pytest.raises(ValueError, match="is not a local folder, and no hub id looks so"):
        LLM(name)


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json"])
def test_a_pointer_of_git_lfs_is_no_file(checkpoints, tmp_path, file):
    folder = tmp_path / "cloned"
    shutil.copytree(checkpoints["qwen3"], folder)
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    (folder / file).write_text(pointer)
    with pytest.raises(ValueError, match=rf"{file}.*git lfs pull"):
        LLM(folder)


def test_a_hub_id_loads_from_where_the_hub_put_it(checkpoints, references, hub):
    asked = hub(checkpoints["qwen3-sharded"])
    llm = LLM("somebody/a-model", num_gpu_blocks_override=16)
    assert greedy(llm) == references("qwen3", list(range(20)), 8)[0]
    [(repo_id, _, patterns)] = asked
    needed = [file.name for file in checkpoints["qwen3-sharded"].iterdir()]
    assert repo_id == "somebody/a-model"
    assert all(any(Path(name).match(pattern) for pattern in patterns) for name in needed)


@pytest.mark.parametrize(("options", "model", "tokenizer"), [
    ({}, {"model.safetensors"}, set()),
    (dict(load_format="dummy"), set(), set()),
    (dict(trust_remote_code=True), {"model.safetensors", "tokenization_own.py"},
     {"tokenization_own.py"}),
])
def test_from_the_hub_comes_what_is_needed(checkpoints, hub, options, model, tokenizer):
    """A tokenizer alone, or random weights, brought gigabytes that nobody read; and the code that
    `trust_remote_code` is about was left there."""
    asked = hub(checkpoints["qwen3-sharded"])
    draft = dict(method="draft_model", model="somebody/a-draft", num_speculative_tokens=2)
    LLM("somebody/a-model", tokenizer="somebody/a-tokenizer", num_gpu_blocks_override=16,
        speculative_config=draft, **options)
    brought = {repo_id: {name for name in ("model.safetensors", "tokenization_own.py")
                         if any(Path(name).match(pattern) for pattern in patterns)}
               for repo_id, _, patterns in asked}
    assert brought == {"somebody/a-model": model, "somebody/a-tokenizer": tokenizer,
                       "somebody/a-draft": model}


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja",
                                  "model.safetensors", "1_Pooling/config.json"])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(checkpoints, tmp_path, name):
    folder = tmp_path / "strange"
    shutil.copytree(checkpoints["qwen3"], folder)
    (folder / name).unlink(missing_ok=True)
    (folder / name).parent.mkdir(exist_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(ValueError, match=f"{name} is no regular file"):
        LLM(folder)


def test_a_folder_of_links_is_a_folder(checkpoints, tmp_path):
    """The hub's cache is made of links to `blobs`, and one that leads nowhere is no file."""
    (tmp_path / "snapshots").mkdir()
    shutil.copytree(checkpoints["qwen3-sharded"], tmp_path / "blobs")
    for file in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshots" / file.name).symlink_to(f"../blobs/{file.name}")
    (tmp_path / "snapshots" / "gone.json").symlink_to("../blobs/gone")
    assert find_model(tmp_path / "snapshots") == tmp_path / "snapshots"
    load(tmp_path / "snapshots")
