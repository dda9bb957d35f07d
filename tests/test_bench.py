"""bench.py at a toy size: what it prints, and what it says to wrong options."""

import re
import sys

import pytest

import bench


def run(monkeypatch, *args: str) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.py", *map(str, args)])
    bench.main()


def test_it_prints_vllms_line_and_the_share_of_the_roofline(toy, monkeypatch, capsys,
                                                            known_machine):
    run(monkeypatch, "--model", toy, "--num-prompts", "3", "--input-len", "7", "--output-len", "5",
        "--set", "load_format=dummy", "--set", "skip_tokenizer_init=True", "--set", "device=cpu",
        "--set", "num_gpu_blocks_override=40")
    throughput, roofline = capsys.readouterr().out.splitlines()
    requests, total, output = map(float, re.fullmatch(
        r"Throughput: ([\d.]+) requests/s, ([\d.]+) total tokens/s, ([\d.]+) output tokens/s",
        throughput).groups())
    assert total / requests == pytest.approx(12, rel=0.01)
    assert output / requests == pytest.approx(5, rel=0.01)
    share, took, least = map(float, re.match(
        r"Roofline: ([\d.]+)%, as the steps took ([\d.]+) s and need ([\d.]+) \(copy 30.0 GB/s, "
        r"matrix product 400 GFLOP/s\)$", roofline).groups())
    assert 0 <= share <= 100 and least <= took


@pytest.mark.parametrize("args, says", [
    (["--num-prompts", "0"], "--num-prompts and --input-len must be at least 1"),
    (["--output-len", "0"], "max_tokens"), (["--input-len", "3000"], "3000"),
    (["--set", "block_size"], "write OPTION=VALUE"), (["--set", "max_seq_num=3"], "max_seq_num"),
    (["--set", "device=gpu"], "device must be auto")])
def test_wrong_options_are_explained(args, says, monkeypatch, capsys):
    with pytest.raises(SystemExit) as exit:
        run(monkeypatch, *args)
    assert exit.value.code == 2 and says in capsys.readouterr().err
