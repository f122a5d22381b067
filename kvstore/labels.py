"""What a namespace is called: its model and its tenant, apart, so that either can be asked for.

A label is model + "\\0" + tenant. One that an older version wrote, or that was lost with the
catalogue, has no "\\0": then model and tenant are not known.
"""

import hashlib

from kvstore.tiers.catalogue_tables import LABEL_BYTES_MAX

SEPARATOR = "\0"
MODEL_BYTES_MAX = 160
TENANT_BYTES_MAX = LABEL_BYTES_MAX - MODEL_BYTES_MAX - 1
DIGEST_CHARACTERS = 32
UNKNOWN = "?"


def make_label(model: str, tenant: str) -> str:
    """Model and tenant as the catalogue keeps them: at most LABEL_BYTES_MAX bytes of UTF-8."""
    return model_part(model) + SEPARATOR + tenant_part(tenant)


def model_part(model: str) -> str:
    """A model as it stands in a label: cut if it is long, and still equal only to itself."""
    return _cut(model, MODEL_BYTES_MAX)


def tenant_part(tenant: str) -> str:
    """A tenant, likewise."""
    return _cut(tenant, TENANT_BYTES_MAX)


def parts_of(label: str) -> tuple[str, str] | None:
    """Model and tenant of a label, each as model_part and tenant_part have it.

    Returns: both | None (the label does not tell).
    """
    model, separator, tenant = label.partition(SEPARATOR)
    return (model, tenant) if separator else None


def shown(label: str) -> str:
    """A label as people read it."""
    return label.replace(SEPARATOR, " ").strip() or UNKNOWN


def _cut(text: str, bytes_max: int) -> str:
    data = text.encode()
    if len(data) <= bytes_max and SEPARATOR not in text:
        return text
    digest = hashlib.sha256(data).hexdigest()[:DIGEST_CHARACTERS]
    kept = data[: bytes_max - DIGEST_CHARACTERS - 1].decode(errors="ignore")
    return f"{kept.replace(SEPARATOR, ' ')}~{digest}"
