"""LangChain: tools bound to a model, its agent, and structured output; over chat completions and `/v1/responses`.

    langchain_client.py URL KEY MODEL
"""

from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI

from forms import Facts, call_of, check_form
from tasks import FUNCTIONS, NOTE, TASKS, check, check_end, mesh

url, key, model = mesh()


def whole(runnable, given):
    return runnable.invoke(given)


def streamed(runnable, given):
    pieces = iter(runnable.stream(given))
    message = next(pieces)
    for piece in pieces:
        message += piece
    return message


def streamed_agent(agent, given):
    """Streams the agent's tokens and its states at once."""
    tokens = ""
    for mode, part in agent.stream(given, stream_mode=["messages", "values"]):
        if mode == "values":
            state = part
        elif part[0].type == "AIMessageChunk":
            tokens += part[0].text
    check(tokens == state["messages"][-1].text, tokens)
    return state


by_name = {function.__name__: function for function in FUNCTIONS}
for use_responses_api in False, True:
    chat = ChatOpenAI(
        base_url=f"{url}/v1", api_key=key, model=model, temperature=0, max_tokens=64, max_retries=0,
        use_responses_api=use_responses_api,
    )
    bound = chat.bind_tools(FUNCTIONS)
    for say in whole, streamed:
        history = []
        for task in TASKS:
            history.append(HumanMessage(task.ask))
            message = say(bound, history)
            check(len(message.tool_calls) == 1, message)
            call = message.tool_calls[0]
            result = by_name[call["name"]](**call["args"])
            history += [message, ToolMessage(result, tool_call_id=call["id"])]
            history.append(say(bound, history))
            check_end(task, history[-1].text)
    agent = create_agent(chat, FUNCTIONS)
    for say in whole, streamed_agent:
        history = []
        for task in TASKS:
            history = say(agent, {"messages": history + [HumanMessage(task.ask)]})["messages"]
            check_end(task, history[-1].text)
    for method in "json_schema", "json_mode":
        bound = chat.with_structured_output(Facts, method=method)
        check_form(bound.invoke(NOTE), Facts)
        check_form(list(bound.stream(NOTE))[-1], Facts)
    for task in TASKS:
        expected = call_of(task)
        for strict in None, True:
            bound = chat.with_structured_output(type(expected), method="function_calling", strict=strict)
            check_form(bound.invoke(task.ask), expected)
            check_form(list(bound.stream(task.ask))[-1], expected)
    for strategy in ProviderStrategy, ToolStrategy:
        agent = create_agent(chat, [], response_format=strategy(Facts))
        check_form(agent.invoke({"messages": [HumanMessage(NOTE)]})["structured_response"], Facts)
