"""The objects that clients ask the shipped model for. A limit bounds every text, so that every answer ends."""

from pydantic import BaseModel, Field

from tasks import check


class Facts(BaseModel):
    """The facts of a note."""

    who: str = Field(max_length=24)
    where: str = Field(max_length=24)
    date: str = Field(pattern="^[0-9]{4}-[0-9]{2}-[0-9]{2}$")
    what: str = Field(max_length=24)
    cost: int = Field(ge=0, le=9999)


class get_weather(BaseModel):
    """Tells the weather of a city."""

    city: str = Field(max_length=24)
    days: int = Field(ge=1, le=9)


class get_stock(BaseModel):
    """Counts an item in stock."""

    item: str = Field(max_length=24)


class create_order(BaseModel):
    """Creates an order."""

    item: str = Field(max_length=24)
    count: int = Field(ge=1, le=99)
    customer: str = Field(max_length=24)


CALLS = [get_weather, get_stock, create_order]


def call_of(task):
    """The call that a task needs, as an object."""
    return next(call for call in CALLS if call.__name__ == task.name)(**task.arguments)


def check_form(said, expected):
    """Checks an answer. Any object of a class that is expected is right; an object that is expected is equal."""
    if isinstance(expected, type):
        check(isinstance(said, expected), f"{said!r} is no {expected.__name__}")
    else:
        # Some clients answer with a class of their own that inherits from the class they were given.
        check(isinstance(said, type(expected)), f"{said!r} is no {type(expected).__name__}")
        check(said.model_dump() == expected.model_dump(), f"{said!r} came, and not {expected!r}")
