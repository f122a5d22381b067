"""Exceptions of the store. They are for misuse and for a store that cannot start, never for a miss.

    KvstoreError
    ├── ConfigError      a setting is wrong, unknown, or does not fit this machine
    ├── LayoutError      a layout or a page pool that cannot be described, or does not match
    ├── TokenError       tokens of the wrong type, shape or range
    ├── StoreError       a directory that is not a store, not ours, or not this format
    │   └── StoreBusyError   another process owns the store
    └── ClosedError      a call on a store that was closed

What goes wrong while serving (a full disk, a bad bit, an expired lease) is an outcome, see base.py.
"""


class KvstoreError(Exception):
    """Base of every exception raised on purpose; one sentence that says what to do."""


class ConfigError(KvstoreError):
    """A setting is wrong, unknown, or does not fit this machine."""


class LayoutError(KvstoreError):
    """A layout or a page pool that the store cannot describe, or that does not match the layout."""


class TokenError(KvstoreError):
    """Tokens of the wrong type, shape or range."""


class StoreError(KvstoreError):
    """A directory that is not a store, is not ours, or has another format."""


class StoreBusyError(StoreError):
    """Another process owns the store; a store has one writer."""


class ClosedError(KvstoreError):
    """A call on a store that was closed."""
