"""LiteLLM, with its providers for OpenAI-compatible servers, for vLLM and for Anthropic.

    litellm_client.py URL KEY MODEL
"""

import gc
import json

import litellm

from tasks import FUNCTIONS, TASKS, check, check_end, mesh, parameters

url, key, model = mesh()
litellm.drop_params = False
# LiteLLM leaves its streams to the garbage collector, which closes them. If that happens while httpcore holds the lock
# of its connections, closing waits for the same lock for ever. So garbage is collected between the calls alone.
gc.disable()
tools = [
    {"type": "function", "function": {
        "name": function.__name__, "description": function.__doc__, "parameters": parameters(function.__name__),
    }}
    for function in FUNCTIONS
]
by_name = {function.__name__: function for function in FUNCTIONS}
settings = {"api_key": key, "temperature": 0, "max_tokens": 64, "tools": tools, "num_retries": 0}


def whole(history, **fields):
    return litellm.completion(messages=history, **fields, **settings)


def streamed(history, **fields):
    pieces = list(litellm.completion(messages=history, stream=True, **fields, **settings))
    gc.collect()
    return litellm.stream_chunk_builder(pieces, messages=history)


for provider, base in ("openai", f"{url}/v1"), ("hosted_vllm", f"{url}/v1"), ("anthropic", url):
    for say in whole, streamed:
        history = []
        for task in TASKS:
            history.append({"role": "user", "content": task.ask})
            while True:
                choice = say(history, model=f"{provider}/{model}", api_base=base).choices[0]
                history.append(choice.message)
                calls = choice.message.tool_calls or []
                check(choice.finish_reason == ("tool_calls" if calls else "stop"), choice)
                if not calls:
                    break
                for call in calls:
                    result = by_name[call.function.name](**json.loads(call.function.arguments))
                    history.append({"role": "tool", "tool_call_id": call.id, "content": result})
            check_end(task, history[-1].content)
