"""The message that goes to all ranks with a step."""

from dataclasses import dataclass, field


@dataclass
class StepNews:
    """What changes on the devices with a step. It is carried out before the step's requests begin."""

    # Changes of the texts, as `Client.device_commands` returns them.
    commands: list = field(default_factory=list)
    # By namespace number: what its matches are worth.
    odds: list = field(default_factory=list)
    # By request id, for requests that get a row with this step: the numbers of its namespace and its group, or -1.
    began: dict = field(default_factory=dict)

    def has_loads(self):
        return any(command[0] == "load" for command in self.commands)
