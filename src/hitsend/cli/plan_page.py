"""The planner behind the inspector's Plan page: one process, one question, one answer.

    python -m hitsend.cli.plan_page --fd N

Enters: a question as JSON on the inherited line (`serve/planning.py`). Leaves: what `hitsend plan` says to the same
fields, or what is wrong with them. Always true: it calls the commands themselves, so page and terminal can't differ; it
stands in an empty folder and takes no field that names a file, a ledger or a setting; it has the lowest priority, a
bound on its memory, and gives up after `CPU_S` of computing. Next: `plan_data.py`.
"""

import inspect
import math
import os
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
        return {"error": str(error), "param": _meant(str(error), question)}
    except (ArithmeticError, ValueError, MemoryError) as error:
        return {"error": f"no plan comes of these numbers: {str(error) or type(error).__name__}", "param": None}
    return {"text": "\n".join(answer.lines), "document": answer.document, "command": _command(question)}


def catalogue(known: Facts) -> dict[str, Any]:
    """The fields of every plan, and the names that are known."""
    return {
        "plans": {
            name: {"about": (inspect.getdoc(command) or "").partition("\n")[0], "fields": tuple(fields_of(command))}
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
    given: dict[str, Any] = {} if question.config is None else {"facts": _pasted(question.config)}
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


def _pasted(config: dict[str, Any]) -> Path:
    """Facts with one model more, in memory: what is pasted never lies on a disk."""
    model = {"name": PASTED, "source": "pasted config.json", "as_of": datetime.now(UTC).date(), "config": config}
    held = os.memfd_create("facts")
    os.write(held, msgspec.json.encode({"models": [model]}))
    return Path(f"/proc/self/fd/{held}")


def _meant(message: str, question: Question) -> str | None:
    """The field that a message begins with."""
    first = message.partition(" ")[0].rstrip(":,").removeprefix("--")
    return first if first in {field.name for field in fields_of(PLANS[question.plan or ""])} else None


def _command(question: Question) -> str:
    """What to type for the same in a terminal."""
    words = ["hitsend", "plan", question.plan or ""]
    if question.config is not None:
        words += ["--model", "./config.json"]
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
