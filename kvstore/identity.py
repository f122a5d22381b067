"""Identity of a namespace: everything that gives KV bytes their meaning, and the tenant's salt."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvstore.hashing.chain import HashName
from kvstore.hashing.namespace import namespace_digest
from kvstore.tiers.errors import ConfigError
from kvstore.tiers.layout import Layout

SCHEMA = b"1"
TEXT_MAX_BYTES = 4096


@dataclass(frozen=True)
class Identity:
    """What must be equal for two engines to share blocks.

    model: digest of the weights, or of config, index and sizes with the revision; never a mere
      display name.
    layout: with the effective dtype.  hash: how keys are made.
    adapter: LoRA name and version, "" for none.  shards: number of tensor-parallel ranks.
    attributes: RoPE and attention parameters, and whatever else changes the bytes.
    tenant, salt: who may share; the salt is secret and comes from the server, never from a request.
    """

    model: str
    layout: Layout
    hash: HashName
    tenant: str = ""
    salt: bytes = field(default=b"", repr=False)
    adapter: str = ""
    shards: int = 1
    attributes: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("model= is empty; give a digest of the weights or their revision")
        texts = [self.model, self.tenant, self.adapter, *self.attributes, *self.attributes.values()]
        if any(len(text.encode()) > TEXT_MAX_BYTES for text in texts):
            raise ConfigError(f"a name in the identity is longer than {TEXT_MAX_BYTES} bytes")
        if not 1 <= self.shards <= 65_535:
            raise ConfigError("shards= must lie in 1..65535, the number of tensor-parallel ranks")

    def digest(self) -> bytes:
        """The namespace: 32 bytes, equal in every process and Python version."""
        fields = [
            ("schema", SCHEMA),
            ("model", self.model.encode()),
            ("layout", self.layout.canonical()),
            ("hash", self.hash.encode()),
            ("shards", str(self.shards).encode()),
            ("adapter", self.adapter.encode()),
            ("tenant", self.tenant.encode()),
            ("salt", self.salt),
        ]
        for name in sorted(self.attributes):
            fields.append((f"attribute.{name}", self.attributes[name].encode()))
        return namespace_digest(fields)
