"""Small tokenizers of the other kinds, trained in milliseconds, as tokenizer.json texts."""

import functools

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

TEXT = [
    "the quick brown fox jumps over the lazy dog",
    "< s > turn < / s > system | user | assistant",
    "héllo wörld naïve 12 12",
]
CONTROL = ["<s>", "</s>", "<|turn|>"]


@functools.cache
def sentencepiece_like() -> str:
    """As Llama 2's or Mistral's: words start with U+2581, characters outside the vocabulary are byte tokens."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=["<unk>", *bytes_], show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in ["<unk>", *CONTROL]])
    return _without_special_bytes(tokenizer)


@functools.cache
def byte_level() -> str:
    """As GPT-2's, with a normaliser and a control token that strips the spaces around it, as Phi-3's do."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, rstrip=t == "<|turn|>") for t in CONTROL])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return tokenizer.to_str()


def _without_special_bytes(tokenizer: Tokenizer) -> str:
    """The trainer makes the byte tokens special; in real files they are ordinary entries of the vocabulary."""
    import json

    plain = json.loads(tokenizer.to_str())
    plain["added_tokens"] = [token for token in plain["added_tokens"] if not token["content"].startswith("<0x")]
    return json.dumps(plain)
