"""kvstore.tiers: where blocks lie (host memory, local disks) and how their bytes are laid out."""
