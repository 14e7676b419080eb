"""A scripted server that speaks the APIs of OpenAI and Anthropic, for the tools that write the sample logs.

It decides by the last message: a task is answered by one call of a tool, and a tool's result by a sentence.
"""

import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MODEL = "sample-model"
USAGE = {"prompt_tokens": 40, "completion_tokens": 12, "total_tokens": 52}


def texts(content):
    if isinstance(content, str):
        return content
    return " ".join(part.get("text") or "" for part in content or [] if isinstance(part, dict))


def turn_of(messages, tools):
    """The next turn of the assistant: its text, and a call or None."""
    last = messages[-1]
    content = last.get("content")
    is_result = last.get("role") == "tool" or str(last.get("type", "")).endswith("_output") or (
        isinstance(content, list) and any(part.get("type") == "tool_result" for part in content))
    users = [texts(message.get("content")) for message in messages if message.get("role") == "user"]
    task = " ".join(users)
    names = [tool.get("name") or tool.get("function", {}).get("name") for tool in tools or []]
    if is_result:
        results = sum(1 for message in messages if message.get("role") == "tool"
                      or str(message.get("type", "")).endswith("_output")
                      or "tool_result" in json.dumps(message.get("content")))
        if "bash" in names and "SUBMIT" in task:
            return "The file is there, so the task is done.", ("bash", {
                "command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"})
        return f"Done after {results} result: the order is on its way.", None
    for name, arguments in (("lookup_order", {"order": 17}),
                            ("bash", {"command": "ls"}), ("Bash", {"command": "ls", "description": "List the files"}),
                            ("exec_command", {"cmd": "ls"}), ("shell", {"command": ["ls"]})):
        if name in names and "title" not in task.lower()[:40]:
            return "I look first.", (name, arguments)
    number = re.findall(r"\d+", task)
    if "```" in task or "SEARCH/REPLACE" in json.dumps(messages):
        return "Use this line:\n\n    print('hello')\n\nNothing else changes.", None
    return f"Order {number[-1] if number else 0} is on its way.", None


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    seen = []

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.reply({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or b"{}")
        path = self.path.split("?")[0]
        if path.endswith("/chat/completions"):
            self.chat_api(body)
        elif path.endswith("/completions"):
            prompt = body["prompt"] if isinstance(body["prompt"], str) else body["prompt"][0]
            text, _ = turn_of([{"role": "user", "content": prompt}], None)
            self.reply({"id": "cmpl-1", "object": "text_completion", "created": int(time.time()), "model": MODEL,
                        "choices": [{"index": 0, "text": " " + text, "finish_reason": "stop", "logprobs": None}],
                        "usage": USAGE})
        elif path.endswith("/responses"):
            self.responses_api(body)
        elif path.endswith("/messages"):
            self.messages_api(body)
        elif "traces" in path:
            Handler.seen.append(body)
            self.reply({})
        else:
            self.reply({"input_tokens": 20})

    def reply(self, value):
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def stream(self, events, named=False):
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        for event in events:
            if named:
                self.wfile.write(f"event: {event['type']}\n".encode())
            data = event if isinstance(event, str) else json.dumps(event)
            self.wfile.write(f"data: {data}\n\n".encode())
        self.close_connection = True

    def chat_api(self, body):
        text, call = turn_of(body["messages"], body.get("tools"))
        message = {"role": "assistant", "content": text}
        if call:
            message["tool_calls"] = [{"id": "call_1", "type": "function", "index": 0, "function": {
                "name": call[0], "arguments": json.dumps(call[1])}}]
        base = {"id": "chatcmpl-1", "created": int(time.time()), "model": MODEL}
        finish = "tool_calls" if call else "stop"
        if not body.get("stream"):
            return self.reply({**base, "object": "chat.completion", "usage": USAGE, "choices": [
                {"index": 0, "message": message, "finish_reason": finish}]})

        def chunk(delta, finish=None):
            return {**base, "object": "chat.completion.chunk", "choices": [
                {"index": 0, "delta": delta, "finish_reason": finish}]}

        half = len(text) // 2
        chunks = [chunk({"role": "assistant", "content": ""}), chunk({"content": text[:half]}),
                  chunk({"content": text[half:]})]
        if call:
            chunks.append(chunk({"tool_calls": message["tool_calls"]}))
        chunks += [chunk({}, finish), {**base, "object": "chat.completion.chunk", "choices": [], "usage": USAGE}]
        self.stream([*chunks, "[DONE]"])

    def responses_api(self, body):
        given = body["input"] if isinstance(body["input"], list) else [{"role": "user", "content": body["input"]}]
        text, call = turn_of(given, body.get("tools"))
        output = [{"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
                   "content": [{"type": "output_text", "text": text, "annotations": []}]}]
        if call:
            output.append({"type": "function_call", "id": "fc_1", "call_id": "call_1", "status": "completed",
                           "name": call[0], "arguments": json.dumps(call[1])})
        usage = {"input_tokens": 40, "output_tokens": 12, "total_tokens": 52,
                 "input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
        response = {"id": "resp_1", "object": "response", "created_at": int(time.time()), "status": "completed",
                    "model": MODEL, "output": output, "usage": usage, "parallel_tool_calls": True,
                    "tool_choice": "auto", "tools": []}
        if not body.get("stream"):
            return self.reply(response)
        events = [{"type": "response.created", "response": {**response, "output": [], "status": "in_progress"}}]
        for index, item in enumerate(output):
            events.append({"type": "response.output_item.added", "output_index": index,
                           "item": {**item, "status": "in_progress", **({"content": []} if "content" in item else {})}})
            if item["type"] == "message":
                events.append({"type": "response.output_text.delta", "item_id": item["id"], "output_index": index,
                               "content_index": 0, "delta": text})
            events.append({"type": "response.output_item.done", "output_index": index, "item": item})
        events.append({"type": "response.completed", "response": response})
        self.stream([{**event, "sequence_number": at} for at, event in enumerate(events)], named=True)

    def messages_api(self, body):
        text, call = turn_of(body["messages"], body.get("tools"))
        content = [{"type": "text", "text": text}]
        if call:
            content.append({"type": "tool_use", "id": "toolu_1", "name": call[0], "input": call[1]})
        message = {"id": f"msg_{time.time_ns()}", "type": "message", "role": "assistant", "model": MODEL,
                   "content": content, "stop_reason": "tool_use" if call else "end_turn", "stop_sequence": None,
                   "usage": {"input_tokens": 40, "output_tokens": 12}}
        if not body.get("stream"):
            return self.reply(message)
        events = [{"type": "message_start", "message": {**message, "content": [], "stop_reason": None}}]
        for index, block in enumerate(content):
            if block["type"] == "text":
                start, delta = {"type": "text", "text": ""}, {"type": "text_delta", "text": text}
            else:
                start = {**block, "input": {}}
                delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            events += [{"type": "content_block_start", "index": index, "content_block": start},
                       {"type": "content_block_delta", "index": index, "delta": delta},
                       {"type": "content_block_stop", "index": index}]
        events += [{"type": "message_delta", "delta": {"stop_reason": message["stop_reason"], "stop_sequence": None},
                    "usage": {"output_tokens": 12}}, {"type": "message_stop"}]
        self.stream(events, named=True)


def start():
    """Starts the server on a free port, and returns its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


if __name__ == "__main__":
    print(start(), flush=True)
    threading.Event().wait()
