"""Catalogues whose commits fail on purpose: what DiskTier(catalogues=...) is for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvstore.tiers.catalogue import Change, CommitFault
from kvstore.tiers.catalogues import LmdbCatalogues
from kvstore.tiers.io import FileIo


class FailingCatalogues(LmdbCatalogues):
    """Real catalogues. fail: asked before each commit; its fault is what the commit gives.

    after: the failing commit was made all the same, as when only its end was not told of.
    """

    def __init__(self) -> None:
        self.fail: Callable[[], CommitFault | None] = lambda: None
        self.after = False
        self.failed = 0

    def own(self, directory: Path, io: FileIo, **options: Any) -> Any:
        catalogue = super().own(directory, io, **options)
        commit, broken = catalogue.commit, False

        def commit_or_fail(change: Change) -> CommitFault | None:
            nonlocal broken
            fault = CommitFault.DEVICE if broken else self.fail()
            if fault is not None:
                if self.after and not broken:
                    commit(change)
                self.failed += 1
                broken = broken or fault is CommitFault.DEVICE
                return fault
            return commit(change)

        catalogue.commit = commit_or_fail  # type: ignore[method-assign]
        return catalogue
