"""Fields of sentence-transformers' files that would change numbers are refused, by name."""

import json

import pytest
from pooled import MODULES, POOLING, dense, write_files

from nanoserve_extras.pooling.sentence_files import longest_text, read_sentence_model

TEXT = dict(method="forward", method_output_name="last_hidden_state")
DENSE = dict(in_features=32, out_features=4)
REFUSED = [
    ("modules.json", {"a": 1}, "must list modules"),
    ("modules.json", [dict(type="sentence_transformers.models.Transformer", path=3)], "a path"),
    *[("modules.json", [("Transformer", ""), (kind, "x")], f"modules.json.*{kind}.*not supported")
      for kind in ("Router", "Asym", "StaticEmbedding", "WordEmbeddings", "BoW", "CNN", "LSTM",
                   "WeightedLayerPooling", "WordWeights", "CLIPModel", "SpladePooling",
                   "SparseAutoEncoder", "SparseStaticEmbedding", "MultiVectorMask", "TokenPooling",
                   "Transformer")],
    ("modules.json", [("StaticEmbedding", "")], "StaticEmbedding.*Transformer stands first"),
    ("modules.json", [("Pooling", "1_Pooling")], "Transformer stands first"),
    ("modules.json", [("Transformer", "0_Transformer")], "path='0_Transformer'"),
    ("modules.json", [("Transformer", ""), ("Dropout", "x")], "no sentence_embedding"),
    ("modules.json", [("Transformer", ""), ("Dense", "2_Dense"), ("Pooling", "1_Pooling")],
     "Dense makes 'sentence_embedding'"),
    ("modules.json", [("Transformer", ""), ("Pooling", "1_Pooling"), ("Pooling", "1_Pooling")],
     "Pooling behind"),
    ("modules.json", [("Transformer", ""), ("LogitScore", "x")], "x.config.json does not exist"),
    ("modules.json", [dict(type="custom_st.Transformer", path="")], "custom_st.Transformer"),
    ("modules.json", [dict(type="sentence_transformers.models.Transformer", path="", extra=1)],
     "extra"),
    ("modules.json", [dict(type=f"{MODULES}.{kind}", path=path, name="0") for kind, path in (
        ("Transformer", ""), ("Pooling", "1_Pooling"))], "same name"),
    ("modules.json", [("Transformer", ""), ("Pooling", "../x")], "outside"),
    ("1_Pooling/config.json", [1], "1_Pooling.config.json"),
    ("1_Pooling/config.json", dict(pooling_mode="sum"), "pooling_mode .*weightedmean.*'sum'"),
    ("1_Pooling/config.json", dict(pooling_mode=[]), "pooling_mode"),
    ("1_Pooling/config.json", dict(pooling_mode=[["cls"]]), "pooling_mode"),
    ("1_Pooling/config.json", dict(pooling_mode_sum=True), "pooling_mode_sum=True"),
    ("1_Pooling/config.json", dict(include_prompt="no"), "include_prompt .*'no'"),
    ("2_Dense/config.json", DENSE | dict(activation_function="my.Swish"), "activation_f.*my.Swish"),
    ("2_Dense/config.json", DENSE | dict(activation_function="torch.nn.PReLU"), "torch.nn.PReLU"),
    ("2_Dense/config.json", DENSE | dict(activation_function=None), "activation_function .*None"),
    ("2_Dense/config.json", DENSE | dict(module_input_name="all"), "module_input_name .*'all'"),
    ("2_Dense/config.json", DENSE | dict(module_input_name="scores"), "'scores'"),
    ("2_Dense/config.json", DENSE | dict(module_input_name="token_embeddings", module_output_name=(
        "sentence_embedding")), "of 'token_embeddings'"),
    ("2_Dense/config.json", DENSE | dict(use_residual=1.5), "use_residual"),
    ("2_Dense/config.json", DENSE | dict(dropout=0.1), "dropout=0.1.*take it out"),
    ("2_Dense/config.json", DENSE | dict(in_features=64), "takes 64 numbers, and gets 32"),
    ("2_Dense/config.json", DENSE | dict(out_features=5), "by its config.json"),
    ("2_Dense/config.json", DENSE | dict(bias=False), "linear.bias.*by its config.json"),
    ("2_Dense/config.json", DENSE | dict(use_residual=True), "by its config.json.*residual.weight"),
    ("2_Dense/config.json", {}, "in_features"),
    ("sentence_bert_config.json", dict(max_seq_length="x"), "max_seq_length .*'x'"),
    ("sentence_bert_config.json", dict(max_seq_length=0), "max_seq_length .*0"),
    ("sentence_bert_config.json", dict(do_lower_case="x"), "do_lower_case"),
    ("sentence_bert_config.json", dict(transformer_task="fill-mask"), "transformer_task.*fill-m"),
    ("sentence_bert_config.json", dict(module_output_name="scores"), "module_output_name='scores'"),
    ("sentence_bert_config.json", dict(modality_config=dict(text=TEXT | dict(
        method_output_name="pooler_output"))), "modality_config.*pooler_output"),
    ("sentence_bert_config.json", dict(modality_config=dict(text=dict(
        method="get_text_features", method_output_name=None))), "get_text_features"),
    ("sentence_bert_config.json", dict(modality_config=dict(image=TEXT)), "takes no text"),
    ("sentence_bert_config.json", dict(processing_kwargs=dict(audio={})), "processing_kwargs"),
    ("sentence_bert_config.json", dict(processing_kwargs=dict(text=dict(stride=3))), "stride=3"),
    ("sentence_bert_config.json", dict(processing_kwargs=dict(text=dict(
        add_special_tokens=False))), "add_special_tokens"),
    ("sentence_bert_config.json", dict(processing_kwargs=dict(common=dict(
        truncation=False))), "truncation"),
    ("sentence_bert_config.json", dict(modality_config=dict(message=TEXT), processing_kwargs=dict(
        chat_template=dict(max_length=9))), "chat_template=.*max_length"),
    *[("sentence_bert_config.json", dict(processing_kwargs={name: given}), "each of them a dict.*")
      for name in ("text", "common", "chat_template") for given in (5, [1], "x")],
    ("sentence_bert_config.json", dict(processing_kwargs=dict(
        chat_template=dict(restore_suffix="no"))), "restore_suffix .*'no'"),
    ("sentence_bert_config.json", dict(modality_config=dict(message=TEXT | dict(format="x"))),
     "format='x' must be one of auto, flat"),
    ("sentence_bert_config.json", dict(query_length=32), "query_length.*ColBERT"),
    ("sentence_bert_config.json", dict(document_length=32), "document_length.*ColBERT"),
    ("sentence_bert_config.json", dict(query_expansion=dict(strategy="fixed")), "query_expansion"),
    ("sentence_bert_config.json", dict(tokenizer_name_or_path="x"), "tokenizer_name_or.*tokenizer"),
    ("sentence_bert_config.json", dict(tokenizer_args=dict(add_bos_token=True)), "tokenizer_args"),
    ("sentence_bert_config.json", dict(processor_kwargs=dict(model_max_length="x")), "'x'"),
    ("sentence_bert_config.json", dict(model_args=dict(rotary_scaling_factor=2)), "model_args.*co"),
    ("sentence_bert_config.json", dict(config_kwargs=dict(num_labels=2)), "config_kwargs.*hf_over"),
    ("sentence_bert_config.json", dict(backend="onnx"), "backend='onnx'"),
    ("sentence_roberta_config.json", dict(max_seq_length="y"), "sentence_roberta_config.*'y'"),
    ("config_sentence_transformers.json", dict(model_type="SparseEncoder"), "SparseEncoder"),
    ("config_sentence_transformers.json", dict(model_type="MultiVectorEncoder"), "ColBERT"),
    ("config_sentence_transformers.json", dict(model_type="CrossEncoder"), "no scores"),
    ("config_sentence_transformers.json", dict(prompts=[1]), r"prompts .*\[1\]"),
    ("config_sentence_transformers.json", dict(prompts=dict(query=1)), "prompts .*query"),
    ("config_sentence_transformers.json", dict(prompts=dict(query="q"), default_prompt_name="x"),
     "default_prompt_name='x'"),
    ("config_sentence_transformers.json", dict(similarity_fn_name="maxsim"), "'maxsim'"),
    ("config_sentence_transformers.json", dict(truncate_dim="8"), "truncate_dim"),
    ("config_sentence_transformers.json", dict(activation_fn="my.Swish"), "activation_fn.*my.Sw"),
    ("config_sentence_transformers.json", dict(keep_in_fp32_modules=["0.model.layers.0"]),
     "keep_in_fp32_modules.*float32"),
    ("config_sentence_transformers.json", dict(query_prefix="[Q] "), "query_prefix=.*take it out"),
    ("config.json", dict(sentence_transformers=dict(activation_fn="x")), "config.json: activ.*'x'"),
    ("config.json", dict(sentence_transformers=dict(more=1)), "more=1"),
    ("config.json", dict(sbert_ce_default_activation_function="x"), "'x'"),
    ("tokenizer_config.json", dict(model_max_length="x"), "model_max_length='x'"),
]


@pytest.mark.parametrize("file, content, words", REFUSED, ids=str)
def test_what_would_be_computed_differently_is_refused_by_name(tmp_path, file, content, words):
    part, _ = dense(32, 4)
    write_files(tmp_path, POOLING, part, ("Normalize", {}, {}), first=dict(
        modality_config=dict(text=TEXT), module_output_name="token_embeddings"))
    if file == "sentence_roberta_config.json":
        (tmp_path / "sentence_bert_config.json").unlink()
    if isinstance(content, list):
        content = [dict(type=f"{MODULES}.{one[0]}", path=one[1]) if isinstance(one, tuple) else one
                   for one in content]
    (tmp_path / file).write_text(json.dumps(content))
    config = content if file == "config.json" else {}
    with pytest.raises(ValueError, match=words):
        read_sentence_model(tmp_path, config, 32)
        longest_text(tmp_path, config)


def test_what_changes_no_number_is_passed_over(tmp_path):
    part, _ = dense(32, 4)
    write_files(tmp_path, ("Pooling", dict(pooling_mode="cls", embedding_dimension=7), {}), part,
                first=dict(unpad_inputs=True, modality_config=dict(text=TEXT, image={"a": 1}),
                           model_args=dict(torch_dtype="float16", trust_remote_code=True),
                           processing_kwargs=dict(text=dict(padding="max_length"), common={}),
                           query_length=None, config_args={}),
                requirements={"torch": ">=2"}, __version__=dict(pytorch="2"),
                keep_in_fp32_modules=["2.linear", "0.model.score"], prompts=dict(query=""))
    model = read_sentence_model(tmp_path, {}, 32)
    assert (model.kind, model.pooling_types, model.width) == ("embed", ("CLS",), 4)


def test_a_module_that_takes_another_width_is_refused(tmp_path):
    write_files(tmp_path, POOLING, ("LayerNorm", dict(dimension=5), {}))
    with pytest.raises(ValueError, match="LayerNorm takes 5 numbers, and gets 32"):
        read_sentence_model(tmp_path, {}, 32)
