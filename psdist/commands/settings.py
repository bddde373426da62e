"""`psdist settings`: list, explain and resolve settings, write a TOML template, print conflicts.

    show_settings("codec.push", None)                             # one setting
    show_settings(None, read_request(["--mode", "ssp"]))          # the values of a run

Imports neither torch nor MPI, and writes to standard output alone.
"""

from __future__ import annotations

import os
import shutil
import textwrap
from collections.abc import Sequence
from typing import Any, Final

from psdist.commands import print_json
from psdist.commands.run import RunRequest
from psdist.config.conflicts import Row, conflicts_table
from psdist.config.old_names import MERGED, SHORT, why_removed
from psdist.config.settings import (
    FIELDS,
    KEYS,
    NAMES,
    TABLES,
    RunConfig,
    allowed_values,
    needs_of,
    to_toml,
    toml_value,
    unit_of,
)
from psdist.config.sources import (
    Resolved,
    deprecation,
    describe,
    did_you_mean,
    environment_variable,
    resolve,
)
from psdist.errors import ConfigError

_NO_TABLE: Final = "without a table"


def show_settings(
    what: str | None,
    request: RunRequest | None,
    *,
    as_toml: bool = False,
    conflicts: bool = False,
    as_json: bool = False,
) -> int:
    """Print what was asked for and return the exit status 0.

    ``what`` is a table, a setting or an old name; ``request`` has the words of a run to resolve.
    Raises ConfigError for an unknown name and for wrong settings.
    """
    resolved = None
    if request is not None:
        resolved = resolve(
            command_line=request.command_line,
            environment=os.environ,
            file=request.config_file,
            profile=request.profile,
        )
    keys = _keys_of(what)
    if conflicts:
        rows = conflicts_table() if what is None else _conflicts(keys)
        if as_json:
            print_json("settings", {"conflicts": [row._asdict() for row in rows]})
        else:
            print("\n".join(map(_line, rows)))
    elif as_json:
        print_json("settings", {"settings": {NAMES[key]: _facts(key, resolved) for key in keys}})
    elif as_toml:
        print(_template() if resolved is None else to_toml(resolved.config), end="")
    elif resolved is not None:
        names = [] if what is None else [NAMES[key] for key in keys]
        for line in (*describe(resolved, names), *deprecation(resolved)):
            print(line)
        if what is None:
            num_defaults = list(resolved.sources.values()).count("default")
            print(f"{num_defaults} settings have their defaults; --json --show prints all")
    elif len(keys) == 1 and what not in TABLES:
        print("\n".join(_explanation(what or "", keys[0])))
    else:
        print("\n".join(_listing(keys)))
    return 0


def _keys_of(what: str | None) -> Sequence[str]:
    """Return the fields of a table or a setting; all for None."""
    if what is None:
        return KEYS
    name = what.replace("-", "_")
    in_table = [key for key in KEYS if name and NAMES[key].startswith(f"{name}.")]
    if in_table:
        return in_table
    name = MERGED[name].instead if name in MERGED and name != SHORT else NAMES.get(name, name)
    if name not in FIELDS:
        wrong = why_removed(name) or f"is no setting and no table{did_you_mean(what)}"
        raise ConfigError(f"{what} {wrong}")
    return [FIELDS[name]]


def _conflicts(keys: Sequence[str]) -> list[Row]:
    """Return the needs and conflicts with one of ``keys`` in an example."""
    names = [NAMES[key] for key in keys]
    return [
        row
        for row in conflicts_table()
        if any(f" {each} " in f" {' '.join(row.settings)} " for each in names)
    ]


def _line(row: Row) -> str:
    one, other = (
        f"{name} ({setting})" if setting else name
        for name, setting in zip(row.pair, row.settings, strict=True)
    )
    relation = "needs" if row.is_need else "excludes"
    return f"{one} {relation} {other}: {row.reason}; {row.remedy}"


def _default(key: str) -> str:
    value = RunConfig.model_fields[key].default
    unit = unit_of(key) if isinstance(value, int | float) else ""
    return "unset" if value is None else f"{toml_value(value)} {unit}".strip()


def _facts(key: str, resolved: Resolved | None) -> dict[str, Any]:
    if resolved is not None:
        return {"value": getattr(resolved.config, key), "source": resolved.sources[key]}
    field = RunConfig.model_fields[key]
    return {
        "default": field.default,
        "unit": unit_of(key),
        "allowed": allowed_values(key),
        "needs": needs_of(key),
        "description": field.description,
    }


def _listing(keys: Sequence[str]) -> list[str]:
    """Return a line for each setting, under its table."""
    columns = shutil.get_terminal_size((100, 24)).columns
    lines: list[str] = []
    for table in TABLES:
        rows = [key for key in keys if NAMES[key].rpartition(".")[0] == table]
        if rows:
            lines += ["", f"[{table}]"] if table else [_NO_TABLE]
        for key in rows:
            default = textwrap.shorten(_default(key), 14, placeholder="...")
            start = f"  {NAMES[key].rpartition('.')[2]:<18} {default:<14} "
            text = RunConfig.model_fields[key].description or ""
            room = max(columns - len(start), 20)
            lines.append(start + textwrap.shorten(text, room, placeholder=" ..."))
    return lines


def _explanation(what: str, key: str) -> list[str]:
    name = NAMES[key]
    table, _, last = name.rpartition(".")
    value = toml_value(RunConfig.model_fields[key].default)
    in_toml = f"{last} = {'...' if value == 'None' else value}"
    rows = {
        "default": _default(key),
        "allowed": allowed_values(key),
        "unit": unit_of(key),
        "needs": needs_of(key),
        "in TOML": f"[{table}] {in_toml}" if table else in_toml,
        "option": f"--set {name}=VALUE",
        "environment": environment_variable(name),
    }
    old = [each for each, merged in MERGED.items() if name in merged.instead and each != SHORT]
    rows["old names"] = ", ".join(old or ([] if key == name else [key]))
    lines = [f"{name}: {RunConfig.model_fields[key].description}"]
    if what.replace("-", "_") not in (name, key):
        lines.insert(0, f"{what} is {name}")
    lines += [f"  {label:<12} {text}" for label, text in rows.items() if text]
    lines += [f"  {_line(row)}" for row in _conflicts([key])]
    columns = shutil.get_terminal_size((100, 24)).columns
    return [part for line in lines for part in _wrapped(line, columns)]


def _wrapped(line: str, columns: int) -> list[str]:
    """Continue a long line below its text; words are not cut."""
    indent = " " * (15 if line.startswith("  ") and line[14:15] == " " else 4)
    return textwrap.wrap(
        line, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _template() -> str:
    """Return a TOML file with every setting in a comment."""
    lines = to_toml(RunConfig()).splitlines()
    return "".join(f"{'#' if line[:1].isalpha() else ''}{line}\n" for line in lines)
