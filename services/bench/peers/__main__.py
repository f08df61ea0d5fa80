"""One other engine, measured when it is asked to: `python -E .../peers NAME MODEL THREADS MAX_BATCH CTX STEPS`.

A JSON line on stdin asks for one measurement, or for a text's logits; one on stdout answers. What the engine itself
prints goes to stderr. The model is loaded once; between two questions the process sleeps in a read.
"""

import json
import os
import sys
from importlib import import_module

import numpy as np


def main() -> None:
    name, model, *numbers = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(line: dict[str, object]) -> None:
        answers.write(json.dumps(line) + "\n")
        answers.flush()

    peer = import_module(f"{name}_peer").Peer(model, *map(int, numbers))
    answer({"engine": peer.engine})
    for number, line in enumerate(sys.stdin):
        asked = json.loads(line)
        if "token_ids" in asked:
            np.save(asked["to"], peer.logits(asked["token_ids"]))
            answer({"to": asked["to"]})
        else:
            answer(peer.measure(**asked, salt=number))


if __name__ == "__main__":
    main()
