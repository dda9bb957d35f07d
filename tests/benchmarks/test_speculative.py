"""The benchmark of speculative decoding runs."""

import pytest

from benchmarks.speculative import main


@pytest.mark.full
def test_the_benchmark_runs(capsys):
    main(["--num-tokens", "8", "--rounds", "1", "--dtype", "float32", "--streams", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [
        [text, name] for text in ("greedy", "drawn") for name in ("none", "ngram", "draft_model",
                                                           "eagle3")]
    assert "another text" not in "".join(lines)
