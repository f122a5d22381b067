"""kvstore.integrations: adapters for serving engines. Not part of this version yet."""
