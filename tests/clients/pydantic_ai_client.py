"""pydantic-ai, over chat completions and over `/v1/responses`.

    pydantic_ai_client.py URL KEY MODEL
"""

import asyncio

from pydantic_ai import Agent, Tool
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from tasks import FUNCTIONS, TASKS, check, check_end, mesh

url, key, model = mesh()
provider = OpenAIProvider(base_url=f"{url}/v1", api_key=key)
tools = [Tool(function, strict=False) for function in FUNCTIONS]


async def whole(agent, ask, history):
    result = await agent.run(ask, message_history=history)
    return result.output, result.all_messages()


async def streamed(agent, ask, history):
    async with agent.run_stream(ask, message_history=history) as result:
        pieces = [piece async for piece in result.stream_text(delta=True, debounce_by=None)]
        return "".join(pieces), result.all_messages()


async def main():
    for kind in OpenAIChatModel, OpenAIResponsesModel:
        spoken = kind(model, provider=provider)
        agent = Agent(spoken, tools=tools, model_settings={"temperature": 0, "max_tokens": 64}, retries=0)
        for run in whole, streamed:
            history = []
            for task in TASKS:
                answer, history = await run(agent, task.ask, history)
                check_end(task, answer)
            check(len(history) == 4 * len(TASKS), history)


asyncio.run(main())
