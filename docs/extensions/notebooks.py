"""Pages from Jupyter notebooks, as they are stored: nothing is executed here.

Text cells are MyST; code cells and their printed output become code blocks. A test executes the
cells (tests/mpi/test_pages.py), so that a build of the site needs neither Jupyter nor MPI.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from docutils import nodes
from myst_parser.parsers.sphinx_ import MystParser
from sphinx.application import Sphinx

PICTURE = "image/png"


def as_markdown(notebook: Any) -> str:
    """Return the page. Pictures are part of it: ``data:`` addresses in HTML."""
    parts: list[str] = []
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text)
            continue
        parts.append(f"```python\n{text}\n```")
        for kind, output in _outputs(cell):
            if kind == PICTURE:
                address = f"data:{PICTURE};base64,{''.join(output.split())}"
                parts.append(f'```{{raw}} html\n<img alt="output" src="{address}">\n```')
            else:
                parts.append(f"```text\n{output.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def _outputs(cell: Any) -> Iterator[tuple[str, str]]:
    for output in cell["outputs"]:
        data = output.get("data", {})
        if PICTURE in data:
            yield PICTURE, "".join(data[PICTURE])
        else:
            yield "text/plain", "".join(output.get("text", data.get("text/plain", "")))


class NotebookParser(MystParser):
    """The parser of MyST, for notebooks."""

    supported = ("ipynb",)

    def parse(self, inputstring: str, document: nodes.document) -> None:
        super().parse(as_markdown(json.loads(inputstring)), document)


def setup(sphinx: Sphinx) -> dict[str, bool]:
    sphinx.add_source_suffix(".ipynb", "ipynb")
    sphinx.add_source_parser(NotebookParser)
    return {"parallel_read_safe": True}
