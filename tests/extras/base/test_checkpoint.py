"""What may be named as a model, and what is none: files, pipes, pointers of git LFS."""

import os
import shutil
from pathlib import Path

import huggingface_hub
import pytest

from nanoserve import LLM
from nanoserve_extras.base.checkpoint import find_folder


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


def test_pickles_are_fetched_only_where_there_is_nothing_else(checkpoints, tmp_path, hub):
    asked = hub(checkpoints["qwen3"])
    find_folder("some/safe")
    (_, _, patterns), = asked
    assert "*.safetensors" in patterns
    (tmp_path / "pytorch_model.bin").write_bytes(b"numbers")
    asked = hub(tmp_path)
    find_folder("some/old")
    assert len(asked) == 2 and asked[1][2] == ["pytorch_model*.bin"]
    find_folder("some/old", weights=False)
    assert len(asked) == 3
