"""The kernel for quantised weights: what test_quantized_linear.py, which holds it to its oracles,
too, can't ask of its kin.

In the interpreter, so in float32 and float16. The interpreter checks no bounds: here each address
of each load and store is held against the tensors that were handed over.
"""

import mmap

import numpy as np
import pytest
import torch
from packing import Drawn
from weight_kinds import needs_interpreter

pytest.importorskip("triton")

from triton.runtime import interpreter

from nanoserve import triton_fused as kernels_fused
from nanoserve_extras.quantization import quantized_triton as kernels
from nanoserve_extras.quantization.quantized_linear import join, with_minima
from nanoserve_extras.quantization.quantized_triton import LAUNCHES, TritonWeight

pytestmark = needs_interpreter
CPU, NAN = torch.device("cpu"), float("nan")


@pytest.fixture
def bounds(monkeypatch):
    """A list of tensors. Whatever else a kernel touches while there are some is a failure."""
    tensors: list[torch.Tensor] = []

    def check(pointers, mask) -> None:
        at = pointers.data[mask.data.astype(bool)].astype(np.int64)
        inside = np.zeros(at.shape, bool)
        for tensor in tensors:
            first = tensor.data_ptr()
            inside |= (at >= first) & (at < first + tensor.nbytes)
        assert not tensors or inside.all(), "out of bounds"

    builder = interpreter.InterpreterBuilder
    load, store, empty = builder.create_masked_load, builder.create_masked_store, torch.empty
    monkeypatch.setattr(builder, "create_masked_load", lambda self, pointers, mask, *more: (
        check(pointers, mask), load(self, pointers, mask, *more))[1])
    monkeypatch.setattr(builder, "create_masked_store", lambda self, pointers, value, mask, *more: (
        check(pointers, mask), store(self, pointers, value, mask, *more))[1])

    def poisoned_empty(*shape, **options):
        out = empty(*shape, **options)
        tensors.append(out)
        return out.fill_(NAN if out.is_floating_point() else 77)

    monkeypatch.setattr(torch, "empty", poisoned_empty)
    return tensors


def random_weight(shape: tuple[int, int], size: int,
                  seed: int = 0) -> tuple[TritonWeight, torch.Tensor]:
    """A matrix of 4 bits as a checkpoint has it, or of 8 by row, and what it means in float32."""
    if size == 0:
        generator = torch.Generator().manual_seed(seed)
        values = torch.randint(-127, 128, shape, generator=generator).to(torch.int8)
        scales = torch.rand(shape[0], 1, generator=generator)
        return TritonWeight(values, scales[..., None], 0, shape[1]), values * scales
    drawn = Drawn(*shape, 4, seed, size)
    scales = torch.from_numpy(drawn.s).float()
    one = join([with_minima(torch.from_numpy(drawn.q).byte(), scales,
                            -scales * torch.from_numpy(drawn.z), size)])
    return TritonWeight.of(one, device=CPU), drawn.dense()


def within(tensor: torch.Tensor) -> torch.Tensor:
    """The same in the middle of a larger memory, whose other bytes are ones: NaN, if a float."""
    room = torch.full((tensor.nbytes + 128,), 255, dtype=torch.uint8)
    inside = room[64:64 + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    return inside.copy_(tensor)


TILES = {tuple(launch.values()): key for key, launch in LAUNCHES.items()}  # alike ones once


@pytest.mark.parametrize("line, rows", TILES.values())
@pytest.mark.parametrize("size", [0, 32, 40])
def test_every_tile_is_right_and_stays_in_its_bounds(size, line, rows, bounds, monkeypatch):
    """Of both architectures, a row less than full; sizes that no tile, byte or group divides."""
    monkeypatch.setattr(kernels_fused, "table_line", lambda device: line)
    shape, x = (70, 291), within(torch.randn(rows - 1, 291).half())
    packed, weight = random_weight(shape, size)
    weight = weight.half() if size else weight
    packed = packed._replace(memory=within(packed.memory), heads=within(packed.heads))
    bias = within(torch.randn(70).half())
    bounds[:] = [x, bias, packed.memory, packed.heads]
    got = packed.linear(x, bias)
    assert kernels.launch_for(x, len(x)) is LAUNCHES[line, rows]
    expected = x.double() @ weight.double().T + bias.double()
    assert (got - expected).abs().max() <= 1e-3 * expected.abs().max()


@pytest.mark.parametrize("line, rows", [*TILES.values(), ("sm_75", 64)])  # it has none of 64
@pytest.mark.parametrize("size", [0, 40])
def test_each_expert_multiplies_its_own_rows(size, line, rows, bounds, monkeypatch):
    """Some have none, one, as many as a tile, and more by one; the last tile may have few."""
    monkeypatch.setattr(kernels_fused, "table_line", lambda device: line)
    counts = [0, 1, rows + 1, 0, 3, rows, 0]
    weights, dense = zip(*[random_weight((70, 291), size, seed) for seed in range(7)], strict=True)
    packed = TritonWeight.stacked(weights)
    packed = packed._replace(memory=within(packed.memory), heads=within(packed.heads))
    x = within(torch.randn(sum(counts), 291).half())
    starts = within(torch.tensor([0, *counts]).cumsum(0).to(torch.int32 if size else torch.int64))
    bounds[:] = [x, starts, packed.memory, packed.heads]
    got = packed.grouped(x, starts)
    assert kernels.launch_for(x, -(-len(x) // 7)) is LAUNCHES.get((line, rows))
    expected = torch.cat([some.double() @ (weight.half() if size else weight).double().T
                          for some, weight in zip(x.split(counts), dense, strict=True)])
    assert (got - expected).abs().max() <= 1e-3 * expected.abs().max()


def test_experts_that_a_file_keeps_in_other_bits_all_become_8():
    """A group of another size, and a matrix that came dense: one launch takes matrices of a kind.
    A row of 4 bits is rounded once more, by a 254th of its largest number at most."""
    weights, dense = zip(*[random_weight((5, 64), size, size) for size in (32, 16, 0)], strict=True)
    packed = TritonWeight.stacked(weights)
    assert packed.size == 0 and packed.memory.shape == (3, 5, 64)
    for memory, heads, weight in zip(packed.memory, packed.heads, dense, strict=True):
        apart = (memory * heads[..., 0] - weight).abs() / weight.abs().amax(1, keepdim=True)
        assert apart.max() <= 1 / 254 + 1e-6
    assert torch.equal(packed.memory[2] * packed.heads[2, ..., 0], dense[2])


def test_a_weight_of_more_than_2_31_bytes(bounds):
    """Its third row begins behind what 32 bits can say. 2.4 GB are reserved, of which three pages
    are ever touched."""
    apart = 1_200_000_000
    memory = mmap.mmap(-1, 2 * apart + 64, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
    values = torch.frombuffer(memory, dtype=torch.int8).as_strided((3, 64), (apart, 1))
    values.copy_(torch.randint(-127, 128, (3, 64)))
    x, scales = torch.randn(2, 64), torch.rand(3, 1)
    expected = x.double() @ (values.double() * scales.double()).T
    bounds[:] = [x, scales, *values]
    packed = TritonWeight(values, scales[..., None], 0, 64)
    torch.testing.assert_close(packed.linear(x, None).double(), expected, rtol=1e-5, atol=1e-5)
    alone = values.as_strided((3, 1, 64), (apart, apart, 1))  # three experts of one row
    experts = TritonWeight(alone, scales[:, None, None], 0, 64)
    starts = torch.tensor([0, 0, 0, 2])
    bounds.append(starts)
    torch.testing.assert_close(experts.grouped(x, starts), packed.linear(x, None)[:, 2:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("size", [0, 32, 40])
def test_many_rows_are_multiplied_with_the_restored_matrix(size, dtype, bounds):
    """A row more than few; sizes that no tile divides, in two programs along the inputs."""
    shape = (7, 1291)
    packed, weight = random_weight(shape, size)
    packed = packed._replace(memory=within(packed.memory), heads=within(packed.heads))
    bounds[:] = [packed.memory, packed.heads]
    assert torch.equal(packed.restored(dtype), weight.to(dtype))
    x, bias = torch.randn(kernels.FEW + 1, 1291).to(dtype), torch.randn(7).to(dtype)
    expected = x.double() @ weight.to(dtype).double().T + bias.double()
    assert (packed.linear(x, bias) - expected).abs().max() <= 2e-3 * expected.abs().max()
