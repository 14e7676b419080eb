"""pydantic-ai, over chat completions and over `/v1/responses`.

    pydantic_ai_client.py URL KEY MODEL
"""

import asyncio

from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from forms import CALLS, Facts, call_of, check_form
from tasks import FUNCTIONS, NOTE, TASKS, check, check_end, mesh

url, key, model = mesh()
provider = OpenAIProvider(base_url=f"{url}/v1", api_key=key)
settings = {"temperature": 0, "max_tokens": 64}


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
        agent = Agent(spoken, tools=FUNCTIONS, model_settings=settings, retries=0)
        for run in whole, streamed:
            history = []
            for task in TASKS:
                answer, history = await run(agent, task.ask, history)
                check_end(task, answer)
            check(len(history) == 4 * len(TASKS), history)
        tools = [ToolOutput(call, name=call.__name__) for call in CALLS]
        for output, asks in [
            (NativeOutput(Facts), [(NOTE, Facts)]),
            (PromptedOutput(Facts), [(NOTE, Facts)]),
            (tools, [(task.ask, call_of(task)) for task in TASKS]),
        ]:
            agent = Agent(spoken, output_type=output, model_settings=settings, retries=0)
            for ask, expected in asks:
                check_form((await agent.run(ask)).output, expected)
                async with agent.run_stream(ask) as result:
                    check_form(await result.get_output(), expected)


asyncio.run(main())
