"""One process's part of `kvstore demo`: a job on stdin, events on stdout, one JSON object a line.

    {"say": sentence}        what is happening
    {"answer": {...}}        one question of one run, answered: see `_answer`
    {"error": sentence}      the job cannot be done; exit code 2

Each run but the cold one has a tenant of its own in the store, and begins when the document, and
only the document, has been computed for that tenant. So a question is new to every run, and what
is reused is the document.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kvstore
from kvstore.cli.demo_questions import QUESTIONS, chat_prompt
from kvstore.planner import Planner
from kvstore.runtime.api import Runtime
from kvstore.runtime.engine import Engine
from kvstore.runtime.pages import PagePool
from kvstore.runtime.request import Request, SamplingParams
from kvstore.runtime.sampler import margins
from kvstore.runtime.weights import open_checkpoint
from kvstore.tiers.base import TierName
from kvstore.tiers.errors import KvstoreError

PAGE_TOKENS = 16
PROMPTS_IN_POOL = 2  # the pages hold a prompt, its answer, and as much again
PROMPTS_IN_STORE = 6  # three runs' documents, with room to spare
STORE_EXTRA_BYTES = 128 << 20
WARM_UP_TOKENS = 512
FIRST_PROCESS, SECOND_PROCESS = "first", "second"
COLD, DEVICE, HOST, DISK = "cold", "device", "host", "disk_after_restart"


@dataclass(frozen=True)
class Job:
    """What a process is to do: the FIRST_PROCESS all runs but the last, the SECOND_PROCESS that."""

    part: str
    model: str
    store: str
    device: str
    dtype: str
    threads: int
    max_tokens: int
    eager: bool


class Part:
    """The model, the prompts, and the engines that answer them, one for each run."""

    def __init__(self, job: Job) -> None:
        self.job = job
        say(f"Process {os.getpid()} loads the model ({job.dtype}, {job.device}).")
        # Only model and tokenizer are used: each run has an engine and pages of its own.
        self.runtime = Runtime.load(
            job.model,
            device=job.device,
            dtype=job.dtype,
            threads=job.threads,
            kv_memory="64MiB",
        )
        self.digest = open_checkpoint(Path(job.model)).digest().hex()
        self.prompts = [self.runtime.encode(chat_prompt(question)) for question in QUESTIONS]
        self.shared = _common_prefix(self.prompts)
        longest = max(map(len, self.prompts)) + job.max_tokens
        self.pages = PROMPTS_IN_POOL * -(-longest // PAGE_TOKENS)
        token_bytes = self.runtime.model.config.token_bytes(self.runtime.model.dtype)
        self.store_bytes = PROMPTS_IN_STORE * longest * token_bytes + STORE_EXTRA_BYTES

    def engine(self, store: kvstore.Store | None, tenant: str, reuse: bool = True) -> Engine:
        """An engine with empty pages, over one tenant's part of a store or over none."""
        config = self.runtime.model.config
        pool = PagePool(
            layers=config.layers,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            pages=self.pages,
            page_tokens=PAGE_TOKENS,
            dtype=self.runtime.model.dtype,
            compute=self.runtime.compute,
        )
        space = None
        if store is not None:
            name = f"sha256:{self.digest}"
            space = store.namespace(
                pool.layout, model=name, tenant=tenant, attributes={"compute": self.job.dtype}
            )
        planner = Planner(eager=self.job.eager)
        return Engine(self.runtime.model, pool, space=space, planner=planner, device_reuse=reuse)

    def warm_up(self, engine: Engine) -> None:
        """An unrelated prompt, so that no run pays for the first use of threads and memory."""
        vocabulary = self.runtime.model.config.vocab_size
        unrelated = [place * 7919 % vocabulary for place in range(WARM_UP_TOKENS)]
        engine.generate([unrelated], SamplingParams(max_tokens=2))

    def read_document(self, engine: Engine) -> None:
        """Compute the document, which fills the tiers with its blocks and with nothing else."""
        engine.generate([self.shared], SamplingParams(max_tokens=1))

    def ask(self, run: str, engine: Engine, question: int) -> None:
        """Answer one question and tell what it cost."""
        params = SamplingParams(
            max_tokens=self.job.max_tokens,
            stop_ids=frozenset(self.runtime.tokenizer.stop_ids),
            keep_logits=run == COLD,
        )
        request = engine.generate([self.prompts[question]], params)[0]
        text = self.runtime.tokenizer.decode(request.output)
        emit("answer", _answer(run, question, request, text))


def first(part: Part) -> None:
    """Cold, from the device, from host memory; and what the second process will need, on disk."""
    _cold(part)
    room = part.store_bytes
    with kvstore.open(disk=[part.job.store], host=room, disk_capacity=2 * room) as store:
        _device(part, store)
        _host(part, store)
        say("Disk: the document is computed once more, and written to the disk.")
        part.read_document(part.engine(store, DISK))
    say(f"Process {os.getpid()} ends now, and with it the model's pages and the host memory.")


def _cold(part: Part) -> None:
    engine = part.engine(None, COLD, reuse=False)
    part.warm_up(engine)
    say("Cold: without a store, each question is computed together with the whole document.")
    for question in range(len(part.prompts)):
        part.ask(COLD, engine, question)


def _device(part: Part, store: kvstore.Store) -> None:
    engine = part.engine(store, DEVICE)
    say(f"Device: the document is computed once ({len(part.shared)} tokens); then the questions.")
    part.read_document(engine)
    for question in range(len(part.prompts)):
        part.ask(DEVICE, engine, question)


def _host(part: Part, store: kvstore.Store) -> None:
    engine = part.engine(store, HOST)
    say("Host memory: the same, but the model's pages are dropped before each question.")
    part.read_document(engine)
    store.flush()
    for question in range(len(part.prompts)):
        engine.pool.clear()
        part.ask(HOST, engine, question)


def second(part: Part) -> None:
    """From disk, in a process that has never computed the document."""
    part.warm_up(part.engine(None, COLD))
    say("Disk: the store is opened anew for each question, so that all comes from the disk.")
    for question in range(len(part.prompts)):
        with kvstore.open(disk=[part.job.store], host=part.store_bytes) as store:
            part.ask(DISK, part.engine(store, DISK), question)


def say(sentence: str) -> None:
    """Tell the person at the other end what is happening."""
    emit("say", sentence)


def emit(kind: str, content: object) -> None:
    """Write one event."""
    sys.stdout.write(json.dumps({kind: content}) + "\n")
    sys.stdout.flush()


def main() -> int:
    """Do the job on stdin. Returns: 0, 2 for a job that cannot be done, or 130."""
    job = Job(**json.loads(sys.stdin.readline()))
    try:
        part = Part(job)
        first(part) if job.part == FIRST_PROCESS else second(part)
    except KeyboardInterrupt:
        return 130
    except KvstoreError as error:
        emit("error", str(error))
        return 2
    return 0


def _common_prefix(prompts: Sequence[Sequence[int]]) -> list[int]:
    shared: list[int] = []
    for tokens in zip(*prompts, strict=False):
        if len(set(tokens)) > 1:
            break
        shared.append(tokens[0])
    return shared


def _answer(run: str, question: int, request: Request, text: str) -> dict[str, Any]:
    """margins: how far each new token's logit lay above the next best one; of the cold run only."""
    seconds, tokens = request.decode_s, list(request.output)
    return {
        "run": run,
        "question": question,
        "text": text,
        "tokens": tokens,
        "prompt_tokens": request.prompt_tokens,
        "computed_tokens": request.computed_tokens,
        "reused_tokens": request.reused_tokens,
        "tier_tokens": {str(tier): request.tier_tokens[tier] for tier in TierName},
        "tier_bytes": {str(tier): request.bytes_moved[tier] for tier in TierName},
        "ttft_s": request.ttft_s,
        "decode_tokens_per_s": (len(tokens) - 1) / seconds if seconds > 0 else 0.0,
        "margins": [float(margins(row[None])[0]) for row in request.logits],
    }


if __name__ == "__main__":
    sys.exit(main())
