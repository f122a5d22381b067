"""What "the same" means, exactly: a run that loaded a prefix and a run that computed it, with its
prefill cut at the same places and the same batch, have equal logits, bit for bit.

And against an ordinary cold run (other chunks, so other rounding): in fp32 the same tokens, up to
a fork at a counted near-tie.
"""

import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from kvstore.runtime.engine import Engine
from kvstore.runtime.fetch import default_cache_dir, fetch_smollm2
from kvstore.runtime.models.llama import LlamaModel
from kvstore.runtime.request import Request
from kvstore.store import open as open_store
from kvstore.tiers.base import TierName
from support.same import B, Case, capacities, engine, groups, make_tokens, serve
from support.tiny_llama import load_model, write_model

FEW, MANY = 24, 200
NEAR_TIE = 1e-4
FORKS_OF_200 = 3
TESTS = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Subject:
    """A model, where it is, and how many prompts it is asked."""

    path: Path
    model: LlamaModel
    count: int

    @property
    def host(self) -> str:
        return capacities(self.path)[0]

    @property
    def disk(self) -> str:
        return capacities(self.path)[1]


LONG = [pytest.mark.long, pytest.mark.timeout(3600)]
TINY_FEW = pytest.param(("tiny", FEW), marks=pytest.mark.slow, id="tiny-24")
REAL = [pytest.mark.slow, pytest.mark.timeout(900)]  # a minute or two on two quiet cores
REAL_FEW = pytest.param(("smollm2", FEW), marks=REAL, id="smollm2-24")
MANY_OF = [
    pytest.param(("tiny", MANY), marks=LONG, id="tiny-200"),
    pytest.param(("smollm2", MANY), marks=LONG, id="smollm2-200"),
]
SUBJECTS = pytest.mark.parametrize("subject", [TINY_FEW, *MANY_OF], indirect=True)
SUBJECTS_AND_REAL = pytest.mark.parametrize(
    "subject", [TINY_FEW, REAL_FEW, *MANY_OF], indirect=True
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def model(tiny: Path) -> LlamaModel:
    return load_model(tiny)


@pytest.fixture
def subject(request: pytest.FixtureRequest, tiny: Path, model: LlamaModel) -> Subject:
    kind, count = request.param
    if kind == "tiny":
        return Subject(tiny, model, count)
    path = fetch_smollm2(default_cache_dir())
    return Subject(path, load_model(path), count)


def computed(model: LlamaModel, cases: list[Case]) -> list[Request]:
    """The group without any store or reuse, cut at the same places."""
    return serve(engine(model, None, device_reuse=False), cases)


def assert_identical(got: Request, expected: Request) -> None:
    assert got.output == expected.output
    for step, (ours, theirs) in enumerate(zip(got.logits, expected.logits, strict=True)):
        assert torch.equal(ours, theirs), f"the logits of new token {step} differ"


def check(
    model: LlamaModel, owner: Engine, made: list[list[Case]], tier: TierName
) -> Iterator[Request]:
    """Serve every group over `owner` and compare; everything usable must come from `tier`."""
    for cases in made:
        expected = computed(model, cases)
        for case, got, reference in zip(cases, serve(owner, cases), expected, strict=True):
            assert got.tier_tokens == dict.fromkeys(TierName, 0) | {tier: case.usable}
            assert got.computed_tokens == len(case.tokens) - case.usable
            assert_identical(got, reference)
            yield got


def fresh_pages(owner: Engine) -> None:
    """Forget what the device holds, so that the next group comes from the store."""
    while owner.pool.copies:
        owner.pool.wait_copies()
    owner.pool.clear()


@SUBJECTS
def test_from_the_device(subject: Subject) -> None:
    model = subject.model
    for cases in groups(subject.count):
        owner = engine(model, None)
        for got, reference in zip(serve(owner, cases), computed(model, cases), strict=True):
            assert_identical(got, reference)
        list(check(model, owner, [cases], TierName.DEVICE))
        owner.check_integrity()


@SUBJECTS
def test_from_host_memory(subject: Subject, tmp_path: Path) -> None:
    model = subject.model
    made = groups(subject.count)
    with open_store(tmp_path / "store", host=subject.host, disk_capacity=subject.disk) as store:
        writer = engine(model, store, device_reuse=False)
        for cases in made:  # the second of two diverging prompts already loads what they share
            for got, reference in zip(serve(writer, cases), computed(model, cases), strict=True):
                assert_identical(got, reference)
            store.flush()
        list(check(model, engine(model, store, device_reuse=False), made, TierName.HOST))
        store.check_integrity()
        assert store.leaks() == {"leases": 0, "holds": 0}


@SUBJECTS
def test_from_disk_because_host_memory_is_small(subject: Subject, tmp_path: Path) -> None:
    model, small = subject.model, "4MiB" if subject.path.is_dir() else "256MiB"
    made = groups(subject.count)
    with open_store(tmp_path / "store", host=small, disk_capacity=subject.disk) as store:
        owner = engine(model, store, device_reuse=False)
        from_disk = 0
        for cases in made:
            serve(owner, cases)
            store.flush()
        for number in range(20):  # more blocks than host memory has slots
            serve(owner, [Case(make_tokens(300, number), ())])
            store.flush()
        for cases in made:
            for got, reference in zip(serve(owner, cases), computed(model, cases), strict=True):
                assert got.reused_tokens == (got.prompt_tokens - 1) // B * B
                assert_identical(got, reference)
                from_disk += got.tier_tokens[TierName.DISK]
        assert from_disk > 0
        store.check_integrity()
        assert store.leaks() == {"leases": 0, "holds": 0}


@SUBJECTS_AND_REAL
def test_from_disk_after_the_process_ended(subject: Subject, tmp_path: Path) -> None:
    model = subject.model
    process = saving(subject, tmp_path / "store", chunks=0)
    process.communicate()
    assert process.returncode == 0
    made = groups(subject.count)
    with open_store(tmp_path / "store", host=subject.host, disk_capacity=subject.disk) as store:
        owner = engine(model, store, device_reuse=False)
        seen: set[bytes] = set()
        for cases in made:
            expected = computed(model, cases)
            for case, got, reference in zip(cases, serve(owner, cases), expected, strict=True):
                assert got.reused_tokens == case.usable
                assert_identical(got, reference)
                if case.usable and case.tokens[:B].tobytes() not in seen:
                    assert got.tier_tokens[TierName.DISK] == case.usable
                seen.add(case.tokens[:B].tobytes())
        store.check_integrity()
        assert store.leaks() == {"leases": 0, "holds": 0}


@SUBJECTS
def test_after_a_kill_while_it_was_saving(subject: Subject, tmp_path: Path) -> None:
    """Whatever survived, it is a prefix, and it is right. Chunks are single blocks here, so every
    prefix that can survive is one at which the other run is cut as well."""
    model, reused = subject.model, 0
    for attempt in range(2 if subject.count == FEW else 6):
        directory = tmp_path / str(attempt)
        killed_at = kill_while_saving(subject, directory, attempt)
        with open_store(directory, host=subject.host, disk_capacity=subject.disk) as store:
            owner = engine(model, store, device_reuse=False)
            for cases in groups(subject.count, chunks=10_000):
                for case in cases:  # one by one: what survived differs between them
                    (got,), (reference,) = serve(owner, [case]), computed(model, [case])
                    assert_identical(got, reference)
                    reused += got.reused_tokens
            store.check_integrity()
            assert store.leaks() == {"leases": 0, "holds": 0}
        assert killed_at >= 0
    assert reused > 0


def saving(subject: Subject, store: Path, chunks: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "support.same", subject.path, store, subject.count, chunks]
    environment = os.environ | {"PYTHONPATH": str(TESTS)}
    return subprocess.Popen(
        list(map(str, command)), env=environment, stdout=subprocess.PIPE, text=True
    )


def kill_while_saving(subject: Subject, store: Path, attempt: int) -> int:
    """Kill a saving process somewhere in the middle; returns the last group it had finished."""
    choose = random.Random(attempt)
    stop_after = choose.randrange(len(groups(subject.count, chunks=10_000)) * 3 // 4) + 1
    process = saving(subject, store, chunks=10_000)
    assert process.stdout is not None
    last = -1
    for line in process.stdout:
        last = int(line) if line.strip().isdigit() else last
        if last >= stop_after:
            time.sleep(choose.random() * 0.05)
            break
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert process.returncode == -signal.SIGKILL, "it ended before it was killed"
    return last


@SUBJECTS
def test_against_ordinary_cold_runs_tokens_fork_only_at_near_ties(
    subject: Subject, tmp_path: Path
) -> None:
    model = subject.model
    made = groups(subject.count)
    forks = total = 0
    with open_store(tmp_path / "store", host=subject.host, disk_capacity=subject.disk) as store:
        owner = engine(model, store)
        for cases in made:
            serve(owner, cases)
            fresh_pages(owner)
            store.flush()
        for cases in made:
            for case, got in zip(cases, serve(owner, cases), strict=True):
                expected = computed(model, [Case(case.tokens, ())])[0]
                total += 1
                forks += forked(got, expected)
            fresh_pages(owner)
    assert forks <= math.ceil(FORKS_OF_200 * total / 200), f"{forks} of {total} runs forked"


def forked(got: Request, expected: Request) -> bool:
    """Whether two runs part; if so, it was where the ordinary run's two best logits nearly tie."""
    for step, (ours, theirs) in enumerate(zip(got.output, expected.output, strict=True)):
        if ours != theirs:
            best = torch.topk(expected.logits[step], 2).values
            assert float(best[0] - best[1]) < NEAR_TIE, f"new token {step}: {ours}, not {theirs}"
            return True
    return False


def test_the_comparison_can_fail(model: LlamaModel) -> None:
    """One bit of one value in one reused page, and the logits are not identical."""
    cases = [Case(groups(FEW)[4][0].tokens, ())]
    owner = engine(model, None)
    serve(owner, cases)
    sequence = owner._space.sequence(cases[0].tokens)
    pages = owner.pool.find(sequence.keys, sequence.block_tokens(0, sequence.blocks))
    bits = owner.pool.values[1][pages[0], 3].view(torch.int32)
    bits[0, 0] ^= 1 << 20
    got, reference = serve(owner, cases)[0], computed(model, cases)[0]
    with pytest.raises(AssertionError):
        assert_identical(got, reference)
