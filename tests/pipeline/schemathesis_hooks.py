"""What a schema does not say of a request that would go well: which model is served, and what goes with what.

Without it most requests would end at the first refusal. A wrong type stays wrong.
"""

from typing import Any

import schemathesis

ROLES = ("system", "developer", "user", "assistant")
SERVED = "tiny"
FOR_TOOLS = ("tool_calls", "function_call", "audio")


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    if not isinstance(body, dict):
        return body
    if isinstance(body.get("model"), str) and len(body["model"]) != 3:  # some stay unknown
        body["model"] = SERVED
    for needed, name in (
        ("stream", "stream_options"),
        ("logprobs", "top_logprobs"),
        ("max_tokens", "max_completion_tokens"),
    ):
        if not body.get(needed) or needed == "max_tokens":
            body.pop(name, None)
    messages = body.get("messages")
    for number, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, dict):
            _mend(message, ROLES[number % len(ROLES)])
    bias = body.get("logit_bias")
    if isinstance(bias, dict):
        body["logit_bias"] = {str(number): value for number, value in enumerate(bias.values())}
    return body


def _mend(message: dict[str, Any], role: str) -> None:
    if isinstance(message.get("role"), str):
        message["role"] = role
    for name in FOR_TOOLS:
        message.pop(name, None)
    content = message.get("content")
    if content is None:
        message["content"] = "hi"
    elif isinstance(content, list):
        message["content"] = [{**part, "type": "text", "text": "hi"} for part in content if isinstance(part, dict)]
