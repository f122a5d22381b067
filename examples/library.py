"""The store as a library, with NumPy arrays in the place of an engine's pages.

Run it twice: the second run finds on disk what the first one saved.

usage: python examples/library.py [DIRECTORY]
"""

import sys

import numpy as np

import kvstore

LAYOUT = kvstore.Layout.attention(layers=2, kv_heads=4, head_dim=64, dtype="float32")


def main() -> None:
    directory = sys.argv[1] if len(sys.argv) > 1 else "kv-cache"
    # One array for each run of a block, in payload order; axis 0 is the page.
    pages = [np.random.rand(100, 16, 4, 64).astype(np.float32) for _ in range(LAYOUT.runs)]
    tokens = np.arange(1000, dtype=np.int32)
    with kvstore.open(directory, host="64MiB", disk_capacity="256MiB") as store:
        space = store.namespace(LAYOUT, model="sha256:digest-of-the-weights")
        pool = space.pool(pages)
        sequence = space.sequence(tokens)
        with sequence.lookup() as ticket:
            load = ticket.load(pool, page_ids=range(63))
            for layer in range(LAYOUT.layers):
                usable = load.wait_layer(layer)  # An engine computes attention of this layer now.
            loaded = load.result()
        print(f"{usable} of {len(tokens)} tokens loaded, {loaded.by_tier['disk']} from disk")
        saved = sequence.save(pool, page_ids=range(63)).result()
        print(f"{saved.saved} blocks saved, {saved.present} were there")


if __name__ == "__main__":
    main()
