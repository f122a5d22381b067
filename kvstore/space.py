"""A namespace of a store: one model, one layout, one tenant; it makes sequences and pools."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvstore.cuda.calibration import calibration_of
from kvstore.cuda.device import Device
from kvstore.hashing.chain import ChainFunction
from kvstore.hashing.namespace import root_key
from kvstore.identity import Identity
from kvstore.labels import make_label
from kvstore.page_copies import Reaches
from kvstore.plans import SpaceFacts
from kvstore.pool import PagePool
from kvstore.sequence import Sequence as TokenSequence
from kvstore.tiers.layout import Layout
from kvstore.tiers.record import RecordFormat
from kvstore.tiers.record_read import RecordCheck

if TYPE_CHECKING:
    from kvstore.store import Store


class Space:
    """Blocks that may be shared with each other. Made by `Store.namespace`.

    layout: what a block is.  digest: 32 bytes of identity.  root: the key before the first block.
    number: this namespace's small number in the index.
    """

    def __init__(
        self, store: "Store", identity: Identity, number: int, chain: ChainFunction
    ) -> None:
        self.store = store
        self.identity = identity
        self.layout: Layout = identity.layout
        self.record = RecordFormat.of(identity.layout)
        self.check = RecordCheck(identity.layout)
        self.digest = identity.digest()
        self.root = root_key(self.digest)
        self.number = number
        self.chain = chain

    @property
    def label(self) -> str:
        """Model and tenant, never the salt: see kvstore.labels."""
        return make_label(self.identity.model, self.identity.tenant)

    @property
    def epoch(self) -> int:
        """Goes up with every invalidation of this namespace: see Sequence.renew.

        An engine that keeps blocks of its own forgets them when it finds another number here.
        """
        # An engine without a store makes its keys by a space without one.
        return self.store.space_epoch(self) if self.store is not None else 0

    def facts(self) -> SpaceFacts:
        """What write-back needs of it."""
        return SpaceFacts(self.digest, self.record, self.layout.canonical(), self.label)

    def pool(
        self,
        arrays: Sequence[Any],
        page_tokens: int | None = None,
        *,
        device: Device | None = None,
    ) -> PagePool:
        """The engine's pages, described run by run and tested by writing and reading one page.

        arrays: one NumPy or torch array for each run, in payload order; axis 0 is the page.
        page_tokens: tokens in a page; a whole block unless told. device: in whose memory the arrays
        lie, see kvstore.cuda; measured when it is used for the first time, and the store's host
        memory is page-locked for it in the background. Raises LayoutError.
        """
        tokens = page_tokens or self.layout.block_tokens
        if device is None:
            pool = PagePool(self.layout, arrays, tokens)
        else:
            reaches: Reaches = self.store.pin_memory(device)
            pool = PagePool(self.layout, arrays, tokens, device, calibration_of(device), reaches)
        pool.self_test()
        return pool

    def sequence(self, tokens: Any = (), media: Mapping[int, bytes] | None = None) -> TokenSequence:
        """One request's tokens. media: 32-byte digest of the media in a block, by block number."""
        return TokenSequence(self, tokens, media)
