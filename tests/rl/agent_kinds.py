"""Agents of others, unchanged: the OpenAI Agents SDK, and the loop of mini-swe-agent.

Each is told the address of a session as if it were OpenAI's, and keeps its history as it always does.
"""

import asyncio
import json
import os
from dataclasses import dataclass
from pathlib import Path

# No calls to other hosts, and no files or greetings in the home of who runs this.
os.environ.update(
    LITELLM_LOCAL_MODEL_COST_MAP="True", LITELLM_MODE="PRODUCTION", MSWEA_SILENT_STARTUP="1",
    MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT="1", OPENAI_AGENTS_DISABLE_TRACING="1",
)
WORK = Path(__file__).resolve().parents[2] / "target/rl"
os.environ.setdefault("MSWEA_GLOBAL_CONFIG_DIR", str(WORK / "mini-swe-agent"))

import agents  # noqa: E402
import litellm  # noqa: E402
import openai  # noqa: E402
from agent_task import ANSWERS_MAX, TOOLS, schema  # noqa: E402
from minisweagent.agents.default import DefaultAgent  # noqa: E402
from minisweagent.exceptions import FormatError, Submitted  # noqa: E402
from minisweagent.models.litellm_model import LitellmModel  # noqa: E402

litellm.suppress_debug_info = True
MODEL, TOKENS_MAX = "default", 64
# `return_token_ids` shows what the engine saw, so that the trajectory can be compared with it.
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "max_tokens": TOKENS_MAX, "extra_body": {"return_token_ids": True}}


@dataclass
class Seen:
    """The tokens of a turn as its answer shows them."""

    prompt: list
    output: list
    finish: str


@dataclass
class Episode:
    """The turns of a rollout, and why it ended. `is_ordinary`: the agent kept all of its history."""

    turns: list
    end: str
    is_ordinary: bool = True


class Recorder:
    """Notes the tokens of each answer that passes the agent's HTTP client."""

    def __init__(self):
        self.turns = []

    def read(self, body):
        answer = json.loads(body)
        [choice] = answer["choices"]
        self.turns.append(Seen(answer["prompt_token_ids"], choice["token_ids"], choice["finish_reason"]))

    def hook(self, response):
        if response.status_code == 200:
            self.read(response.read())

    async def async_hook(self, response):
        if response.status_code == 200:
            self.read(await response.aread())


def run_openai_agents(url, conversation):
    """A rollout by the OpenAI Agents SDK."""
    return asyncio.run(openai_agents(url, conversation, lambda history, _: history))


def run_forgetful_agents(url, conversation):
    """The same, but the agent takes its first answer back, and after the second it forgets all that was before."""
    episode = asyncio.run(openai_agents(url, conversation, lambda history, asked: history[:-1] if asked == 1 else []))
    episode.is_ordinary = False
    return episode


async def openai_agents(url, conversation, edit):
    """`edit` makes the history before each question but the first, from the history and the number of questions."""
    recorder = Recorder()
    http = openai.DefaultAsyncHttpxClient(event_hooks={"response": [recorder.async_hook]})
    async with openai.AsyncOpenAI(base_url=url, api_key="unused", max_retries=0, http_client=http) as client:
        agent = agents.Agent(
            "clerk",
            model=agents.OpenAIChatCompletionsModel(MODEL, client),
            model_settings=agents.ModelSettings(**SAMPLING),
            tools=[openai_tool(name, conversation) for name in TOOLS],
        )
        history = []
        while (question := conversation.question()) is not None:
            history.append({"role": "user", "content": question})
            try:
                result = await agents.Runner.run(agent, history, max_turns=ANSWERS_MAX)
            except (agents.MaxTurnsExceeded, agents.ModelBehaviorError) as error:
                return Episode(recorder.turns, type(error).__name__)
            conversation.answer(result.final_output)
            history = edit(result.to_input_list(), conversation.at)
    return Episode(recorder.turns, "done")


def openai_tool(name, conversation):
    async def invoke(_, arguments):
        try:
            return conversation.call(name, json.loads(arguments))
        except ValueError:
            return json.dumps({"error": "no JSON"})

    # A strict tool binds the arguments to its schema. The trainer's network would not know what was ruled out.
    return agents.FunctionTool(name, "A tool.", schema(name), invoke, strict_json_schema=False)


class ToolModel(LitellmModel):
    """mini-swe-agent's model, with the tools of the task in place of a shell, and answers in words."""

    def __init__(self, url, recorder):
        super().__init__(
            model_name=f"openai/{MODEL}", model_kwargs=SAMPLING, cost_tracking="ignore_errors",
            observation_template="{{ output.output }}",
        )
        http = openai.DefaultHttpxClient(event_hooks={"response": [recorder.hook]})
        self.format_errors = 0
        self.client = openai.OpenAI(base_url=url, api_key="unused", max_retries=0, http_client=http)
        self.tools = [
            {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": schema(name)}}
            for name in TOOLS
        ]

    def _query(self, messages, **kwargs):
        options = self.config.model_kwargs | kwargs
        return litellm.completion(
            model=self.config.model_name, messages=messages, tools=self.tools, client=self.client, **options
        )

    def _parse_actions(self, response):
        message = response.choices[0].message
        if not message.tool_calls:
            return [{"said": message.content or ""}]
        try:
            calls = [(call, json.loads(call.function.arguments)) for call in message.tool_calls]
        except ValueError as error:
            self.format_errors += 1
            wrong = {"role": "user", "content": "That was no JSON.", "extra": {"interrupt_type": "FormatError"}}
            raise FormatError(wrong) from error
        return [
            {"tool_call_id": call.id, "name": call.function.name, "arguments": arguments} for call, arguments in calls
        ]


class TaskEnvironment:
    """mini-swe-agent's environment: tools are called in this process, and words go to the user."""

    def __init__(self, conversation):
        self.conversation = conversation

    def execute(self, action, cwd=""):
        if "said" not in action:
            return {"output": self.conversation.call(action["name"], action["arguments"]), "returncode": 0}
        question = self.conversation.answer(action["said"])
        if question is None:
            extra = {"exit_status": "Submitted", "submission": action["said"]}
            raise Submitted({"role": "exit", "content": action["said"], "extra": extra})
        return {"output": question, "returncode": 0}

    def get_template_vars(self, **kwargs):
        return kwargs

    def serialize(self):
        return {}


def run_mini_swe_agent(url, conversation):
    """A rollout by mini-swe-agent, whose loop forgets an answer that it cannot read."""
    recorder = Recorder()
    model = ToolModel(url, recorder)
    with model.client:
        agent = DefaultAgent(
            model, TaskEnvironment(conversation), system_template="", instance_template="{{ task }}", cost_limit=0,
            step_limit=ANSWERS_MAX * len(conversation.task.questions),
        )
        end = agent.run(conversation.question())["exit_status"]
    return Episode(recorder.turns, "done" if end == "Submitted" else end, model.format_errors == 0)


AGENTS = {
    "openai-agents": run_openai_agents,
    "mini-swe-agent": run_mini_swe_agent,
    "forgetful-agents": run_forgetful_agents,
}
