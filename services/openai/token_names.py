"""How logprobs spell tokens, which are bytes and not always text."""

from services.text.tokenizer import Tokenizer


class TokenNames:
    """Remembers what it looked up: at most one entry for each token of the vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes: dict[int, bytes] = {}

    def raw(self, token_id: int) -> bytes:
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._tokenizer.token_bytes(token_id)
        return found

    def text(self, token_id: int) -> str:
        """For chat, which gives the bytes beside it: broken UTF-8 is U+FFFD."""
        return self.raw(token_id).decode("utf-8", errors="replace")

    def key(self, token_id: int) -> str:
        """For completions, where tokens are keys: half characters stay apart, as OpenAI's `bytes:\\xf0\\x9f`."""
        raw = self.raw(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
