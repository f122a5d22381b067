"""The repository's files as text and syntax trees: what the layering and tidiness tests look at.

Knows nothing about the rules. A rule is a function from a Source to its faults; it runs over this
checkout, and over a small tree with a planted violation that shows that it bites.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("kvstore", "tiers", "hashing", "cuda", "daemon", "integrations")
AROUND = ("tests", "bench", "examples")
SKIPPED = {"__pycache__", "build", "dist", "node_modules"}


@dataclass(frozen=True)
class Reference:
    """A name that code uses, imports resolved: `from torch import load` makes `load` torch.load."""

    name: str
    line: int
    node: ast.expr


@dataclass(frozen=True)
class Source:
    """One file. `path` is relative to the root of its tree, with forward slashes."""

    path: str
    text: str

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @property
    def module(self) -> str:
        """The name it is imported by: tiers/slab.py is kvstore.tiers.slab."""
        parts = self.path.removesuffix(".py").removesuffix("/__init__").split("/")
        inside = parts[0] in PRODUCT and parts[0] != "kvstore"
        return ".".join(["kvstore", *parts] if inside else parts)

    def imports(self) -> Iterator[tuple[str, int]]:
        """Every module the file imports, also inside functions and by constant string."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((alias.name, node.lineno) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                module = "." * node.level + (node.module or "")
                yield from ((f"{module}.{alias.name}", node.lineno) for alias in node.names)
            elif isinstance(node, ast.Call) and node.args:
                called = dotted(node.func) or ""
                named = isinstance(node.args[0], ast.Constant) and str(node.args[0].value)
                if named and called.split(".")[-1] in {"import_module", "__import__"}:
                    yield named, node.lineno

    def references(self) -> Iterator[Reference]:
        """Every name and dotted name the code uses, with this file's imports resolved."""
        origins = dict(self._origins())
        for node in ast.walk(self.tree):
            name = dotted(node) if isinstance(node, ast.Name | ast.Attribute) else None
            if name is not None and isinstance(node, ast.Name | ast.Attribute):
                first, _, rest = name.partition(".")
                origin = origins.get(first, first)
                yield Reference(f"{origin}.{rest}" if rest else origin, node.lineno, node)

    def _origins(self) -> Iterator[tuple[str, str]]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((alias.asname, alias.name) for alias in node.names if alias.asname)
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def dotted(node: ast.AST) -> str | None:
    """`a.b.c` as text; None where the chain starts with a call or a subscript, not a name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        head = dotted(node.value)
        return f"{head}.{node.attr}" if head else None
    return None


def sources(
    root: Path, folders: tuple[str, ...] = (*PRODUCT, *AROUND), suffixes: tuple[str, ...] = (".py",)
) -> list[Source]:
    """The files under those folders of a tree, by path. Folders that do not exist are left out."""
    found = []
    for folder in folders:
        for path in sorted((root / folder).rglob("*")):
            parts = path.relative_to(root).parts
            if path.is_file() and path.suffix in suffixes and not SKIPPED.intersection(parts):
                found.append(Source("/".join(parts), path.read_text(encoding="utf-8")))
    return found


def plant(root: Path, path: str, text: str) -> None:
    """Write one file of a small tree, with its folders."""
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")
