"""instructor, in the one mode that lets the model choose whether it calls a tool.

    instructor_client.py URL KEY MODEL
"""

from typing import Iterable

import instructor
import openai
from pydantic import BaseModel

from tasks import TASKS, check, mesh

url, key, model = mesh()


class get_weather(BaseModel):
    """Tells the weather of a city."""

    city: str
    days: int


class get_stock(BaseModel):
    """Counts an item in stock."""

    item: str


class create_order(BaseModel):
    """Creates an order."""

    item: str
    count: int
    customer: str


client = instructor.from_openai(
    openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0), mode=instructor.Mode.PARALLEL_TOOLS
)
for task in TASKS:
    called = client.chat.completions.create(
        model=model, temperature=0, max_tokens=64, max_retries=0,
        messages=[{"role": "user", "content": task.ask}],
        response_model=Iterable[get_weather | get_stock | create_order],
    )
    said = [(type(call).__name__, call.model_dump()) for call in called]
    check(said == [(task.name, task.arguments)], said)
