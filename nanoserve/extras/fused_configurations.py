"""Every launch of the fused kernels as it is shipped, for compiling without a GPU.

Triton needs no device to compile for one: a signature (what each argument is), the constexprs and
the options are enough. The list here says which launches a model of the usual sizes makes; the test
compiles them for two architectures and reads registers, spills and shared memory off the result.
The launch parameters themselves are asked from `kernels_fused`, not repeated. Merge this list into
the kernel report: an extra, because the engine never needs it.
"""

from nanoserve import kernels_fused as kernels


def configurations(arch: int) -> list[tuple]:
    """(kernel, signature, constexprs, options) of each launch, as `triton.compile` wants them.

    All pointers and integers are meant to divide by 16, as those of real models do.
    """
    shipped = []

    def add(kernel, types: str, constexprs: dict, num_warps: int = 4, num_stages: int = 3) -> None:
        """types: those of the arguments that aren't constexprs, in order."""
        rest = iter(types.split())
        signature = {name: "constexpr" if name in constexprs else next(rest)
                     for name in kernel.arg_names}
        assert not list(rest), kernel.__name__
        options = dict(num_warps=num_warps, num_stages=num_stages)
        shipped.append((kernel, signature, constexprs, options))

    for t in ("*bf16", "*fp16", "*fp32"):
        for head_dim in (64, 80, 128, 256):
            sizes = dict(HEAD_DIM=head_dim, **kernels._norm_rope_launch(head_dim))
            rest = f" fp32 {t} {t} {t} {t} *i64" + 7 * " i32"
            add(kernels._norm_rope_store_kernel, 6 * f"{t} " + rest, sizes)
            if head_dim == 128:
                sizes = dict(sizes, q_weight=None, k_weight=None)
                add(kernels._norm_rope_store_kernel, 4 * f"{t} " + rest, sizes)
        for size in (1024, 4096, 8192):
            launch = kernels._norm_launch(size)
            warps = launch.pop("num_warps")
            add(kernels._add_rms_norm_kernel, f"{t} {t} {t} fp32 {t} {t} i32 i32 i32", launch,
                warps)
        add(kernels._add_rms_norm_kernel, f"{t} {t} fp32 {t} {t} i32 i32 i32",
            dict(launch, residual=None), warps)
        for activation in ("silu", "gelu_tanh"):
            add(kernels._silu_and_mul_kernel, f"{t} {t} i32 i32",
                dict(ACTIVATION=activation, BLOCK=kernels.GATED_BLOCK))
        for phase in ("float32",) if t == "*fp32" else ("few", "many"):
            for activation in ("silu", "gelu_tanh", None):
                launch = kernels._experts_launch(arch, phase)
                warps, stages = launch.pop("num_warps"), launch.pop("num_stages")
                constexprs = dict(launch, PAIRS_PER_ROW=8 if activation else 1, EXPERTS=128,
                                  ACTIVATION=activation)
                add(kernels._experts_kernel, f"{t} {t} {t} *i64 *i64 i32 i32 i32", constexprs,
                    warps, stages)
        add(kernels._combine_kernel, f"{t} *fp32 *i64 {t} i32 i32 i32",
            dict(PAIRS_PER_ROW=8, BLOCK=kernels.GATED_BLOCK))
        sizes = dict(CHUNK=kernels.SAMPLE_CHUNK, BLOCK=kernels.SAMPLE_BLOCK)
        add(kernels._sample_kernel, f"{t} *fp32 *i64 *i64 *fp32 *i32 *fp32 *i64 i32 i32", sizes, 8)
        add(kernels._sample_kernel, f"{t} *fp32 *i64 *i64 *fp32 *i64 i32 i32",
            dict(sizes, floors=None, last_ids=None), 8)
        add(kernels._find_floors_kernel, f"{t} *fp32 *fp32 *i64 *fp32 *fp32 *i32 i32 i32",
            dict(BLOCK=kernels.FILTER_BLOCK), 16)
    return shipped
