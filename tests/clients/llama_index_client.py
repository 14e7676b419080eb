"""LlamaIndex: calls of an OpenAI-like model, and its agent.

    llama_index_client.py URL KEY MODEL
"""

import asyncio

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

from tasks import FUNCTIONS, TASKS, check, check_end, mesh

url, key, model = mesh()
llm = OpenAILike(
    model=model, api_base=f"{url}/v1", api_key=key, is_chat_model=True, is_function_calling_model=True,
    context_window=4096, max_tokens=64, temperature=0, max_retries=0,
)
tools = [FunctionTool.from_defaults(function) for function in FUNCTIONS]


async def main():
    for streaming in False, True:
        agent = FunctionAgent(llm=llm, tools=tools, streaming=streaming)
        history = []
        for task in TASKS:
            result = await agent.run(task.ask, chat_history=history)
            check([call.tool_name for call in result.tool_calls] == [task.name], result.tool_calls)
            check_end(task, str(result))
            history += [ChatMessage(role="user", content=task.ask), result.response]


asyncio.run(main())
