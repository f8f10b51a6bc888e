"""The planner behind the inspector's Plan page: one process, one question, one answer.

    python -m hitsend.cli.plan_page --fd N

Enters: a question as JSON on the inherited line (`serve/planning.py`). Leaves: what `hitsend plan` says to the same
fields, or what is wrong with them. Always true: it calls the commands themselves, so page and terminal can't differ; it
stands in an empty folder and takes no field that names a file, a ledger or a setting: what a terminal reads from a file
comes with the question and stays in memory; it has the lowest priority, a bound on its memory, and gives up after
`CPU_S` of computing. Next: `plan_data.py`.
"""

import inspect
import math
import os
import re
import resource
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
from typer.models import OptionInfo

from hitsend.cli import CallFailed, plan_cost, plan_fleet, plan_memory, plan_rent, plan_speed, plan_train
from hitsend.cli.plan_answer import Answer
from hitsend.core.errors import ConfigError
from hitsend.plan.facts import Facts, load_facts
from hitsend.serve.parent import ParentLine

PLANS: dict[str, Callable[..., Answer]] = {
    "memory": plan_memory.memory,
    "speed": plan_speed.speed,
    "compare": plan_speed.compare_command,
    "cost": plan_cost.cost,
    "fleet": plan_fleet.fleet,
    "rent-or-buy": plan_rent.rent_or_buy,
    "train": plan_train.train,
}
CPU_S = 120.0
"""Of one question. A big fleet takes a third of it."""
MAX_MEMORY_BYTES = 4 * 1024**3
NICENESS = 19
PASTED = "pasted"
"""What a pasted config.json's model is called."""

_OWN_HELP = "A known name; or paste its config.json below."
_NOT_OURS = ("from_ledger", "as_json")
PASTABLE = {"calibrate": "calibrate.json", "trace": "trace.jsonl", "facts": "facts.json"}
"""Flags whose file's content may come with a question, and what that file is called in a terminal's command."""

Pasted = dict[str, Any] | list[dict[str, Any]] | None
"""One document, or one a line."""


class Field(msgspec.Struct, frozen=True, omit_defaults=True):
    """One flag of a command. `default` is what leaving it out means."""

    name: str
    kind: str
    help: str = ""
    default: Any = None
    needed: bool = False
    parameter: str = ""
    least: float | None = None
    most: float | None = None


class Question(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the page sends; `plan` None: what may be asked."""

    plan: str | None = None
    fields: dict[str, Any] = {}
    config: dict[str, Any] | None = None
    calibrate: Pasted = None
    trace: Pasted = None
    facts: Pasted = None

    @property
    def pasted(self) -> dict[str, dict[str, Any] | list[dict[str, Any]]]:
        """What came instead of files, by flag."""
        return {name: content for name in PASTABLE if (content := getattr(self, name)) is not None}


def main(arguments: list[str]) -> None:
    """Answer once, and end."""
    line = ParentLine(int(arguments[arguments.index("--fd") + 1]))
    _bind()
    while not line.is_closed:
        for body in line.receive(timeout_s=1.0):
            line.send(msgspec.json.encode(answered(msgspec.json.decode(body, type=Question))))
            line.drain(timeout_s=5.0)
            return


def _bind() -> None:
    """What a question may cost."""

    def stop(_number: int, _frame: Any) -> None:
        raise CallFailed(f"no plan within {CPU_S:g} s of computing: ask for less, or use hitsend plan in a terminal")

    folder = tempfile.mkdtemp()  # where no relative path leads anywhere
    os.chdir(folder)
    Path(folder).rmdir()
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, CPU_S)


def answered(question: Question) -> dict[str, Any]:
    """`text`, `document` and `command`; or `error`, with the `param` it is about where one is."""
    if question.plan is None:
        return catalogue(load_facts())
    if question.plan not in PLANS:
        return {"error": f"plan: {question.plan[:40]!r} is none of {', '.join(PLANS)}", "param": "plan"}
    try:
        answer = PLANS[question.plan](**_given(question), as_json=True)
    except (ConfigError, CallFailed) as error:
        said = _HELD.sub(lambda found: f"pasted {_NAMES.get(int(found[1]), 'file')}", str(error))
        return {"error": said, "param": _meant(said, question)}
    except (ArithmeticError, ValueError, MemoryError) as error:
        return {"error": f"no plan comes of these numbers: {str(error) or type(error).__name__}", "param": None}
    return {"text": "\n".join(answer.lines), "document": answer.document, "command": _command(question)}


def catalogue(known: Facts) -> dict[str, Any]:
    """The fields of every plan, and the names that are known."""
    return {
        "plans": {
            name: {
                "about": (inspect.getdoc(command) or "").partition("\n")[0],
                "fields": tuple(fields_of(command)),
                "pastable": pastable(command),
            }
            for name, command in PLANS.items()
        },
        "models": sorted((model.name for model in known.models), key=str.casefold),
        "gpus": sorted(min((*gpu.aliases, gpu.name), key=len) for gpu in known.gpus),
        "prices": sorted(price.name for price in known.prices),
    }


def fields_of(command: Callable[..., Answer]) -> Iterator[Field]:
    """Every flag but those that name a file or what is this machine's."""
    defaults = inspect.signature(command).parameters
    for parameter, hint in get_type_hints(command, include_extras=True).items():
        if get_origin(hint) is not Annotated or parameter in _NOT_OURS:
            continue
        base, option = get_args(hint)[:2]
        kinds = get_args(base) or (base,)
        if not isinstance(option, OptionInfo) or Path in kinds or datetime in kinds:
            continue
        default = defaults[parameter].default
        is_needed = default is inspect.Parameter.empty
        yield Field(
            # inside Annotated, typer keeps the first flag where a default would be
            name=str(option.default).partition("/")[0].removeprefix("--"),
            kind=_kind(base, kinds),
            help=_OWN_HELP if "config.json" in (option.help or "") else option.help or "",
            default=None if is_needed else default,
            needed=is_needed,
            parameter=parameter,
            least=option.min,
            most=option.max,
        )


def pastable(command: Callable[..., Answer]) -> tuple[str, ...]:
    """Of `PASTABLE`, what this command reads."""
    return tuple(name for name in PASTABLE if name in inspect.signature(command).parameters)


def _kind(base: Any, kinds: tuple[Any, ...]) -> str:
    if get_origin(base) is list or any(get_origin(kind) is list for kind in kinds):
        return "texts"
    names = {bool: "switch", int: "whole", float: "number", str: "text"}
    return next(name for kind, name in names.items() if kind in kinds)


_TYPES = {"switch": bool, "whole": int, "number": float, "text": str, "texts": list[str]}


def _given(question: Question) -> dict[str, Any]:
    """The command's own arguments. Raises ConfigError that names the field."""
    command = PLANS[question.plan or ""]
    known = {field.name: field for field in fields_of(command)}
    asked = dict(question.fields)
    if question.config is not None:
        if "model" not in known:
            raise ConfigError("config: this plan has no --model")
        asked["model"] = PASTED
    elif not _is_name(asked.get("model")):
        raise ConfigError("--model: a known name, or a pasted config.json; this page reads no files")
    if "," not in str(asked.get("timing", ",")):
        raise ConfigError("--timing: STEP,PREFILL,DECODE in ms; this page reads no files")
    given = _attached(question, pastable(command))
    for name, value in asked.items():
        if name not in known:
            raise ConfigError(f"--{name[:40]}: this plan has no such field here")
        given[known[name].parameter] = _typed(known[name], value)
    for field in known.values():
        if field.needed and field.parameter not in given:
            raise ConfigError(f"--{field.name} is needed")
    return given


def _is_name(model: Any) -> bool:
    if not isinstance(model, str):
        return True
    path = PurePosixPath(model)
    return not path.is_absolute() and ".." not in path.parts and "\0" not in model


def _typed(field: Field, value: Any) -> Any:
    if field.kind == "texts" and isinstance(value, str):
        value = [part.strip() for part in value.split(",")]
    try:
        found: Any = msgspec.convert(value, _TYPES[field.kind], strict=False)
    except msgspec.ValidationError:
        raise ConfigError(f"--{field.name} {str(value)[:40]}: needed is a {field.kind}") from None
    if isinstance(found, float) and not math.isfinite(found):
        raise ConfigError(f"--{field.name} {value}: needed is a number")
    if isinstance(found, int | float):
        if field.least is not None and found < field.least:
            raise ConfigError(f"--{field.name} is {found}, at least {field.least:g} is needed")
        if field.most is not None and found > field.most:
            raise ConfigError(f"--{field.name} is {found}, limit {field.most:g}")
    return found


def _attached(question: Question, taken: tuple[str, ...]) -> dict[str, Any]:
    """The arguments that are files in a terminal. Raises ConfigError for what this plan doesn't read."""
    contents = question.pasted
    for name in contents:
        if name not in taken:
            raise ConfigError(f"{name}: this plan has no --{name}")
    if question.config is not None:
        model = {"name": PASTED, "source": "pasted config.json", "as_of": datetime.now(UTC).date()}
        own = contents.get("facts", {})
        models = own.get("models", []) if isinstance(own, dict) else None
        if not isinstance(own, dict) or not isinstance(models, list):
            raise ConfigError("facts: needed is an object, and models in it a list")
        contents["facts"] = own | {"models": [model | {"config": question.config}, *models]}
    return {name: _held(name, content) for name, content in contents.items()}


def _held(name: str, content: dict[str, Any] | list[dict[str, Any]]) -> Path:
    """A file in memory: what is pasted never lies on a disk."""
    lines = content if isinstance(content, list) else [content]
    held = os.memfd_create(name)
    with os.fdopen(os.dup(held), "wb") as file:
        file.write(b"\n".join(msgspec.json.encode(line) for line in lines))
    _NAMES[held] = name
    return Path(f"/proc/self/fd/{held}")


_NAMES: dict[int, str] = {}
_HELD = re.compile(r"/proc/self/fd/(\d+)")


def _meant(message: str, question: Question) -> str | None:
    """The field that a message begins with."""
    first = message.removeprefix("pasted ").partition(" ")[0].rstrip(":,").removeprefix("--")
    known = {field.name for field in fields_of(PLANS[question.plan or ""])} | set(PASTABLE)
    return first if first in known else None


def _command(question: Question) -> str:
    """What to type for the same in a terminal."""
    words = ["hitsend", "plan", question.plan or ""]
    if question.config is not None:
        words += ["--model", "./config.json"]
    for name in question.pasted:
        words += [f"--{name}", f"./{PASTABLE[name]}"]
    for field in fields_of(PLANS[question.plan or ""]):
        if field.name not in question.fields or (field.name == "model" and question.config is not None):
            continue
        value = _typed(field, question.fields[field.name])
        if isinstance(value, bool):
            words.append(f"--{field.name}" if value else f"--no-{field.name}")
        else:
            for one in value if isinstance(value, list) else [value]:
                words += [f"--{field.name}", str(one)]
    return shlex.join(words)


if __name__ == "__main__":
    main(sys.argv[1:])
