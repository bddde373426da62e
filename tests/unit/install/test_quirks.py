"""Each remedy for a fault of others says when it can be deleted."""

from __future__ import annotations

import inspect

from psdist.install import quirks


def test_each_remedy_says_when_it_can_be_deleted() -> None:
    found = [
        each
        for name, each in inspect.getmembers(quirks, inspect.isfunction)
        if each.__module__ == quirks.__name__ and not name.startswith("_")
    ]
    assert len(found) > 3
    for each in found:
        assert "Can be deleted" in " ".join((each.__doc__ or "").split()), each.__name__
