"""Instruments of measurement, outside the package: `python -m benchmarks.NAME` from a clone's root.

    throughput    one model, one workload: tokens a second, latencies, the share of the roofline;
                  beside other engines (--against), or idea by idea (--ladder)
    host          the host's time of a step, and what observers cost
    kernels       the compiled GPU kernels, without a GPU
    gpu           what a GPU does: kernels, the engine, what each idea is worth
    tables        measures the tables of docs/benchmarks.md and of README, and writes them
    lora, quantization, speculative, structured, pooling, server, block_store
                  what one optional idea costs and brings
    train, train_lora, train_eagle3
                  how the bundled models were made
    workloads, meter, roofline, peers
                  what the others share: requests, a stopwatch, the least time, other engines

The package never imports this folder, and a wheel doesn't have it. A test runs each instrument at a
toy size and reads what it prints; no test judges a time.
"""

import nanoserve  # noqa: F401  before torch, whose OpenMP threads it tells how long to spin
