"""The compiled helper: the lowest layer, which imports nothing of kvstore.

C++ built by `build` at first use. Every function here has a Python twin at its caller that gives
the same results, so a machine without a compiler is slower and never wrong.
"""
