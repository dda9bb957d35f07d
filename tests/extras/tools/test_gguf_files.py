"""A model may be a GGUF file everywhere: on this machine, or on the hub by its quantisation."""

import shutil

import huggingface_hub
import pytest
from checkpoints import byte_tokenizer
from test_convert import made  # noqa: F401

from nanoserve import LLM, SamplingParams
from nanoserve_extras.tools import as_vllm, convert, doctor, gguf_files, verify, verify_served
from nanoserve_extras.tools.gguf_files import find_file, pick

FILES = ["README.md", "model-Q4_K_M.gguf", "model-Q4_K_S.gguf", "model-UD-Q4_K_XL.gguf",
         "model.q8_0.gguf", "BF16/model.gguf", "mmproj-F16.gguf", "model-Q2_K-00001-of-00002.gguf",
         "model-Q2_K-00002-of-00002.gguf", "a/model-Q6_K.gguf", "b/model-Q6_K.gguf"]


@pytest.mark.parametrize("tag, file", [
    ("Q4_K_M", FILES[1]), ("q4_k_m", FILES[1]), ("Q8_0", "model.q8_0.gguf"),
    ("UD-Q4_K_XL", FILES[3]), ("Q4_K_XL", FILES[3]), ("bf16", "BF16/model.gguf"),
    ("model-Q4_K_S.gguf", FILES[2])])
def test_a_quantisation_is_one_file(tag, file):
    assert pick(FILES, tag, "model='a/b'") == file


@pytest.mark.parametrize("tag, words", [
    ("Q4_K", "no GGUF files are of this quant.*BF16/model.gguf"),  # a beginning of others
    ("8_0", "no GGUF files"), ("F16", "no GGUF files"),  # a tower for images alone
    ("latest", "no GGUF files"), ("model", "9 GGUF files"),
    ("Q6_K", "2 GGUF files are of this.*there are a/model-Q6_K.gguf, b/model-Q6_K.gguf"),
    ("Q2_K", "split into 2 files.*llama-gguf-split --merge")])
def test_anything_else_lists_what_there_is(tag, words):
    with pytest.raises(ValueError, match=f"^model='a/b'.*{words}"):
        pick(FILES, tag, "model='a/b'")


@pytest.mark.parametrize("name, path, revision", [
    ("some/one:Q4_K_M", FILES[1], None), ("hf.co/some/one:q8_0", FILES[4], None),
    ("https://huggingface.co/some/one:Q4_K_S", FILES[2], "v1"),
    ("some/one/a/model-Q6_K.gguf", FILES[9], None)])
def test_the_hub_is_asked_for_one_file(monkeypatch, tmp_path, name, path, revision):
    asked = []
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda repo, revision: FILES)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *args, **options: (
        asked.append((*args, options)) or str(tmp_path / "file")))
    assert find_file(name, revision=revision) == tmp_path / "file"
    assert asked == [("some/one", path, dict(revision=revision))]


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """huggingface_hub without a network, and its cache."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_without_a_network_the_cache_has_it_or_the_remedy_is_said(offline, tmp_path):
    with pytest.raises(ValueError, match=r"^tokenizer='some/one:Q8_0' is no file here, and could "
                       r"not be fetched.*: fetch the file elsewhere, and name its path"):
        find_file("some/one:Q8_0", "tokenizer")
    commit = offline / "models--some--one" / "snapshots" / "abc"
    commit.mkdir(parents=True)
    (commit.parents[1] / "refs").mkdir()
    (commit.parents[1] / "refs" / "main").write_text("abc")
    (commit / "model.Q8_0.gguf").write_bytes(b"GGUF")
    assert find_file("some/one:Q8_0") == find_file("some/one/model.Q8_0.gguf")
    assert find_file("some/one:Q8_0") == commit / "model.Q8_0.gguf"
    with pytest.raises(ValueError, match="no GGUF files are .*there are model.Q8_0.gguf"):
        find_file("some/one:Q4_0")


def test_a_name_of_ollamas_is_told_from_a_hub_id():
    with pytest.raises(ValueError, match="'llama3.2:1b' is a name of ollama's.*OWNER/REPOSITORY"):
        find_file("llama3.2:1b")
    assert find_file("gpt2") is None and find_file("C:\\model") is None


def test_what_is_here_comes_first_and_other_names_stay_what_they_are(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("a/b/model-Q8_0.gguf", "a/b:Q8_0/config.json", "blob", "other.bin", "a:b.gguf"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"PK" if name == "other.bin" else b"GGUF")
    assert find_file("a/b:Q8_0") is None  # a folder of this name
    assert find_file(tmp_path / "a/b:q8_0") == tmp_path / "a/b/model-Q8_0.gguf"
    assert find_file("blob").name == "blob" and find_file("a:b.gguf").name == "a:b.gguf"
    for name in ("other.bin", "a/b", "storyteller", "Qwen/Qwen3-0.6B", "nowhere/blob.bin"):
        assert find_file(name) is None
    for name in ("./no/such.gguf", "/no/such.gguf", "such.gguf", "~/such.gguf"):
        with pytest.raises(ValueError, match="^draft='.*such.gguf': there is no such file"):
            find_file(name, "draft")


@pytest.fixture
def file(made, offline, tmp_path, monkeypatch):  # noqa: F811
    """A GGUF file on the hub, as it is in the cache, and the folder of what it means."""
    monkeypatch.setattr(gguf_files, "cache_folder", lambda: tmp_path / "cache")
    path, dense = made()
    commit = offline / "models--some--one" / "snapshots" / "abc"
    shutil.copytree(path.parent, commit, ignore=lambda *_: ["dense", "hub"])
    (commit.parents[1] / "refs").mkdir()
    (commit.parents[1] / "refs" / "main").write_text("abc")
    (commit / "tiny.gguf").rename(commit / "tiny-Q8_0.gguf")
    return path, dense, "some/one:Q8_0"


def test_every_option_that_takes_a_model_takes_a_file(file):
    path, dense, on_hub = file
    small = dict(num_gpu_blocks_override=24, dtype="float32")
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

    def text(llm) -> list[int]:
        return llm.generate([[5, 99, 20]], params, use_tqdm=False)[0].outputs[0].token_ids

    with LLM(str(path), tokenizer=on_hub, **small) as llm:
        expected, ids = text(llm), llm.get_tokenizer().encode("ab and so on")
        llm.update_weights(on_hub)
        assert text(llm) == expected
    assert ids[0] == 260 and ids != byte_tokenizer().encode("ab and so on")  # the file's own merge
    assert as_vllm.get_tokenizer(str(path)).encode("ab and so on") == ids
    draft = dict(method="draft_model", model=on_hub, num_speculative_tokens=3)
    with LLM(on_hub, speculative_config=draft, **small) as llm:
        assert text(llm) == expected


def test_every_command_that_takes_a_model_takes_a_file(file, tmp_path, capsys, monkeypatch):
    path, _, on_hub = file
    monkeypatch.setattr(verify, "MODES", [verify.BATCHED])
    monkeypatch.setattr(verify_served, "KINDS", verify_served.KINDS[:1])
    monkeypatch.setattr(doctor, "MB", 2 ** 8)
    assert convert.main([on_hub, str(tmp_path / "folder")]) == 0
    assert " MB in tiny-Q8_0.gguf" in capsys.readouterr().out
    assert verify.main([on_hub, "--num-prompts", "1", "--max-tokens", "2"]) == 0
    assert "some/one:Q8_0: none of" in capsys.readouterr().out
    assert doctor.main([str(path)]) == 0
    assert "| tiny.gguf, bfloat16" in capsys.readouterr().out
