"""docs/configuration.md says what control_plane/config.py declares."""

from __future__ import annotations

import runpy
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_up_to_date():
    render = runpy.run_path(str(DOCS / "make_configuration.py"))["render"]
    assert render() == (DOCS / "configuration.md").read_text(encoding="utf-8"), "run docs/make_configuration.py"
