"""The directive ``psdist-commands``: a section with the help text of each psdist command.

Reads the application that users run, so that the page needs no maintenance.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import typer.main
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from psdist.commands.cli import app

COLUMNS = 80


def help_texts() -> Iterator[tuple[str, str]]:
    """Yield (command, its help) for psdist and each of its commands, groups before members."""
    with mock.patch.dict(os.environ, {"COLUMNS": str(COLUMNS), "TERMINAL_WIDTH": str(COLUMNS)}):
        yield from _help_of(typer.main.get_command(app), "psdist", None)


def _help_of(command: Any, name: str, parent: Any) -> Iterator[tuple[str, str]]:
    context = command.context_class(
        command, info_name=name, parent=parent, terminal_width=COLUMNS, max_content_width=COLUMNS
    )
    yield context.command_path, command.get_help(context)
    for member_name, member in getattr(command, "commands", {}).items():
        if not member.hidden:
            yield from _help_of(member, member_name, context)


class Commands(SphinxDirective):
    def run(self) -> list[nodes.Node]:
        text = "\n\n".join(f"## {name}\n\n```text\n{text}\n```" for name, text in help_texts())
        return self.parse_text_to_nodes(text, allow_section_headings=True)


def setup(sphinx: Sphinx) -> dict[str, bool]:
    sphinx.add_directive("psdist-commands", Commands)
    return {"parallel_read_safe": True}
