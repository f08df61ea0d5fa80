"""A model's text side small enough to build in a test: one token a byte, ChatML, a context of 128 tokens."""

import json

from services.text.model import TextModel
from services.text.template import ChatTemplate
from services.text.tokenizer import Tokenizer

SLUG = "tiny-model"
CONTEXT_TOKENS = 128
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS = 2
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_text(slug: str = SLUG) -> TextModel:
    tokenizer = Tokenizer(tokenizer_json(), (EOS,))
    return TextModel(
        slug=slug,
        tokenizer=tokenizer,
        template=ChatTemplate(TEMPLATE, {}),
        context_tokens=CONTEXT_TOKENS,
        vocab_size=tokenizer.vocab_size,
        eos_ids=(EOS,),
    )


def token_id(byte: int) -> int:
    """The token of one byte."""
    return byte + len(CONTROL)


def _byte_alphabet() -> dict[int, str]:
    """GPT-2's printable spelling of the 256 bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


def tokenizer_json() -> str:
    char_of_byte = _byte_alphabet()
    vocab = {text: number for number, text in enumerate(CONTROL)}
    vocab |= {char_of_byte[byte]: token_id(byte) for byte in range(256)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    added = [
        {
            "id": number,
            "content": text,
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for number, text in enumerate(CONTROL)
    ]
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": vocab,
                "merges": [],
            },
        }
    )
