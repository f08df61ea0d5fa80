"""The store for its operator: list, verify, explain, pin, remove. No torch, no model, no queue."""
