"""The runtime over a store: two questions about one document; only the first computes the document.

usage: python examples/runtime.py MODEL DOCUMENT [STORE]   (kvstore model fetch smollm2 fetches one)
"""

import sys
from pathlib import Path

from kvstore.runtime.api import Runtime


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    model, document = sys.argv[1], Path(sys.argv[2]).read_text(encoding="utf-8")
    store = sys.argv[3] if len(sys.argv) > 3 else "kv-cache"
    with Runtime.load(model, store=store) as runtime:
        for question in ("What is this text about?", "Who is named in it?"):
            answer = runtime.generate(f"{document}\n\n{question}\n", max_tokens=32)
            print(answer.text.strip())
            print(f"{answer.reused_tokens} of {answer.prompt_tokens} prompt tokens reused")


if __name__ == "__main__":
    main()
