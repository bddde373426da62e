"""Types for what comes from outside, and pydantic's refusal of it in one line.

The first fault is told: where, what is there, what belongs there, what to do. Scalars are strict,
so that ``"1"`` is no number and ``true`` none either; of a long list only the first fault is
found, and a table has a limit, because pydantic would keep an error for every item.

    @dataclass(frozen=True, kw_only=True)
    class Link:
        __pydantic_config__ = CLOSED
        name: Text
        bytes_per_s: Amount

    link = validated(Link, content, where="plan.json", remedy="make the plan again")
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Annotated, Any, Final, TypeAlias, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    Strict,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from psdist.errors import PlacementError
from psdist.topology.text import HOST_NAME, shown

T = TypeVar("T")

CLOSED: Final = ConfigDict(extra="forbid", revalidate_instances="always")
"""The configuration of a model that takes no unknown keys; what was made here is checked, too."""

MAX_CHARACTERS: Final = 2000
MAX_TABLE: Final = 1 << 16


def fault(words: str) -> PydanticCustomError:
    """Return the error a validator raises: ``words`` follow the name of the place."""
    return PydanticCustomError("fault", "{words}", {"words": words})


def fits(is_fit: Callable[[Any], object], wanted: str) -> AfterValidator:
    """Refuses a value that ``is_fit`` finds false: it is not ``wanted``."""

    def check(value: T) -> T:
        if not is_fit(value):
            raise fault(f"is {shown(value)}, not {wanted}")
        return value

    return AfterValidator(check)


def _each_once(items: tuple[T, ...]) -> tuple[T, ...]:
    if len(set(items)) < len(items):
        twice = next(each for each, count in Counter(items).items() if count > 1)
        raise fault(f"has {shown(twice)} twice")
    return items


def _within_table(value: object) -> object:
    if isinstance(value, dict) and len(value) > MAX_TABLE:
        raise fault(f"has {len(value):,} keys, more than {MAX_TABLE:,}")
    return value


Whole: TypeAlias = Annotated[int, Strict()]
Truth: TypeAlias = Annotated[bool, Strict()]
String: TypeAlias = Annotated[str, Strict()]
Number: TypeAlias = Annotated[float, Strict()]
Amount: TypeAlias = Annotated[Number, Field(ge=0, allow_inf_nan=False)]
"""A finite number, 0 or more."""
Text: TypeAlias = Annotated[
    String,
    fits(
        lambda text: len(text) <= MAX_CHARACTERS and text.isprintable(),
        f"at most {MAX_CHARACTERS} characters without control characters",
    ),
]
"""Text that a message or a terminal may show."""
HostName: TypeAlias = Annotated[
    String,
    fits(
        HOST_NAME.fullmatch,
        "letters, digits, '.', '_' and '-', with no '-' or '.' at the start",
    ),
]
FIRST_FAULT: Final = FailFast()
"""For lists of what a file has many of."""
EACH_ONCE: Final = AfterValidator(_each_once)
"""For lists where nothing is twice."""
TABLE: Final = BeforeValidator(_within_table)
"""For objects whose keys the file chooses."""


_ADAPTERS: Final[dict[type, TypeAdapter[Any]]] = {}
"""Adapters of the types read so far; making one takes milliseconds."""


def validated(
    declared: type[T], content: object, *, where: str, remedy: str, context: Any = None
) -> T:
    """``content`` as the type ``declared``, or a PlacementError that ends in ``remedy``.

    ``context`` is what the type's own validators get.
    """
    if declared not in _ADAPTERS:
        _ADAPTERS[declared] = TypeAdapter(declared)
    adapter: TypeAdapter[T] = _ADAPTERS[declared]
    try:
        return adapter.validate_python(content, context=context)
    except ValidationError as error:
        faults = error.errors(include_url=False)
        raise PlacementError(f"{where}: {_in_words(faults[0])}: {remedy}") from None


def check_format(
    content: object, form: str, version: int, *, where: str, remedy: str
) -> dict[str, object]:
    """The other members of an object of this format and version; otherwise a PlacementError.

    Looked at before anything else, so that another program's file is called that.
    """
    if not isinstance(content, dict):
        raise PlacementError(f"{where}: this is {shown(content)}, not an object: {remedy}")
    found = content.get("format"), content.get("version")
    if found != (form, version):
        raise PlacementError(
            f"{where}: format {shown(found[0])}, version {shown(found[1])}: this psdist reads "
            f"{form!r}, version {version}: {remedy}"
        )
    return {key: each for key, each in content.items() if key not in ("format", "version")}


_WANTED: Final = {
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "an object",
    "dataclass_type": "an object",
    "finite_number": "a finite number",
}


def _in_words(error: ErrorDetails) -> str:
    place, kind, message, value = error["loc"], error["type"], error["msg"], error["input"]
    if kind == "missing":
        return f"{_words(place[:-1])} has no key {shown(place[-1])}"
    if kind == "unexpected_keyword_argument":
        return f"{_words(place[:-1])} has the unknown key {shown(place[-1])}"
    where = f"a key of {_words(place[:-2])}" if place[-1:] == ("[key]",) else _words(place)
    if kind == "fault":
        return f"{where} {message}"
    if kind == "too_long":
        return f"{where} has more than {error['ctx']['max_length']:,} items"
    wanted = _WANTED.get(kind) or message.removeprefix("Input should be ")
    if kind == "float_type" and isinstance(value, int) and not isinstance(value, bool):
        wanted = "a number that a float holds"
    return f"{where} is {shown(value)}, not {wanted}"


def _words(place: tuple[int | str, ...]) -> str:
    """``ranks[3].host``; keys that the file chose are quoted where they could be anything."""
    words = ""
    for part in place:
        if isinstance(part, int):
            words += f"[{part}]"
        elif part.isidentifier() and len(part) <= 48:
            words += f".{part}" if words else part
        else:
            words += f"[{shown(part)}]"
    return words or "the content"
