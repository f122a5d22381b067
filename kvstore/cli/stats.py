"""`kvstore stats`: what a store holds, what was asked of it, and why it missed."""

from kvstore.cli.options import JsonOption, StoreOption
from kvstore.cli.output import print_json, print_lines, print_table
from kvstore.clock import Clock
from kvstore.inspect import read_stats
from kvstore.sizes import format_size
from kvstore.tiers.disk_outcomes import DiskState
from kvstore.write_budget import written_today_bytes


def stats(store: StoreOption, as_json: JsonOption = False) -> None:
    """Show room, hits and misses of a store. Only reads; the store may be in use."""
    found = read_stats(store)
    if as_json:
        print_json(found.document())
        return
    state = "in use" if found.in_use else "not in use"
    print_lines(f"{store}: {state}")
    tiers = [
        [
            name,
            format_size(tier.used_bytes),
            format_size(tier.capacity_bytes),
            str(tier.blocks),
            _share(found.tokens_hit.get(name, 0), found.tokens_asked),
        ]
        for name, tier in found.tiers.items()
    ]
    print_table("Tiers", ["tier", "used", "capacity", "blocks", "of tokens asked"], tiers)
    disk = list(DiskState)[found.counters["disk_state"] % len(DiskState)]
    if found.in_use and disk is not DiskState.ON:
        print_lines(f"the disk is {disk.replace('_', '-')} now, because its device fails")
    print_lines(
        f"tokens asked: {found.tokens_asked}", f"tokens hit: {sum(found.tokens_hit.values())}"
    )
    limit = found.counters["disk_writes_limit_bytes"]
    written = written_today_bytes(found.counters, Clock().time())
    of = f" of {format_size(limit)}" if limit else ", without a limit"
    print_lines(f"written to disk today (UTC): {format_size(written)}{of}")
    if found.counters["pinned_blocks"]:
        size = format_size(found.counters["pinned_bytes"])
        print_lines(f"pinned: {found.counters['pinned_blocks']} blocks, {size}")
    if locked := int(found.page_locked["bytes"]):
        print_lines(
            f"page-locked for a device: {format_size(locked)}, "
            f"{found.page_locked['seconds_per_gib']:.2f} s a GiB"
        )
    misses = [[reason, str(tokens)] for reason, tokens in found.misses.items() if tokens]
    if misses:
        print_table("Tokens missed, by reason", ["reason", "tokens"], misses)


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"
