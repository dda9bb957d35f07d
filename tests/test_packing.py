"""Packed weights give what plain ones give; and where they can't be had, nobody notices.

The oracle is the product itself in float32.
"""

from types import SimpleNamespace

import pytest
import torch
from conftest import Reference
from torch.testing import assert_close

from nanoserve import LLM, SamplingParams
from nanoserve.device import packing
from nanoserve.device import memory
from nanoserve.layers import Embedding, Linear, Placement
from nanoserve.model import Decoder
from nanoserve.device.packing import LINE_WIDTHS, Lines, Product, pack, product, second_copy, works
from nanoserve.parallel.ranks import Ranks, Span

CPU = torch.device("cpu")
SHAPES = [(1, 1), (3, 5), (48, 32), (95, 64), (260, 48), (7, 300), (151, 129), (512, 256)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MULTIPLY = torch.ops.mkldnn._linear_pointwise.default


@pytest.fixture
def without_operators(monkeypatch):
    """A torch that knows nothing of packing, or changed its mind about the arguments."""

    class Nothing:
        def __getattr__(self, name):
            raise AttributeError(f"no operator {name}")

    works.cache_clear()
    monkeypatch.setattr(torch.ops, "mkldnn", Nothing())
    yield
    works.cache_clear()


def close(got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias) -> None:
    expected = torch.nn.functional.linear(
        x.float(), weight.float(), None if bias is None else bias.float())
    assert got.dtype == x.dtype and got.shape == expected.shape
    tolerance = 1e-5 if x.dtype == torch.float32 else 2e-2
    assert_close(got.float(), expected, rtol=tolerance, atol=tolerance * 4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_packed_product_is_the_plain_one(shape, dtype):
    """Of no rows at all, of one, and of a number that no tile divides; also of rows that lie apart,
    as a slice of the hidden states does."""
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(shape, generator=generator) * shape[1] ** -0.5).to(dtype)
    packed, before = pack(weight), weight.clone()
    assert packed.shape == weight.shape
    for bias in (None, torch.randn(shape[0], generator=generator).to(dtype)):
        for rows in (0, 1, 2, 17, 130):
            x = torch.randn(rows, shape[1] + 3, generator=generator).to(dtype)
            for inputs in (x[:, :-3], x[:, :-3].contiguous()):
                close(product(packed, bias)(inputs), inputs, weight, bias)
    assert torch.equal(weight, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("is_intel", [False, True])
def test_some_products_may_read_a_second_copy(shape, dtype, is_intel, monkeypatch):
    """As before whichever is read: few rows, enough to be many, or numbers between them."""
    monkeypatch.setattr(packing, "is_intel", lambda: is_intel)
    monkeypatch.setattr(packing, "MANY_ROWS", 9)
    generator = torch.Generator().manual_seed(1)
    weight = (torch.randn(shape, generator=generator) * shape[1] ** -0.5).to(dtype)
    for bias in (None, torch.randn(shape[0], generator=generator).to(dtype)):
        for rows in (0, 1, 2, 5, 9):
            x = torch.randn(rows, shape[1] + 3, generator=generator).to(dtype)[:, 3:]
            for second in (weight, second_copy(weight)):
                close(product(pack(weight), bias, second)(x), x, weight, bias)
    assert torch.backends.mkldnn.enabled  # for everybody else, as before


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("shape", [*SHAPES, (1280, 40)], ids=str)
def test_a_single_row_times_lines(shape, threads, monkeypatch):
    """Bags of every width, the last one full or not; also of a row that is part of a larger one.
    The sum is rounded once, as in the product of float32 numbers that is rounded behind it."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(shape, generator=generator).bfloat16()
    lines = Lines(weight)
    assert lines.memory.shape[1] in LINE_WIDTHS and lines.memory.is_contiguous()
    row = torch.randn(1, shape[1] + 3, generator=generator).bfloat16()[:, 3:]
    expected = torch.nn.functional.linear(row.double(), weight.double())
    assert_close(lines(row, None).double(), expected, rtol=2 ** -8, atol=1e-5)
    bias = torch.randn(shape[0], generator=generator).bfloat16()
    close(lines(row, bias), row, weight, bias)


def test_lines_are_as_wide_as_leaves_work_for_all_threads(monkeypatch):
    """And where some would have none, the plain weight is kept."""
    monkeypatch.setattr(packing, "is_intel", lambda: True)
    monkeypatch.setattr(packing, "works", lambda dtype: True)
    weight = torch.zeros(1024, 4, dtype=torch.bfloat16)
    for threads, width in ((1, 256), (2, 256), (4, 128), (8, 64), (16, 64)):
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        assert second_copy(weight).memory.shape == (1024 // width * 4, width)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 17)
    assert second_copy(weight) is weight


def test_a_failed_product_leaves_torch_as_it_was():
    weight = torch.randn(8, 4, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError):
        product(pack(weight), None, weight)(torch.randn(1, 5, dtype=torch.bfloat16))
    assert torch.backends.mkldnn.enabled


@pytest.mark.parametrize("is_intel", [False, True])
@pytest.mark.parametrize("plenty", [False, True])
def test_second_copies_are_kept_where_there_is_plenty_of_memory(checkpoints, monkeypatch, plenty,
                                                                 is_intel):
    """The free memory is four times the weights, or a byte less; then their text is compared."""
    monkeypatch.setattr(packing, "is_intel", lambda: is_intel)
    monkeypatch.setattr(packing, "LINE_WIDTHS", (8, 4))  # several bags of a toy's weights
    monkeypatch.setattr(memory, "free_cpu_memory", lambda: 0)
    prompt, params = list(range(30)), SamplingParams(temperature=0, max_tokens=6)
    options = dict(dtype="bfloat16", num_gpu_blocks_override=64)
    llm = LLM(checkpoints["qwen3"], kernels="torch", **options)
    expected = llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids
    model = Decoder(llm.runner.model_config, Placement(torch.bfloat16, CPU))  # as it is loaded
    free = 4 * sum(weight.nbytes for weight in model.parameters()) - (not plenty)
    monkeypatch.setattr(memory, "free_cpu_memory", lambda: free)
    llm = LLM(checkpoints["qwen3"], **options)
    linears = [part for part in llm.runner.model.modules() if isinstance(part, Linear)]
    assert len(linears) > 4
    for part in linears:
        second = part.product.second if part.packed and works(torch.bfloat16) else None
        assert (second is not None) == (plenty and part.packed and works(torch.bfloat16))
        assert second is None or isinstance(second, Lines) == is_intel
    assert llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids == expected


def test_one_rank_without_memory_is_enough_for_none_to_keep_second_copies(checkpoints, monkeypatch):
    """All of them multiply in the same way, so that their routers pick the same experts."""
    monkeypatch.setattr(memory, "free_cpu_memory", lambda: 2 ** 50)
    monkeypatch.setattr(packing, "is_intel", lambda: True)
    for smallest in (0, 1):
        asked = []
        monkeypatch.setattr(Ranks, "minimum", lambda self, value: asked.append(value) or smallest)
        model = LLM(checkpoints["qwen3"], dtype="float32", num_gpu_blocks_override=64).runner.model
        linears = [part for part in model.modules() if isinstance(part, Linear) and part.packed]
        assert asked == [bool(linears)] and all(
            (part.product.second is not None) == bool(smallest) for part in linears
            if isinstance(part.product, Product))


@pytest.mark.parametrize("is_intel", [False, True])
def test_in_float32_a_second_copy_is_kept_where_it_is_read(checkpoints, references, monkeypatch,
                                                          is_intel):
    """Elsewhere the packed product is the faster one for a single row, too."""
    monkeypatch.setattr(memory, "free_cpu_memory", lambda: 2 ** 50)
    monkeypatch.setattr(packing, "is_intel", lambda: is_intel)
    llm = LLM(checkpoints["qwen3"], dtype="float32", num_gpu_blocks_override=64)
    linears = [part for part in llm.runner.model.modules() if isinstance(part, Linear)]
    assert len(linears) > 4
    for part in linears:
        second = part.product.second if part.packed and works(torch.float32) else None
        assert (second is not None) == (is_intel and part.packed and works(torch.float32))
    prompt = list(range(30))
    output, = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=6), use_tqdm=False)
    assert output.outputs[0].token_ids == references("qwen3", prompt, 6)[0]


def test_which_products_read_the_second_copy(monkeypatch):
    """A single token's in bfloat16; in float32 few and many rows', where MKL is at home."""
    for is_intel, in_float32 in ((False, []), (True, [1, 2, 3, 512, 2048])):
        monkeypatch.setattr(packing, "is_intel", lambda: is_intel)
        for dtype, expected in ((torch.float32, in_float32), (torch.bfloat16, [1])):
            for second, of_these in ((torch.zeros(3, 2, dtype=dtype), expected), (None, [])):
                one = Product(torch.zeros(3, 2, dtype=dtype), None, second)
                one.multiply, one.by_second = lambda x, *args: x, lambda x, bias: "second"
                assert [n for n in (0, 1, 2, 3, 4, 16, 511, 512, 2048)
                        if isinstance(one(torch.zeros(n, 2)), str)] == of_these


def test_what_is_not_packed():
    """float16, which few CPUs multiply, and shares of nothing."""
    for weight in (torch.zeros(4, 4, dtype=torch.float16), torch.zeros(0, 4), torch.zeros(4, 0)):
        assert pack(weight) is weight


def test_without_the_operators_weights_stay_as_they_are(without_operators):
    weight = torch.randn(8, 4)
    assert pack(weight) is weight
    assert torch.equal(product(weight)(torch.eye(4)), weight.T)


@pytest.mark.parametrize("default, usable", [
    (lambda *args: MULTIPLY(*args), True),  # without `_op`, which is not torch's promise
    (SimpleNamespace(_op="it means something else"), False)])
def test_an_operator_is_called_as_it_can_be(monkeypatch, default, usable):
    ours = SimpleNamespace(_linear_pointwise=SimpleNamespace(default=default),
                           _reorder_linear_weight=torch.ops.mkldnn._reorder_linear_weight)
    works.cache_clear()
    monkeypatch.setattr(torch.ops, "mkldnn", ours)
    weight, x = torch.randn(8, 4), torch.randn(5, 4)
    packed = pack(weight)
    assert packed.is_mkldnn == works(torch.float32) == usable
    assert_close(product(packed)(x), x @ weight.T)
    works.cache_clear()


def test_operators_with_other_results_are_not_trusted(monkeypatch):
    works.cache_clear()
    monkeypatch.setattr(packing, "product", lambda weight, *second: lambda x: x.new_zeros(
        len(x), weight.shape[0]))
    assert not works(torch.float32)
    works.cache_clear()


def test_a_linear_keeps_one_copy_and_a_tied_embedding_two():
    on = Placement(torch.float32, CPU, packed=True)
    plain = torch.randn(6, 4)
    one = Linear(Span.whole(4), {"all": Span.whole(6)}, True, on)
    one.weight_loader("weight", plain)
    one.weight_loader("bias", torch.arange(6.0))
    tied, untied = (Embedding(Span.whole(6), 4, on, tied=tied) for tied in (True, False))
    for module in (tied, untied):
        module.weight_loader("weight", plain)
    for module in (one, tied, untied):
        module.finish_loading()
    x = torch.randn(3, 4)
    assert_close(one(x), x @ plain.T + torch.arange(6.0))
    assert_close(tied.logits(x), x @ plain.T)
    assert torch.equal(tied(torch.tensor([5, 0])), plain[[5, 0]])
    for head in (one.product, tied.logits):
        assert isinstance(head, Product) == works(torch.float32)
    if works(torch.float32):
        assert one.weight.is_mkldnn and one.product.second is None
        assert tied.logits.second.data_ptr() == tied.weight.data_ptr()  # it is there anyway
    assert not isinstance(untied.logits, Product)
    assert dict(one.named_parameters()).keys() == {"weight", "bias"}


def test_with_plenty_of_memory_a_tied_head_has_its_lines(checkpoints, monkeypatch):
    monkeypatch.setattr(memory, "free_cpu_memory", lambda: 2 ** 50)
    monkeypatch.setattr(packing, "is_intel", lambda: True)
    monkeypatch.setattr(packing, "LINE_WIDTHS", (8, 4))
    model = LLM(checkpoints["qwen3-tied"], dtype="bfloat16",
                num_gpu_blocks_override=64).runner.model
    head = model.embed_tokens
    if works(torch.bfloat16):
        assert isinstance(head.logits.second, Lines)
    row = torch.randn(1, head.weight.shape[1]).bfloat16()
    close(head.logits(row), row, head.weight, None)


@pytest.mark.parametrize("name", ["qwen3", "qwen3-tied", "gemma3", "qwen3-moe"])
def test_an_engine_without_the_operators_gives_the_same_text(checkpoints, references, name,
                                                             without_operators):
    prompt = list(range(40))
    output = LLM(checkpoints[name], num_gpu_blocks_override=64).generate(
        [prompt], SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)[0]
    assert output.outputs[0].token_ids == references(name, prompt, 8)[0]


@pytest.mark.parametrize("name", ["qwen3", "qwen3-tied", "llama-bias", "mistral", "gemma2",
                                  "qwen3-moe"])
@torch.inference_mode()
def test_bfloat16_is_as_near_to_the_truth_as_transformers_bfloat16(checkpoints, name):
    """Logprobs of a prompt, in chunks that decode rows and tiles both see. Two roundings of one
    number differ, so the measure is the distance from the float32 reference."""
    prompt = torch.randint(256, (150,), generator=torch.Generator().manual_seed(2)).tolist()
    truth, theirs = (
        Reference(checkpoints[name], dtype).model(torch.tensor([prompt])).logits[0].float()
        .log_softmax(-1)[:-1].gather(-1, torch.tensor(prompt)[1:, None])[:, 0]
        for dtype in (torch.float32, torch.bfloat16))
    llm = LLM(checkpoints[name], dtype="bfloat16", num_gpu_blocks_override=64,
              max_num_batched_tokens=70)
    output = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0),
                          use_tqdm=False)[0]
    ours = torch.tensor([entries[token].logprob for entries, token in
                         zip(output.prompt_logprobs[1:], prompt[1:], strict=True)])
    assert (ours - truth).abs().mean() < 1.5 * (theirs - truth).abs().mean() + 1e-3


@pytest.mark.skipif(not works(torch.bfloat16), reason="this CPU has no bfloat16 products")
def test_ctrl_c_does_not_leave_onednn_switched_off(monkeypatch):
    """Python looks for signals behind every call, so behind the one that switches it off, too. It
    was off for the rest of the process then, and the next engine found nothing to pack with."""
    switch = torch._C._set_mkldnn_enabled

    def interrupted(on: bool) -> None:
        switch(on)
        if not on:
            raise KeyboardInterrupt

    monkeypatch.setattr(torch._C, "_set_mkldnn_enabled", interrupted)
    weight = torch.ones(8, 4, dtype=torch.bfloat16)
    try:
        with pytest.raises(KeyboardInterrupt):
            Product(pack(weight), None, weight)(weight[:1])
        assert torch.backends.mkldnn.enabled
    finally:
        switch(True)
