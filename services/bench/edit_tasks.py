"""Ten kept tasks whose answers repeat most of what is asked about: edits of texts and of code, and extracts."""

from services.bench.passages import PASSAGES

_CODE = '''def moving_average(values, size):
    """The mean of each window of `size` values."""
    if size <= 0:
        raise ValueError("size must be positive")
    total = sum(values[:size])
    means = [total / size]
    for index in range(size, len(values)):
        total += values[index] - values[index - size]
        means.append(total / size)
    return means
'''

_CONFIG = """[server]
host = "127.0.0.1"
port = 8080
workers = 4
log_level = "info"

[store]
path = "/var/lib/service/store"
max_bytes = 10000000000
ttl_seconds = 86400
compression = "zstd"

[queue]
url = "nats://127.0.0.1:4222"
ack_wait_seconds = 3
max_deliver = 5
"""

_LETTER = """Dear Mrs. Thompson,

thank you for your order of 12 May. We have sent the three boxes of blue tiles to the address in Millbrook Lane, and
the two bags of grey mortar will follow on Thursday. If anything is missing or broken, please write to us within
fourteen days, and we will replace it without any cost to you. The invoice is enclosed with the tiles.

Yours sincerely,
Robert Hale"""

_CONTACTS = """name: Anna Keller, city: Bern, phone: 555-0134, email: anna.keller@example.org
name: Bruno Marti, city: Basel, phone: 555-0178, email: bruno.marti@example.org
name: Carla Rossi, city: Lugano, phone: 555-0112, email: carla.rossi@example.org
name: Daniel Weber, city: Zurich, phone: 555-0156, email: daniel.weber@example.org
name: Elena Fuchs, city: Chur, phone: 555-0190, email: elena.fuchs@example.org"""

_LOG = """2024-03-05 10:15:02 INFO worker-1 started with 16 sequences
2024-03-05 10:15:09 WARNING worker-2 store is slow: 480 ms for a block
2024-03-05 10:15:11 INFO worker-1 job 8812 done in 1.9 s
2024-03-05 10:15:14 ERROR worker-2 store timed out after 500 ms
2024-03-05 10:15:20 INFO worker-2 store answers again
2024-03-05 10:15:31 INFO worker-1 job 8813 done in 2.2 s"""

TASKS: dict[str, str] = {
    "copy a passage": f"Repeat this text word for word, and nothing else:\n\n{PASSAGES[0]}",
    "rename in code": f"Write this Python function again with `values` renamed to `numbers`:\n\n```python\n{_CODE}```",
    "change a setting": f"Write this file again with port 9090 instead of 8080:\n\n```toml\n{_CONFIG}```",
    "change a name": f"Write this letter again, to Mr. Parker instead of Mrs. Thompson:\n\n{_LETTER}",
    "correct a letter": f"Correct the spelling of this letter:\n\n{_LETTER.replace('sent', 'snet')}",
    "add a line": f"Repeat this list and add a sixth person, Felix Braun:\n\n{_CONTACTS}",
    "extract a section": f"Repeat the sections [store] and [queue] of this file:\n\n```toml\n{_CONFIG}```",
    "extract lines": f"Repeat the lines of this log, in the same order:\n\n```\n{_LOG}\n```",
    "quote the ending": f"Quote this text from the third sentence to its end:\n\n{PASSAGES[5]}",
    "comment code": f"Write this Python function again, with the same code:\n\n```python\n{_CODE}```",
}

FREE_TEXTS: dict[str, str] = {
    "story": "Write a story about a lighthouse keeper who finds a letter in a bottle.",
    "explain": "Explain to a child why the sky is blue and why it is red in the evening.",
    "advice": "What should somebody know who wants to begin to run, and has never done any sport?",
    "opinion": "Is it better to live in a village or in a large city? Give reasons for both.",
    "history": "Tell me how people sent news over long distances before there were telephones.",
}
