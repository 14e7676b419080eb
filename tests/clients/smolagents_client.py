"""smolagents' agent that calls tools. It sends `tool_choice: required` in every step.

    smolagents_client.py URL KEY MODEL
"""

from smolagents import OpenAIServerModel, ToolCallingAgent, tool
