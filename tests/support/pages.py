"""Code that pages of docs/ show: blocks of Markdown, and the notebook with its outputs.

python_blocks("docs/tutorials/from-ddp.md")          # the text of each ```python block
execute(read_notebook(path), cwd=tmp_path)           # run the code cells, return their outputs

python -m tests.support.pages docs/tutorials/staleness.ipynb     # store the outputs in it
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def python_blocks(page: str) -> list[str]:
    return blocks(page, "python")


def blocks(page: str, language: str) -> list[str]:
    found = _BLOCK.findall((REPOSITORY / page).read_text(encoding="utf-8"))
    return [text for its_language, text in found if its_language == language]


def whole_scripts(page: str) -> list[str]:
    """Return the blocks that are scripts of psdist with their own data."""
    scripts = python_blocks(page)
    return [each for each in scripts if "psdist.init(" in each and "import torch" in each]


def read_notebook(path: Path) -> dict[str, Any]:
    notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return notebook


def execute(notebook: dict[str, Any], *, cwd: Path) -> list[list[dict[str, Any]]]:
    """Run the code cells one after the other in ``cwd``. Return the outputs of each code cell, as
    notebooks store them: printed text, and a picture of each open figure of matplotlib."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    names: dict[str, Any] = {"__name__": "__main__"}
    outputs: list[list[dict[str, Any]]] = []
    with contextlib.chdir(cwd):
        for cell in notebook["cells"]:
            if cell["cell_type"] != "code":
                continue
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                # Code of this repository's notebook, as a reader would run it.
                exec("".join(cell["source"]), names)
            outputs.append([])
            if text := printed.getvalue():
                outputs[-1].append({"output_type": "stream", "name": "stdout", "text": text})
            for number in pyplot.get_fignums():
                outputs[-1].append(_picture(pyplot.figure(number)))
            pyplot.close("all")
    return outputs


def _picture(figure: Any) -> dict[str, Any]:
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=80)
    picture = base64.b64encode(data.getvalue()).decode("ascii")
    return {"output_type": "display_data", "data": {"image/png": picture}, "metadata": {}}


def store_outputs(path: Path) -> None:
    notebook = read_notebook(path)
    with tempfile.TemporaryDirectory() as folder:
        outputs = execute(notebook, cwd=Path(folder))
    code = (cell for cell in notebook["cells"] if cell["cell_type"] == "code")
    for number, (cell, its) in enumerate(zip(code, outputs, strict=True), start=1):
        cell.update(execution_count=number, outputs=its)
    path.write_text(json.dumps(notebook, indent=1) + os.linesep, encoding="utf-8")


if __name__ == "__main__":
    store_outputs(Path(sys.argv[1]))
