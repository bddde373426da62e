"""Each remedy says when it can go, and its room lists it."""

from __future__ import annotations

import importlib
import pkgutil

from psdist.install import quirks


def test_each_quirk_says_when_it_can_be_deleted_and_how_to_find_out() -> None:
    found = [module.name for module in pkgutil.iter_modules(quirks.__path__)]
    assert found
    for name in found:
        text = importlib.import_module(f"{quirks.__name__}.{name}").__doc__ or ""
        assert "**Can be deleted when**" in text, name
        assert "To find out:" in text, name
        assert f"\n``{name}``: " in (quirks.__doc__ or ""), name
