"""Encoders by transformers' network: the vectors that transformers gives, one prompt at a time."""

import json
import shutil
from itertools import product

import pytest
import torch
from architectures import SIZES
from checkpoints import byte_tokenizer
from encoders import ENCODERS, PAD, classes_of, hidden_of, make
from pooled import assert_close, data, normalised, pooled, start, vectors
from safetensors.torch import load_file, save_file
from small_engine import assert_idle
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    MPNetConfig,
    PreTrainedTokenizerFast,
)

from nanoserve import PoolingParams
from nanoserve_extras.foreign.encoder import find_separator

CLASSIFIERS = [name for name in ENCODERS if name not in ("eurobert", "embeddinggemma")]
# The heads of these two are refused.


@pytest.fixture(scope="session")
def encoders(tmp_path_factory):
    root = tmp_path_factory.mktemp("encoders")
    return {name: make(name, root / name) for name in ENCODERS}


@pytest.fixture(scope="session")
def texts(prompts):
    """Without padding's id, which nobody would write, and of the lengths 1 to 70, some equal."""
    return [[token if token != PAD else 9 for token in prompt] for prompt in prompts]


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("pooling_type", ["CLS", "MEAN", "LAST"])
def test_embeddings_equal_transformers_alone_and_batched(encoders, texts, name, pooling_type):
    expected = [pooled(hidden, pooling_type) for hidden in hidden_of(encoders[name], texts)]
    config = dict(pooling_type=pooling_type)
    for options in (dict(max_num_seqs=1), dict(max_num_batched_tokens=128),
                    dict(async_scheduling=True, kernels="torch")):
        with start(encoders[name], runner="auto", pooler_config=config, **options) as llm:
            outputs = llm.embed(texts, use_tqdm=False)
            assert_close(vectors(outputs), expected, f"{name}, {options}")
            assert_idle(llm)


def test_each_tokens_vector(encoders, texts):
    expected = [normalised(hidden) for hidden in hidden_of(encoders["bert"], texts)]
    with start(encoders["bert"]) as llm:
        assert_close(data(llm.encode(texts, pooling_task="token_embed", use_tqdm=False)), expected)


def test_prompts_are_whole_and_nothing_is_remembered(encoders, texts, capsys):
    """Whatever was asked for: a first token depends on the last. `describe` says so."""
    with start(encoders["bert"], enable_prefix_caching=True, enable_chunked_prefill=True) as llm:
        assert "transformers' network" in capsys.readouterr().err
        assert "pooling CLS to embed, whole prompts without a prefix cache" in llm.describe()
        first, again = (llm.embed(texts, use_tqdm=False) for _ in range(2))
        assert not any(output.num_cached_tokens for output in again)
        assert_close(vectors(first), vectors(again))
    with pytest.raises(ValueError, match="max_num_batched_tokens=64"):
        start(encoders["bert"], max_num_batched_tokens=64)


def test_an_encoder_answers_after_steps_that_were_lost_with_overlap(encoders, monkeypatch):
    """Both steps in flight are dropped, and all of their prompts run by then: the last one was cut,
    and each step from then on failed with "a prompt is not whole in its step"."""
    texts = [[5 + (7 * i + j) % 200 for j in range(70 + i)] for i in range(6)]
    expected = [pooled(hidden, "CLS") for hidden in hidden_of(encoders["bert"], texts)]
    with start(encoders["bert"], async_scheduling=True, max_num_batched_tokens=128) as llm:
        run, calls = llm.runner.run, []

        def fails(*args, **options):
            calls.append(len(calls))
            if calls[-1] in (1, 4):
                raise RuntimeError("out of memory")
            return run(*args, **options)

        monkeypatch.setattr(llm.runner, "run", fails)
        for i, text in enumerate(texts):
            llm.add_request(str(i), text, PoolingParams())
        got = {}
        for _ in range(30):
            try:
                got |= {out.request_id: out.outputs.data for out in llm.step()}
            except RuntimeError:
                pass
        assert not llm.has_unfinished_requests() and len(calls) > 5
    assert_close([got[str(i)] for i in range(6)], expected)


@pytest.mark.parametrize("name", CLASSIFIERS)
@pytest.mark.parametrize("num_labels", [1, 3])
def test_classes_equal_transformers(tmp_path, texts, name, num_labels):
    """The class's own head: a pooler, two layers, or one. One number goes through a sigmoid."""
    folder = make(name, tmp_path / name, AutoModelForSequenceClassification, num_labels=num_labels)
    logits = classes_of(folder, texts)
    expected = [x.sigmoid() if num_labels == 1 else x.softmax(-1) for x in logits]
    with start(folder, runner="auto") as llm:
        outputs = llm.classify(texts, use_tqdm=False)
        assert_close([torch.tensor(output.outputs.probs) for output in outputs], expected)
    with start(folder, runner="auto", dtype="bfloat16") as llm:  # classes are not rounded to it
        outputs = llm.encode(texts, PoolingParams(use_activation=False), pooling_task="classify",
                             use_tqdm=False)
        assert any((one.outputs.data != one.outputs.data.bfloat16()).any() for one in outputs)


KINDS = ["roberta", "xlm-roberta", "camembert", "data2vec-text", "bert", "electra", "ernie"]
TEMPLATES = {  # CLS is 256, SEP 258
    "bert's": dict(single="<s> $A <|end|>", pair="<s> $A <|end|> $B:1 <|end|>:1"),
    "roberta's": dict(single="<s> $A <|end|>", pair="<s> $A <|end|> <|end|> $B <|end|>")}


def cross_encoder(kind: str, folder, template: str, names: list[str] | None = None, **config):
    """A network of transformers' with two token types, and a tokenizer that joins pairs."""
    sizes = dict(vocab_size=260, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                 num_attention_heads=4, max_position_embeddings=128, embedding_size=32)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(kind, **dict(
            sizes, type_vocab_size=2, num_labels=1, initializer_range=0.5, **config)))
    model.save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        **TEMPLATES[template], special_tokens=[("<s>", 256), ("<|end|>", 258)])
    if names is not None:
        tokenizer.model_input_names = tokenizer.init_kwargs["model_input_names"] = names
    tokenizer.save_pretrained(folder)
    return folder, tokenizer


@pytest.mark.parametrize(("template", "names", "typed"), [
    ("roberta's", None, ()), ("bert's", None, ("bert", "electra", "ernie")),
    ("bert's", ["input_ids", "attention_mask"], ()),
    ("bert's", ["input_ids", "token_type_ids", "attention_mask"], KINDS)], ids=str)
@pytest.mark.parametrize("kind", ["roberta", "camembert", "data2vec-text", "bert", "electra"])
def test_tokens_have_types_where_their_tokenizer_makes_them(tmp_path, kind, template, names, typed):
    """BERT was trained to tell two texts apart by a token's type: 0 up to the separator, 1 behind.
    RoBERTa's config has two types by default, and its tokenizer makes none: scores of its kind
    were those of other pairs, in silence. One says in its config that a score is no probability."""
    plain = {} if kind != "electra" else dict(
        sentence_transformers={"activation_fn": "torch.nn.modules.linear.Identity"})
    folder, tokenizer = cross_encoder(kind, tmp_path / kind, template, names, **plain)
    documents = ["in the forest", "x", "nobody knows that, says the king"]
    pairs = [tokenizer("where is the fox", one, return_token_type_ids=True) for one in documents]
    types = [pair["token_type_ids"] for pair in pairs] if kind in typed else None
    expected = classes_of(folder, [pair["input_ids"] for pair in pairs], types)
    with start(folder, runner="auto") as llm:
        outputs = llm.score("where is the fox", documents, use_tqdm=False)
        assert_close([torch.tensor([output.outputs.score]) for output in outputs],
                     [x if plain else x.sigmoid() for x in expected])


@pytest.mark.parametrize("names", [None, ["input_ids", "token_type_ids"]])
def test_a_letter_is_no_separator(tmp_path, names):
    """A tokenizer without a template joins a pair's texts without one, and by itself gives them no
    types: then all are 0, also behind the "a" that stands between the two of a trial."""
    folder = make("bert", tmp_path / "bert", AutoModelForSequenceClassification, num_labels=1)
    if names:
        config = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps(
            config | dict(model_input_names=names)))
        with pytest.raises(ValueError, match="no separator"):
            start(folder)
        return
    text = "says the king, and goes away"
    ids = AutoTokenizer.from_pretrained(folder)("where", text)["input_ids"]
    with start(folder) as llm:
        (output,) = llm.score("where", text, use_tqdm=False)
    assert output.prompt_token_ids == ids
    (expected,) = classes_of(folder, [ids])
    assert output.outputs.score == pytest.approx(float(expected.sigmoid()), abs=1e-5)


@pytest.mark.parametrize("pair", ["[CLS] $A $B:1 [SEP]:1", "[CLS] $A [SEP]:1 $B:1 [SEP]:1"])
def test_types_that_begin_behind_no_separator_are_refused(pair):
    """The template asks for them, and all would have been 0."""
    ids = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "a": 3, "b": 4}
    tokenizer = Tokenizer(WordLevel(ids, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair=pair, special_tokens=[("[CLS]", 1), ("[SEP]", 2)])
    with pytest.raises(ValueError, match="no separator"):
        find_separator("BertModel", "bert", PreTrainedTokenizerFast(tokenizer_object=tokenizer))


@pytest.mark.parametrize("padding", [0, 1, 3, 12, 200])
@pytest.mark.parametrize("kind", ["roberta", "xlm-roberta", "camembert"])
def test_any_id_may_be_the_paddings(tmp_path, kind, padding):
    """A model whose padding is 3 was refused, because 3 was among the ids of the check at load.
    Positions begin behind it: with 290 and a padding of 3 there are 286."""
    folder, _ = cross_encoder(kind, tmp_path / kind, "roberta's", pad_token_id=padding,
                              max_position_embeddings=290)
    prompt = [20 + i % 60 for i in range(289 - padding)]
    with start(folder, runner="auto") as llm:
        assert llm.config.max_model_len == 289 - padding
        [output] = llm.classify([prompt], use_tqdm=False)
    [expected] = classes_of(folder, [prompt])
    assert_close([torch.tensor(output.outputs.probs)], [expected.sigmoid()])


def test_what_transformers_refuses_to_make_is_refused_in_words(tmp_path):
    """A padding id beyond the vocabulary ended as a bare AssertionError of torch, with random
    weights only."""
    folder, _ = cross_encoder("roberta", tmp_path / "roberta", "roberta's")
    for options in (dict(load_format="dummy"), {}):
        for wrong in (dict(pad_token_id=260), dict(num_attention_heads=5), dict(hidden_act="x")):
            with pytest.raises(ValueError, match="config.json|its own run|mismatched tensors"):
                start(folder, runner="auto", hf_overrides=wrong, **options)
    with pytest.raises(ValueError, match="pad_token_id"):
        start(folder, runner="auto", hf_overrides=dict(pad_token_id=None))


@pytest.mark.parametrize("single", ["<s> $A <|end|>", "<s> $A", "$A <|end|>", "$A"])
@pytest.mark.parametrize("name", ["bert", "qwen3"])
def test_what_stands_around_a_text_survives_a_cut(tmp_path, checkpoints, name, single):
    """[CLS], [SEP], a last EOS, at both sides. Oracle: the tokenizer's own cut."""
    folder = tmp_path / "model"
    if name == "bert":
        make("bert", folder)
    else:
        shutil.copytree(checkpoints[name], folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=single, special_tokens=[("<s>", 256), ("<|end|>", 258)])
    tokenizer.save_pretrained(folder)
    text = "a fox in the forest " * 9
    with start(folder, max_model_len=100) as llm:
        for side in ("left", "right", None):  # by default encoders keep the beginning
            tokenizer.truncation_side = side or ("right" if name == "bert" else "left")
            for count in (-1, 40, 5):
                ids = tokenizer(text, truncation=True, max_length=100 if count == -1 else count)
                params = PoolingParams(truncate_prompt_tokens=count, truncation_side=side)
                forms = [text, tokenizer.encode(text)]  # an encoder's last id is a separator
                forms = forms if name == "qwen3" or single.endswith("|>") else forms[:1]
                outputs = llm.embed(forms, pooling_params=params, use_tqdm=False)
                assert all(one.prompt_token_ids == ids["input_ids"] for one in outputs)


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_pair_loses_tokens_of_its_longer_text(tmp_path, template):
    """As its tokenizer cuts it: a long query pushed the document out, and all scores were equal."""
    folder, tokenizer = cross_encoder("bert", tmp_path / "bert", template)
    pairs = [("fox", "a fox in the forest " * 9), ("a", "b"), ("which fox is it? " * 9, "this"),
             ("where is it? " * 9, "the king of the sea " * 8)]
    with start(folder, runner="auto") as llm:
        for count, (query, document) in product((-1, 64, 11, 5, 4), pairs):
            ids = tokenizer(query, document, truncation="longest_first",
                            max_length=128 if count == -1 else count)["input_ids"]
            [output] = llm.score(query, document, use_tqdm=False,
                                 pooling_params=PoolingParams(truncate_prompt_tokens=count))
            assert output.prompt_token_ids == ids and len(ids) <= (128 if count == -1 else count)


def test_texts_begin_with_a_prompt_by_its_name(tmp_path):
    folder = make("bert", tmp_path / "bert")
    named = folder / "config_sentence_transformers.json"
    named.write_text(json.dumps(dict(prompts=dict(query="search: ", passage="read: "))))
    with start(folder) as llm:
        texts = ["the fox", {"prompt": "a king"}]
        got = vectors(llm.embed(texts, prompt_name="query", use_tqdm=False))
        spelt = vectors(llm.embed(["search: the fox", "search: a king"], use_tqdm=False))
        assert_close(got, spelt)
        with pytest.raises(ValueError, match="prompt_name='x'.*query, passage"):
            llm.embed(texts, prompt_name="x")
        with pytest.raises(ValueError, match="prompt_name='query'"):
            llm.embed([[5, 6]], prompt_name="query")
    named.write_text(json.dumps(dict(prompts=dict(query="search: "), default_prompt_name="query")))
    with start(folder) as llm:
        assert_close(vectors(llm.embed(["the fox", "a king"], use_tqdm=False)), spelt)


@pytest.mark.parametrize("name", ENCODERS)
def test_embeddings_equal_sentence_transformers(tmp_path, name):
    """Its own files, written by itself; `pip install -e ".[test-full]"`."""
    sentence_transformers = pytest.importorskip("sentence_transformers")
    models = pytest.importorskip("sentence_transformers.models")
    folder = make(name, tmp_path / name)
    with torch.random.fork_rng(devices=[]):
        oracle = sentence_transformers.SentenceTransformer(modules=[
            models.Transformer(str(folder), max_seq_length=100), models.Pooling(32, "mean"),
            models.Dense(32, 24), models.Normalize()], prompts=dict(query="search: "), device="cpu")
    oracle.save(str(tmp_path / "saved"))
    texts = ["the fox", "In the middle of the forest there was a house, and in it lived", "x"]
    expected = oracle.encode(texts, prompt_name="query", convert_to_tensor=True)
    with start(tmp_path / "saved", runner="auto") as llm:
        assert_close(vectors(llm.embed(texts, prompt_name="query", use_tqdm=False)), list(expected))


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_scores_equal_sentence_transformers_cross_encoder(tmp_path, name):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    folder = make(name, tmp_path / name, AutoModelForSequenceClassification, num_labels=1)
    oracle = sentence_transformers.CrossEncoder(str(folder), device="cpu")
    documents = ["in the forest", "x", "nobody knows that, says the king"]
    expected = oracle.predict([("where", document) for document in documents],
                              convert_to_tensor=True)
    with start(folder, runner="auto") as llm:
        outputs = llm.score("where", documents, use_tqdm=False)
        assert_close([torch.tensor(output.outputs.score) for output in outputs], list(expected))


def test_a_masked_language_models_checkpoint_embeds(tmp_path, texts):
    """Names begin with "bert.", there is a head that nobody needs, and no pooler."""
    folder = make("bert", tmp_path / "bert", AutoModelForMaskedLM)
    expected = [pooled(hidden, "CLS") for hidden in hidden_of(folder, texts)]
    with start(folder, runner="auto") as llm:
        assert_close(vectors(llm.embed(texts, use_tqdm=False)), expected)


@pytest.mark.parametrize("options, words", [
    (dict(runner="generate"), "has no model of that name that writes text"),
    (dict(convert="classify"), "BertModel has none.*convert='classify'"),
    (dict(convert="reward"), "convert='reward'"),
    (dict(tensor_parallel_size=2), "tensor_parallel_size=2"),
    (dict(hf_overrides=dict(is_decoder=True)), "neither causal|is causal|not supported"),
], ids=str)
def test_what_an_encoder_can_not_do_is_refused(encoders, options, words):
    with pytest.raises(ValueError, match=words):
        start(encoders["bert"], **dict(runner="auto") | options)


def test_mpnet_is_refused_for_its_relative_bias(tmp_path):
    config = MPNetConfig(**SIZES, architectures=["MPNetModel"])
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="MPNetModel.*bias"):
        start(tmp_path, runner="auto", load_format="dummy", skip_tokenizer_init=True)


def test_a_missing_tensor_is_never_made_up(tmp_path):
    folder = make("roberta", tmp_path / "roberta")
    name = "encoder.layer.1.attention.self.key.weight"
    stored = load_file(folder / "model.safetensors")
    del stored[name]
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=f"missing.*RobertaModel.*{name}"):
        start(folder)
