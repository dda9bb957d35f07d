"""The parity matrix of an engine on kernels, in the interpreter and on a GPU."""


MODES = {
    "alone": dict(max_num_seqs=1),
    "batched": dict(enable_prefix_caching=False),
    "chunked, cached": dict(max_num_batched_tokens=24, max_num_seqs=4),
    "blocks of 32": dict(block_size=32, max_num_batched_tokens=64, max_num_seqs=6),
    "preempted, overlap": dict(num_gpu_blocks_override=8, max_num_batched_tokens=40,
                               max_num_seqs=5, async_scheduling=True),
}


def few(prompts) -> list[list[int]]:
    """Lengths 1, 16, 33 and 48, 48 again (a prefix hit), 64: around blocks of 16 and 32."""
    return [prompts[i] for i in (0, 3, 7, 10, 11)] + [prompts[12][:64]]
