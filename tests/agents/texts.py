"""The texts of a request, and whether a prompt has them."""

import json


def leaves(value):
    """The texts in a value of JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from leaves(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from leaves(item)


def arguments(text):
    """The texts in the arguments of a call, which are JSON in a text."""
    try:
        yield from leaves(json.loads(text) if isinstance(text, str) else text)
    except ValueError:
        yield text


def content(value):
    """The texts in a content: a text, or parts of which some have one. Reasoning and images have none here."""
    if isinstance(value, str):
        yield value
    for part in value if isinstance(value, list) else []:
        if part.get("type") in ("text", "input_text", "output_text"):
            yield part["text"]
        elif part.get("type") == "tool_use":
            yield from arguments(part["input"])
        elif part.get("type") == "tool_result":
            yield from content(part.get("content"))


def references(messages):
    """The names of tools that a search has found, of which the model has seen no more than the name before."""
    for message in messages:
        for block in message["content"] if isinstance(message.get("content"), list) else []:
            results = block.get("content") if block.get("type") == "tool_result" else []
            for part in results if isinstance(results, list) else []:
                if part.get("type") == "tool_reference":
                    yield part["tool_name"]


def functions(tools):
    """The names and descriptions of functions. What the provider runs itself, such as a web search, is left out."""
    for tool in tools or []:
        if tool.get("type") == "namespace":
            yield from functions(tool["tools"])
        elif not tool.get("defer_loading"):
            function = tool.get("function", tool)
            if "parameters" in function or "input_schema" in function or tool.get("type") == "custom":
                yield function["name"]
                yield function.get("description") or ""


def sent(path, body):
    """Pairs of the place and the text, for each text that a request gives to the model."""
    for text in functions(body.get("tools")):
        yield "tools", text
    if path.endswith("/responses"):
        yield "instructions", body.get("instructions") or ""
        items = body["input"]
        for item in [{"role": "user", "content": items}] if isinstance(items, str) else items:
            place = f"input {item.get('type')} {item.get('role', '')}"
            if item.get("type") in ("function_call", "custom_tool_call"):
                texts = arguments(item.get("arguments") or item.get("input") or "")
            elif item.get("type") in ("function_call_output", "custom_tool_call_output"):
                texts = content(item["output"])
            elif item.get("type") in ("message", None):
                texts = content(item["content"])
            else:
                continue
            for text in texts:
                yield place, text
        return
    for name in references(body["messages"]):
        yield "a found tool", next(tool["description"] for tool in body["tools"] if tool["name"] == name)
    system = body.get("system") or []
    for block in [{"text": system}] if isinstance(system, str) else system:
        # Claude Code's own header for bills, which is no text for the model.
        if not block["text"].startswith("x-anthropic-billing-header"):
            yield "system", block["text"]
    for message in body["messages"]:
        for text in content(message.get("content")):
            yield message["role"], text
        for call in message.get("tool_calls") or []:
            for text in arguments(call["function"]["arguments"]):
                yield "a call", text


def is_in(text, prompt):
    """Whether a prompt has a text as it is, trimmed, or as JSON."""
    text = text.strip()
    return text in prompt or any(json.dumps(text, ensure_ascii=ascii)[1:-1] in prompt for ascii in (False, True))


def missing(path, body, prompt):
    """The texts of a request that are not in a prompt, each with its place."""
    return [(place, text) for place, text in sent(path, body) if not is_in(text, prompt)]
