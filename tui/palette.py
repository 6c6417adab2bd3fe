"""The list of ctrl+p before anything is typed: the monitor's own commands in the order of its keys,
then Textual's."""

from textual.command import DiscoveryHit, Hits
from textual.system_commands import SystemCommandsProvider


class Commands(SystemCommandsProvider):
    """The app's commands in the app's order, where Textual sorts them by name."""

    async def discover(self) -> Hits:
        for command in self.app.get_system_commands(self.screen):
            if command.discover:
                yield DiscoveryHit(command.title, command.callback, help=command.help)
