"""Measurements: each file prints what it measured, and with --json for scripts."""
