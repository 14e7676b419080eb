"""Writes sample logs with the tools themselves: clients, loggers and tracers, against the scripted server.

    python3 tests/logs/make/tools.py FOLDER

Needs: openai, anthropic, litellm with fastapi and orjson, langfuse, opentelemetry-instrumentation-openai-v2,
openinference-instrumentation-openai. README.md has the versions.
"""

import io
import json
import os
import pathlib
import sys
from datetime import datetime, timezone

import server

OUT = pathlib.Path(sys.argv[1])
URL = server.start()
TOOLS = [{"type": "function", "function": {"name": "lookup_order", "description": "Looks up an order.", "parameters": {
    "type": "object", "properties": {"order": {"type": "integer"}}, "required": ["order"]}}}]
SYSTEM = "You are the clerk of a small shop."
os.environ["OPENAI_API_KEY"] = "not-a-key"


def write(name, file, text):
    path = OUT / name / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def lines(records):
    return "".join(json.dumps(record) + "\n" for record in records)


def agent(client, record=lambda request, response: None, number=17):
    """A conversation with one call of a tool."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"Where is order {number}?"}]
    for _ in range(2):
        request = {"model": server.MODEL, "messages": list(messages), "tools": TOOLS, "user": "acme"}
        response = client.chat.completions.create(**request)
        record(request, response)
        message = response.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or []:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": '{"state": "sent"}'})


def openai_client():
    import openai

    client = openai.OpenAI(base_url=URL + "/v1")
    records = []
    for number in (17, 18):
        agent(client, lambda request, response: records.append({
            "session_id": f"s{number}", "request": request, "response": response.model_dump()}), number)
    write("openai-chat", "calls.jsonl", lines(records))
    # The same, printed as a list, each in an object of its own.
    write("openai-chat-pretty", "calls.json", json.dumps(records, indent=2))
    # A body of a request and the next line its response, as a proxy writes them.
    write("openai-alternating", "proxy.jsonl", lines(part for record in records for part in (
        record["request"], record["response"])))
    # The conversation grows from request to request, and no response is logged.
    write("openai-requests", "requests.jsonl", lines([*[record["request"] for record in records[:2]], {
        **records[1]["request"], "messages": records[1]["request"]["messages"] + [
            {"role": "assistant", "content": "It is on its way."}, {"role": "user", "content": "Thanks."}]}]))

    records = []
    for number in (3, 4):
        request = {"model": server.MODEL, "messages": [{"role": "user", "content": f"Where is order {number}?"}]}
        chunks = [chunk.model_dump() for chunk in client.chat.completions.create(**request, stream=True)]
        records.append({"request": request, "response": chunks})
    sse = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in records[1]["response"]) + "data: [DONE]\n\n"
    records[1]["response"] = sse
    write("openai-stream", "calls.jsonl", lines(records))

    request = {"model": server.MODEL, "prompt": "Where is order 5?", "max_tokens": 20}
    response = client.completions.create(**request)
    write("openai-completions", "calls.jsonl", lines([{
        "timestamp": "2026-11-29T10:00:00Z", "endpoint": "/v1/completions", "body": request, "response": response.model_dump()}]))

    tools = [{"type": "function", **TOOLS[0]["function"]}]
    given, records = [{"role": "user", "content": "Where is order 6?"}], []
    for _ in range(2):
        request = {"model": server.MODEL, "instructions": SYSTEM, "input": list(given), "tools": tools}
        response = client.responses.create(**request)
        records.append({"request": request, "response": response.model_dump()})
        given += [item.model_dump() for item in response.output]
        given += [{"type": "function_call_output", "call_id": item.call_id, "output": '{"state": "sent"}'}
                  for item in response.output if item.type == "function_call"]
    write("openai-responses", "calls.jsonl", lines(records))

    requests, answers = [], []
    for number in (7, 8, 9):
        body = {"model": server.MODEL, "messages": [{"role": "user", "content": f"Where is order {number}?"}]}
        requests.append({"custom_id": f"order-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body})
        response = client.chat.completions.create(**body).model_dump()
        answers.append({"id": f"batch_req_{number}", "custom_id": f"order-{number}", "error": None,
                        "response": {"status_code": 200, "request_id": "r", "body": response}})
    answers[2] = {**answers[2], "response": {"status_code": 500, "request_id": "r", "body": {
        "error": {"message": "server error"}}}}
    write("openai-batch", "input.jsonl", lines(requests))
    write("openai-batch", "output.jsonl", lines(reversed(answers)))


def anthropic_client():
    import anthropic

    client = anthropic.Anthropic(base_url=URL, api_key="not-a-key")
    tools = [{"name": "lookup_order", "description": "Looks up an order.",
              "input_schema": TOOLS[0]["function"]["parameters"]}]
    messages, records = [{"role": "user", "content": "Where is order 17?"}], []
    for _ in range(2):
        request = {"model": server.MODEL, "max_tokens": 100, "system": SYSTEM, "messages": list(messages), "tools": tools,
                   "metadata": {"user_id": "user_1_account_2_session_77"}}
        response = client.messages.create(**request)
        records.append({"request": request, "response": response.model_dump()})
        messages.append({"role": "assistant", "content": [block.model_dump(exclude_none=True)
                                                          for block in response.content]})
        messages.append({"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": "sent"}]})
    write("anthropic-messages", "calls.jsonl", lines(records))
    request = {"model": server.MODEL, "max_tokens": 100, "messages": [{"role": "user", "content": "Where is order 4?"}]}
    with client.messages.stream(**request) as stream:
        events = [event.model_dump() for event in stream]
    raw = [event for event in events if event["type"] in (
        "message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta")]
    write("anthropic-stream", "calls.jsonl", lines([{"request": request, "events": raw}]))


def litellm_loggers():
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    import litellm
    from litellm.integrations.custom_logger import CustomLogger
    from litellm.proxy.spend_tracking.spend_tracking_utils import get_logging_payload

    standard, spend = [], []

    class Logger(CustomLogger):
        def log_success_event(self, kwargs, response_obj, start_time, end_time):
            standard.append(kwargs["standard_logging_object"])
            add_spend(kwargs, response_obj, start_time, end_time)

    def add_spend(kwargs, response_obj, start_time, end_time):
        payload = dict(get_logging_payload(kwargs, response_obj, start_time, end_time))
        # The proxy stores texts where it is told to (store_prompts_in_spend_logs).
        payload["messages"] = json.dumps(kwargs["messages"])
        payload["response"] = json.dumps(response_obj.model_dump(), default=str)
        spend.append(payload)

    litellm.callbacks = [Logger()]
    for number in (17, 18):
        litellm.completion(model="openai/" + server.MODEL, api_base=URL + "/v1", api_key="not-a-key", messages=[
            {"role": "system", "content": SYSTEM}, {"role": "user", "content": f"Where is order {number}?"}],
            metadata={"session_id": f"s{number}", "user_api_key_alias": "shop", "tags": ["orders"]}, user="acme")
    import time

    for _ in range(600):
        if len(spend) == 2:
            break
        time.sleep(0.1)
    plain = json.loads(json.dumps(standard, default=str))
    for record in plain:
        # Neither is of use, and both are long.
        for key in ("model_map_information", "hidden_params", "cost_breakdown"):
            record.pop(key, None)
    write("litellm-standard", "log.jsonl", lines(plain))
    write("litellm-spend", "spend.json", json.dumps(spend, default=str, indent=1))


def spans_of(instrument):
    """The spans that an instrumentation makes of a conversation."""
    import openai
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    stop = instrument(provider)
    with provider.get_tracer("shop").start_as_current_span("answer a customer"):
        agent(openai.OpenAI(base_url=URL + "/v1"))
    stop()
    return exporter.get_finished_spans()


def otlp_json(spans):
    from google.protobuf.json_format import MessageToDict
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

    return MessageToDict(encode_spans(spans))


def opentelemetry():
    os.environ["OTEL_SEMCONV_STABILITY_OPT_IN"] = "gen_ai_latest_experimental"
    os.environ["OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"] = "SPAN_ONLY"
    from opentelemetry.instrumentation.openai_v2 import OpenAIInstrumentor

    def instrument(provider):
        OpenAIInstrumentor().instrument(tracer_provider=provider)
        return OpenAIInstrumentor().uninstrument

    spans = spans_of(instrument)
    write("otel-genai", "otlp.json", json.dumps(otlp_json(spans)))
    # As the console's exporter prints them.
    write("otel-console", "console.log", "".join(span.to_json() + "\n" for span in spans))

    from openinference.instrumentation.openai import OpenAIInstrumentor as OpenInference

    def instrument(provider):
        OpenInference().instrument(tracer_provider=provider)
        return OpenInference().uninstrument

    write("openinference", "otlp.jsonl", lines([otlp_json([span]) for span in spans_of(instrument)]))


def langfuse_sdk():
    from langfuse import Langfuse, propagate_attributes
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    client = Langfuse(public_key="pk-lf-sample", secret_key="sk-lf-sample", base_url=URL, span_exporter=exporter)
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Where is order 17?"}]
    answer = {"role": "assistant", "content": "Order 17 is on its way."}
    with client.start_as_current_observation(as_type="span", name="answer a customer", input={"order": 17}):
        with propagate_attributes(session_id="s17", user_id="acme", tags=["orders"]):
            with client.start_as_current_observation(as_type="generation", name="say where", model=server.MODEL,
                                                     input=messages) as generation:
                generation.update(output=answer)
    client.flush()
    write("langfuse-otel", "spans.json", json.dumps(otlp_json(exporter.get_finished_spans()), indent=1))

    # The API's model has camel case and more members, all of which may be null.
    from langfuse.api import ObservationV2

    def view(kind, name, given, output, parent=None):
        at = datetime(2026, 11, 29, 10, tzinfo=timezone.utc)
        is_call = kind == "GENERATION"
        known = {"id": name.replace(" ", "-"), "trace_id": "t1", "type": kind, "name": name, "start_time": at,
                 "completion_start_time": at.replace(microsecond=500_000) if is_call else None,
                 "end_time": at.replace(second=2), "provided_model_name": server.MODEL if is_call else None,
                 "input": given, "output": output, "parent_observation_id": parent, "level": "DEFAULT",
                 "environment": "default", "usage_details": {"input": 20, "output": 8}, "project_id": "shop",
                 "created_at": at, "updated_at": at}
        fields = {name: known.get(name) for name in ObservationV2.model_fields}
        return json.loads(ObservationV2.model_construct(**fields).model_dump_json(by_alias=True))

    observations = [view("SPAN", "answer a customer", {"order": 17}, "done"),
                    view("GENERATION", "say where", messages, answer, "answer-a-customer"),
                    view("GENERATION", "say it shortly", "Say it in three words.", "On its way.", "answer-a-customer")]
    write("langfuse-observations", "observations.json", json.dumps({"data": observations, "meta": {"page": 1}}, indent=1))
    trace = {"id": "t1", "name": "answer a customer", "sessionId": "s17", "userId": "acme", "tags": ["orders"],
             "timestamp": "2026-11-29T10:00:00.000Z", "input": {"order": 17}, "output": "done",
             "observations": observations}
    write("langfuse-traces", "traces.jsonl", lines([trace]))


for make in (openai_client, anthropic_client, litellm_loggers, opentelemetry, langfuse_sdk):
    try:
        make()
        print("made:", make.__name__)
    except Exception as error:
        import traceback

        traceback.print_exc()
        print("failed:", make.__name__, repr(error))
