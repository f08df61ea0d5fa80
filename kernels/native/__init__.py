"""The arithmetic int8 in C++: see `kernels.reference.int8` for what it computes.

Imports nothing: it is read at installation too, when there is nothing but setuptools.
"""

LIBRARY = "libkvrelay_kernels.so"
"""The shared library's file in this folder."""
