"""The OpenAI Agents SDK, with its default model, which speaks `/v1/responses`, and with chat completions.

    agents_client.py URL KEY MODEL
"""

import asyncio

import agents
import openai

from forms import Facts, check_form
from tasks import FUNCTIONS, NOTE, TASKS, check, check_end, mesh

url, key, model = mesh()
client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
agents.set_tracing_disabled(True)
agents.set_default_openai_client(client, use_for_tracing=False)
settings = agents.ModelSettings(temperature=0, max_tokens=64)
tools = [agents.function_tool(function) for function in FUNCTIONS]


async def whole(agent, history):
    return await agents.Runner.run(agent, history)


async def streamed(agent, history):
    result = agents.Runner.run_streamed(agent, history)
    kinds = [event.name async for event in result.stream_events() if event.type == "run_item_stream_event"]
    check(kinds == ["tool_called", "tool_output", "message_output_created"], kinds)
    return result


async def main():
    for spoken in [model, agents.OpenAIChatCompletionsModel(model, client)]:
        agent = agents.Agent("clerk", model=spoken, model_settings=settings, tools=tools)
        for run in whole, streamed:
            history = []
            for task in TASKS:
                result = await run(agent, history + [{"role": "user", "content": task.ask}])
                check_end(task, result.final_output)
                history = result.to_input_list()
        clerk = agents.Agent("clerk", model=spoken, model_settings=settings, output_type=Facts)
        result = await agents.Runner.run(clerk, NOTE)
        check_form(result.final_output, Facts)
        said = agents.Runner.run_streamed(clerk, NOTE)
        async for _ in said.stream_events():
            pass
        check_form(said.final_output, result.final_output)


asyncio.run(main())
