"""The engine's options on the command line: `--max-model-len 2k`, by the rules of the fields.

    EngineArgs ──a field each──► add_engine_options(parser) ──parse_args──► engine_options ──► LLM

The options are made from the dataclass, so a new field is an option at once. A dict is given as
JSON. vLLM's other options are read, too, and `LLM` renames, drops or refuses them. Values are
checked where offline ones are. `serve` and `chat` share this module, which needs none of the
server's packages.
"""

import argparse
import json
import re
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, get_args

from nanoserve.rules import rule_of
from nanoserve_extras.base.command import DashedParser
from nanoserve_extras.base.vllm import ROWS, nearest
from nanoserve_extras.engine_args import EngineArgs

# vLLM's names of options, but for those that are ours as well: the engine's, or the server's.
OURS = {*(field.name for field in fields(EngineArgs)), "served_model_name"}
VLLMS = {name: row for (taker, name), row in ROWS.items()
         if taker in ("LLM", "serve") and name not in OURS}
SHORT = {"tensor_parallel_size": ["-tp"], "pipeline_parallel_size": ["-pp"],
         "data_parallel_size": ["-dp"], "quantization": ["-q"]}  # vLLM's
# Options of llama.cpp, ollama and SGLang that people type, and hints to ours.
OTHERS = {"m model model-path": "name the model without an option",
          "c ctx-size num-ctx n-ctx context-length": "--max-model-len",
          "ngl n-gpu-layers gpu-layers num-gpu": "a GPU takes all layers; --layer-plan "
          "'{\"disk\": 8}' leaves some on disk",
          "np parallel max-running-requests": "--max-num-seqs",
          "mem-fraction-static": "--gpu-memory-utilization", "tp-size": "--tensor-parallel-size",
          "temp": "--temperature", "n predict n-predict num-predict": "nanoserve chat has "
          "--max-tokens, and a request max_tokens",
          "t threads": "set OMP_NUM_THREADS", "hf hf-repo": "name OWNER/REPOSITORY:Q4_K_M as the "
          "model", "ctk cache-type-k": "--kv-cache-dtype int8"}
HINTS = {name: hint for names, hint in OTHERS.items() for name in names.split()}
UNITS = {"": 1, "k": 10 ** 3, "m": 10 ** 6, "g": 10 ** 9, "t": 10 ** 12,
         "K": 2 ** 10, "M": 2 ** 20, "G": 2 ** 30, "T": 2 ** 40}


class Parser(DashedParser):
    """Prints an error in one line, not below sixty lines of usage."""

    def error(self, message: str):
        if unknown := re.match(r"unrecognized arguments: (--?)([\w-]+)", message):
            dashes, name = unknown.groups()
            names = [option[2:] for option in self._option_string_actions]
            near = nearest(name, [other for other in names if other not in VLLMS])
            hint = HINTS.get(name) or near and f"did you mean --{near}?"
            message = f"there is no option {dashes}{name}" + (f": {hint}" if hint else "")
        self.exit(2, f"{self.prog}: error: {message} (--help lists the options)\n")


def add_engine_options(engine) -> None:
    """Add an option for each field, and vLLM's options, to a parser or a group of one."""
    for field in engine_fields():
        names = [field.name, *(name for name, row in VLLMS.items() if row.ours == field.name)]
        engine.add_argument(*map(option_name, names), *SHORT.get(field.name, ()),
                            **_how_to_read(field))
    for name, row in VLLMS.items():
        if not row.ours:  # --disable-log-requests, or --kv-cache-dtype fp8
            engine.add_argument(option_name(name), *SHORT.get(name, ()), nargs="?", const=True,
                                type=json_or_text, default=argparse.SUPPRESS,
                                help=argparse.SUPPRESS)


def engine_fields() -> list[Field]:
    """All options of the engine except the model, which is a positional argument."""
    return [field for field in fields(EngineArgs) if field.name != "model"]


def option_name(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _how_to_read(field: Field) -> dict:
    """argparse's arguments for one option. The rule's text is its help; values are checked where
    offline ones are."""
    assert field.default is not MISSING, f"{field.name} needs a default"
    must = rule_of(field.type).must.replace("%", "%%")
    reader = dict(default=field.default, help=must or "see the class of this name")
    kinds = types_of(field.type)
    if bool in kinds:
        return reader | dict(action=argparse.BooleanOptionalAction)
    if list in kinds and dict not in kinds:
        return reader | dict(nargs="+", metavar="NAME")
    for kind, read, metavar in ((dict, json_object, "DICT"), (Any, json_object, "JSON"),
                                (int, whole, "INT"), (float, float, "FLOAT")):
        if kind in kinds:
            return reader | dict(type=read, metavar=metavar)
    return reader | dict(metavar="TEXT")


def types_of(kind: Any) -> set:
    """The types in a field's type: three of them in `Annotated[dict | list, ...] | None`."""
    if hasattr(kind, "__metadata__"):
        return types_of(kind.__origin__)
    parts = get_args(kind)
    return set().union(*map(types_of, parts)) if parts else {kind}


def whole(text: str) -> int:
    """Read a whole number, also vLLM's short form: 2k is 2000, 2K is 2048, 1.5k is 1500."""
    number = re.fullmatch(r"(-?\d+(?:\.\d+)?)([kmgtKMGT]?)", text)
    value = float(number[1]) * UNITS[number[2]] if number else 0.5
    if value != int(value):
        raise argparse.ArgumentTypeError(f"must be a whole number, or one as 2k, got {text!r}")
    return int(value)


def json_object(text: str) -> dict:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r}")
    return value


def json_or_text(text: str) -> Any:
    """The value that a Python caller would pass: 1 for "1", "auto" for "auto"."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def engine_options(args: argparse.Namespace) -> dict:
    """The arguments of `LLM`. vLLM's names are in it only if they were given."""
    said = [name for name, row in VLLMS.items() if "serve" not in row.takers and name in args]
    return {name: getattr(args, name) for name in [f.name for f in engine_fields()] + said}


def positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)


def load_chat_template(name: str) -> str:
    """Read a chat template from a file, or from the argument itself. Raises `ValueError`."""
    if "{" in name:
        return name
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"chat_template must be a file or a template, got {name!r} ({error})"
                         ) from error
