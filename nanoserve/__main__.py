"""The command `nanoserve`. The commands themselves, such as `nanoserve serve`, are in
`nanoserve_extras`; without that package there is only a hint.

This file imports nothing that takes long: see nanoserve_extras/base/command.py.
"""

import sys
from pathlib import Path

from nanoserve import __version__

HOME = Path(__file__).parent.parent  # printed, because there may be several installations
IN_PYTHON = """\
In Python
  from nanoserve import LLM, SamplingParams
  llm = LLM()  # the bundled story model; or LLM("Qwen/Qwen3-0.6B"), or a folder
  print(llm.generate("Once upon a time", SamplingParams(max_tokens=50))[0].outputs[0].text)"""


def main(argv: list[str] | None = None) -> int:
    """Run the command that `argv` begins with. Returns the exit code."""
    argv = (sys.argv[1:] if argv is None else argv) or ["--help"]
    try:
        import nanoserve_extras
    except ModuleNotFoundError:
        print(f"nanoserve {__version__}, {HOME}\n\nNo commands: nanoserve_extras, which has them, "
              f"is not there\n\n{IN_PYTHON}")
        return 0 if argv[0] in ("-h", "--help") else 2
    return nanoserve_extras.find("base.command.run")(argv)


if __name__ == "__main__":
    sys.exit(main())
