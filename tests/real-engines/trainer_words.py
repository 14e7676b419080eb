"""The words in which trainers ask for rollouts, as their code sends them, and what they read of the answers."""

import dataclasses
import http.client
import json
import threading
import time

from engines import call

# The routes, and a trainer that calls each.
VIME, SLIME, AREAL = "/inference/v1/generate", "/generate", "/v1/completions"
ROUTES = (VIME, SLIME, AREAL)
# Longer than any check takes: trainers wait for rollouts without a limit.
TIMEOUT_S = 300


@dataclasses.dataclass
class Rollout:
    """An output, as a trainer reads it."""

    tokens: list
    logprobs: list
    finish: str
    # What only this project says: spans of versions, and the version of the last token.
    spans: list
    version: str
    cached: int


def body(route, model, prompt, tokens_max, temperature=0.0, seed=None, name=None, endless=False, stream=False, stop=None):
    """The body of a rollout. Without `tokens_max` it has no limit."""
    if route == SLIME:
        sampling = {
            "temperature": temperature, "top_p": 1.0, "top_k": -1, "stop": stop, "stop_token_ids": None,
            "skip_special_tokens": False, "no_stop_trim": True, "spaces_between_special_tokens": False,
            "max_new_tokens": tokens_max, "sampling_seed": seed, "ignore_eos": endless,
        }  # fmt: skip
        fields = {"input_ids": prompt, "sampling_params": present(sampling), "return_logprob": True, "rid": name}
        return present({**fields, "stream": stream})
    if route == VIME:
        sampling = {
            "temperature": temperature, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "logprobs": 1, "max_tokens": tokens_max,
            "skip_special_tokens": False, "return_token_ids": True, "seed": seed, "ignore_eos": endless, "cache_salt": "0",
            "stop": stop, "include_stop_str_in_output": True,
        }  # fmt: skip
        fields = {"model": model, "token_ids": prompt, "sampling_params": present(sampling), "request_id": name}
        return present({**fields, "stream": stream})
    return present({
        "model": model, "prompt": prompt, "max_tokens": tokens_max, "temperature": temperature, "top_p": 1.0, "seed": seed,
        "logprobs": 0, "return_tokens_as_token_ids": True, "use_beam_search": False, "ignore_eos": endless, "stream": stream,
        "stop": stop, "include_stop_str_in_output": True,
    })  # fmt: skip


def present(fields):
    return {name: value for name, value in fields.items() if value is not None}


def read(route, answer):
    """What a trainer reads of a whole answer."""
    if route == SLIME:
        about = answer["meta_info"]
        scored = about["output_token_logprobs"]
        tokens, logprobs = [token for _, token, _ in scored], [logprob for logprob, _, _ in scored]
        assert tokens == answer["output_ids"] and about["completion_tokens"] == len(tokens), answer
        finish, cached = about["finish_reason"]["type"], about["cached_tokens"]
        return Rollout(tokens, logprobs, finish, about["weight_versions"], about["weight_version"], cached)
    choice = answer["choices"][0]
    if route == VIME:
        tokens, logprobs = choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]]
    else:
        tokens = [int(name.removeprefix("token_id:")) for name in choice["logprobs"]["tokens"]]
        logprobs = choice["logprobs"]["token_logprobs"]
    usage = answer["usage"]
    assert len(tokens) == len(logprobs) == usage["completion_tokens"], answer
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return Rollout(tokens, logprobs, choice["finish_reason"], choice["weight_versions"], choice.get("weight_version"), cached)


class Listener:
    """The trainers' listener of a mesh."""

    def __init__(self, port, model):
        self.port, self.model = port, model
        self.url = f"http://127.0.0.1:{port}"

    def post(self, path, fields=None, timeout=TIMEOUT_S):
        return call(self.url + path, {} if fields is None else fields, timeout)

    def get(self, path):
        return call(self.url + path, timeout=TIMEOUT_S)

    def delete(self, path):
        """Returns the status and the text of the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)
        connection.request("DELETE", path)
        response = connection.getresponse()
        return response.status, response.read().decode()

    def ask(self, route, prompt, tokens_max, **how):
        """One rollout, whole."""
        status, answer = self.post(route, body(route, self.model, prompt, tokens_max, **how))
        if status != 200:
            raise RuntimeError(f"{route} answered {status}: {answer}")
        return read(route, answer)

    def order(self, path, fields=None):
        """An order that every worker has to carry out."""
        status, answer = self.post(path, fields)
        if status != 200:
            raise RuntimeError(f"{path} answered {status}: {answer}")
        return answer


class Running(threading.Thread):
    """A rollout that runs while the trainer does other things. As a stream it tells how far it is."""

    def __init__(self, listener, route, prompt, tokens_max, is_streamed, **how):
        super().__init__(daemon=True)
        self.listener, self.route, self.is_streamed = listener, route, is_streamed
        self.asked = (prompt, tokens_max)
        self.prompt, self.how = prompt, how
        self.rollout, self.error, self.count = None, None, 0
        self.start()

    def run(self):
        try:
            if self.is_streamed:
                self.rollout = self.follow()
            else:
                self.rollout = self.listener.ask(self.route, *self.asked, **self.how)
        except Exception as error:  # It is reported by whoever waits for the rollout.
            self.error = error

    def follow(self):
        connection = http.client.HTTPConnection("127.0.0.1", self.listener.port, timeout=TIMEOUT_S)
        fields = body(self.route, self.listener.model, *self.asked, stream=True, **self.how)
        connection.request("POST", self.route, json.dumps(fields), {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"{self.route} answered {response.status}: {response.read().decode()[:500]}")
        return self.whole(self.events(response))

    @staticmethod
    def events(response):
        for line in response:
            if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(f"a stream ended with {event}")
                yield event

    def whole(self, events):
        """The whole output of a stream: an event of SGLang has all of it, one of vLLM what is new."""
        if self.route == SLIME:
            for event in events:
                self.count, last = len(event["output_ids"]), event
            return read(SLIME, last)
        whole = Rollout([], [], None, [], None, 0)
        for event in events:
            for choice in event["choices"]:
                whole.tokens += choice["token_ids"]
                whole.logprobs += [entry["logprob"] for entry in choice["logprobs"]["content"]]
                whole.finish = choice["finish_reason"] or whole.finish
                whole.spans = choice.get("weight_versions", whole.spans)
                whole.version = choice.get("weight_version", whole.version)
            self.count = len(whole.tokens)
        return whole


class Runs:
    """Rollouts that run together. Every other one is a stream."""

    def __init__(self, listener, route, prompts, tokens_max, names=None, **how):
        self.all = [
            Running(listener, route, prompt, tokens_max, number % 2 == 0, name=names and names[number], **how)
            for number, prompt in enumerate(prompts)
        ]
        self.streams = [one for one in self.all if one.is_streamed]

    def counts(self):
        return [one.count for one in self.streams]

    def await_tokens(self, least, share=1.0, seconds=120):
        """Waits until this share of the streams has so many tokens."""
        until = time.monotonic() + seconds
        while sum(count >= least for count in self.counts()) < share * len(self.streams):
            failed = next((one.error for one in self.all if one.error), None)
            if failed or time.monotonic() > until:
                raise RuntimeError(f"rollouts do not run: {failed or self.counts()}")
            time.sleep(0.005)

    def end(self, seconds=TIMEOUT_S):
        """The rollouts, once all have ended. A rollout that was lost is an error."""
        until = time.monotonic() + seconds
        for one in self.all:
            one.join(max(0.1, until - time.monotonic()))
            if one.error:
                raise one.error
            if one.rollout is None:
                raise RuntimeError(f"a rollout has no answer after {seconds} s")
        return [one.rollout for one in self.all]

    def ended(self):
        return sum(not one.is_alive() for one in self.all)
