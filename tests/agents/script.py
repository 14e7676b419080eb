"""What the engine writes: for each task, and each turn of it, an answer."""

from engine import Answer
from programs import CONTENT

# The last words of a task, by which the test knows that it was carried out.
FINAL = {f"TASK-{name}": f"FINAL-{name}" for name in ("WRITE", "PAIR", "SLOW", "DEATH")}
TASKS = {
    "TASK-WRITE": 'TASK-WRITE: create the file made.txt as agreed, and read it back: "quoted" <b>bold</b> \\ 🙂',
    "TASK-PAIR": "TASK-PAIR: create the files one.txt and two.txt, both at once.",
    "TASK-LONG": "TASK-LONG: tell a long story.",
    "TASK-SLOW": "TASK-SLOW: create the file slow.txt.",
    "TASK-DEATH": "TASK-DEATH: create the file death.txt.",
}
STORY = "Once upon a time there was a mesh that remembered. " * 200


class Script:
    """The answers to one program."""

    def __init__(self, program):
        self.program = program
        self.has_died = False

    def __call__(self, prompt):
        if prompt.form:
            # A title of the session, say. The names are those that the programs' schemas have.
            return Answer('{"title": "A file", "isNewTopic": false}')
        if prompt.task is None or (self.program.has_tools and not prompt.tools):
            return Answer("A file that is made")
        if prompt.task == "TASK-LONG":
            return Answer(STORY, seconds_between=0.05)
        return self.turn(prompt)

    def turn(self, prompt):
        program, task, final = self.program, prompt.task, Answer(FINAL[prompt.task])
        if not program.has_tools:
            return Answer(program.edit("made.txt", CONTENT if task == "TASK-WRITE" else "pair") + FINAL[task])
        calls = {
            "TASK-WRITE": [[program.write("made.txt", CONTENT)], [program.read("made.txt")], *program.extras()],
            "TASK-PAIR": [[program.write(f"{name}.txt", name) for name in ("one", "two")]],
            "TASK-SLOW": [[program.write("slow.txt", "slow")]],
            "TASK-DEATH": [[program.write("death.txt", "death")]],
        }[task] + program.last_calls(FINAL[task])
        if prompt.step >= len(calls):
            return final
        if task == "TASK-SLOW":
            return Answer("I take my time.", calls[prompt.step], seconds_before=10, seconds_between=0.05)
        if task == "TASK-DEATH" and not self.has_died:
            self.has_died = True
            return Answer("This engine dies soon, and then comes back.", calls[prompt.step], dies=True)
        return Answer("I go on.", calls[prompt.step])
