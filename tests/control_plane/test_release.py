"""The version that is shown."""

from __future__ import annotations

import importlib.metadata

from control_plane import release


def test_code_that_was_never_installed_says_so(monkeypatch):
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(release, "version", absent)
    assert release.release() == "source"


def test_an_installed_one_says_its_number(monkeypatch):
    monkeypatch.setattr(release, "version", lambda name: {"nanoflow-runtime": "1.2"}[name])
    assert release.release() == "1.2"
