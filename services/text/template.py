"""A model's chat template: rendered in a sandbox, with what Hugging Face templates expect to find there."""

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from msgspec import to_builtins

from schemas.errors import InvalidRequest, SetupError
from schemas.job import CalledFunction, Message, Tool
from schemas.response_format import MAX_SCHEMA_DEPTH, depth_of
from services.text.control_tokens import ControlTokens, GuardedText
from services.text.tokenizer import Tokenizer
from services.text.tool_format import OPENING

# What a template's own code may raise on messages that it does not like; all of it is the request's fault.
_RENDER_ERRORS = (jinja2.TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError)


class ChatTemplate:
    """Messages to a prompt. Control tokens are recognised only where the template wrote them."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens`: bos_token, eos_token and so on, as the template's variables.

        Raises `SetupError` for a source that jinja cannot compile.
        """
        self._source = source
        self._variables = dict(special_tokens)
        try:
            environment = _environment()
            self._template = environment.from_string(source)
            self._takes_tools = "tools" in jinja2.meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError as error:
            raise SetupError(f"the model's chat template is broken (line {_line(error)}): {error}") from error

    @property
    def has_calls(self) -> bool:
        """Whether it shows tools to the model, and has it call them in the format that `CallReader` reads."""
        return self._takes_tools and OPENING in self._source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        now: datetime | None = None,
    ) -> str:
        """The prompt's text. `now` is what `strftime_now` tells a template; None for the clock of this host.

        Raises `InvalidRequest` for an empty list and with whatever the template itself raises.
        """
        if not messages:
            raise InvalidRequest("messages is empty: there is nothing to continue", param="messages")
        plain = [{**m, "role": "system" if m["role"] == "developer" else m["role"]} for m in messages]
        try:
            return self._template.render(
                messages=plain,
                tools=tools or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                strftime_now=(now or datetime.now()).strftime,
                **self._variables,
            )
        except _RENDER_ERRORS as error:
            raise InvalidRequest(
                f"the model's chat template refuses the messages: {error}", param="messages"
            ) from error

    def render_guarded(
        self,
        messages: Sequence[Message],
        control: ControlTokens,
        *,
        tools: Sequence[Tool] = (),
        add_generation_prompt: bool = True,
        now: datetime | None = None,
    ) -> GuardedText:
        """As `render`, with the control tokens that somebody typed into a message or a tool guarded."""
        plain = {"messages": [_turn(message) for message in messages], "tools": [to_builtins(tool) for tool in tools]}
        strings = list(_strings(plain))
        guarded, guards = control.guard(strings)
        swapped = {string: other for string, other in zip(strings, guarded, strict=True) if string != other}
        found = _swapped(plain, swapped) if swapped else plain
        text = self.render(
            found["messages"], tools=found["tools"], add_generation_prompt=add_generation_prompt, now=now
        )
        return GuardedText(text, guards)

    def render_ids(
        self, messages: Sequence[Message], tokenizer: Tokenizer, *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Prompt ids: for harmless messages exactly `transformers`' apply_chat_template, and a control token typed
        in a message stays text. Raises `InvalidRequest`, also where the origin of a control token cannot be told.
        """
        guarded = self.render_guarded(messages, tokenizer.control, add_generation_prompt=add_generation_prompt)
        return tokenizer.encode_guarded(guarded)


def _turn(message: Message) -> dict[str, Any]:
    """As Hugging Face's templates expect it: arguments of calls are objects."""
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        turn["tool_calls"] = [
            {"id": call.id, "type": call.type, "function": _called(call.function)} for call in message.tool_calls
        ]
    if message.tool_call_id:
        turn["tool_call_id"] = message.tool_call_id
    return turn


def _called(function: CalledFunction) -> dict[str, Any]:
    try:
        arguments = json.loads(function.arguments)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"arguments of a call are not JSON: {error}", param="messages") from error
    if not isinstance(arguments, dict) or depth_of(arguments) > MAX_SCHEMA_DEPTH:
        raise InvalidRequest("arguments of a call are no JSON object of a usual depth", param="messages")
    return {"name": function.name, "arguments": arguments}


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def _swapped(value: Any, others: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return others.get(value, value)
    if isinstance(value, dict):
        return {others.get(key, key): _swapped(item, others) for key, item in value.items()}
    return [_swapped(item, others) for item in value] if isinstance(value, list) else value


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """As `transformers` sets it up (utils/chat_template_utils.py), so that templates behave the same."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    return environment


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks training targets; for a prompt it is just its content."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _line(error: jinja2.TemplateError) -> int | str:
    return getattr(error, "lineno", "?")
