"""The one prepared script for a GPU: `make gpu BUDGET_S=240`, correctness first, then figures.

It runs from the checkout without installing it, goes on where it stopped, and keeps to its budget.
    __main__.py  starts the process below again when a step took the device down, or hangs
    child.py     runs one step after the other
    steps.py     which steps there are, in order, and what each costs
`--twin` runs all of it on the CPU twin with tiny sizes: that proves the script; its figures mean
nothing.
"""

import sys
from pathlib import Path

# The cases are those of the tests, and the checkout need not be installed.
sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))
