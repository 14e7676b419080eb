"""instructor, in the modes that it has for OpenAI's clients.

    instructor_client.py URL KEY MODEL

MD_JSON is left out. It binds nothing, and the shipped model answers its request with something else than the object.
"""

from typing import Iterable

import instructor
import openai
from instructor import Mode

from forms import Facts, call_of, check_form, create_order, get_stock, get_weather
from tasks import NOTE, TASKS, check, mesh

url, key, model = mesh()
spoken = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
settings = {"model": model, "temperature": 0, "max_tokens": 64, "max_retries": 0}


def ask(mode, text, response_model):
    client = instructor.from_openai(spoken, mode=mode)
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(messages=messages, response_model=response_model, **settings)


for task in TASKS:
    called = ask(Mode.PARALLEL_TOOLS, task.ask, Iterable[get_weather | get_stock | create_order])
    said = list(called)
    check(len(said) == 1, said)
    check_form(said[0], call_of(task))
    for mode in Mode.TOOLS, Mode.TOOLS_STRICT, Mode.RESPONSES_TOOLS:
        check_form(ask(mode, task.ask, type(call_of(task))), call_of(task))
for mode in Mode.JSON, Mode.JSON_SCHEMA:
    check_form(ask(mode, NOTE, Facts), Facts)
