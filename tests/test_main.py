"""`python -m nanoserve` tells what there is; a command that isn't there is explained."""

import subprocess
import sys

import pytest
import torch

from nanoserve import __main__ as door
from nanoserve import __version__
from nanoserve.device import build
from nanoserve.tools import about
from nanoserve.tools.house import PACKAGE


def test_the_page_from_anywhere(tmp_path, monkeypatch):
    """In a process of its own, in a folder where nothing of nanoserve lies."""
    monkeypatch.setenv("PYTHONPATH", str(PACKAGE.parent))
    done = subprocess.run([sys.executable, "-m", "nanoserve"], cwd=tmp_path, capture_output=True,
                          text=True, check=True)
    shown = done.stdout
    assert done.stderr == "" and shown.startswith(f"nanoserve {__version__}, ")
    for words in ("device c", "kernels='", f"torch {torch.__version__}", "storyteller-draft",
                  "python -m nanoserve.tools.verify\n      Check the engine",
                  "python -m nanoserve.tools.trace\n", "from nanoserve import LLM"):
        assert words in shown
    assert all(len(line) <= 100 for line in shown.splitlines())


def test_it_is_found_beside_a_folder_of_its_name(tmp_path, monkeypatch):
    """As beside the clone: an editable install was a hook that is asked last, and the clone's own
    folder a package without files."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    (tmp_path / "nanoserve").mkdir()
    code = "import nanoserve; print(nanoserve.LLM.__name__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, text=True,
                          capture_output=True)
    assert done.stdout == "LLM\n", done.stderr


def test_every_instrument_that_is_named_can_be_run():
    """By its file: each has a `main`; libraries among the tools are not named."""
    named = {command for command, _ in about.commands()}
    files = {f"python -m nanoserve.tools.{path.stem}": path.read_text()
             for path in (PACKAGE / "tools").glob("*.py")}
    runnable = {command for command, text in files.items() if "\ndef main(" in text
                and '\nif __name__ == "__main__":\n' in text}
    assert runnable and runnable == named & set(files)


def test_the_first_lines_to_type_run(capsys):
    exec(about.SNIPPET.replace("LLM()", "LLM(max_model_len=128)"), {})
    assert len(capsys.readouterr().out) > 20


def test_a_machine_without_a_compiler_is_told(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("a GPU takes other kernels")

    def no_compiler():
        raise build.BuildError("there is no C++ compiler: install one")

    assert "kernels='cpu'" in about.machine()[0]
    monkeypatch.setattr(about, "find_compiler", no_compiler)
    first, reason = about.machine()
    assert "kernels='onednn'" in first and reason == "there is no C++ compiler: install one"


@pytest.mark.parametrize(("argv", "says"), [
    (["abuot"], "no command 'abuot': did you mean about?"), (["xyz"], "lists what there is"),
    (["about", "--x"], "takes no arguments, got --x")])
def test_a_wrong_command_is_explained(capsys, argv, says):
    assert door.main(argv) == 2
    assert says in capsys.readouterr().err


def test_a_command_of_a_deleted_annex_is_explained(capsys, monkeypatch):
    monkeypatch.setitem(door.COMMANDS, "gone", "nanoserve.extras.gone")
    assert door.main(["gone"]) == 2
    assert "nanoserve.extras.gone is not there: it belongs to an annex" in capsys.readouterr().err
    assert "gone" not in str(about.commands())


def test_a_command_gets_its_arguments(monkeypatch):
    seen = []
    monkeypatch.setattr(about, "main", lambda argv: seen.append(argv))
    assert door.main(["about", "a", "-b"]) == 0 and door.main(["--help"]) == 0
    assert seen == [["a", "-b"], []]
