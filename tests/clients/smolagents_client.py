"""smolagents' agent that calls tools.

    smolagents_client.py URL KEY MODEL

The agent forces a call in every step, and its final answer is a call as well. After a tool's result the shipped model
knows only answers in words, so those agents end after one step. An agent whose only tool is the final answer ends.
"""

from smolagents import ActionStep, LogLevel, OpenAIModel, ToolCallingAgent, tool

import tasks
from tasks import TASKS, check, mesh, ran


@tool
def get_weather(city: str, days: int) -> str:
    """Tells the weather of a city.

    Args:
        city: The city.
        days: How many days are wanted.
    """
    return tasks.get_weather(city, days)


@tool
def get_stock(item: str) -> str:
    """Counts an item in stock.

    Args:
        item: The item.
    """
    return tasks.get_stock(item)


@tool
def create_order(item: str, count: int, customer: str) -> str:
    """Creates an order.

    Args:
        item: The item.
        count: How many are ordered.
        customer: The name of the customer.
    """
    return tasks.create_order(item, count, customer)


url, key, model = mesh()
spoken = OpenAIModel(model, api_base=f"{url}/v1", api_key=key, temperature=0, max_tokens=64)
for stream_outputs in False, True:
    agent = ToolCallingAgent(
        [get_weather, get_stock, create_order], spoken, max_steps=1,
        stream_outputs=stream_outputs, verbosity_level=LogLevel.ERROR,
    )
    # The long prompt of the agent has examples of other tools, which the shipped model would follow.
    agent.prompt_templates["system_prompt"] = "Be brief."
    for task in TASKS:
        agent.run(task.ask)
        step = next(step for step in agent.memory.steps if isinstance(step, ActionStep))
        check(ran == [(task.name, task.arguments)], f"{task.ask} The tools ran as {ran}")
        check(step.observations == task.result, step.observations)
        ran.clear()
    agent = ToolCallingAgent(
        [], spoken, max_steps=1, stream_outputs=stream_outputs, verbosity_level=LogLevel.ERROR,
    )
    agent.prompt_templates["system_prompt"] = "Be brief."
    answer = agent.run("Call final_answer with answer Oslo.")
    step = next(step for step in agent.memory.steps if isinstance(step, ActionStep))
    called = [(call.name, call.arguments) for call in step.tool_calls]
    check(called == [("final_answer", {"answer": answer})] and isinstance(answer, str), called)
