"""Text to token ids and back: tokenizer, chat template, detokeniser. No torch, no transformers."""
