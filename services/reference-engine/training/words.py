"""Word pools and name makers shared by all generators.

Real words keep the text readable. Made-up names force the model to copy from the
prompt instead of recalling, as it has to do with unseen prompts.
"""

ENTITIES = [
    ("order", "orders"), ("customer", "customers"), ("product", "products"),
    ("invoice", "invoices"), ("employee", "employees"), ("ticket", "tickets"),
    ("city", "cities"), ("book", "books"), ("author", "authors"),
    ("film", "films"), ("song", "songs"), ("player", "players"),
    ("team", "teams"), ("flight", "flights"), ("airport", "airports"),
    ("hotel", "hotels"), ("room", "rooms"), ("course", "courses"),
    ("student", "students"), ("teacher", "teachers"), ("school", "schools"),
    ("device", "devices"), ("sensor", "sensors"), ("server", "servers"),
    ("deploy", "deploys"), ("project", "projects"), ("task", "tasks"),
    ("article", "articles"), ("comment", "comments"), ("payment", "payments"),
    ("shipment", "shipments"), ("supplier", "suppliers"), ("vehicle", "vehicles"),
    ("driver", "drivers"), ("route", "routes"), ("patient", "patients"),
    ("doctor", "doctors"), ("recipe", "recipes"), ("museum", "museums"),
    ("garden", "gardens"), ("plant", "plants"), ("bridge", "bridges"),
]

TEXT_COLUMNS = [
    "name", "title", "status", "country", "category", "color", "region",
    "language", "genre", "department", "brand", "city", "kind", "owner",
    "priority", "level", "model", "label", "material", "season",
]
NUMBER_COLUMNS = [
    "price", "amount", "quantity", "age", "rating", "score", "salary",
    "weight", "height", "length", "duration", "distance", "stock", "budget",
    "population", "capacity", "points", "pages", "speed", "cost",
]
DATE_COLUMNS = ["created_at", "updated_at", "start_date", "due_date", "sold_at", "joined_at"]

TEXT_VALUES = [
    "open", "closed", "active", "pending", "paid", "late", "red", "blue",
    "green", "black", "white", "north", "south", "east", "west", "small",
    "large", "high", "low", "new", "old", "Norway", "Japan", "Brazil",
    "Kenya", "France", "Canada", "jazz", "rock", "drama", "science", "history",
    "steel", "wood", "glass", "winter", "summer", "sales", "support", "design",
]
PEOPLE = [
    "Ada", "Ben", "Clara", "David", "Elena", "Farid", "Grace", "Hugo", "Iris",
    "Jonas", "Kira", "Leo", "Maya", "Nils", "Olga", "Pablo", "Quinn", "Rosa",
    "Sam", "Tara", "Uma", "Victor", "Wanda", "Yusuf", "Zoe",
]
CITIES = [
    "Oslo", "Lima", "Cairo", "Tokyo", "Paris", "Delhi", "Berlin", "Madrid",
    "Rome", "Vienna", "Quito", "Accra", "Lagos", "Hanoi", "Seoul", "Dublin",
    "Lisbon", "Prague", "Athens", "Boston", "Denver", "Austin", "Perth", "Nairobi",
]
THINGS = [
    "apple", "pear", "lamp", "chair", "table", "pencil", "bottle", "basket",
    "ticket", "stone", "coin", "card", "box", "brick", "cable", "shirt",
    "candle", "mirror", "blanket", "bucket", "hammer", "ladder", "kettle", "spoon",
]
VERBS = [
    "load", "save", "parse", "build", "count", "merge", "split", "filter",
    "check", "update", "find", "send", "read", "write", "clean", "sort",
]
NOUNS = [
    "items", "rows", "lines", "users", "tokens", "values", "files", "words",
    "points", "events", "records", "prices", "scores", "names", "pages", "blocks",
]

_ONSETS = list("bdfgklmnprstvz") + ["br", "cr", "dr", "gr", "pl", "st", "tr"]
_VOWELS = list("aeiou")
_CODAS = ["", "", "n", "r", "l", "s", "m", "x", "k"]


def made_up(rng, parts=None):
    """Returns a pronounceable word that is in no list, such as 'trevosan'."""
    parts = parts or rng.choice([2, 2, 3])
    return "".join(
        rng.choice(_ONSETS) + rng.choice(_VOWELS) + (rng.choice(_CODAS) if i == parts - 1 else "")
        for i in range(parts)
    )


def entity(rng):
    """Returns the singular and the plural of a noun. One in four is made up."""
    if rng.random() < 0.25:
        word = made_up(rng)
        return word, word + "s"
    return rng.choice(ENTITIES)


def column(rng, pool):
    return made_up(rng) if rng.random() < 0.2 else rng.choice(pool)


def distinct(rng, make, count):
    """Returns up to `count` different results of make(), in the order in which they appeared."""
    seen = []
    for _ in range(count * 10):
        value = make()
        if value not in seen:
            seen.append(value)
        if len(seen) == count:
            break
    return seen


def text_value(rng):
    if rng.random() < 0.2:
        return made_up(rng)
    return rng.choice(TEXT_VALUES)


def number(rng):
    """Returns a number. Most are round or short, as people write them in questions."""
    pick = rng.random()
    if pick < 0.4:
        return rng.randint(1, 20)
    if pick < 0.8:
        return rng.randint(1, 20) * rng.choice([5, 10, 50, 100])
    return rng.randint(10, 9999)


def date(rng):
    return f"20{rng.randint(18, 27)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"


def person(rng):
    return made_up(rng).capitalize() if rng.random() < 0.25 else rng.choice(PEOPLE)


def place(rng):
    return made_up(rng).capitalize() if rng.random() < 0.2 else rng.choice(CITIES)


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def system(text):
    return {"role": "system", "content": text}


def tool(text):
    return {"role": "tool", "content": text}
