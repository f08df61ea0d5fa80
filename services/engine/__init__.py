"""Sequences in, tokens out: the model, its KV pages, batching and sampling."""
