"""vLLM's side of bench.beside_vllm: runs under vLLM's own Python, answers one JSON line for each.

usage: PYTHON_WITH_VLLM -P vllm_side.py MODEL_DIRECTORY DTYPE   (-P: bench/copy.py is not `copy`)
Asks on stdin: {"prompts": [[ids], ...], "max_tokens": n}; answers on stdout: {"seconds": s}.
"""

import json
import os
import sys
import time


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM writes its log to stdout.
    from vllm import LLM, SamplingParams  # noqa: PLC0415

    model = LLM(
        sys.argv[1],
        dtype=sys.argv[2],
        max_model_len=4096,
        max_num_seqs=8,
        enable_prefix_caching=True,
        enforce_eager=True,
        disable_log_stats=True,
    )
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        prompts = [{"prompt_token_ids": ids} for ids in asked["prompts"]]
        params = SamplingParams(
            max_tokens=asked["max_tokens"], temperature=0.0, ignore_eos=True, detokenize=False
        )
        began = time.perf_counter()
        model.generate(prompts, params, use_tqdm=False)
        print(json.dumps({"seconds": time.perf_counter() - began}), file=answers, flush=True)


if __name__ == "__main__":
    main()
