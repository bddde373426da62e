"""Sphinx configuration: ``python -m sphinx -W --keep-going docs docs/_build``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "extensions"))

project = "psdist"
author = "The psdist authors"
project_copyright = "The psdist authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "commands", "notebooks"]
exclude_patterns = ["bench", "_build"]

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 4

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"

html_theme = "furo"
html_title = "psdist"
