"""The programs: how each is set up, started, resumed and stopped, and which of its tools the engine calls."""

import json

KEY = "refrain-dev"
# What the first task writes: quotes, a backslash, markup, a variable of a shell, an emoji and letters of two bytes.
# The last line has nothing that a program would write in another way where it shows what it read.
CONTENT = """He said "hi" & 'bye' \\ C:\\new\\table
<b>bold</b> {{ name }} ${HOME} `tick` </tool_call
Grüße 🙂
line number 4711"""

# A file in each program's folder: a picture of one pixel.
IMAGE = "pixel.png"
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


def heredoc(name, content):
    """A command that writes a file, byte by byte, with a line feed at its end."""
    return f"cat > {name} <<'END_OF_TEXT'\n{content}\nEND_OF_TEXT"


class Program:
    """A program in one of its ways to speak to a model. A subclass has what differs from this."""

    name = ""
    # The folder in target/agents, and the program in it.
    folder, program = "", ""
    # The signal that Control-C sends ends it. Others are ended by a termination.
    obeys_interrupts = True
    # Whether it has tools, and so calls; and whether it goes on with a session.
    has_tools = has_sessions = has_pairs = True
    # What it is refused without harm: status and path, with the reason.
    expected = {}
    # Names of a head, or of a field of the body, in which it names its session.
    session = ()
    # The end of the base URL.
    base = "/v1"

    def __init__(self, work, url, model):
        self.work, self.url, self.model = work, url, model
        self.home, self.repo = work / "home", work / "repo"

    def prepare(self):
        """Writes the files that the program reads at its start."""

    def env(self):
        return {}

    def first(self, task):
        """The command that starts a session with a task."""
        raise NotImplementedError

    def again(self, task):
        """The command that goes on with the last session."""
        raise NotImplementedError

    def write(self, name, content):
        """A call that writes a file."""
        return self.shell(heredoc(name, content))

    def read(self, name):
        """A call that reads a file."""
        return self.shell(f"cat {name}")

    def shell(self, command):
        raise NotImplementedError

    def extras(self):
        """More turns of the first task: calls of kinds that are hard to carry."""
        return []

    def last_calls(self, final):
        """The turns by which a task ends, where a program wants a call and no text."""
        return []

    def file(self, path, content):
        path = self.home / path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content, indent=2))


class Codex(Program):
    name, folder, program = "codex", "codex", "node_modules/.bin/codex"
    session = ("session-id", "prompt_cache_key")

    def prepare(self):
        self.file(".codex/config.toml", f"""model = "{self.model}"
model_provider = "refrain"

[model_providers.refrain]
name = "Refrain"
base_url = "{self.url}/v1"
env_key = "REFRAIN_API_KEY"
wire_api = "responses"
""")

    def env(self):
        return {"REFRAIN_API_KEY": KEY}

    def options(self):
        return ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]

    def first(self, task):
        return [*self.options(), task]

    def again(self, task):
        return [*self.options(), "resume", "--last", task]

    def shell(self, command):
        return "exec_command", {"cmd": command}

    def extras(self):
        # Codex takes a function of a namespace only under the name that it gave it.
        return [[("view_image", {"path": str(self.repo / IMAGE)})],
                [("multi_agent_v1__close_agent", {"target": "nobody"})]]


class ClaudeCode(Program):
    name, folder, program = "claude-code", "claude-code", "node_modules/.bin/claude"
    base = ""
    session = ("x-claude-code-session-id",)
    expected = {(404, "/api/hello"): "it looks whether there is a server, and takes any answer"}

    def env(self):
        # As root it wants to be told that it is in a sandbox.
        return {"ANTHROPIC_BASE_URL": self.url, "ANTHROPIC_AUTH_TOKEN": KEY, "IS_SANDBOX": "1"}

    def first(self, task):
        return ["-p", "--dangerously-skip-permissions", task]

    def again(self, task):
        return ["-p", "--dangerously-skip-permissions", "--continue", task]

    def shell(self, command):
        return "Bash", {"command": command, "description": "Do a step of the task"}

    def write(self, name, content):
        return "Write", {"file_path": str(self.repo / name), "content": content + "\n"}

    def extras(self):
        return [[("Read", {"file_path": str(self.repo / IMAGE)})],
                [("ToolSearch", {"query": "select:WebFetch", "max_results": 1})]]


class OpenCode(Program):
    name, folder, program = "opencode", "opencode", "node_modules/.bin/opencode"
    npm = "@ai-sdk/openai-compatible"
    session = ("x-session-affinity", "x-session-id")

    def prepare(self):
        self.file(".config/opencode/opencode.json", {
            "model": f"refrain/{self.model}",
            "autoupdate": False,
            "permission": "allow",
            "provider": {"refrain": {
                "npm": self.npm,
                "name": "Refrain",
                "options": {"baseURL": f"{self.url}/v1", "apiKey": KEY},
                "models": {self.model: {"name": "Mine", "limit": {"context": 131072, "output": 8192}}},
            }},
        })

    def env(self):
        return {"OPENCODE_DISABLE_MODELS_FETCH": "1"}

    def first(self, task):
        return ["run", task]

    def again(self, task):
        return ["run", "--continue", task]

    def shell(self, command):
        return "bash", {"command": command, "description": "Do a step of the task"}

    def write(self, name, content):
        return "write", {"filePath": str(self.repo / name), "content": content + "\n"}

    def extras(self):
        return [[("read", {"filePath": str(self.repo / IMAGE)})]]


class OpenCodeResponses(OpenCode):
    name, npm = "opencode-responses", "@ai-sdk/openai"


class OpenCodeMessages(OpenCode):
    name, npm = "opencode-messages", "@ai-sdk/anthropic"


class Pi(Program):
    name, folder, program = "pi", "pi", "node_modules/.bin/pi"
    api, session = "openai-completions", ()

    def prepare(self):
        self.file(".pi/agent/models.json", {"providers": {"refrain": {
            "baseUrl": self.url + self.base,
            "api": self.api,
            "apiKey": KEY,
            "models": [{"id": self.model, "reasoning": True, "contextWindow": 131072, "maxTokens": 8192}],
        }}})

    def options(self):
        return ["-p", "--provider", "refrain", "--model", self.model]

    def first(self, task):
        return [*self.options(), task]

    def again(self, task):
        return [*self.options(), "-c", task]

    def shell(self, command):
        return "bash", {"command": command}

    def write(self, name, content):
        return "write", {"path": name, "content": content + "\n"}

    def read(self, name):
        return "read", {"path": name}

    def extras(self):
        return [[self.read(IMAGE)]]


class PiResponses(Pi):
    name, api, session = "pi-responses", "openai-responses", ("session_id", "prompt_cache_key")


class PiMessages(Pi):
    name, api, base = "pi-messages", "anthropic-messages", ""


class QwenCode(Program):
    name, folder, program = "qwen-code", "qwen-code", "node_modules/.bin/qwen"

    def env(self):
        return {"OPENAI_API_KEY": KEY, "OPENAI_BASE_URL": f"{self.url}/v1", "OPENAI_MODEL": self.model}

    def options(self):
        return ["--auth-type", "openai", "--yolo"]

    def first(self, task):
        return [*self.options(), "-p", task]

    def again(self, task):
        return [*self.options(), "--continue", "-p", task]

    def write(self, name, content):
        return "write_file", {"file_path": str(self.repo / name), "content": content + "\n"}

    def read(self, name):
        # On a busy machine its shell tool may say "(empty)" of a command that wrote something.
        return "read_file", {"file_path": str(self.repo / name)}

    def extras(self):
        return [[self.read(IMAGE)]]


class Aider(Program):
    name, folder, program = "aider", "aider", "bin/aider"
    has_tools = has_pairs = False

    def env(self):
        return {"OPENAI_API_BASE": f"{self.url}/v1", "OPENAI_API_KEY": KEY, "AIDER_ANALYTICS": "false",
                "LITELLM_LOCAL_MODEL_COST_MAP": "True"}

    def options(self):
        return ["--model", f"openai/{self.model}", "--no-git", "--yes-always", "--no-show-model-warnings",
                "--no-check-update", "--no-show-release-notes", "--no-pretty"]

    def edit(self, name, content):
        """A whole file as aider reads it in a text."""
        return f"Here it is.\n\n{name}\n```\n{content}\n```\n\n"

    def first(self, task):
        return [*self.options(), "--message", task, "made.txt"]

    def again(self, task):
        return [*self.options(), "--restore-chat-history", "--message", task, "made.txt"]


class MiniSweAgent(Program):
    name, folder, program = "mini-swe-agent", "mini-swe-agent", "bin/mini"
    has_sessions = False

    def env(self):
        return {"OPENAI_API_BASE": f"{self.url}/v1", "OPENAI_API_KEY": KEY, "MSWEA_CONFIGURED": "true",
                "MSWEA_COST_TRACKING": "ignore_errors", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}

    def first(self, task):
        return ["-m", f"openai/{self.model}", "-y", "--exit-immediately", "-t", task]

    def shell(self, command):
        return "bash", {"command": command}

    def last_calls(self, final):
        return [[self.shell(f"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo {final}")]]


class OpenHands(Program):
    name, folder, program = "openhands", "openhands", "bin/openhands"
    obeys_interrupts = False
    session = ("prompt_cache_key",)

    def env(self):
        return {"LLM_BASE_URL": f"{self.url}/v1", "LLM_API_KEY": KEY, "LLM_MODEL": f"openai/{self.model}",
                "LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENHANDS_SUPPRESS_BANNER": "1"}

    def options(self):
        return ["--headless", "--override-with-envs"]

    def first(self, task):
        return [*self.options(), "-t", task]

    def again(self, task):
        [session] = (self.home / ".openhands/conversations").iterdir()
        return [*self.options(), "--resume", session.name, "-t", task]

    def shell(self, command):
        return "terminal", {"command": command, "security_risk": "LOW", "summary": "a step of the task"}


PROGRAMS = {kind.name: kind for kind in (
    Codex, ClaudeCode, OpenCode, OpenCodeResponses, OpenCodeMessages, Pi, PiResponses, PiMessages, QwenCode,
    Aider, MiniSweAgent, OpenHands)}


def environment(program, path):
    """The environment of a program: its own home, and nothing that the caller has set for such programs."""
    path += ":/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    folder = str(program.work / "tmp")
    general = {"PATH": path, "HOME": str(program.home), "TMPDIR": folder, "TMUX_TMPDIR": folder,
               "TERM": "dumb", "LANG": "C.UTF-8", "NO_COLOR": "1"}
    return general | program.env()
