"""A GGUF file becomes a folder: the same text as of the weights that the file means.

Files are written by llama.cpp's own package, which also says what its blocks mean; the folder that
the text is compared with is written here, tensor by tensor.
"""

import json
import os
import re
import resource

import numpy as np
import pytest
import torch
from checkpoints import byte_tokenizer
from safetensors.torch import load_file, save_file
from tokenizers.pre_tokenizers import ByteLevel

from nanoserve import LLM, SamplingParams
from nanoserve.loader import stored_tensors
from nanoserve_extras.quantization.formats import assemble
from nanoserve_extras.tools import convert, gguf_files
from nanoserve_extras.tools.convert import main
from nanoserve_extras.tools.gguf_entries import Stored, read_file
from nanoserve_extras.tools.gguf_weights import UNPACK, Source, in_order, keeps_8_bits

SIZES = dict(vocab_size=261, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-6,
             max_position_embeddings=128, tie_word_embeddings=False)
TOP = {"token_embd": ("model.embed_tokens", 261, 64), "output_norm": ("model.norm", 64),
       "output": ("lm_head", 261, 64)}
LAYER = {"attn_norm": ("input_layernorm", 64), "ffn_norm": ("post_attention_layernorm", 64),
         "attn_q": ("self_attn.q_proj", 64, 64), "attn_k": ("self_attn.k_proj", 32, 64),
         "attn_v": ("self_attn.v_proj", 32, 64), "attn_output": ("self_attn.o_proj", 64, 64),
         "ffn_gate": ("mlp.gate_proj", 96, 64), "ffn_up": ("mlp.up_proj", 96, 64),
         "ffn_down": ("mlp.down_proj", 64, 96)}
ADDED = ["<s>", "</s>", "<|end|>", "<pad>", "ab"]  # the last one is a merge


@pytest.fixture
def made(tmp_path):
    """A Llama as a file, and as a folder of what its blocks mean. change: of the writer. others:
    kinds of some tensors."""
    gguf = pytest.importorskip("gguf")

    def make(kind: str = "Q8_0", arch: str = "llama", change=lambda writer: None, left_out=(),
             seed: int = 0, others: dict[str, str] | None = None):
        writer = gguf.GGUFWriter(str(tmp_path / "tiny.gguf"), arch)
        for name, value in dict(
                context_length=128, embedding_length=64, block_count=2, feed_forward_length=96,
                head_count=4, head_count_kv=2, layer_norm_rms_eps=1e-6, rope_freq_base=1e4,
                rope_dimension_count=16, vocab_size=261, tokenizer_model="gpt2",
                tokenizer_pre="qwen2", token_list=sorted(ByteLevel.alphabet()) + ADDED,
                token_types=[1] * 256 + [3] * 4 + [1], token_merges=["a b"], bos_token_id=256,
                eos_token_id=257, pad_token_id=259,
                chat_template="{{ messages[0].content }}").items():
            getattr(writer, f"add_{name}")(value)
        change(writer)
        names = TOP | {f"blk.{i}.{name}": (f"model.layers.{i}.{other}", *shape)
                       for i in range(2) for name, (other, *shape) in LAYER.items()}
        generator, dense = torch.Generator().manual_seed(seed), {}
        for name, (other, *shape) in names.items():
            weight = torch.randn(*shape, generator=generator)
            weight = weight * 2.5 * shape[-1] ** -0.5 if len(shape) > 1 else 1 + 0.3 * weight
            raw, stored = weight.numpy(), None
            if len(shape) > 1:
                stored = gguf.GGMLQuantizationType[
                    (others or {}).get(name.rpartition(".")[2], kind)]
                raw = gguf.quants.quantize(raw, stored)
                weight = torch.from_numpy(gguf.quants.dequantize(raw, stored))
                if name.endswith(("attn_q", "attn_k")):  # its RoPE turns 2 i, 2 i + 1
                    weight = weight.view(-1, 8, 2, 64).transpose(1, 2).reshape(shape)
            dense[f"{other}.weight"] = weight.clone().contiguous()
            if name not in left_out:
                writer.add_tensor(f"{name}.weight", raw, raw_dtype=stored)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        byte_tokenizer().save_pretrained(tmp_path / "dense")
        save_file(dense, tmp_path / "dense" / "model.safetensors", {"format": "pt"})
        (tmp_path / "dense" / "config.json").write_text(json.dumps(SIZES | dict(
            architectures=["LlamaForCausalLM"], model_type="llama", rope_theta=1e4)))
        return tmp_path / "tiny.gguf", tmp_path / "dense"

    return make


def texts(folder, **options) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(folder, num_gpu_blocks_override=24, dtype="float32", **options) as llm:
        outputs = llm.generate([[5, 99, 20], [7] * 4 + [200, 31]], params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def test_a_full_disk_is_a_sentence_and_leaves_nothing(made, tmp_path, capsys):
    """By the system's limit of a file. safetensors' own error was a traceback."""
    file, _ = made()
    limits, was = resource.getrlimit(resource.RLIMIT_FSIZE), {*tmp_path.iterdir()}
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        assert main([str(file), str(tmp_path / "folder")]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = capsys.readouterr().err
    assert re.search(r"folder .*File too large.* [\d,]+ bytes were free", said), said
    assert {*tmp_path.iterdir()} == was


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_the_folder_writes_what_the_blocks_mean(made, tmp_path, capsys, kind):
    file, dense = made(kind)
    folder = tmp_path / "new" / "folder"
    assert main([str(file), str(folder), "--dtype", "float32"]) == 0
    said = capsys.readouterr().out
    assert "folder: LlamaForCausalLM, " in said and " MB in tiny.gguf" in said
    assert texts(folder) == texts(dense)
    meant = load_file(dense / "model.safetensors")
    stored = {name: one for _, name, one in stored_tensors(folder)}
    assert stored.keys() == meant.keys()
    for name in meant:
        torch.testing.assert_close(stored[name], meant[name], rtol=0, atol=0)
    assert [one.name for one in folder.parent.iterdir()] == ["folder"]  # nothing is left beside it


@pytest.mark.parametrize("kind, bits", [
    ("Q4_0", "int4"), ("Q4_1", "int4"), ("Q5_0", "int4"), ("Q5_1", "int4"), ("Q8_0", "int4"),
    ("F16", "int4"), ("Q8_0", "int8")])
def test_few_bits_are_those_of_the_file_where_it_has_them(made, tmp_path, kind, bits, capfd):
    """Read by the engine's own reader of formats; the steps are typed here. A folder of few bits is
    served as such."""
    file, dense = made(kind)
    folder, meant = tmp_path / "folder", load_file(dense / "model.safetensors")
    assert main([str(file), str(folder), "--dtype", "float32", "--quantization", bits]) == 0
    entry = json.loads((folder / "config.json").read_text())["quantization_config"]
    stored = {name: one for _, name, one in assemble(stored_tensors(folder), entry)}
    assert stored.keys() == meant.keys()
    for name, one in meant.items():
        step = torch.zeros(())
        if one.dim() > 1 and ".layers." in name and bits == "int8":
            step = one.abs().amax(1, keepdim=True) / 127
        elif one.dim() > 1 and ".layers." in name and kind in ("Q8_0", "F16"):
            groups = one.unflatten(1, (-1, 32))
            step = ((groups.amax(2) - groups.amin(2)) / 15).repeat_interleave(32, 1)
            if any(part in name for part in ("q_proj", "k_proj", "v_proj")):  # in 8 bits
                step = groups.abs().amax(2).repeat_interleave(32, 1) / 127 * (kind == "F16")
        assert ((stored[name] - one).abs() <= 0.51 * step).all(), name
    said = capfd.readouterr().out
    assert (" numbers in 8 tensors, rounded: " in said) == (
        bits == "int4" and kind in ("Q8_0", "F16"))
    expected = texts(folder, quantization=bits, kernels="torch")
    assert texts(folder) == expected == texts(folder, quantization=bits)
    assert f"float32, quantization='{bits}'" in capfd.readouterr().err
    if kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1"):  # the head, too, which has a row for each token
        assert expected == texts(dense)


def test_a_file_is_read_as_llama_cpps_own_package_reads_it(made):
    """Entries of every kind, and tensors byte by byte."""
    file, _ = made("Q4_1", change=lambda writer: (
        writer.add_array("llama.odd", [-1, 2]), writer.add_float64("llama.wide", 0.1),
        writer.add_array("llama.flags", [True, False]), writer.add_int8("llama.small", -5),
        writer.add_uint64("llama.large", 2 ** 63), writer.add_string("llama.text", "\u00e9")))
    import gguf
    reader, (entries, tensors) = gguf.GGUFReader(file), read_file(file)
    assert entries == {name: field.contents() for name, field in reader.fields.items()
                       if not name.startswith("GGUF.")}
    assert [(one.name, [*one.shape[::-1]], one.tensor_type) for one in tensors] == [
        (one.name, one.shape.tolist(), one.tensor_type) for one in reader.tensors]
    assert all(one.data.tobytes() == other.data.tobytes() for one, other in zip(
        tensors, reader.tensors, strict=True))


def test_every_kind_of_block_is_kept_to_the_last_bit():
    """Bytes at random, but for the scales, which are to be numbers; llama.cpp's package says what
    they mean. Inputs may stand in another order, if groups stay whole."""
    gguf = pytest.importorskip("gguf")
    rng = np.random.default_rng(0)
    scales = {name: (0, 2) for name in UNPACK} | dict(Q6_K=(208,), Q4_0=(0,), Q5_0=(0,), Q8_0=(0,))
    for name, unpack in UNPACK.items():
        kind = gguf.GGMLQuantizationType[name]
        size = gguf.GGML_QUANT_SIZES[kind][1]
        rows = rng.integers(0, 256, (6, 3 * size), dtype=np.uint8)
        for at in scales[name]:
            drawn = rng.normal(0, 1, (18, 1)).astype(np.float16)
            rows.reshape(-1, size)[:, at:at + 2] = drawn.view(np.uint8)
        one, meant = unpack(torch.from_numpy(rows)), gguf.quants.dequantize(rows, kind)
        assert torch.equal(one[:], torch.from_numpy(meant)), name
        order = torch.arange(one.shape[1]).view(-1, 32).flip(0).flatten()
        assert torch.equal(in_order(one, order)[:], torch.from_numpy(meant)[:, order]), name
        assert in_order(one, order.flip(0)) is None


@pytest.mark.parametrize("kinds", [dict(Q8_0="attn_v", F16="ffn_down"), dict(MXFP4="ffn_down")])
def test_what_a_file_of_few_bits_leaves_wider_keeps_8(made, tmp_path, kinds):
    """Q4_K_M and its kin do so for what suffers most. Kinds with uneven steps are rounded to 8."""
    file, dense = made("Q4_0", others={part: kind for kind, part in kinds.items()})
    folder, meant = tmp_path / "folder", load_file(dense / "model.safetensors")
    assert main([str(file), str(folder), "--dtype", "float32", "--quantization", "int4"]) == 0
    entry = json.loads((folder / "config.json").read_text())["quantization_config"]
    for _, name, one in assemble(stored_tensors(folder), entry, keep=True):
        if name in meant and meant[name].dim() > 1:
            step = meant[name].unflatten(1, (-1, 32)).abs().amax(2) / 127
            is_exact = not any(part in name for part in ("down_proj",))
            far = 0 if is_exact else 0.51 * step.repeat_interleave(32, 1)
            assert ((one[:] - meant[name]).abs() <= far).all(), name
            wider = "down_proj" in name or "v_proj" in name and "Q8_0" in kinds
            assert one.bits == (8 if wider else 4), name
    assert texts(folder) == texts(folder, kernels="torch")


def test_where_the_vocabulary_is_most_of_a_network_layers_keep_8_bits():
    gguf = pytest.importorskip("gguf")

    def stored(name, kind, rows):
        shape = (rows, 64)
        return Source(Stored(name, shape, gguf.GGMLQuantizationType[kind], None), [name], shape)

    for kind, rows, expected in (("Q8_0", 96, False), ("Q8_0", 97, True), ("Q5_0", 96, True)):
        found = [stored("token_embd.weight", "Q8_0", rows), stored("output.weight", "Q8_0", rows),
                 stored("blk.0.ffn_up.weight", kind, 96)]
        assert keeps_8_bits(found) == expected


def test_a_file_is_written_in_shards_and_what_waits_is_one(made, tmp_path, monkeypatch):
    """Files that those may read who may read the others."""
    file, dense = made()
    monkeypatch.setattr(convert, "SHARD", 50_000)
    assert main([str(file), str(tmp_path / "folder"), "--dtype", "float32"]) == 0
    files = [*(tmp_path / "folder").glob("model-*.safetensors")]
    largest = 261 * 64 * 4 + 2_000  # the embedding, behind what waits, and a header
    assert len(files) > 4 and max(one.stat().st_size for one in files) < 50_000 + largest
    assert len({one.stat().st_mode for one in (tmp_path / "folder").iterdir()}) == 1
    assert texts(tmp_path / "folder") == texts(dense)


@pytest.mark.parametrize("shard, count", [(1, 21), (2 ** 30, 1)])
def test_no_shard_is_empty(made, tmp_path, monkeypatch, shard, count):
    """There was a last one without tensors where the one before was just full."""
    file, _ = made()
    monkeypatch.setattr(convert, "SHARD", shard)
    assert main([str(file), str(tmp_path / "folder")]) == 0
    files = [*(tmp_path / "folder").glob("*.safetensors")]
    assert len(files) == count and all(load_file(one) for one in files)


def test_what_became_of_the_numbers_is_told_and_the_tokenizer_comes_along(made, tmp_path, capsys):
    file, dense = made()
    folder = tmp_path / "folder"
    folder.mkdir()  # an empty one may be there
    assert main([str(file), str(folder)]) == 0
    weights = [one.double() for one in load_file(dense / "model.safetensors").values()]
    changed = sum((one.bfloat16().double() - one).square().sum() for one in weights)
    loss = float((changed / sum(one.square().sum() for one in weights)) ** 0.5)
    assert f"0.1 million numbers in 21 tensors, rounded: {loss:.2%} from" in capsys.readouterr().out
    with LLM(folder, num_gpu_blocks_override=24) as llm:
        assert llm.get_tokenizer().encode("ab c") == [260, llm.get_tokenizer().encode(" ")[0],
                                                      llm.get_tokenizer().encode("c")[0]]
        (output,) = llm.chat([{"role": "user", "content": "ab"}],
                             SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
        assert output.prompt_token_ids == [260]
        assert llm.model_config.eos_token_ids == (257, 258)  # </s> and <|end|>


@pytest.mark.parametrize("options, words", [
    (dict(arch="sphinx"), "architecture sphinx is not supported, but llama, .*safetensors"),
    (dict(change=lambda writer: writer.add_tensor("blk.0.ffn_up.bias", torch.ones(96).numpy())),
     "has no place for blk.0.ffn_up.bias; use the checkpoint in safetensors"),
    (dict(left_out=["blk.1.ffn_up"]), r"missing keys model.layers.1.mlp.up_proj.weight.*--merge"),
], ids=["unknown", "a bias", "a part"])
def test_what_would_become_another_network_is_refused(made, tmp_path, capsys, options, words):
    file, _ = made(**options)
    assert main([str(file), str(tmp_path / "folder")]) == 2
    assert not (tmp_path / "folder").exists()
    said = capsys.readouterr().err
    assert re.search(f"convert: error: .*{words}", said), said


def test_bad_input_is_named_before_anything_is_read(tmp_path, capsys, monkeypatch):
    file, full = tmp_path / "a.gguf", tmp_path / "full"
    full.mkdir()
    (full / "kept").write_text("mine")
    for content, folder, words in [
            (None, "new", "a.gguf': there is no such file"),
            (b"PK\3\4", "new", "is no GGUF file"),
            (b"version https://git-lfs.github.com/spec/v1\n", "new", "run git lfs pull"),
            (b"GGUF\3\0\0\0", "full", "is there and not an empty folder"),
            (b"GGUF\3\0\0\0", "full/kept", "is there and not an empty folder"),
            (b"GGUF\3\0\0\0", "new", r"needs gguf: pip install 'nanoserve[gguf]'")]:
        if content is not None:
            file.write_bytes(content)
        monkeypatch.setattr(convert, "find_spec", lambda name: None)
        assert main([str(file), str(tmp_path / folder)]) == 2
        assert words in capsys.readouterr().err
    assert (full / "kept").read_text() == "mine" and not (tmp_path / "new").exists()


def test_a_file_that_was_cut_off_is_named(made, tmp_path, capsys):
    file, _ = made()
    whole = file.read_bytes()
    for length in (50, len(whole) // 2):
        file.write_bytes(whole[:length])
        assert main([str(file), str(tmp_path / "new")]) == 2
        assert "cut off" in capsys.readouterr().err and not (tmp_path / "new").exists()


def test_a_gguf_file_is_a_model_and_is_converted_once(made, tmp_path, monkeypatch, capfd):
    """What its user means by LLM("x.gguf"). In float32 the numbers are the file's, otherwise
    rounded to bfloat16."""
    file, dense = made()
    monkeypatch.setattr(gguf_files, "cache_folder", lambda: tmp_path / "cache")
    expected = texts(dense)
    capfd.readouterr()
    for times in (1, 0):
        assert texts(str(file)) == expected
        out, said = capfd.readouterr()
        assert said.count("tiny.gguf is converted into") == times and not out
    texts(str(file), quantization="int4")
    LLM(str(file), num_gpu_blocks_override=24).shutdown()
    folders = {one.name.rpartition("-")[0]: one for one in (tmp_path / "cache" / "gguf").iterdir()}
    assert folders.keys() == {"tiny", "tiny-float32", "tiny-int4-float32"}
    numbers = load_file(dense / "model.safetensors")
    for name, change in (("tiny-float32", torch.Tensor.float), ("tiny", torch.Tensor.bfloat16)):
        found = load_file(folders[name] / "model.safetensors")
        assert found.keys() == numbers.keys()
        assert all(torch.equal(one, change(numbers[key])) for key, one in found.items())
    time = file.stat().st_mtime_ns
    file, _ = made(seed=1)  # another file of that name and size, and, as from an archive, time
    os.utime(file, ns=(time, time))
    assert texts(file) != expected
    assert len([*(tmp_path / "cache" / "gguf").iterdir()]) == 4
    (tmp_path / "mended.py").write_text("another converter")
    monkeypatch.setattr(gguf_files, "SOURCES", [tmp_path / "mended.py"])
    texts(file)
    assert len([*(tmp_path / "cache" / "gguf").iterdir()]) == 5


def test_a_gguf_file_that_can_not_be_converted_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_files, "cache_folder", lambda: tmp_path / "cache")
    with pytest.raises(ValueError, match="a.gguf': .*no such file"):
        LLM(tmp_path / "a.gguf")
    (tmp_path / "a.gguf").write_bytes(b"GGUE")
    with pytest.raises(ValueError, match="a.gguf .*GGUF"):
        LLM(tmp_path / "a.gguf")
    with pytest.raises(ValueError, match="revision='main' .*a.gguf' is a file: leave it out"):
        LLM(tmp_path / "a.gguf", revision="main")
    (tmp_path / "cache").write_bytes(b"")
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(convert, "convert", lambda file, folder, *kinds: folder.mkdir())
    with pytest.raises(ValueError, match="a.gguf' can't be converted into .*: nanoserve convert"):
        LLM(tmp_path / "a.gguf")
    (tmp_path / "folder.gguf").mkdir()
    with pytest.raises(ValueError, match="folder.gguf.*config.json"):
        LLM(tmp_path / "folder.gguf")
    monkeypatch.setattr(gguf_files, "cache_folder", lambda: None)
    with pytest.raises(ValueError, match="nanoserve convert a.gguf FOLDER"):
        LLM(tmp_path / "a.gguf")
    with pytest.raises(ValueError, match="a GGUF file is named as the model.*got 'gguf'"):
        LLM(load_format="gguf")
