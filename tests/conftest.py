"""What all tests share: `from support.x import y` reaches tests/support.

This folder itself must not be on sys.path: it mirrors the repository, so tests/kvstore would be
found as a package named `kvstore`.
"""

import sys
from pathlib import Path
from types import ModuleType

_support = ModuleType("support")
_support.__path__ = [str(Path(__file__).parent / "support")]
sys.modules["support"] = _support
