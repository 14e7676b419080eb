"""A tool parser of vLLM for the shipped model, whose calls are bare JSON objects.

It is vLLM's parser of Llama 3's JSON. That one only refuses models without Llama's marker before a call, which is
optional in the output. So another token takes the marker's place, one that no output has.
"""

from vllm.tool_parsers import ToolParserManager
from vllm.tool_parsers.llama_tool_parser import Llama3JsonToolParser


@ToolParserManager.register_module("bare_json")
class BareJson(Llama3JsonToolParser):
    bot_token = "<|endoftext|>"
