"""Settings: makes frozen dataclasses whose fields pydantic checks, describes them as JSON, and loads named functions.

A module that declares settings must import nothing that is slow to import, because the command line imports the module
to make options from the settings.
"""

from __future__ import annotations

import functools
import importlib
import json
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar, dataclass_transform

from pydantic import AfterValidator, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from replay_protos.settings import explain, unknown_name

T = TypeVar("T")

Count = Annotated[int, Field(ge=1)]
Whole = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
Finite = Annotated[float, Field(ge=0, allow_inf_nan=False)]
"""A finite number that is at least 0."""
Share = Annotated[float, Field(ge=0, le=1)]
# The lambda is necessary, because `_absolute` is defined below.
FixedPath = Annotated[str | Path, AfterValidator(lambda path: _absolute(path))]
"""A path, which is made absolute when the settings are made, because users' code may change the folder of the process
later. An address with :// stays as it is."""
Names = Annotated[tuple[str, ...], Field(strict=False)]
"""A tuple of names. A list is accepted too, because JSON and TOML have no tuples."""

SETTINGS_FILE = "settings.json"
"""The name of the file with a trainer's settings, beside its metrics. The name is not `config.json`, because a model
has a file of that name, which may be in the same folder."""
MOST_TEXT = 256
"""The most characters that the value of one setting may have in the description that a process sends to the server
(`described`). The server accepts 4 kB for all settings together."""


@dataclass_transform(frozen_default=True)
def settings(*, kw_only: bool = False) -> Callable[[type[T]], type[T]]:
    """Makes a class a frozen dataclass whose fields pydantic checks. A field's docstring becomes its description.

    The types are strict: a text is not accepted for a number, nor true for 1. A list is accepted for a tuple only if
    the field says so (`Names`). The constructor raises ValueError with a message of one line for a value that pydantic
    refuses. For an unknown name, the message suggests the nearest known name.
    """

    def decorate(kind: type[T]) -> type[T]:
        config = ConfigDict(strict=True, arbitrary_types_allowed=True, use_attribute_docstrings=True)
        checked: type[Any] = dataclass(frozen=True, kw_only=kw_only, config=config)(kind)
        construct = checked.__init__
        known = [setting.name for setting in fields(checked)]

        # Calls pydantic's constructor, and turns its errors into messages of one line. This text is no docstring,
        # because `wraps` copies the docstring of pydantic's constructor.
        @functools.wraps(construct)
        def __init__(self: Any, *values: Any, **named: Any) -> None:
            for name in named:
                if name not in known:
                    raise ValueError(f"{kind.__name__}: {unknown_name(name, known)}")
            try:
                construct(self, *values, **named)
            except ValidationError as error:
                raise ValueError(explain(error)) from None

        checked.__init__ = __init__
        return checked

    return decorate


def _absolute(path: str | Path) -> str | Path:
    """Makes a path absolute, as seen from the present folder of the process. An address with :// stays as it is."""
    if isinstance(path, Path):
        return path.absolute()
    return path if "://" in path else str(Path(path).absolute())


def check_choice(name: str, value: object, choices: Collection[object]) -> None:
    """Raises ValueError if the `value` of the setting `name` is not one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(str, choices))}, not {value!r}")


def described(part: str, own: Mapping[str, Any]) -> dict[str, str]:
    """The settings with which a generator or trainer describes itself to a server: each value as JSON, by its name.

    `part`, for example "generator" or "trainer", becomes one of these settings. `own` has the other settings by name.
    Leaves out a value whose JSON is longer than MOST_TEXT. `records.read_described` reads the description.
    """
    texts: dict[str, str] = {}
    for name, value in {"part": part, **own}.items():
        text = json.dumps(value, default=_name_of)
        if len(text) <= MOST_TEXT:
            texts[name] = text
    return texts


def as_json(own: Any) -> str:
    """All settings of an object whose class `settings` decorates, as JSON for people and the dashboard."""
    return json.dumps(asdict(own), indent=1, default=_name_of) + "\n"


def _name_of(value: object) -> str:
    """The text that stands in JSON for a value of a type that JSON lacks. For a function, it is the function's name."""
    return str(getattr(value, "__qualname__", value))


def load_function(kind: str, name: str, built_in: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """The built-in function `name`; or, for a name of the form "package.module:function", the function of that module.

    `built_in` has functions by name. `kind` is the purpose of the function, such as "advantages", for errors. Raises
    ValueError for a name that leads to no function.
    """
    if name in built_in:
        return built_in[name]
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        names = "".join(f"{built_in_name!r} or " for built_in_name in built_in)
        raise ValueError(f"{kind} must be {names}'package.module:function', not {name!r}")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        # True if the module, or a package around it, is missing. If another module is missing, the user's module has
        # tried to import that one.
        is_missing = isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}.")
        if is_missing:
            raise ValueError(f"{kind} {name!r}: {error}") from error
        # The user's module raised this error during its import.
        place = raised_in(error, skip=1)  # skip the outermost frame, which is this function
        raised = f"{type(error).__name__}: {error}{place}"
        raise ValueError(f"{kind} {name!r}: its module cannot be imported, for it raised {raised}") from error
    try:
        function = getattr(module, attribute)
    except AttributeError as error:
        raise ValueError(f"{kind} {name!r}: {error}") from error
    if not callable(function):
        raise ValueError(f"{kind} {name!r} is a {type(function).__name__}, which cannot be called")
    loaded: Callable[..., Any] = function
    return loaded


def raised_in(error: BaseException, *, skip: int) -> str:
    """The file and line of the user's code that raised an error, in brackets after a space.

    `skip` is the number of outermost frames that are left out, because they belong to the caller and not to the user.
    Frames of Python's own import machinery are left out too. The result is empty if no frame is left.
    """
    frames = traceback.extract_tb(error.__traceback__)[skip:]
    user_frames = [frame for frame in frames if not frame.filename.startswith("<frozen ")]
    if not user_frames:
        return ""
    innermost = user_frames[-1]
    return f" ({innermost.filename}, line {innermost.lineno})"
