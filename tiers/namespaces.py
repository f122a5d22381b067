"""The namespaces of a disk tier: one number each, the same in the catalogues of all volumes."""

from dataclasses import dataclass, field

from kvstore.tiers.catalogue_tables import LABEL_BYTES_MAX, LAYOUT_BYTES_MAX, Namespace


@dataclass
class Namespaces:
    """The namespaces of a tier, one number each for all volumes. The tier's lock guards it."""

    by_number: dict[int, Namespace] = field(default_factory=dict)
    by_digest: dict[bytes, int] = field(default_factory=dict)

    def number(self, namespace: Namespace, limit: int) -> int | None:
        """The number of a namespace, a new one if needed; None beyond `limit` namespaces."""
        number = self.by_digest.get(namespace.digest)
        if number is None:
            if len(self.by_number) >= limit:
                return None
            number = max(self.by_number, default=0) + 1
            if number > limit:  # A damaged table has holes.
                number = min(set(range(1, limit + 1)) - self.by_number.keys())
        elif not namespace.layout or self.by_number[number] == namespace:
            return number
        self.by_number[number] = namespace
        self.by_digest[namespace.digest] = number
        return number

    def merge(self, found: dict[int, Namespace]) -> bool:
        """Take over a volume's table. Returns: False if it contradicts what is known."""
        for number, namespace in found.items():
            known = self.by_number.get(number)
            if known is not None and known.digest != namespace.digest:
                return False
            if self.by_digest.get(namespace.digest, number) != number:
                return False
        for number, namespace in found.items():
            self.by_number[number] = namespace
            self.by_digest[namespace.digest] = number
        return True


def refuse_too_long(namespace: Namespace) -> None:
    """Raise ValueError for a layout or a label that no catalogue takes."""
    if len(namespace.layout) > LAYOUT_BYTES_MAX or len(namespace.label.encode()) > LABEL_BYTES_MAX:
        raise ValueError(
            f"a layout takes at most {LAYOUT_BYTES_MAX} bytes, a label {LABEL_BYTES_MAX}"
        )
