"""kvstore.cuda: moving bytes between an engine's pages and contiguous blocks."""

if __name__ == "cuda":
    # The checkout is on sys.path, so this folder has shadowed NVIDIA's `cuda` namespace.
    # Step aside: `cuda` becomes NVIDIA's folders again, and `kvstore.cuda` the only way in here.
    from pkgutil import extend_path

    __path__ = [path for path in extend_path(__path__, __name__) if path not in __path__]
