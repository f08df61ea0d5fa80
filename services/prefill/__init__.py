"""The prefill worker: prompts in, KV blocks and first tokens out."""
