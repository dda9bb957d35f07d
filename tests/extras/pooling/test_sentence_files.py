"""What sentence-transformers' files say is computed, or refused by name, on decoders and encoders.

Oracle: hidden states and logits of transformers, and the modules' formulas by hand. The library
itself is asked in test_sentence_files_library.py.
"""

import shutil

import pytest
import torch
import torch.nn.functional as F
from checkpoints import byte_tokenizer
from encoders import classes_of, hidden_of, make
from helpers import write_json
from pooled import POOLING, assert_close, data, dense, start, vectors, write_files
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from nanoserve import PoolingParams
from nanoserve_extras.pooling.sentence_files import POOLING_TYPES

RERANKER = dict(model_type="CrossEncoder", activation_fn="torch.nn.modules.linear.Identity")
IDENTITY = "torch.nn.modules.linear.Identity"
PROMPTS = [[5, 6, 7], list(range(40, 73)), [9]]


@pytest.fixture(params=["qwen3", "bert"])
def model(request, checkpoints, tmp_path):
    """(folder, hidden states of prompts, width) of a decoder of our own, and of an encoder."""
    folder = tmp_path / "model"
    if request.param == "bert":
        make("bert", folder)
        return folder, lambda prompts: hidden_of(folder, prompts), 32
    AutoModel.from_pretrained(checkpoints["qwen3"], dtype=torch.float32).save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    return folder, lambda prompts: hidden_of(folder, prompts), 64


def with_ends(folder):
    """The folder's tokenizer puts <s> and </s> around a text, and around a pair's two."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1",
        special_tokens=[("<s>", 256), ("</s>", 257)])
    tokenizer.save_pretrained(folder)
    return tokenizer


# ------------------------------------------------------------------------------------- the pooling


def weighted(hidden):
    weights = torch.arange(1.0, len(hidden) + 1)[:, None]
    return (hidden * weights).sum(0) / weights.sum()


WAYS = {"cls": lambda h: h[0], "max": lambda h: h.amax(0), "mean": lambda h: h.mean(0),
        "mean_sqrt_len_tokens": lambda h: h.sum(0) / len(h) ** 0.5, "weightedmean": weighted,
        "lasttoken": lambda h: h[-1]}


@pytest.mark.parametrize("said, modes", [
    (dict(pooling_mode=list(reversed(WAYS))), list(reversed(WAYS))),
    (dict(pooling_mode_lasttoken=True, pooling_mode_weightedmean_tokens=True,
          pooling_mode_cls_token=True, pooling_mode_mean_tokens=False), [
              "cls", "weightedmean", "lasttoken"]),
    (dict(word_embedding_dimension=64), ["mean"]), (dict(pooling_mode="max"), ["max"])], ids=str)
def test_all_ways_to_pool_alone_and_joined_whole_and_in_chunks(model, said, modes):
    folder, hidden, width = model
    write_files(folder, ("Pooling", said, {}))
    expected = [torch.cat([WAYS[mode](h) for mode in modes]) for h in hidden(PROMPTS)]
    for options in [{}, dict(max_num_batched_tokens=7)][:1 + (width == 64)]:  # BERT's are whole
        with start(folder, runner="auto", **options) as llm:
            assert_close(vectors(llm.embed(PROMPTS, use_tqdm=False)), expected)


@pytest.mark.parametrize("mode", WAYS)
def test_vectors_are_float32_whatever_the_network_computes_in(qwen3, mode):
    """MEAN over 200 states of bfloat16: summed in that, it was off by half a percent. The oracle is
    computed in float64 from the same states, one by one."""
    prompts = [[(7 * i + j) % 250 for i in range(200)] for j in range(3)]
    with start(qwen3, dtype="bfloat16", max_num_batched_tokens=64,
               pooler_config=dict(pooling_type=POOLING_TYPES[mode])) as llm:
        states = data(llm.encode(prompts, PoolingParams(use_activation=False),
                                 pooling_task="token_embed", use_tqdm=False))
        got = vectors(llm.embed(prompts, use_tqdm=False))
    for ours, state in zip(got, states, strict=True):
        expected = F.normalize(WAYS[mode](state.double()), dim=-1).float()
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


def test_what_a_text_begins_with_is_not_pooled_where_the_file_says_so(model):
    """A step may hold nothing else: on a decoder they take five tokens here."""
    folder, hidden_of, width = model
    tokenizer, texts = with_ends(folder), ["a fox", "", "The king"]
    chunks = dict(max_num_batched_tokens=5, max_num_seqs=5) if width == 64 else {}
    for mode, way in WAYS.items():
        write_files(folder, ("Pooling", dict(pooling_mode=mode, include_prompt=False), {}),
                    prompts=dict(query="find: "), default_prompt_name="query")
        hidden = hidden_of([tokenizer.encode(f"find: {text}") for text in texts])
        expected = [way(h[1 + len("find: "):]) for h in hidden]  # <s>, too
        if mode == "weightedmean":  # a position keeps its weight
            counted = [torch.arange(1.0, len(h) + 1)[7:, None] for h in hidden]
            expected = [(h[7:] * w).sum(0) / w.sum() for h, w in zip(hidden, counted, strict=True)]
        with start(folder, runner="auto", **chunks) as llm:
            assert_close(vectors(llm.embed(texts, use_tqdm=False)), expected, mode)
            if mode == "mean":
                short = PoolingParams(truncate_prompt_tokens=7, truncation_side="right")
                with pytest.raises(ValueError, match="include_prompt|no room"):
                    llm.embed("a fox", pooling_params=short)


# ------------------------------------------------------------------------------------- the modules


def test_modules_are_computed_in_their_order_before_and_behind_the_pooling(model):
    folder, hidden, width = model
    before, f = dense(width, 24, "GELU", seed=1, module_input_name="token_embeddings")
    behind, g = dense(24, 24, use_residual=True, seed=2)
    last, h = dense(24, 10, "Softmax", bias=False, use_residual=True, seed=3)
    norm = dict(zip(("norm.weight", "norm.bias"), torch.rand(2, 24), strict=True))
    tokens = dict(module_input_name="token_embeddings")
    write_files(folder, before, ("Normalize", tokens, {}), POOLING, behind, ("Normalize", {}, {}),
                ("LayerNorm", dict(dimension=24), norm), ("Dropout", dict(dropout=0.5), {}), last,
                truncate_dim=6)
    expected = []
    for state in hidden(PROMPTS):
        x = F.normalize(g(F.normalize(f(state), dim=-1).mean(0)), dim=-1)
        x = F.layer_norm(x, (24,), norm["norm.weight"], norm["norm.bias"])
        expected.append(h(x))
    with start(folder, runner="auto") as llm:
        assert llm.runner.pooler.tasks == ("embed",)
        assert_close(vectors(llm.embed(PROMPTS, use_tqdm=False)), [x[:6] for x in expected])
        wide = PoolingParams(dimensions=8)  # a request's own: its vector has length 1 if they have
        assert_close(vectors(llm.embed(PROMPTS, pooling_params=wide, use_tqdm=False)),
                     [x[:8] for x in expected])
        with pytest.raises(ValueError, match="at most 10"):
            llm.embed([5], pooling_params=PoolingParams(dimensions=11))


def test_a_files_cut_comes_behind_normalize(model):
    """As sentence-transformers has it: such a vector is shorter than 1."""
    folder, hidden, _ = model
    write_files(folder, POOLING, ("Normalize", {}, {}), truncate_dim=6)
    [expected] = [F.normalize(h.mean(0), dim=-1)[:6] for h in hidden(PROMPTS[1:2])]
    with start(folder, runner="auto") as llm:
        assert_close(vectors(llm.embed(PROMPTS[1], use_tqdm=False)), [expected])


@pytest.mark.parametrize("name, similarity", [
    (None, lambda a, b: F.cosine_similarity(a, b, 0)), ("dot", torch.dot),
    ("euclidean", lambda a, b: -(a - b).norm()), ("manhattan", lambda a, b: -(a - b).abs().sum())])
def test_scores_are_the_similarity_that_the_file_names(model, name, similarity):
    folder, _, _ = model
    write_files(folder, POOLING, similarity_fn_name=name)
    with start(folder, runner="auto") as llm:
        one, *others = vectors(llm.embed(["a fox", "The king", "x"], use_tqdm=False))
        scores = [out.outputs.score for out in llm.score("a fox", ["The king", "x"],
                                                         use_tqdm=False)]
        assert scores == pytest.approx([float(similarity(one, other)) for other in others],
                                       rel=1e-5)


# ---------------------------------------------------------------------------------- the rerankers


CLASSES = dict(transformer_task="sequence-classification")
FUNCTIONS = {IDENTITY: lambda x: x, "torch.nn.modules.activation.Sigmoid": torch.sigmoid,
             "torch.nn.modules.activation.Tanh": torch.tanh}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("where", ["modules", "config.json", "older"])
@pytest.mark.parametrize("name", ["qwen3", "bert"])
def test_a_rerankers_activation_is_that_of_its_files(classifiers, tmp_path, name, where, function):
    folder = tmp_path / "model"
    if name == "bert":
        make("bert", folder, AutoModelForSequenceClassification, num_labels=1)
    else:
        shutil.copytree(classifiers("qwen3", 1), folder)
    # The newer word counts where there are several.
    said = dict.fromkeys(("older", "config.json", "modules"), "torch.nn.modules.activation.ReLU")
    said[where] = function
    write_json(folder / "config.json", sbert_ce_default_activation_function=said["older"])
    if where != "older":
        write_json(folder / "config.json", sentence_transformers=dict(
            activation_fn=said["config.json"], version="5.1.0"))
    if where == "modules":
        write_files(folder, first=CLASSES, **RERANKER | dict(activation_fn=function))
    tokenizer = byte_tokenizer()
    [logits] = classes_of(folder, [tokenizer("king?", "A fox.")["input_ids"]])
    with start(folder, runner="auto") as llm:
        [output] = llm.score("king?", "A fox.", use_tqdm=False)
        assert output.outputs.score == pytest.approx(float(FUNCTIONS[function](logits)), abs=1e-5)


def test_a_reranker_made_of_modules(model):
    """Its score is the last module's number, which was taken to be an embedding: all were 1.0."""
    folder, hidden, width = model
    tokenizer = with_ends(folder)
    middle, f = dense(width, 12, "ReLU", seed=1)
    last, g = dense(12, 1, "Identity", seed=2, module_output_name="scores")
    write_files(folder, ("Pooling", dict(pooling_mode="cls"), {}), middle, last,
                prompts=dict(query="q: "), default_prompt_name="query", **RERANKER)
    documents = ["A fox.", "", "The king is in the garden."]
    pairs = tokenizer([("q: king?", one) for one in documents], return_token_type_ids=True)
    states = hidden(pairs["input_ids"])
    if width == 32:  # BERT: tokens of the second text are of type 1
        network = AutoModel.from_pretrained(folder).float().eval()
        with torch.no_grad():
            states = [network(torch.tensor([ids]), token_type_ids=torch.tensor([types])
                              ).last_hidden_state[0] for ids, types in zip(
                                  pairs["input_ids"], pairs["token_type_ids"], strict=True)]
    expected = [float(g(f(state[0]))) for state in states]
    with start(folder, runner="auto") as llm:
        outputs = llm.score("king?", documents, use_tqdm=False)
        assert [one.outputs.score for one in outputs] == pytest.approx(expected, abs=1e-4)
        assert [one.prompt_token_ids for one in outputs] == pairs["input_ids"]


ROLES = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


@pytest.mark.parametrize("name", ["qwen3", "qwen3-tied"])
@pytest.mark.parametrize("no", [ord("n"), None])
@pytest.mark.parametrize("renders", [True, False])
def test_a_generator_whose_files_make_it_a_reranker(checkpoints, tmp_path, name, no, renders):
    """LogitScore: the logit of one token, less that of another, behind the chat template if the
    files name messages. What queries begin with is then the system's message."""
    folder = tmp_path / "model"
    shutil.copytree(checkpoints[name], folder)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = ROLES + "{% if add_generation_prompt %}A:{% endif %}"
    tokenizer.save_pretrained(folder)
    output = dict(method="forward", method_output_name="logits")
    write_files(folder, ("LogitScore", dict(true_token_id=ord("y"), false_token_id=no), {}),
                prompts=dict(query="find"), default_prompt_name="query",
                first=dict(transformer_task="text-generation", modality_config=dict(
                    text=output, **({"message": dict(output, format="flat")} if renders else {})),
                    processing_kwargs=dict(chat_template=dict(add_generation_prompt=True))),
                **RERANKER)
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if network.config.tie_word_embeddings:  # some files have the same numbers twice
        [file] = folder.glob("*.safetensors")
        tensors = load_file(file)
        save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file)
    text = "<system>find<query>king?<document>A fox.A:" if renders else "findking?A fox."
    with torch.no_grad():
        logits = network(torch.tensor([tokenizer.encode(text)])).logits[0, -1]
    expected = logits[tokenizer.convert_tokens_to_ids("y")] - (
        0 if no is None else logits[tokenizer.convert_tokens_to_ids("n")])
    for entry, one in (("true_token_id", "y"), ("false_token_id", "n" if no else None)):
        write_json(folder / "1_LogitScore" / "config.json", **{
            entry: one and tokenizer.convert_tokens_to_ids(one)})
    with start(folder, runner="auto") as llm:
        [output] = llm.score("king?", "A fox.", use_tqdm=False)
        assert output.outputs.score == pytest.approx(float(expected), rel=1e-4)


PARTS = ("{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}"
         "{% else %}{% for c in m.content %}[{{ c.type }}]{{ c.text }}{% endfor %}{% endif %}"
         "{% endfor %}")


@pytest.mark.parametrize("template, form, mark", [
    (ROLES, "flat", ""), (ROLES, None, ""), (PARTS, "flat", ""), (PARTS, "structured", "[text]"),
    (PARTS, None, "[text]"), (PARTS, "auto", "[text]")])
def test_texts_are_read_through_the_chat_template_where_the_files_say_so(model, template, form,
                                                                         mark):
    """In the form that they name, else in parts where the template speaks of parts' types."""
    folder, hidden, _ = model
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    output = dict(method="forward", method_output_name="last_hidden_state")
    write_files(folder, POOLING, prompts=dict(query="find"), first=dict(
        modality_config=dict(text=output, message=output | ({} if form is None else dict(
            format=form)))))
    texts = {None: f"<user>{mark}a fox", "query": f"<system>{mark}find<user>{mark}a fox"}
    expected = hidden([tokenizer.encode(text) for text in texts.values()])
    with start(folder, runner="auto") as llm:
        for name, state in zip(texts, expected, strict=True):
            got = llm.embed("a fox", prompt_name=name, use_tqdm=False)
            assert_close(vectors(got), [state.mean(0)])


@pytest.mark.parametrize("restores", [None, True, False])
def test_the_end_of_a_template_stays_or_is_cut_as_the_files_say(model, restores):
    folder, hidden, _ = model
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = f"{ROLES}ABC"
    tokenizer.save_pretrained(folder)
    output = dict(method="forward", method_output_name="last_hidden_state")
    options = {} if restores is None else dict(restore_suffix=restores)
    write_files(folder, POOLING, first=dict(
        modality_config=dict(text=output, message=output | dict(format="flat")),
        processing_kwargs=dict(chat_template=options, text=dict(max_length=16))))
    kept = tokenizer.encode("<user>a fox in t" if restores is False else "<user>a fox iABC")
    [expected] = hidden([kept])
    with start(folder, runner="auto") as llm:
        asked = PoolingParams(truncate_prompt_tokens=-1, truncation_side="right")
        [output] = llm.embed("a fox in the forest", pooling_params=asked, use_tqdm=False)
        assert output.prompt_token_ids == kept
        assert_close(vectors([output]), [expected.mean(0)])


# ----------------------------------------------------------------------------------------- texts


def test_an_empty_text_is_its_special_tokens(tmp_path):
    """It ended the call of all others."""
    folder = make("bert", tmp_path / "bert")
    tokenizer = with_ends(folder)
    write_files(folder, POOLING)
    a, empty, b = hidden_of(folder, [tokenizer.encode("a"), [256, 257], tokenizer.encode("b")])
    with start(folder) as llm:
        for texts in (["a", "", "b"], ["a", {"prompt": "", "cache_salt": "x"}, "b"]):
            assert_close(vectors(llm.embed(texts, use_tqdm=False)), [
                h.mean(0) for h in (a, empty, b)])
        assert_close(vectors(llm.embed("", use_tqdm=False)), [empty.mean(0)])


def test_letters_become_small_ones_where_the_file_says_so(model):
    folder, hidden, _ = model
    write_files(folder, POOLING, first=dict(do_lower_case=True))
    [expected] = hidden([list(byte_tokenizer().encode("the king é"))])
    with start(folder, runner="auto") as llm:
        assert_close(vectors(llm.embed("The KING É", use_tqdm=False)), [expected.mean(0)])


@pytest.mark.parametrize("where", ["sentence_bert_config", "tokenizer_config", "processing",
                                   "tokenizer"])
def test_a_text_is_as_long_as_the_files_let_it_be(model, where):
    """A longer one is refused or, where the files say that texts are cut, cut at its end."""
    folder, hidden, width = model
    tokenizer, first = with_ends(folder), {}
    if where in ("tokenizer_config", "tokenizer"):
        write_json(folder / "tokenizer_config.json", model_max_length=16)
    elif where == "processing":  # it comes before max_seq_length
        first = dict(max_seq_length=90, processing_kwargs=dict(text=dict(max_length=16)))
    else:
        first = dict(max_seq_length=16)
        write_json(folder / "tokenizer_config.json", model_max_length=90)
    if where == "tokenizer":
        tokenizer.backend_tokenizer.enable_truncation(16)
        tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    write_files(folder, POOLING, first=first)
    text = "a fox in the forest and a king"
    kept = [*tokenizer.encode(text)[:15], 257]
    [expected] = hidden([kept])
    cuts = where == "tokenizer" or width == 32 and where != "tokenizer_config"
    with start(folder, runner="auto") as llm:
        assert llm.config.max_model_len == 16
        if not cuts:
            with pytest.raises(ValueError, match="32 tokens.*16.*truncate_prompt_tokens"):
                llm.embed(text)
        asked = PoolingParams(truncate_prompt_tokens=None if cuts else -1, truncation_side=(
            None if cuts else "right"))
        for texts in (text, ["x", text]):
            *_, output = llm.embed(texts, pooling_params=asked, use_tqdm=False)
            assert output.prompt_token_ids == kept
            assert_close(vectors([output]), [expected.mean(0)])
    with pytest.raises(ValueError, match="max_model_len=17.*16 tokens.*max_seq_length"):
        start(folder, runner="auto", max_model_len=17)
    with start(folder, runner="auto", max_model_len=10) as llm:  # the user's own: nothing is cut
        with pytest.raises(ValueError, match="12 tokens.*10"):
            llm.embed("a fox in t")


def test_where_no_file_names_a_length_a_text_ends_with_the_positions(model):
    folder, hidden, _ = model
    tokenizer = with_ends(folder)
    tokenizer.backend_tokenizer.enable_truncation(500)
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", model_max_length=None)
    write_files(folder, POOLING)
    with start(folder, runner="auto") as llm:
        most = llm.model_config.max_position_embeddings
        [output] = llm.embed("fox " * most, use_tqdm=False)
        assert output.prompt_token_ids == [*tokenizer.encode("fox " * most)[:most - 1], 257]
        assert_close(vectors([output]), [hidden([output.prompt_token_ids])[0].mean(0)])


@pytest.mark.parametrize("options, words", [
    (dict(convert="classify"), "convert='classify'.*modules.json"),
    (dict(pooler_config=dict(pooling_type="LAST")), "joins CLS, MEAN"),
    (dict(pooler_config=dict(task="token_embed")), "task='token_embed'")], ids=str)
def test_options_that_the_files_leave_no_room_for(model, options, words):
    folder, _, width = model
    part, _ = dense(2 * width, 4)
    write_files(folder, ("Pooling", dict(pooling_mode=["cls", "mean"]), {}), part)
    with pytest.raises(ValueError, match=words):
        start(folder, **options)


def test_a_head_that_the_network_does_not_have_is_refused(model):
    folder, _, width = model
    write_files(folder, first=CLASSES, **RERANKER)
    with pytest.raises(ValueError, match="classifier|score.weight"):
        start(folder, runner="auto")
    if width == 32:
        write_files(folder, ("LogitScore", dict(true_token_id=1), {}), first=dict(
            transformer_task="text-generation"), **RERANKER)
        with pytest.raises(ValueError, match="classifier"):
            start(folder, runner="auto")
    else:
        write_files(folder, ("LogitScore", dict(true_token_id=260), {}), first=dict(
            transformer_task="text-generation"), **RERANKER)
        with pytest.raises(ValueError, match="260.*vocabulary"):
            start(folder, runner="auto")
