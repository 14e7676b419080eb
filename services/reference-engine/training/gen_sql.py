"""Questions over made-up schemas, answered in one fixed SQL style."""

from words import (
    DATE_COLUMNS, NUMBER_COLUMNS, TEXT_COLUMNS,
    assistant, column, date, distinct, entity, number, system, text_value, user,
)

SYSTEM = [
    "You write SQL. Answer with one statement.",
    "You are Refrain. Answer with SQL only.",
    "Translate the question to SQL.",
]


class Table:
    """One table: typed columns plus, sometimes, a reference to another table."""

    def __init__(self, rng, name=None, parent=None):
        self.one, self.name = name or entity(rng)
        self.texts = distinct(rng, lambda: column(rng, TEXT_COLUMNS), rng.randint(1, 3))
        self.numbers = distinct(rng, lambda: column(rng, NUMBER_COLUMNS), rng.randint(1, 2))
        self.dates = distinct(rng, lambda: rng.choice(DATE_COLUMNS), rng.randint(0, 1))
        self.parent = parent

    def columns(self):
        return self.texts + self.numbers + self.dates

    def ddl(self):
        lines = ["  id INTEGER PRIMARY KEY"]
        if self.parent:
            lines.append(f"  {self.parent.one}_id INTEGER REFERENCES {self.parent.name}(id)")
        lines += [f"  {c} TEXT" for c in self.texts]
        lines += [f"  {c} INTEGER" for c in self.numbers]
        lines += [f"  {c} DATE" for c in self.dates]
        return f"CREATE TABLE {self.name} (\n" + ",\n".join(lines) + "\n);"


class Query:
    """A SELECT kept in parts so that a follow-up question can change one part."""

    def __init__(self, table, select):
        self.table, self.select = table, select
        self.join = self.group = self.order = self.limit = None
        self.where = []

    def text(self):
        lines = [f"SELECT {', '.join(self.select)}", f"FROM {self.table.name}"]
        if self.join:
            lines.append(self.join)
        if self.where:
            lines.append("WHERE " + "\n  AND ".join(self.where))
        if self.group:
            lines.append(f"GROUP BY {self.group}")
        if self.order:
            lines.append(f"ORDER BY {self.order}")
        if self.limit:
            lines.append(f"LIMIT {self.limit}")
        return "\n".join(lines) + ";"


def condition(rng, table):
    """Returns a filter in words and in SQL. The words always name the column."""
    pick = rng.random()
    if table.dates and pick < 0.2:
        day, col = date(rng), rng.choice(table.dates)
        return rng.choice([
            (f"{col} is after {day}", f"{col} > '{day}'"),
            (f"{col} is before {day}", f"{col} < '{day}'"),
        ])
    if pick < 0.6:
        col, n = rng.choice(table.numbers), number(rng)
        return rng.choice([
            (f"{col} is over {n}", f"{col} > {n}"),
            (f"{col} is more than {n}", f"{col} > {n}"),
            (f"{col} is under {n}", f"{col} < {n}"),
            (f"{col} is less than {n}", f"{col} < {n}"),
            (f"{col} is at least {n}", f"{col} >= {n}"),
            (f"{col} is {n}", f"{col} = {n}"),
        ])
    col, value = rng.choice(table.texts), text_value(rng)
    return rng.choice([
        (f"{col} is '{value}'", f"{col} = '{value}'"),
        (f"{col} is {value}", f"{col} = '{value}'"),
        (f"{col} is not {value}", f"{col} <> '{value}'"),
    ])


def q_list(rng, t):
    cols = rng.sample(t.columns(), min(len(t.columns()), rng.randint(1, 2)))
    names = " and ".join(cols)
    query = Query(t, cols)
    if rng.random() < 0.3:
        return rng.choice([f"List the {names} of all {t.name}.",
                           f"Show {names} for every {t.one}."]), query
    words, sql = condition(rng, t)
    query.where = [sql]
    return rng.choice([
        f"List the {names} of the {t.name} where {words}.",
        f"Show the {names} of all {t.name} where {words}.",
        f"What is the {names} of the {t.name} where {words}?",
    ]), query


def q_count(rng, t):
    query = Query(t, ["COUNT(*) AS total"])
    if rng.random() < 0.25:
        return f"How many {t.name} are there?", query
    words, sql = condition(rng, t)
    query.where = [sql]
    return rng.choice([f"How many {t.name} are there where {words}?",
                       f"Count the {t.name} where {words}."]), query


def q_top(rng, t):
    col, label, n = rng.choice(t.numbers), rng.choice(t.texts), rng.randint(2, 20)
    high = rng.random() < 0.6
    word = rng.choice(["highest", "largest"] if high else ["lowest", "smallest"])
    query = Query(t, [label, col])
    query.order, query.limit = f"{col} {'DESC' if high else 'ASC'}", n
    return rng.choice([
        f"Show the {label} and {col} of the {n} {t.name} with the {word} {col}.",
        f"Which {n} {t.name} have the {word} {col}? Show {label} and {col}.",
    ]), query


def q_group(rng, t):
    col, label = rng.choice(t.numbers), rng.choice(t.texts)
    word, func = rng.choice([("average", "AVG"), ("total", "SUM"), ("highest", "MAX"),
                             ("lowest", "MIN"), ("count", "COUNT")])
    if word == "count":
        query = Query(t, [label, "COUNT(*) AS total"])
        query.group, query.order = label, "total DESC"
        return rng.choice([f"How many {t.name} are there per {label}?",
                           f"Count the {t.name} for each {label}."]), query
    alias = f"{func.lower()}_{col}"
    query = Query(t, [label, f"{func}({col}) AS {alias}"])
    query.group, query.order = label, f"{alias} DESC"
    return rng.choice([f"What is the {word} {col} of the {t.name} per {label}?",
                       f"Show the {word} {col} for each {label} of the {t.name}."]), query


def q_join(rng, t):
    p = t.parent
    a, b = rng.choice(t.columns()), rng.choice(p.texts)
    query = Query(t, [f"{t.name}.{a}", f"{p.name}.{b}"])
    query.join = f"JOIN {p.name} ON {p.name}.id = {t.name}.{p.one}_id"
    return rng.choice([f"Show the {a} of each {t.one} with the {b} of its {p.one}.",
                       f"List the {a} of all {t.name} and the {b} of the {p.one}."]), query


def follow_up(rng, query):
    """Changes one part of the last query, so the answer repeats all the rest."""
    t = query.table
    options = []
    if not query.join:
        options.append("where")
    if not query.order and not query.join and not query.select[0].startswith("COUNT"):
        options.append("order")
    if not query.select[0].startswith("COUNT"):
        options.append("limit")
    if not options:
        return None
    kind = rng.choice(options)
    if kind == "where":
        words, sql = condition(rng, t)
        query.where = query.where + [sql]
        return rng.choice([f"Now only those where {words}.", f"Keep only those where {words}."])
    if kind == "order":
        col = rng.choice(query.select)
        down = rng.random() < 0.5
        query.order = f"{col} {'DESC' if down else 'ASC'}"
        return f"Sort by {col}, {'highest' if down else 'lowest'} first."
    query.limit = rng.randint(1, 50)
    return rng.choice([f"Only the first {query.limit}.", f"Limit that to {query.limit} rows."])


def change(rng, t):
    """Returns a request for an UPDATE, DELETE or INSERT, and the statement."""
    pick = rng.random()
    if pick < 0.45:
        text = rng.random() < 0.5
        col = rng.choice(t.texts if text else t.numbers)
        value = text_value(rng) if text else number(rng)
        sql_value = f"'{value}'" if text else value
        key = number(rng)
        return (f"Set {col} to {value} for the {t.one} with id {key}.",
                f"UPDATE {t.name}\nSET {col} = {sql_value}\nWHERE id = {key};")
    if pick < 0.7:
        words, sql = condition(rng, t)
        return f"Delete the {t.name} where {words}.", f"DELETE FROM {t.name}\nWHERE {sql};"
    col, num = rng.choice(t.texts), rng.choice(t.numbers)
    value, n = text_value(rng), number(rng)
    return (f"Add a {t.one} with {col} {value} and {num} {n}.",
            f"INSERT INTO {t.name} ({col}, {num})\nVALUES ('{value}', {n});")


def sql(rng):
    tables = [Table(rng)]
    if rng.random() < 0.5:
        child = Table(rng, parent=tables[0])
        if child.name != tables[0].name:
            tables.append(child)
    schema = "\n".join(t.ddl() for t in tables)
    messages, intro = [], ""
    place = rng.random()
    if place < 0.35:
        messages.append(system(f"{rng.choice(SYSTEM)}\n\n{schema}"))
    else:
        if place < 0.75:
            messages.append(system(rng.choice(SYSTEM)))
        intro = schema + "\n\n"
    query = None
    for turn in range(rng.choice([1, 1, 2, 2, 3, 4, 6])):
        words = follow_up(rng, query) if query and rng.random() < 0.5 else None
        if words is None:
            t = rng.choice(tables)
            if rng.random() < 0.15:
                words, answer = change(rng, t)
                query = None
            else:
                makers = [q_list, q_list, q_count, q_top, q_group]
                if t.parent:
                    makers += [q_join, q_join]
                words, query = rng.choice(makers)(rng, t)
        if query:
            answer = query.text()
        messages += [user(intro + words), assistant(answer)]
        intro = ""
    return messages
