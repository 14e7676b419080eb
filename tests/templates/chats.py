"""The conversations that every template is rendered with: what agents and chat clients send."""

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Says the weather of a \"city\" & its days <b>.",
        "parameters": {
            "type": "object",
            "required": ["city"],
            "properties": {
                "city": {"type": "string", "description": "The city, such as Zürich"},
                "days": {"type": "integer", "minimum": 1, "default": 2},
                "units": {"type": "string", "enum": ["metric", "imperial"]},
                "threshold": {"type": "number", "default": 1e-07},
                "tags": {"type": "array", "items": {"type": "string"}},
                "where": {"type": "object", "properties": {"lat": {"type": "number"}, "lon": {"type": ["number", "null"]}}},
            },
            "additionalProperties": False,
        },
        "strict": True,
    },
}
CLOCK = {
    "type": "function",
    "function": {"name": "now", "description": "The time.", "parameters": {"type": "object", "properties": {}}},
}


def call(name, arguments, number=1):
    return {"id": f"call{number:05d}", "type": "function", "function": {"name": name, "arguments": arguments}}


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **fields):
    return {"role": "assistant", "content": text, **fields}


def result(text, number=1, name="get_weather"):
    return {"role": "tool", "tool_call_id": f"call{number:05d}", "name": name, "content": text}


OSLO = {"city": "Oslo", "days": 2, "threshold": 0.5, "tags": ["a", "b"], "where": {"lat": 59.9, "lon": None}, "deep": True}

# name: (messages, tools, further arguments of the rendering)
CHATS = {
    "user": ([user("Hello!")], None, {}),
    "no generation prompt": ([user("Hello!")], None, {"add_generation_prompt": False}),
    "system": ([{"role": "system", "content": "Be  kind. "}, user(" Hello!\n")], None, {}),
    "several turns": (
        [user("One"), assistant("Two"), user("Three"), assistant("  Four\n\n"), user("Five")], None, {},
    ),
    "unicode": ([user("naïve 🦀👩‍👩‍👧 你好 \u05d0\u0301 \u00a0\u2028 \t\x07 \\ \" ' {{ x }} {% if %}")], None, {}),
    "empty content": ([user(""), assistant(""), user("Well?")], None, {}),
    "text parts": (
        [user([{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}])], None, {},
    ),
    "tools": ([user("How is Oslo?")], [WEATHER, CLOCK], {}),
    "system and tools": ([{"role": "system", "content": "Be kind."}, user("How is Oslo?")], [WEATHER], {}),
    "tool history": (
        [user("How is Oslo?"), assistant(None, tool_calls=[call("get_weather", OSLO)]), result("{\"degrees\": 12}")],
        [WEATHER], {},
    ),
    "tool history goes on": (
        [user("How is Oslo?"), assistant("I look.", tool_calls=[call("get_weather", OSLO)]), result("rain, 12 degrees"),
         assistant("Rain."), user("And Rome?")],
        [WEATHER, CLOCK], {},
    ),
    "several calls": (
        [user("Oslo and Rome?"),
         assistant("", tool_calls=[call("get_weather", {"city": "Oslo"}), call("get_weather", {"city": "Röme", "days": 1}, 2)]),
         result("rain, 12 degrees"), result("sun", 2)],
        [WEATHER], {},
    ),
    "calls of two rounds": (
        [{"role": "system", "content": "Be kind."}, user("Oslo, and the time?"),
         assistant("", tool_calls=[call("get_weather", {"city": "Oslo"})]), result("rain, 12 degrees"),
         assistant("", tool_calls=[call("now", {}, 2)]), result("noon", 2, "now"),
         assistant("Rain at noon."), user("Thanks.")],
        [WEATHER, CLOCK], {},
    ),
    "reasoning": (
        [user("2+2?"), assistant("4", reasoning_content="Two and two."), user("3+3?")], None, {},
    ),
    "reasoning and a call": (
        [user("How is Oslo?"),
         assistant("", reasoning_content="I ask.", tool_calls=[call("get_weather", {"city": "Oslo"})]), result("rain, 12 degrees")],
        [WEATHER], {},
    ),
    "reasoning in content": (
        [user("2+2?"), assistant("<think>\nTwo and two.\n</think>\n\n4"), user("3+3?")], None, {},
    ),
    "no thinking": ([user("Hello!")], None, {"enable_thinking": False, "reasoning_effort": "low", "thinking": False}),
    "thinking": ([user("Hello!")], None, {"enable_thinking": True, "reasoning_effort": "high", "thinking": True}),
}

# Conversations as coding agents send them, which every template of chats with a system message has to take.
AGENTS = {
    "developer first": ([{"role": "developer", "content": "Be a coder."}, user("Hi.")], None, {}),
    "system and developer": (
        [{"role": "system", "content": "Be kind."}, {"role": "developer", "content": "Be a coder."}, user("Hi.")], None, {},
    ),
    "two systems": (
        [{"role": "system", "content": "Be kind."}, {"role": "system", "content": "Be brief."}, user("Hi.")], None, {},
    ),
    "a system message behind the user": (
        [{"role": "system", "content": "Be kind."}, user("Hi."), {"role": "system", "content": "It is noon."}], None, {},
    ),
    "a developer in later turns": (
        [{"role": "developer", "content": "Be a coder."}, user("Hi."), assistant("Hello."),
         {"role": "developer", "content": "It is noon."}, user("So?")], None, {},
    ),
    "two messages of the user": ([user("One."), user("Two.")], None, {}),
}
