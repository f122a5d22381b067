"""kvstore.cli: the `kvstore` command."""
