"""Real engines on this machine: how each is started and asked without Refrain."""

import atexit
import json
import os
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request

SERVED = "shipped"
END_TOKEN = 2


def call(url, body=None, timeout=30, key=None):
    """Posts JSON (or gets, without a body), with an API key or none. Returns (status, parsed answer or text)."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
    request = urllib.request.Request(url, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            status, answer = response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        status, answer = error.code, error.read().decode()
    try:
        return status, json.loads(answer)
    except ValueError:
        return status, answer


def series(url, name):
    """The sum of a Prometheus metric over its labels."""
    _, text = call(url + "/metrics")
    values = re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", text, re.M)
    return sum(map(float, values))


class Process:
    """A child process with its output in a file. It has a process group, so all that it starts ends with it."""

    def __init__(self, arguments, log, env=None):
        self.log = log
        with open(log, "ab") as out:
            self.child = subprocess.Popen(
                arguments, stdout=out, stderr=out, env={**os.environ, **(env or {})}, start_new_session=True
            )
        atexit.register(self.kill_all)

    def stop(self, how=signal.SIGTERM, timeout=30):
        if self.child.poll() is None:
            self.child.send_signal(how)
            try:
                self.child.wait(timeout)
            except subprocess.TimeoutExpired:
                pass
        self.kill_all()
        return self.child.wait()

    def kill_all(self):
        """Kills the whole group. A killed server leaves its workers, which hold its memory and its port."""
        atexit.unregister(self.kill_all)
        try:
            os.killpg(self.child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # The group has ended.

    def family(self):
        """The child and its descendants: their process ids, with the clock ticks that each has used."""
        parents, ticks = {}, {}
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{name}/stat") as stat:
                    fields = stat.read().rsplit(")", 1)[1].split()
            except OSError:
                continue  # The process ended meanwhile.
            parents[int(name)], ticks[int(name)] = int(fields[1]), int(fields[11]) + int(fields[12])
        family = {self.child.pid}
        while more := {pid for pid, parent in parents.items() if parent in family} - family:
            family |= more
        return {pid: ticks.get(pid, 0) for pid in family}

    def cpu_seconds(self):
        return sum(self.family().values()) / os.sysconf("SC_CLK_TCK")

    def run_on(self, cores):
        """Pins all threads of the family to these cores."""
        for pid in self.family():
            try:
                for thread in os.listdir(f"/proc/{pid}/task"):
                    os.sched_setaffinity(int(thread), cores)
            except OSError:
                pass  # The process ended meanwhile.


class Engine:
    """The common part of all engines."""

    def __init__(self, work, port):
        self.work, self.port = work, port
        self.url = f"http://127.0.0.1:{port}"
        self.process = None

    def start(self):
        self.process = Process(self.arguments(), self.work / f"{self.kind}.log", self.env())
        until = time.monotonic() + self.start_seconds
        while time.monotonic() < until:
            if self.process.child.poll() is not None:
                raise SystemExit(f"{self.kind} exited during its start: see {self.process.log}")
            try:
                if call(self.url + "/health", timeout=5)[0] == 200:
                    return
            except OSError:
                pass
            time.sleep(0.05)
        self.kill()
        raise SystemExit(f"{self.kind} is not ready after {self.start_seconds} s: see {self.process.log}")

    def kill(self):
        self.process.stop(signal.SIGKILL)

    def env(self):
        return {}

    def metric(self, name):
        return series(self.url, name)


class LlamaCpp(Engine):
    kind = "llama-cpp"
    start_seconds = 30
    running_series = "llamacpp:requests_processing"
    generated_series = "llamacpp:tokens_predicted_total"
    generate_path = "/completion"

    def __init__(self, work, port, model):
        super().__init__(work, port)
        self.template = model / "chat_template.jinja"

    def arguments(self):
        return [
            self.work / "llama-server", "-m", self.work / "model.gguf", "--alias", SERVED, "--host", "127.0.0.1",
            "--port", str(self.port), "-t", "1", "-tb", "1", "-c", "8192", "-np", "4", "--metrics", "--no-ui",
            # Chats have the template of the model, from which the server also learns the form of its calls.
            "--jinja", "--chat-template-file", self.template,
        ]  # fmt: skip

    def tokenize(self, text):
        return call(self.url + "/tokenize", {"content": text, "parse_special": True})[1]["tokens"]

    def body(self, prompt, tokens_max, stream=False):
        return {
            "prompt": prompt, "n_predict": tokens_max, "temperature": 0, "repeat_penalty": 1.0, "cache_prompt": True,
            "return_tokens": True, "stream": stream, "response_fields": ["tokens", "stop", "stop_type"],
        }  # fmt: skip

    def greedy(self, prompt, tokens_max):
        return call(self.url + self.generate_path, self.body(prompt, tokens_max))[1]["tokens"]

    def margin(self, text):
        """The distance of the best next token from the second, in natural log-probabilities."""
        body = {"prompt": text, "n_predict": 1, "temperature": 0, "n_probs": 2}
        best = call(self.url + "/completion", body)[1]["completion_probabilities"][0]["top_logprobs"]
        return best[0]["logprob"] - best[1]["logprob"]


class Vllm(Engine):
    kind = "vllm"
    start_seconds = 900
    running_series = "vllm:num_requests_running"
    generated_series = "vllm:generation_tokens_total"
    generate_path = "/v1/completions"

    def __init__(self, work, port, model, more=(), variables=None):
        super().__init__(work, port)
        self.model, self.more, self.variables = model, more, variables or {}

    def arguments(self):
        return [
            self.work / "vllm/bin/python", "-m", "vllm.entrypoints.openai.api_server", "--model", self.model,
            "--served-model-name", SERVED, "--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32",
            "--max-model-len", "2048", "--max-num-seqs", "16", "--enforce-eager", "--enable-prompt-tokens-details",
            # Its grammars for JSON allow any white space otherwise, in which a small model stays until its limit.
            "--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}',
            *self.more,
        ]  # fmt: skip

    def env(self):
        return {
            "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1", **self.variables,
        }  # fmt: skip

    def tokenize(self, text):
        body = {"model": SERVED, "prompt": text, "add_special_tokens": False}
        return call(self.url + "/tokenize", body)[1]["tokens"]

    def body(self, prompt, tokens_max, stream=False):
        return {
            "model": SERVED, "prompt": prompt, "max_tokens": tokens_max, "temperature": 0, "return_token_ids": True,
            "stream": stream,
        }  # fmt: skip

    def greedy(self, prompt, tokens_max):
        return call(self.url + self.generate_path, self.body(prompt, tokens_max))[1]["choices"][0]["token_ids"]

    def margin(self, text):
        body = {**self.body(text, 1), "logprobs": 2}
        best = call(self.url + self.generate_path, body)[1]["choices"][0]["logprobs"]["top_logprobs"][0]
        best = sorted(best.values(), reverse=True)
        return best[0] - best[1]
