"""Translates bodies of `/v1/messages`, Anthropic's API, into chats. Texts and tools are supported.

As for completions, an unsupported parameter that would change the answer is refused by name.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from gpulease.client.decode.openai.api_errors import ApiError, invalid
from gpulease.client.decode.openai.completion_request import (
    MAX_CALLS,
    MAX_TOOLS,
    check_model,
    parse_chat_prompt,
    parse_object,
)
from gpulease.client.decode.openai.prompt_job import about, read_as_chat
from gpulease.client.decode.openai.request_parameters import RequestParameter, check_parameters
from gpulease.client.texts import quoted

if TYPE_CHECKING:
    from gpulease.client.decode.text.prompt_reader import PromptReader

_USED: Final = RequestParameter(is_used=True)
_IGNORED: Final = RequestParameter(is_ignored=True)
_REFUSED: Final = RequestParameter()

COUNTED: Final[Mapping[str, RequestParameter]] = {
    # This says which blocks of the prompt to cache. The server caches all of them.
    "cache_control": _IGNORED,
    "messages": _USED,
    "model": _USED,
    # The form of the answer changes neither the prompt nor the count.
    "output_config": _USED,
    "speed": RequestParameter(neutral=("standard",)),
    "system": _USED,
    "thinking": RequestParameter(neutral=({"type": "disabled"},)),
    "tool_choice": _USED,
    "tools": _USED,
}
"""The parameters of `/v1/messages/count_tokens`, by name."""

PARAMETERS: Final[Mapping[str, RequestParameter]] = {
    **COUNTED,
    "container": _REFUSED,
    "context_management": _REFUSED,
    "diagnostics": _REFUSED,
    "inference_geo": _REFUSED,
    "max_tokens": _USED,
    "mcp_servers": RequestParameter(neutral=([],)),
    "metadata": _IGNORED,
    "output_format": _REFUSED,
    "service_tier": _IGNORED,
    "stop_sequences": _USED,
    "stream": _USED,
    "temperature": _USED,
    "top_k": _USED,
    "top_p": _USED,
    "user_profile_id": _REFUSED,
    "workspace_id": _REFUSED,
}
"""The parameters of `/v1/messages`, by name."""

_SAME_NAMES: Final = ("model", "max_tokens", "stream", "temperature", "top_k", "top_p")
"""The parameters that a chat has under the same name and with the same values."""

_NAMES: Final = {
    "stop": "stop_sequences",
    "parallel_tool_calls": "tool_choice",
    "continue_final_message": "messages",
    "response_format": "output_config",
}
"""Maps a chat's parameters to parameters of `/v1/messages` with another name, to translate the chat's errors."""

_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}
"""Maps the types of `tool_choice` in Anthropic's API to a chat's values of `tool_choice`."""

TURN_GAP: Final = "\n\n"
"""Separates the texts of consecutive messages of the same role."""

_TEXT_AFTER_CALL: Final = "a text after a tool_use is not supported"

_TOOL_MEMBERS: Final = ("type", "name", "description", "input_schema", "cache_control", "strict")
_MESSAGE_MEMBERS: Final = ("role", "content")
_CHOICE_MEMBERS: Final = ("type", "name", "disable_parallel_tool_use")

_BLOCK_MEMBERS: Final[Mapping[str, tuple[str, ...]]] = {
    "text": ("type", "text", "cache_control"),
    "tool_use": ("type", "id", "name", "input", "cache_control"),
    "tool_result": ("type", "tool_use_id", "content", "is_error", "cache_control"),
}
"""The accepted members of each type of block. Other members must be null or [], because clients send back blocks of
earlier replies, which contain such members."""


def read_message(
    reader: "PromptReader", body: bytes, is_chat: bool, fresh_seed: int, names: list[str]
) -> dict[str, Any]:
    """Parse a body, in a text process, as `read_completion` does.

    Args:
        reader: Tokenizes the prompt.
        body: The body, JSON.
        is_chat: Not used: all such functions take the parameters of `read_completion`.
        fresh_seed: The seed to use.
        names: The names of the served model.
    """
    try:
        parameters = parse_object(body)
        check_parameters(parameters, PARAMETERS, is_chat=True)
        if parameters.get("max_tokens") is None:
            raise invalid("max_tokens must be given", "max_tokens")
        chat = chat_of(parameters)
    except ApiError as error:
        return {"error": error.parts}
    return read_as_chat(reader, chat, _NAMES, fresh_seed, names)


def count_tokens(reader: "PromptReader", body: bytes, names: list[str]) -> dict[str, Any]:
    """Count a prompt's tokens, in a text process. Returns the reply's body, or `error` with an ApiError's parts."""
    try:
        parameters = parse_object(body)
        check_parameters(parameters, COUNTED, is_chat=True)
        check_model(parameters.get("model") or "", names)
        messages, variables, continues = parse_chat_prompt(chat_of(parameters))
    except ApiError as error:
        return {"error": error.parts}
    with about("messages"):
        return {"input_tokens": len(reader.read_chat(messages, variables, continues=continues))}


def chat_of(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of the chat request with the same meaning. Raises ApiError."""
    chat = {name: parameters[name] for name in _SAME_NAMES if parameters.get(name) is not None}
    messages = _messages(parameters.get("messages"))
    # If the last message is the assistant's, the answer continues it.
    if messages[-1]["role"] == "assistant":
        if "tool_calls" in messages[-1]:
            raise invalid("messages end with a tool_use; send its tool_result after it", "messages")
        chat["continue_final_message"] = True
    if (system := parameters.get("system")) is not None:
        messages.insert(0, {"role": "system", "content": _text("system", system, "system")})
    chat["messages"] = messages
    if (stops := parameters.get("stop_sequences")) is not None:
        if not isinstance(stops, list):
            raise invalid("stop_sequences must be a list of strings", "stop_sequences")
        chat["stop"] = stops
    if (form := _answer_form(parameters.get("output_config"))) is not None:
        chat["response_format"] = form
    if parameters.get("tools") is not None:
        chat["tools"] = _tools(parameters["tools"])
    if (choice := parameters.get("tool_choice")) is not None:
        chat |= _tool_choice(choice, [tool["function"].get("name") for tool in chat.get("tools", [])])
    return chat


def _answer_form(config: Any) -> dict[str, Any] | None:
    """Return the chat's `response_format` for an `output_config`; None if the answer may be any text."""
    if config is None:
        return None
    if not isinstance(config, dict):
        raise invalid("output_config must be an object", "output_config")
    _check_members("output_config", config, ("format",), "output_config")
    if (form := config.get("format")) is None:
        return None
    schema = form.get("schema") if isinstance(form, dict) and form.get("type") == "json_schema" else None
    if not isinstance(schema, dict):
        text = "output_config.format must have the type json_schema, and a JSON Schema as its schema"
        raise invalid(text, "output_config")
    _check_members("output_config.format", form, ("type", "schema"), "output_config")
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def _messages(value: Any) -> list[dict[str, Any]]:
    """Return a chat's messages. Their contents are checked when the chat is parsed."""
    if not isinstance(value, list) or not value:
        raise invalid("messages must be a list of messages, and not empty", "messages")
    messages: list[dict[str, Any]] = []
    for number, message in enumerate(value):
        where = f"messages[{number}]"
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ("user", "assistant"):
            raise invalid(f"{where} must be an object with the role user or assistant", "messages")
        _check_members(where, message, _MESSAGE_MEMBERS, "messages")
        content = message.get("content")
        if isinstance(content, str):
            _add_turn(where, messages, {"role": role, "content": content})
            continue
        if not isinstance(content, list) or not content:
            raise invalid(f"{where}: content must be a string or a list of blocks, and not empty", "messages")
        for turn in _assistant(where, content) if role == "assistant" else _user(where, content):
            _add_turn(where, messages, turn)
        if len(messages[-1].get("tool_calls", [])) > MAX_CALLS:
            raise invalid(f"{where}: a turn has at most {MAX_CALLS} blocks of the type tool_use", "messages")
    return messages


def _add_turn(where: str, messages: list[dict[str, Any]], turn: dict[str, Any]) -> None:
    """Add a message to a chat. As in Anthropic's API, consecutive messages of the same role are joined."""
    last = messages[-1] if messages else {}
    if last.get("role") != turn["role"] or turn["role"] == "tool":
        messages.append(turn)
        return
    if turn["content"]:
        if "tool_calls" in last:
            raise invalid(f"{where}: {_TEXT_AFTER_CALL}", "messages", "unsupported_parameter")
        last["content"] = TURN_GAP.join(filter(None, (last["content"], turn["content"])))
    if calls := turn.get("tool_calls"):
        last.setdefault("tool_calls", []).extend(calls)


def _user(where: str, blocks: list[Any]) -> list[dict[str, Any]]:
    """Return a user's message as messages of a chat: one for each tool result and each text between results."""
    messages: list[dict[str, Any]] = []
    for block in blocks:
        if _kind(block) == "tool_result":
            _check_members(where, block, _BLOCK_MEMBERS["tool_result"], "messages")
            _check_text(where, block, "tool_use_id")
            # Leave out `is_error`, for which templates have no field. The content describes the error.
            content = block.get("content")
            text = "" if content is None else _text(where, content, "messages")
            messages.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
            continue
        text = _text(where, [block], "messages")
        if messages and messages[-1]["role"] == "user":
            messages[-1]["content"] += text
        else:
            messages.append({"role": "user", "content": text})
    return messages


def _assistant(where: str, blocks: list[Any]) -> list[dict[str, Any]]:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for block in blocks:
        if _kind(block) == "tool_use":
            _check_members(where, block, _BLOCK_MEMBERS["tool_use"], "messages")
            for name in ("id", "name"):
                _check_text(where, block, name)
            if not isinstance(block.get("input"), dict):
                raise invalid(f"{where}: the input of a tool_use must be an object", "messages")
            function = {"name": block["name"], "arguments": block["input"]}
            message.setdefault("tool_calls", []).append({"id": block["id"], "type": "function", "function": function})
        elif "tool_calls" in message:
            raise invalid(f"{where}: {_TEXT_AFTER_CALL}", "messages", "unsupported_parameter")
        else:
            message["content"] += _text(where, [block], "messages")
    return [message]


def _kind(block: Any) -> Any:
    return block.get("type") if isinstance(block, dict) else None


def _check_members(where: str, item: Mapping[str, Any], members: tuple[str, ...], parameter: str) -> None:
    """Refuse members that would be ignored. Raises ApiError."""
    for name, value in item.items():
        if name not in members and value not in (None, []):
            raise invalid(f"{where}: {quoted(name)} is not supported", parameter, "unsupported_parameter")


def _check_text(where: str, block: Mapping[str, Any], name: str) -> None:
    if not isinstance(block.get(name), str):
        raise invalid(f"{where}: {name} must be a string, not {quoted(block.get(name))}", "messages")


def _text(where: str, content: Any, parameter: str) -> str:
    """Return the text of a string or of a list of text blocks. Raises ApiError for other blocks."""
    if isinstance(content, str):
        return content
    texts = []
    blocks: list[Any] = content if isinstance(content, list) else [None]
    for block in blocks:
        text = block.get("text") if _kind(block) == "text" else None
        if not isinstance(text, str):
            supported = "content must be a string, or a list of blocks of the types text, tool_use and tool_result"
            raise invalid(f"{where}: {supported}, not {quoted(_kind(block))}", parameter)
        _check_members(where, block, _BLOCK_MEMBERS["text"], parameter)
        texts.append(text)
    return "".join(texts)


def _tools(tools: Any) -> list[dict[str, Any]]:
    """Return the chat's tools. Their names are checked when the chat is parsed."""
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise invalid(f"tools must be a list of at most {MAX_TOOLS} tools", "tools")
    functions = []
    for number, tool in enumerate(tools):
        where = f"tools[{number}]"
        if not isinstance(tool, dict) or tool.get("type") not in (None, "custom"):
            raise invalid(f"{where} must have the type custom; the server has no tools of its own", "tools")
        _check_members(where, tool, _TOOL_MEMBERS, "tools")
        if not isinstance(tool.get("input_schema"), dict):
            raise invalid(f"{where}: input_schema must be a JSON Schema, an object", "tools")
        members = {"name": "name", "description": "description", "input_schema": "parameters"}
        function = {other: tool[name] for name, other in members.items() if tool.get(name) is not None}
        functions.append({"type": "function", "function": function})
    return functions


def _tool_choice(choice: Any, names: list[Any]) -> dict[str, Any]:
    """Return a chat's parameters for a `tool_choice`. `names` are the names of the tools."""
    if not isinstance(choice, dict) or choice.get("type") not in (*_CHOICES, "tool"):
        raise invalid("tool_choice must have the type auto, any, tool or none", "tool_choice")
    _check_members("tool_choice", choice, _CHOICE_MEMBERS, "tool_choice")
    if choice["type"] == "tool" and choice.get("name") not in names:
        raise invalid(f"tool_choice: name {quoted(choice.get('name'))} must be that of one of the tools", "tool_choice")
    chosen: Any = _CHOICES.get(choice["type"]) or {"type": "function", "function": {"name": choice.get("name")}}
    alone = choice.get("disable_parallel_tool_use")
    if alone is not None and not isinstance(alone, bool):
        raise invalid("tool_choice.disable_parallel_tool_use must be true or false", "tool_choice")
    return {"tool_choice": chosen} | ({"parallel_tool_calls": False} if alone else {})
