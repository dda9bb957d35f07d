"""`python -m nanoserve` lists what there is; a command that isn't there is explained."""

import re
import subprocess
import sys

import pytest
from clean_process import PACKAGE

from nanoserve import __main__ as door
from nanoserve import __version__
from nanoserve_extras import COMMANDS


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_the_list_from_anywhere(arguments, tmp_path, monkeypatch):
    """In a process of its own, in a folder where nothing of nanoserve lies."""
    monkeypatch.setenv("PYTHONPATH", str(PACKAGE.parent))
    done = subprocess.run([sys.executable, "-m", "nanoserve", *arguments], cwd=tmp_path,
                          capture_output=True, text=True, check=True)
    assert done.stderr == "" and done.stdout.startswith(f"nanoserve {__version__}, ")
    assert re.findall(r"^  nanoserve (\w+)", done.stdout, re.M) == list(COMMANDS)


def test_the_version_alone(capsys):
    assert door.main(["--version"]) == 0 and capsys.readouterr().out == f"{__version__}\n"


def test_the_first_lines_to_type_run(capsys):
    lines = door.IN_PYTHON.removeprefix("In Python\n").replace("LLM()", "LLM(max_model_len=128)")
    exec("\n".join(line.strip() for line in lines.splitlines()), {})
    assert len(capsys.readouterr().out) > 20


def test_it_is_found_beside_a_folder_of_its_name_and_every_public_name_is_there(tmp_path,
                                                                             monkeypatch):
    """As beside the clone: an editable install was a hook that is asked last, and the clone's own
    folder a package without files. Names of extras stand in `__all__`, too, and a star takes only
    what is there."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    (tmp_path / "nanoserve").mkdir()
    code = ("import nanoserve; from nanoserve import *; "
            "print(LLM.__name__, all(name in globals() for name in nanoserve.__all__), "
            "'PoolingParams' in globals())")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, text=True,
                          capture_output=True)
    assert done.stdout == "LLM True True\n", done.stderr


@pytest.mark.parametrize(("argv", "says"), [
    (["sevre"], "no command 'sevre': did you mean serve?"), (["xyz"], "lists what there is"),
    (["pull", "x"], "a hub id is when it is first used"), (["run", "x"], "nanoserve chat MODEL"),
    (["rm", "x"], "HF_HOME")])
def test_a_wrong_command_is_explained(capsys, argv, says):
    assert door.main(argv) == 2
    assert says in capsys.readouterr().err


LACKING = {
    ("nanoserve_extras.server", "serve"): "nanoserve_extras.server.cli is not there: it may have",
    ("uvicorn", "serve"): "needs uvicorn, which is not installed: pip install 'nanoserve[server]'",
    ("transformers", "verify"): "transformers, which is not installed: pip install transformers",
    ("nanoserve_extras.block_store", "verify"): "nanoserve_extras.block_store",
}


def test_what_a_command_lacks_is_said_with_what_to_do():
    """Also where it is something that the command's module imports."""
    code = f"""if 1:
        import sys
        for missing, command in {[*LACKING]}:
            sys.modules |= {{missing: None}}
            from nanoserve.__main__ import main
            assert main([command, "--help"]) == 2
            print(file=sys.stderr)
            for name in [name for name in sys.modules if name.startswith("nanoserve")] + [missing]:
                sys.modules.pop(name, None)
    """
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    for said, says in zip(done.stderr.split("\n\n"), LACKING.values(), strict=False):
        assert says in said


def test_a_command_gets_its_arguments(monkeypatch):
    from nanoserve_extras.trace import trace

    seen = []
    monkeypatch.setattr(trace, "main", lambda argv: seen.append(argv))
    assert door.main(["trace", "a", "-b"]) == 0
    assert seen == [["a", "-b"]]
