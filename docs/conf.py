"""Sphinx configuration of the documentation site. `make docs` builds it, with every warning as an error."""

import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS / "_ext"))

import deltazoo  # noqa: E402  (the extensions below import it, too)

project = "deltazoo"
author = "the deltazoo authors"
release = deltazoo.__version__
version = release

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx_copybutton",
    "docstrings",
    "math_text",
    "public_api",
    "cli_reference",
    "kernel_table",
    "repository_links",
]
exclude_patterns = ["_ext"]
nitpicky = False  # annotations name classes of torch and pydantic, whose inventories an offline build cannot load

myst_enable_extensions = ["colon_fence"]
myst_fence_as_directive = ["math"]  # ```math is also what GitHub renders
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # those of torch.nn.Module say nothing about a subclass
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
add_module_names = False
toc_object_entries_show_parents = "hide"
smartquotes = False  # quotes are often those of a value

html_theme = "pydata_sphinx_theme"
html_title = "deltazoo"
html_static_path = ["_static"]
html_css_files = ["deltazoo.css"]
html_show_sourcelink = False
html_copy_source = False
html_last_updated_fmt = None
html_sidebars = {"index": [], "changelog": [], "contributing": []}
html_theme_options = {
    "logo": {"text": "deltazoo"},
    "navbar_align": "left",
    "navbar_end": ["theme-switcher"],
    "show_prev_next": True,
    "show_toc_level": 1,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": ["sphinx-version"],
    "pygments_light_style": "tango",
    "pygments_dark_style": "monokai",
}
copyright = "the deltazoo authors, Apache-2.0"
