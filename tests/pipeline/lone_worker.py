"""A worker of the tiny model in a process of its own: `python -m tests.pipeline.lone_worker ROLE URL FOLDER [P D]`.

P and D are the dtypes of a mixed build, of prefill and of decode.
Loads, waits for a line on its standard input, serves until that ends, then prints what its store counted.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from services.both.role import BothRole
from services.decode.role import DecodeRole
from services.engine.arithmetics import Arithmetics
from services.prefill.role import PrefillRole
from services.worker.runtime import Runtime
from tests.pipeline.local import run_worker, settings_for
from tests.pipeline.tiny import tiny_files, tiny_model, tiny_models, tiny_pipeline_text

ROLES: dict[str, Any] = {"prefill": PrefillRole, "decode": DecodeRole, "both": BothRole}


async def serve(role: str, url: str, folder: Path, dtypes: list[str]) -> None:
    settings = settings_for(folder, kv={"block_tokens": 16})
    model, arithmetics = tiny_models()[0], None
    if dtypes:
        prefill, decode = map(tiny_model, dtypes)
        model = prefill if role == "prefill" else decode
        arithmetics = Arithmetics(prefill.arithmetic, decode.arithmetic)
    runtime = Runtime(settings, tiny_files(), tiny_pipeline_text(), model, arithmetics)
    await asyncio.to_thread(sys.stdin.readline)
    async with run_worker(url, runtime, ROLES[role]):
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        print(json.dumps(runtime.store.snapshot()), flush=True)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4:]))
