"""The message that goes to all ranks with a step."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Place:
    """Where the drafts of a request are."""

    # The numbers of its namespace and of its group, or -1.
    namespace: int = -1
    group: int = -1
    # Tokens at the end of its prompt that are output already, of a part that came before.
    written: int = 0
    # Most places of a step by its own rules.
    places_max: int | None = None


@dataclass
class StepNews:
    """What changes on the devices with a step. It is carried out before the step's requests begin."""

    # Changes of the texts, as `Client.device_commands` returns them.
    commands: list = field(default_factory=list)
    # By namespace number: what its matches are worth.
    odds: list = field(default_factory=list)
    # By request id: the place of each request that gets a row with this step.
    began: dict = field(default_factory=dict)

    def has_loads(self):
        return any(command[0] == "load" for command in self.commands)
