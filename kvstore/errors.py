"""The store's exceptions, drawn in kvstore.tiers.errors and re-exported here for callers."""

from kvstore.tiers.errors import (
    ClosedError,
    ConfigError,
    KvstoreError,
    LayoutError,
    StoreBusyError,
    StoreError,
    TokenError,
)

__all__ = [
    "ClosedError",
    "ConfigError",
    "KvstoreError",
    "LayoutError",
    "StoreBusyError",
    "StoreError",
    "TokenError",
]
