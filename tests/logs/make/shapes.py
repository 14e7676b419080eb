"""Writes sample logs of tools that cannot run here, in the shapes of their documentation and source.

    python3 tests/logs/make/shapes.py FOLDER
"""

import csv
import gzip
import io
import json
import pathlib
import subprocess
import sys

OUT = pathlib.Path(sys.argv[1])
SYSTEM = "You are the clerk of a small shop."
CALL = {"id": "call_1", "type": "function", "function": {"name": "lookup_order", "arguments": "{\"order\": 17}"}}
CHAT = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Where is order 17?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sent"},
        {"role": "assistant", "content": "It is on its way."}]


def write(name, file, text):
    path = OUT / name / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())


def lines(records):
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def table(rows, delimiter=","):
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0].keys(), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


write("refrain-calls", "calls.jsonl", lines([
    {"workload": "orders", "tenant": "acme", "session": "s1", "prompt_token_ids": [1, 2, 3], "output_token_ids": [4, 5]},
    {"tenant": "acme", "group": "g", "created_ms": 1764410000000, "output_token_ids": [6], "model": "m"}]))
write("prompt-output", "calls.jsonl", lines([
    {"prompt": "Where is order 17?", "output": "On its way.", "workload": "orders", "tenant": "acme"},
    {"question": "Where is order 18?", "answer": "Not sent yet.", "session": 7}]))
write("fine-tuning", "messages.jsonl", lines([
    {"messages": CHAT}, {"messages": [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Hello."}]}]))
write("preferences", "dpo.jsonl", lines([
    {"prompt": "Is it sent?", "chosen": "Yes, on Monday.", "rejected": "No idea."},
    {"chosen": [{"role": "user", "content": "Is it sent?"}, {"role": "assistant", "content": "Yes."}],
     "rejected": [{"role": "user", "content": "Is it sent?"}, {"role": "assistant", "content": "No."}]}]))
write("alpaca", "alpaca.json", json.dumps([
    {"instruction": "Name the state of the order.", "input": "Order 17 left on Monday.", "output": "sent"},
    {"instruction": "Say hello.", "input": "", "output": "Hello."}], indent=2))
write("sharegpt", "sharegpt.json", json.dumps([{"id": "talk-1", "conversations": [
    {"from": "system", "value": SYSTEM}, {"from": "human", "value": "Where is order 17?"},
    {"from": "gpt", "value": "On its way."}, {"from": "human", "value": "Thanks."},
    {"from": "gpt", "value": "You are welcome."}]}], indent=2))
write("chatgpt-export", "conversations.json", json.dumps([{
    "title": "Orders", "conversation_id": "c1", "create_time": 1764410000.5, "mapping": {
        "root": {"id": "root", "message": None, "parent": None, "children": ["a"]},
        "a": {"id": "a", "parent": "root", "children": ["b"], "message": {
            "id": "a", "author": {"role": "user"}, "create_time": 1764410001.5,
            "content": {"content_type": "text", "parts": ["Where is order 17?"]}}},
        "b": {"id": "b", "parent": "a", "children": [], "message": {
            "id": "b", "author": {"role": "assistant"}, "create_time": 1764410002.5,
            "content": {"content_type": "text", "parts": ["On its way."]}, "metadata": {"model_slug": "m"}}}}}]))
write("claude-export", "conversations.json", json.dumps([{
    "uuid": "c1", "name": "Orders", "created_at": "2026-11-29T10:00:00Z", "chat_messages": [
        {"uuid": "m1", "sender": "human", "text": "Where is order 17?", "content": [
            {"type": "text", "text": "Where is order 17?"}]},
        {"uuid": "m2", "sender": "assistant", "text": "On its way.", "content": [
            {"type": "text", "text": "On its way."}]}]}]))
write("tau-bench", "results.json", json.dumps([{
    "task_id": 3, "reward": 1.0, "info": {"task": {"user_id": "noah", "instruction": "Ask about order 17."}},
    "traj": CHAT, "trial": 0}], indent=2))
write("swe-agent", "task-1.traj", json.dumps({
    "environment": "main", "trajectory": [
        {"action": "ls", "observation": "notes.txt", "response": "I look.\n```\nls\n```", "thought": "I look.", "state": {}}],
    "history": [
        {"role": "system", "content": "You solve tasks.", "agent": "main", "message_type": "system_prompt"},
        {"role": "user", "content": [{"type": "text", "text": "List the files."}], "agent": "main",
         "message_type": "observation"},
        {"role": "assistant", "content": "I look.\n```\nls\n```", "thought": "I look.", "action": "ls", "agent": "main",
         "message_type": "action"},
        {"role": "user", "content": [{"type": "text", "text": "OBSERVATION:\nnotes.txt"}], "agent": "main",
         "message_type": "observation"},
        {"role": "assistant", "content": "I am done.", "tool_calls": [
            {"function": {"name": "submit", "arguments": "{}"}, "id": "c2", "type": "function"}], "agent": "main",
         "message_type": "action"}],
    "info": {"exit_status": "submitted", "model_stats": {"api_calls": 2}}, "replay_config": "{}"}, indent=2))

RESPONSE = {"id": "chatcmpl-1", "model": "sample-model", "object": "chat.completion", "choices": [
    {"index": 0, "finish_reason": "tool_calls", "message": {"role": "assistant", "content": "I look.", "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "execute_bash", "arguments": "{\"command\": \"ls\"}"}}]}}]}
EVENTS = [
    {"id": 0, "timestamp": "2026-11-29T10:00:00", "source": "agent", "message": "", "action": "system",
     "args": {"content": "You solve tasks."}},
    {"id": 1, "timestamp": "2026-11-29T10:00:01", "source": "user", "message": "List the files.", "action": "message",
     "args": {"content": "List the files.", "image_urls": None}},
    {"id": 2, "timestamp": "2026-11-29T10:00:02", "source": "environment", "cause": 1, "observation":
        "agent_state_changed", "content": "", "extras": {"agent_state": "running"}},
    {"id": 3, "timestamp": "2026-11-29T10:00:03", "source": "agent", "message": "Running command: ls", "action": "run",
     "args": {"command": "ls", "thought": "I look."}, "tool_call_metadata": {
        "function_name": "execute_bash", "tool_call_id": "c1", "model_response": RESPONSE}},
    {"id": 4, "timestamp": "2026-11-29T10:00:04", "source": "agent", "cause": 3, "observation": "run",
     "content": "notes.txt", "extras": {"command": "ls"}},
    {"id": 5, "timestamp": "2026-11-29T10:00:05", "source": "agent", "message": "I am done.", "action": "message",
     "args": {"content": "I am done."}}]
write("openhands-trajectory", "trajectory.json", json.dumps(EVENTS, indent=2))
write("openhands-output", "output.jsonl", lines([{
    "instance_id": "task-1", "instruction": "List the files.", "metadata": {"llm_config": {"model": "sample-model"}},
    "history": EVENTS, "metrics": {}, "error": None, "test_result": {"git_patch": ""}}]))
text = [{"type": "text", "text": "List the files."}]
write("openhands-sdk", "events.jsonl", lines([
    {"kind": "SystemPromptEvent", "id": "e0", "source": "agent", "timestamp": "2026-11-29T10:00:00",
     "system_prompt": {"type": "text", "text": "You solve tasks."}, "tools": []},
    {"kind": "MessageEvent", "id": "e1", "source": "user", "timestamp": "2026-11-29T10:00:01",
     "llm_message": {"role": "user", "content": text}},
    {"kind": "ActionEvent", "id": "e2", "source": "agent", "timestamp": "2026-11-29T10:00:02", "thought": [
        {"type": "text", "text": "I look."}], "reasoning_content": None, "tool_name": "execute_bash", "tool_call_id": "c1",
     "tool_call": {"id": "c1", "name": "execute_bash", "arguments": "{\"command\": \"ls\"}", "origin": "completion"},
     "llm_response_id": "r1", "action": {"command": "ls", "kind": "ExecuteBashAction"}},
    {"kind": "ObservationEvent", "id": "e3", "source": "environment", "timestamp": "2026-11-29T10:00:03",
     "tool_name": "execute_bash", "tool_call_id": "c1", "observation": {
        "kind": "ExecuteBashObservation", "content": [{"type": "text", "text": "notes.txt"}]}},
    {"kind": "MessageEvent", "id": "e4", "source": "agent", "timestamp": "2026-11-29T10:00:04",
     "llm_message": {"role": "assistant", "content": [{"type": "text", "text": "I am done."}]}}]))

CHAT_RESPONSE = {"id": "chatcmpl-2", "object": "chat.completion", "model": "sample-model", "choices": [
    {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "On its way."}}]}
ASKED = {"model": "sample-model", "messages": CHAT[:2]}
write("helicone", "requests.jsonl", lines([{
    "request_id": "r1", "request_created_at": "2026-11-29T10:00:00.000Z", "response_created_at": "2026-11-29T10:00:01.500Z",
    "request_body": ASKED, "response_body": CHAT_RESPONSE, "response_status": 200, "delay_ms": 1500,
    "request_user_id": "acme", "request_properties": {"Helicone-Session-Id": "s17"}}]))
write("langsmith", "runs.jsonl", lines([
    {"id": "r0", "run_type": "chain", "trace_id": "t1", "inputs": {"question": "Where?"}, "outputs": {"answer": "There."}},
    {"id": "r1", "run_type": "llm", "trace_id": "t1", "parent_run_id": "r0", "start_time": "2026-11-29T10:00:00.000000",
     "end_time": "2026-11-29T10:00:01.000000", "extra": {"metadata": {"ls_model_name": "m", "session_id": "s17"}},
     "inputs": {"messages": [[
        {"lc": 1, "type": "constructor", "id": ["langchain", "schema", "messages", "SystemMessage"],
         "kwargs": {"content": SYSTEM, "type": "system"}},
        {"lc": 1, "type": "constructor", "id": ["langchain", "schema", "messages", "HumanMessage"],
         "kwargs": {"content": "Where is order 17?", "type": "human"}}]]},
     "outputs": {"generations": [[{"text": "On its way.", "generation_info": {}, "message": {
        "lc": 1, "type": "constructor", "id": ["langchain", "schema", "messages", "AIMessage"],
        "kwargs": {"content": "On its way.", "tool_calls": []}}}]]}}]))
write("gemini", "calls.jsonl", lines([{
    "request": {"systemInstruction": {"parts": [{"text": SYSTEM}]}, "contents": [
        {"role": "user", "parts": [{"text": "Where is order 17?"}]},
        {"role": "model", "parts": [{"functionCall": {"name": "lookup_order", "args": {"order": 17}}}]},
        {"role": "user", "parts": [{"functionResponse": {"name": "lookup_order", "response": {"state": "sent"}}}]}]},
    "response": {"candidates": [{"content": {"role": "model", "parts": [{"text": "On its way."}]}, "finishReason": "STOP"}],
                 "modelVersion": "gemini-sample"}}]))
write("ollama", "calls.jsonl", lines([
    {"request": {"model": "m", "messages": CHAT[:2]}, "response": {"model": "m", "created_at": "2026-11-29T10:00:00Z",
     "message": {"role": "assistant", "content": "On its way."}, "done": True}},
    {"request": {"model": "m", "prompt": "Where is order 18?"}, "response": {"model": "m", "response": "Not sent.", "done": True}}]))
write("http-archive", "calls.har", json.dumps({"log": {"version": "1.2", "creator": {"name": "sample"}, "entries": [{
    "startedDateTime": "2026-11-29T10:00:00.000Z", "time": 900,
    "request": {"method": "POST", "url": "https://example.org/v1/chat/completions", "postData": {
        "mimeType": "application/json", "text": json.dumps(ASKED)}},
    "response": {"status": 200, "content": {"mimeType": "application/json", "text": json.dumps(CHAT_RESPONSE)}}}]}}, indent=1))
write("table", "calls.csv", table([
    {"id": 1, "Prompt": "Where is order 17?", "Response": "On its way,\nsince Monday.", "user_id": "acme"},
    {"id": 2, "Prompt": "Say \"yes\".", "Response": "yes", "user_id": "other"}]))
write("table-messages", "calls.tsv", table([
    {"messages": json.dumps(CHAT), "session_id": "s1"}, {"messages": repr([*CHAT[:2], CHAT[4]]), "session_id": "s2"}], "\t"))
write("plain-text", "outputs.txt", "Order 17 is on its way.\nIt left on Monday.\n\n\nOrder 18 is not sent yet.\n")

# The formats of these lines are those of vllm/entrypoints/logger.py, 0.10 and later, with --enable-log-outputs.
PROMPT = "<|im_start|>user\nIt's \"order\" 17?<|im_end|>\n<|im_start|>assistant\n"
write("vllm", "server.log", "".join(line + "\n" for line in [
    "(APIServer pid=1) INFO 11-29 10:00:00 [api_server.py:1800] Starting vLLM API server 0 on http://0.0.0.0:8000",
    "(APIServer pid=1) INFO 11-29 10:00:01 [logger.py:40] Received request %s: prompt: %r, params: %s, prompt_token_ids: %s, "
    "prompt_embeds shape: %s, lora_request: %s." % ("chatcmpl-1", PROMPT, "SamplingParams(n=1, temperature=0.7, stop=[], "
                                                    "max_tokens=100, guided_decoding=None)", None, None, None),
    "(APIServer pid=1) INFO:     127.0.0.1:50000 - \"POST /v1/chat/completions HTTP/1.1\" 200 OK",
    "(APIServer pid=1) INFO 11-29 10:00:02 [logger.py:70] Generated response %s%s: output: %r, output_token_ids: %s, "
    "finish_reason: %s" % ("chatcmpl-1", "", "It is.\nSince Monday.", [1, 2, 3], "stop"),
    "(APIServer pid=1) INFO 11-29 10:00:03 [loggers.py:123] Engine 000: Avg prompt throughput: 10.0 tokens/s"]))


def dataclass(name, fields):
    return name + "(" + ", ".join(f"{key}={value!r}" for key, value in fields.items()) + ")"


# As sglang/srt/utils/request_logger.py 0.5.23 prints them at level 3.
ASKS = {"rid": "r1", "text": PROMPT, "input_ids": None, "sampling_params": {"temperature": 0.7, "max_new_tokens": 100},
        "stream": False}
GIVES = {"text": "It is.\nSince Monday.", "output_ids": [1, 2, 3], "meta_info": {"id": "r1", "finish_reason": {"type": "stop"},
                                                                                "e2e_latency": 0.4}}
write("sglang", "server.log", "".join(line + "\n" for line in [
    "[2026-11-29 10:00:00] INFO:     Uvicorn running on http://127.0.0.1:30000 (Press CTRL+C to quit)",
    "[2026-11-29 10:00:01] Receive: obj=" + dataclass("GenerateReqInput", ASKS),
    "[2026-11-29 10:00:02] Finish: obj=" + dataclass("GenerateReqInput", ASKS) + ", out=" + repr(GIVES),
    "[2026-11-29 10:00:02] INFO:     127.0.0.1:50000 - \"POST /generate HTTP/1.1\" 200 OK"]))
write("sglang-json", "requests.log", "".join("[2026-11-29 10:00:01] " + json.dumps(record) + "\n" for record in [
    {"timestamp": "2026-11-29T10:00:01", "event": "request.received", "rid": "r1", "obj": ASKS},
    {"timestamp": "2026-11-29T10:00:02", "event": "request.finished", "rid": "r1", "obj": ASKS, "out": GIVES}]))

write("compressed", "a.jsonl.gz", gzip.compress(lines([{"messages": CHAT[:2], "output": "On its way."}]).encode(), mtime=0))
packed = subprocess.run(["zstd", "-q", "-c"], input=lines([{"prompt": "18?", "output": "Not sent."}]).encode(),
                        capture_output=True, check=True).stdout
write("compressed", "b.jsonl.zst", packed)
write("compressed", "notes.md", "# Notes\n\nThis is no log.\n")
write("broken", "calls.jsonl", lines([{"prompt": "17?", "output": "On its way."}]) + '{"prompt": "18?", "output": "It wa\n'
      + '{"prompt": "19?", "outp\n{"prompt": "20?"\nnonsense\n' + lines([
          {"prompt": "21?", "output": "Sent."}, {"prompt": "22?", "output": ""}, {"name": "no call"},
          {"prompt": "23?", "error": "timeout"}, [1, 2]]))
