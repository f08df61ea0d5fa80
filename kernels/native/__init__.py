"""The arithmetic int8 in C++: see kernels.reference.int8 for what it computes. Imports nothing at installation."""
