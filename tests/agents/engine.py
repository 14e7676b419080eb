"""A scripted engine that speaks vLLM's protocol with token ids. It decides by what it reads in the prompt."""

import json
import re
import select
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

CONTEXT_TOKENS = 131072
# How long the engine is away once it has died.
AWAY_SECONDS = 2.0
START, END = "<|im_start|>", "<|im_end|>"
OPENING = START + "assistant\n"
THINK = "<think>\nI know what to do.\n</think>\n\n"


class Tokenizer:
    """A byte-level tokenizer.json, as far as an engine with a script needs it."""

    def __init__(self, file):
        read = json.loads(file.read_text())
        plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in plain]
        # Bytes that cannot be printed are spelled by letters from 256 on.
        byte_of = {chr(byte): byte for byte in plain} | {chr(256 + at): byte for at, byte in enumerate(others)}
        self.bytes_of = {id: bytes(byte_of[letter] for letter in text) for text, id in read["model"]["vocab"].items()
                         if all(letter in byte_of for letter in text)}
        specials = {added["content"]: added["id"] for added in read["added_tokens"]}
        self.end = specials[END]
        self.id_of = {text: id for id, text in self.bytes_of.items() if id not in specials.values()}
        self.longest = max(map(len, self.id_of))
        self.bytes_of |= {id: text.encode() for text, id in specials.items()}

    def decode(self, ids):
        return b"".join(self.bytes_of[id] for id in ids)

    def encode(self, text):
        """Some ids that spell the text. A model may write a text in more than one way."""
        ids, at = [], 0
        while at < len(text):
            size = next(size for size in range(self.longest, 0, -1) if text[at:at + size] in self.id_of)
            ids.append(self.id_of[text[at:at + size]])
            at += size
        return ids


class Prompt:
    """What the engine reads in a prompt."""

    def __init__(self, body, text):
        self.form = body.get("structured_outputs")
        self.at = time.monotonic()
        self.text, self.tokens = text, len(body["prompt"])
        before = text.rpartition(OPENING)[0]
        place, self.task = max(((text.rfind(task), task) for task in TASKS), default=(-1, None))
        self.task = self.task if place >= 0 else None
        # Turns of the model since the task was set.
        self.step = before.count(OPENING, max(place, 0))
        # The definitions of functions, by name: what a template shows as JSON, each in a line of its own.
        self.tools = {}
        for line in re.findall(r"^\{.*\}$", text, re.M):
            try:
                function = json.loads(line)
                function = function.get("function", function)
                self.tools[function["name"]] = function.get("parameters") or {}
            except (ValueError, KeyError, AttributeError, TypeError):
                pass


# Words in the tasks of a test by which the engine knows them.
TASKS = ("TASK-WRITE", "TASK-PAIR", "TASK-LONG", "TASK-SLOW", "TASK-DEATH")


class Answer:
    """What the engine writes in one turn."""

    def __init__(self, text, calls=(), seconds_before=0.0, seconds_between=0.0, dies=False):
        self.text, self.calls = text, calls
        self.seconds_before, self.seconds_between = seconds_before, seconds_between
        # Ends its process, so to say, in the middle of this answer.
        self.dies = dies

    def written(self, model):
        """The answer as a model of this template writes it."""
        parts = [THINK if model != "bare" else "", self.text]
        for name, arguments in self.calls:
            if model == "strict":
                values = ((name, value if isinstance(value, str) else json.dumps(value))
                          for name, value in arguments.items())
                values = "".join(f"<parameter={name}>\n{text}\n</parameter>\n" for name, text in values)
                call = f"<function={name}>\n{values}</function>"
            else:
                call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
            parts.append(f"\n<tool_call>\n{call}\n</tool_call>")
        return "".join(parts)


class Stream:
    """An answer on its way."""

    def __init__(self, prompt, answer):
        self.prompt, self.answer = prompt, answer
        self.tokens = 0
        # When its reader left before its end, and when it ended.
        self.dropped_at = self.ended_at = None


class Engine:
    """The engine of one model. `script` makes an answer of a prompt."""

    def __init__(self, tokenizer_file, model):
        self.tokenizer = Tokenizer(tokenizer_file)
        self.model = model
        self.script = None
        self.streams = []
        self.lock = threading.Lock()
        self.server = None
        self.port = 0
        self.open()
        self.url = f"http://127.0.0.1:{self.port}"

    def open(self):
        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64
            is_dead = False

            def handle_error(self, request, client_address):
                pass

        self.server = Server(("127.0.0.1", self.port), type("Bound", (Handler,), {"engine": self}))
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def die(self):
        """Goes away with all its connections, and comes back after a while."""
        self.server.is_dead = True
        self.server.server_close()
        self.server.shutdown()
        threading.Timer(AWAY_SECONDS, self.open).start()

    def since(self, time):
        """The answers that were begun since a time."""
        with self.lock:
            return [stream for stream in self.streams if stream.prompt.at >= time]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    engine = None

    def log_message(self, *_):
        pass

    def answer(self, status, body, kind="application/json"):
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        if self.path == "/v1/models":
            model = self.engine.model
            card = {"id": model, "object": "model", "root": model, "max_model_len": CONTEXT_TOKENS}
            self.answer(200, {"object": "list", "data": [card]})
        elif self.path == "/version":
            self.answer(200, {"version": "0.32.0"})
        elif self.path in ("/health", "/metrics"):
            self.answer(200, b"", "text/plain")
        else:
            self.answer(404, {"detail": "Not Found"})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/detokenize":
            self.answer(200, {"prompt": self.engine.tokenizer.decode(body["tokens"]).decode(errors="replace")})
        elif self.path == "/v1/completions":
            self.complete(body)
        else:
            self.answer(404, {"detail": "Not Found"})

    def has_reader(self):
        readable, _, _ = select.select([self.connection], [], [], 0)
        return not readable or self.connection.recv(1) != b""

    def pause(self, seconds):
        """Waits while there is a reader."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            readable, _, _ = select.select([self.connection], [], [], left)
            if readable and not self.has_reader():
                raise BrokenPipeError

    def complete(self, body):
        tokenizer, model = self.engine.tokenizer, self.engine.model
        raw = tokenizer.decode(body["prompt"])
        prompt = Prompt(body, raw.decode(errors="replace"))
        answer = self.engine.script(prompt)
        stream = Stream(prompt, answer)
        with self.engine.lock:
            self.engine.streams.append(stream)
        whole = answer.written(model).encode()
        # What the prompt has of this answer already: the beginning that the template writes, and, where a request
        # goes on after a fault, what was sent so far.
        begun = raw[raw.rfind(OPENING.encode()) + len(OPENING):]
        if not whole.startswith(begun):
            begun = b""
        ids = [*tokenizer.encode(whole[len(begun):]), tokenizer.end]
        reason = "stop"
        if len(ids) > body["max_tokens"]:
            ids, reason = ids[:body["max_tokens"]], "length"
        self.close_connection = True
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        # A few tokens an event, so that events do not stand for the time of a test.
        size = 1 if answer.seconds_between or answer.dies else 8
        try:
            self.pause(answer.seconds_before)
            for at in range(0, len(ids), size):
                if answer.dies and at >= 12:
                    self.engine.die()
                    raise BrokenPipeError
                last = at + size >= len(ids)
                choice = {"index": 0, "text": "", "token_ids": ids[at:at + size],
                          "finish_reason": reason if last else None, "stop_reason": None}
                if self.server.is_dead:
                    raise BrokenPipeError
                self.event({"choices": [choice]})
                stream.tokens += len(ids[at:at + size])
                self.pause(answer.seconds_between)
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(ids),
                     "prompt_tokens_details": {"cached_tokens": 0}}
            self.event({"choices": [], "usage": usage})
            self.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            stream.dropped_at = time.monotonic()
        finally:
            stream.ended_at = time.monotonic()

    def event(self, fields):
        if not self.has_reader():
            raise BrokenPipeError
        fields = {"id": "cmpl", "object": "text_completion", "created": 0, "model": "m", **fields}
        self.wfile.write(b"data: " + json.dumps(fields).encode() + b"\n\n")
        self.wfile.flush()
