"""Tensors in, tensors out: the arithmetic of the engine. Imports nothing of ours."""
