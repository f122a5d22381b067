"""One source compiled by a process of its own. Imports little: there are a dozen of them."""

from kvstore.cuda import nvrtc


def compile_log(job: tuple[str, int, int]) -> str:
    """The compiler's words on (source, architecture, head_dim or 0); the code goes to the cache."""
    source, architecture, head_dim = job
    definitions = [f"KV_HEAD_DIM={head_dim}"] if head_dim else []
    return nvrtc.compile_source(source, architecture, definitions).log
