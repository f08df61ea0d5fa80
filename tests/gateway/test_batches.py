"""Files and batches as OpenAI's client sees them, over a scripted worker."""

import asyncio
import itertools
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from schemas.batch import MAX_LINES, file_decoder
from schemas.errors import Internal
from schemas.events import Error
from schemas.subjects import FILE_META, FILES_STREAM, Lane, file_subject, tenant_and_lane
from schemas.wire import encode
from services.batch import keeper, shelf
from services.batch.sweeping import Sweeper
from services.bus import records
from services.bus.connection import Bus
from services.settings import Bus as BusSettings
from tests.bus.throwaway import throwaway_server
from tests.gateway.conftest import MakePipeline, Pipeline, _numbers
from tests.gateway.scripted_worker import Work, saying

ENDED = ("completed", "failed", "expired", "cancelled")


@pytest.fixture
async def client(pipeline: Pipeline) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=pipeline.url + "/v1", api_key="none", max_retries=0) as found:
        yield found


def line(pipeline: Pipeline, custom_id: str, content: Any = "hi", **fields: Any) -> dict[str, Any]:
    body = {**pipeline.chat(content), **fields.pop("body", {})}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body, **fields}


def lines(*made: dict[str, Any] | str) -> bytes:
    return "".join(one if isinstance(one, str) else json.dumps(one) + "\n" for one in made).encode()


async def submitted(client: openai.AsyncOpenAI, data: bytes, window: str = "24h") -> Any:
    file = await client.files.create(file=("in.jsonl", data), purpose="batch")
    assert file.bytes == len(data)
    return await client.batches.create(
        input_file_id=file.id,
        endpoint="/v1/chat/completions",
        completion_window=window,  # type: ignore[arg-type]
    )


async def ended(client: openai.AsyncOpenAI, batch: Any) -> Any:
    while batch.status not in ENDED:
        await asyncio.sleep(0.05)
        batch = await client.batches.retrieve(batch.id)
    return batch


async def read(client: openai.AsyncOpenAI, file: str | None) -> dict[Any, dict[str, Any]]:
    if file is None:
        return {}
    content = (await client.files.content(file)).content
    assert content.endswith(b"\n") and b"\r" not in content
    found = [json.loads(one) for one in content.split(b"\n")[:-1]]
    assert (await client.files.retrieve(file)).bytes == len(content)
    return {one["custom_id"]: one for one in found}


async def test_a_batch_of_the_official_client(pipeline: Pipeline, client: openai.AsyncOpenAI) -> None:
    async def echo(work: Work) -> None:
        assert tenant_and_lane(work.delivery.subject)[1] is Lane.BATCH
        await saying(f"len {len(work.job.prompt_token_ids or [])}")(work)

    pipeline.worker.script = echo
    ids = ["a", "", "x" * 10_000, "a.b *>", "🎉 é e\u0301", "\u2028", 'quote"\\']
    data = lines(*(line(pipeline, name, "y" * number) for number, name in enumerate(ids)))
    batch = await ended(client, await submitted(client, data))
    assert (batch.status, batch.request_counts.total, batch.request_counts.completed) == ("completed", 7, 7)
    assert batch.error_file_id is None
    answers = await read(client, batch.output_file_id)
    texts = [answers[name]["response"]["body"]["choices"][0]["message"]["content"] for name in ids]
    shortest = int(texts[0].split()[1])
    assert texts == [f"len {shortest + number}" for number in range(7)]
    assert all(answer["response"]["status_code"] == 200 and answer["error"] is None for answer in answers.values())
    listed = [one async for one in client.batches.list(limit=2)]
    assert batch.id in [one.id for one in listed]
    assert batch.output_file_id in [one.id async for one in client.files.list()]
    await client.files.delete(batch.input_file_id)
    with pytest.raises(openai.NotFoundError):
        await client.files.retrieve(batch.input_file_id)


async def test_custom_ids_come_out_byte_for_byte(pipeline: Pipeline, client: openai.AsyncOpenAI) -> None:
    spelled = [r'"caf\u00e9 \/ \ud83d\ude00"', '"café"', r'"\u0000"']
    data = b"".join(
        lines(line(pipeline, f"@{number}")).replace(f'"@{number}"'.encode(), name.encode())
        for number, name in enumerate(spelled)
    )
    batch = await ended(client, await submitted(client, data))
    assert batch.request_counts.completed == 3
    content = (await client.files.content(batch.output_file_id)).content
    assert sorted(spelled) == sorted(one.split(b'"custom_id":')[1].split(b',"response"')[0].decode()
                                     for one in content.splitlines() if one)  # fmt: skip


async def test_stray_lines(pipeline: Pipeline, client: openai.AsyncOpenAI) -> None:
    good = [line(pipeline, f"g{number}", "a\u2028b") for number in range(10)]
    bad: list[dict[str, Any] | str] = [
        "[1,2]\n", "null\n", '"x"\n', "{\n", line(pipeline, "string body", body={}) | {"body": "x"},
        line(pipeline, "get", method="GET"), line(pipeline, "url", url="/v1/embeddings"),
        line(pipeline, "stream", body={"stream": True}), line(pipeline, "model", body={"model": "nobody"}),
        line(pipeline, "long", "x" * 500), line(pipeline, "field", body={"tools": [{}]}),
    ]  # fmt: skip
    text = b"\xef\xbb\xbf" + lines(*good[:5], "\n", *bad, *good[5:], "\n", "\r\n")
    batch = await ended(client, await submitted(client, text.replace(b"\n", b"\r\n") + b'{"custom_id": "\xff"}'))
    counts = batch.request_counts
    assert (batch.status, counts.total, counts.completed, counts.failed) == ("completed", 22, 10, 12)
    assert set(await read(client, batch.output_file_id)) == {f"g{number}" for number in range(10)}
    content = (await client.files.content(batch.error_file_id)).content
    failures = [json.loads(one) for one in content.splitlines()]
    by_name = {one["custom_id"]: one for one in failures}
    assert by_name["get"]["error"]["code"] == "invalid_request" and "line 12" in by_name["get"]["error"]["message"]
    assert by_name["model"]["response"]["status_code"] == 404
    assert by_name["long"]["response"]["body"]["error"]["code"] == "context_length_exceeded"
    assert by_name["field"]["response"]["body"]["error"]["param"] == "tools"
    assert Counter(one["custom_id"] for one in failures)[None] == 5


@pytest.mark.parametrize(
    ("data", "code"),
    [(b"", "empty_file"), (b"\n\r\n", "empty_file"), (b"{}\n" * (MAX_LINES + 1), "too_many_lines")],
)
async def test_files_of_which_nothing_runs(client: openai.AsyncOpenAI, data: bytes, code: str) -> None:
    batch = await ended(client, await submitted(client, data))
    assert batch.status == "failed" and [error.code for error in batch.errors.data] == [code]


async def test_one_custom_id_twice(pipeline: Pipeline, client: openai.AsyncOpenAI) -> None:
    data = lines(line(pipeline, "a"), line(pipeline, "é"), line(pipeline, "é")).replace(b'"\\u00e9"', '"é"'.encode(), 1)
    batch = await ended(client, await submitted(client, data))
    assert batch.status == "failed"
    assert "lines 2 and 3" in batch.errors.data[0].message and batch.errors.data[0].line == 3
    assert pipeline.worker.taken.empty()


async def test_two_batches_with_the_same_ids(pipeline: Pipeline, client: openai.AsyncOpenAI) -> None:
    made = [[line(pipeline, str(number), "x" * (10 * many + number)) for number in range(10)] for many in (1, 2)]
    batches = [await submitted(client, lines(*one)) for one in made]
    for batch, sent in zip(batches, made, strict=True):
        done = await ended(client, batch)
        answers = await read(client, done.output_file_id)
        used = [answers[str(number)]["response"]["body"]["usage"]["prompt_tokens"] for number in range(10)]
        assert [count - used[0] for count in used] == list(range(10)) and len(sent) == len(answers)


async def test_lines_under_an_alias_run_here(make_pipeline: MakePipeline) -> None:
    """The only gateway: another one may take the batch, and knows no alias."""
    mine = f"tiny-{next(_numbers) + 1}"
    upstream = {"url": "http://127.0.0.1:1", "aliases": f"fast={mine}@1,upstream/x@99"}
    aliased = await make_pipeline(upstream=upstream)
    async with openai.AsyncOpenAI(base_url=aliased.url + "/v1", api_key="none", max_retries=0) as client:
        batch = await ended(client, await submitted(client, lines(line(aliased, "a", body={"model": "fast"}))))
        found = await read(client, batch.output_file_id)
    assert found["a"]["response"]["body"]["model"] == aliased.model


async def test_what_begins_alike_reaches_the_worker_together(pipeline: Pipeline, client: openai.AsyncOpenAI) -> None:
    begun: list[str] = []

    async def script(work: Work) -> None:
        begun.append(made[int(str(work.job.id).rpartition("-")[2]) - 1]["custom_id"].split("/")[0])
        await saying("well")(work)

    pipeline.worker.script = script
    made = [line(pipeline, f"{group}/{number}", f"group {group} " * 8 + str(number))
            for group in range(4) for number in range(6)]  # fmt: skip
    random.Random(7).shuffle(made)
    batch = await ended(client, await submitted(client, lines(*made)))
    assert batch.request_counts.completed == 24 and len(begun) == 24
    assert sum(earlier != later for earlier, later in itertools.pairwise(begun)) == 3, begun


async def test_cancel(pipeline: Pipeline, client: openai.AsyncOpenAI) -> None:
    async def script(work: Work) -> None:
        await work.say(work.start())
        await work.lost.wait()

    pipeline.worker.script = script
    batch = await submitted(client, lines(*(line(pipeline, str(number)) for number in range(20))))
    await pipeline.worker.taken.get()
    assert (await client.batches.cancel(batch.id)).status in ("cancelling", "cancelled")
    batch = await ended(client, batch)
    assert batch.status == "cancelled" and batch.output_file_id is None
    await pipeline.worker.cancelled.get()
    assert (await client.batches.cancel(batch.id)).status == "cancelled"


async def test_expiry(pipeline: Pipeline, client: openai.AsyncOpenAI) -> None:
    async def script(work: Work) -> None:
        if len(work.job.prompt_token_ids or []) > 60:
            await work.lost.wait()
        await saying("quick")(work)

    pipeline.worker.script = script
    data = lines(line(pipeline, "quick"), line(pipeline, "slow", "x" * 60), line(pipeline, "slower", "y" * 60))
    batch = await ended(client, await submitted(client, data, window="2s"))
    assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("expired", 1, 2)
    errors = await read(client, batch.error_file_id)
    assert {one["error"]["code"] for one in errors.values()} == {"batch_expired"} and set(errors) == {"slow", "slower"}


async def test_a_line_whose_job_fails_for_no_fault_of_its_own_is_tried_again(
    pipeline: Pipeline, client: openai.AsyncOpenAI
) -> None:
    async def script(work: Work) -> None:
        if not str(work.job.id).endswith("-r1"):
            await work.say(work.start(), Error(code="build_gone", message="gone"))
        else:
            await saying("well")(work)

    pipeline.worker.script = script
    batch = await ended(client, await submitted(client, lines(line(pipeline, "a"))))
    assert batch.request_counts.completed == 1


async def end_time(bus: Bus, file: str) -> None:
    """Its time is over."""
    subject = file_subject("default", file, FILE_META)
    meta = await records.get(bus, FILES_STREAM, subject)
    assert meta is not None
    ended = msgspec.structs.replace(file_decoder.decode(meta.payload), expires_at=1)
    assert await records.put(bus, subject, encode(ended), meta.sequence)


@pytest.mark.parametrize(
    ("file", "status", "num_done"), [("kept", "completed", 12), ("expired", "completed", 12), ("removed", "failed", 5)]
)
async def test_a_batch_goes_on_in_another_gateway(
    make_pipeline: MakePipeline, server: Any, file: str, status: str, num_done: int
) -> None:
    """As long as its file is there, which an end of its own waits for; and what was answered stays."""
    from tests.gateway.test_resuming import another_gateway

    pipeline = await make_pipeline()
    steps = asyncio.Semaphore(5)

    async def script(work: Work) -> None:
        await steps.acquire()
        await saying("once")(work)

    pipeline.worker.script = script
    async with openai.AsyncOpenAI(base_url=pipeline.url + "/v1", api_key="none", max_retries=0) as client:
        batch = await submitted(client, lines(*(line(pipeline, str(number)) for number in range(12))))
        while (await client.batches.retrieve(batch.id)).request_counts.completed < 5:
            await asyncio.sleep(0.05)
        if file == "removed":
            await client.files.delete(batch.input_file_id)
    if file == "expired":
        await end_time(pipeline.bus, batch.input_file_id)
        await Sweeper(pipeline.bus, "*").sweep()
    async with another_gateway(pipeline, server.url) as other:
        await pipeline.gateway.close()
        for _ in range(12):
            steps.release()
        async with openai.AsyncOpenAI(base_url=other.url + "/v1", api_key="none", max_retries=0) as client:
            done = await ended(client, batch)
            answers = await read(client, done.output_file_id)
    assert (done.status, done.request_counts.completed, len(answers)) == (status, num_done, num_done)
    jobs = Counter(pipeline.worker.taken.get_nowait().job.id for _ in range(pipeline.worker.taken.qsize()))
    assert len(jobs) == 12 or file == "removed"
    if file == "expired":
        await Sweeper(pipeline.bus, "*").sweep()
        subjects = file_subject("default", batch.input_file_id, "*")
        assert await records.subjects(pipeline.bus, FILES_STREAM, subjects) == []


async def test_a_broker_that_refuses_a_read_stops_no_batches(
    client: openai.AsyncOpenAI, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = asyncio.Event()

    async def refused(*_: Any) -> Any:
        looked.set()
        monkeypatch.undo()
        raise Internal("no")

    monkeypatch.setattr(keeper, "all_batches", refused)
    async with asyncio.timeout(20):
        await looked.wait()
        assert (await ended(client, await submitted(client, lines(line(pipeline, "a"))))).status == "completed"


@pytest.mark.parametrize("limit", ["0", "10001", "x", "9" * 5000])
async def test_lists_that_are_refused(pipeline: Pipeline, limit: str) -> None:
    for path in ("files", "batches"):
        async with pipeline.session.get(f"{pipeline.url}/v1/{path}?limit={limit}") as response:
            assert response.status == 400 and (await response.json())["error"]["param"] == "limit"


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"endpoint": "/v1/embeddings"}, "endpoint"), ({"completion_window": "soon"}, "completion_window"),
     ({"input_file_id": "file-0"}, "batch_id"), ({"metadata": "x"}, "metadata")],
)  # fmt: skip
async def test_batches_that_are_refused(
    pipeline: Pipeline, client: openai.AsyncOpenAI, fields: Any, param: str
) -> None:
    file = await client.files.create(file=b"{}", purpose="batch")
    body = {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h", **fields}
    async with pipeline.post(body, "/v1/batches") as response:
        assert response.status == (404 if "input_file_id" in fields else 400), await response.text()


async def test_uploads_that_are_refused(pipeline: Pipeline, client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="purpose"):
        await client.files.create(file=b"{}", purpose="vision")
    async with pipeline.session.post(pipeline.url + "/v1/files", json={}) as response:
        assert response.status == 400
    async with pipeline.session.post(pipeline.url + "/v1/files", data=b"x", headers={
        "Content-Type": "multipart/form-data; boundary=b"
    }) as response:  # fmt: skip
        assert response.status == 400, await response.text()
    for name in ("file-none", "a%20b%3E*", "file-0-output"):
        async with pipeline.session.get(f"{pipeline.url}/v1/files/{name}/content") as response:
            assert response.status == 404


async def test_a_file_that_is_too_large_leaves_nothing(
    client: openai.AsyncOpenAI, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shelf, "MAX_FILE_BYTES", 1_000_000)
    assert (await client.files.create(file=b"x" * 1_000_000, purpose="batch")).bytes == 1_000_000
    with pytest.raises(openai.APIStatusError) as refused:
        await client.files.create(file=b"x" * 1_000_001, purpose="batch")
    assert refused.value.status_code == 413
    parts = await records.latest(pipeline.bus, FILES_STREAM, file_subject("default", "*", "*"))
    names = {part.subject.split(".")[3] for part in parts}
    assert all([part for part in parts if part.subject.endswith(f"{name}.meta")] for name in names)


async def test_a_file_with_an_end(pipeline: Pipeline, client: openai.AsyncOpenAI) -> None:
    month_s = 30 * 86_400
    file = await client.files.create(file=b"{}", purpose="batch")
    assert file.expires_at == file.created_at + month_s
    after: Any = {"anchor": "created_at", "seconds": 3600}
    file = await client.files.create(file=b"{}", purpose="batch", expires_after=after)
    assert file.expires_at == file.created_at + 3600
    for wrong in ({**after, "seconds": 3599}, {**after, "seconds": month_s + 1}, {**after, "anchor": "last_use"}):
        with pytest.raises(openai.BadRequestError, match="expires_after"):
            await client.files.create(file=b"{}", purpose="batch", expires_after=wrong)
    with pytest.raises(openai.APIStatusError, match="too long") as refused:
        await client.files.create(file=b"{}", purpose="x" * 2000)  # type: ignore[arg-type]
    assert refused.value.status_code == 413
    firsts, metas = [
        {subject.split(".")[3] for subject in await records.subjects(pipeline.bus, FILES_STREAM, of_part)}
        for of_part in (file_subject("default", "*", 0), file_subject("default", "*", FILE_META))
    ]
    assert firsts <= metas, "what was refused has left something"


async def test_storage_that_is_full(make_pipeline: MakePipeline, tmp_path: Path) -> None:
    settings = BusSettings(files_max_bytes=1_000_000, sync_interval="2s")
    with throwaway_server(tmp_path, settings=settings) as server:
        pipeline = await make_pipeline(bus=settings, url=server.url)
        async with openai.AsyncOpenAI(base_url=pipeline.url + "/v1", api_key="none", max_retries=0) as client:
            kept = await client.files.create(file=b"x" * 600_000, purpose="batch")
            with pytest.raises(openai.InternalServerError) as refused:
                await client.files.create(file=b"x" * 600_000, purpose="batch")
            assert refused.value.status_code == 507 and refused.value.code == "storage_full"
            assert [file.id async for file in client.files.list()] == [kept.id]
            await client.files.delete(kept.id)
            await client.files.create(file=b"x" * 600_000, purpose="batch")


async def test_a_file_comes_back_as_it_went(client: openai.AsyncOpenAI) -> None:
    data = bytes(range(256)) * 4_000
    file = await client.files.create(file=("ü.bin", data), purpose="batch")
    assert (await client.files.content(file.id)).content == data
    assert (await client.files.retrieve(file.id)).filename == "ü.bin"
