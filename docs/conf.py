"""Sphinx configuration: ``python -m sphinx -W --keep-going docs docs/_build``."""

project = "psdist"
author = "The psdist authors"
project_copyright = "The psdist authors"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 4
html_theme = "furo"
html_title = "psdist"
exclude_patterns = ["bench", "_build"]
